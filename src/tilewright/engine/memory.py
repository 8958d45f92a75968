"""What an error says where the GPU is full: what is held, and what to lower."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..models.probe import own_numbers
from ..models.quantized import weight_bytes
from .checks import gib
from .cost import memory
from .layers import Decoder
from .state import cache_bytes


@dataclass(frozen=True, slots=True)
class Held:
    """An engine's cache. shape: sequences and tokens of each, or pages and tokens of a page."""

    decoder: Decoder
    shape: tuple[int, int]
    paged: bool
    max_batch: int
    max_len: int

    @property
    def size(self) -> int:
        return cache_bytes(self.decoder, *self.shape)


def check_fits(needed: int, what: str, model: Any, cache: Held, prefill_tokens: int) -> None:
    """Raises MemoryError unless so much is free."""
    device = cache.decoder.embedding.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if needed > memory(device)[0]:
        raise MemoryError(too_much(what, model, cache, prefill_tokens))


def too_much(what: str, model: Any, cache: Held, prefill_tokens: int) -> str:
    free, total = memory(cache.decoder.embedding.device)
    weights = weight_bytes(model)
    count, page_size = cache.shape
    size = f"{count} pages of {page_size} tokens" if cache.paged else f"max_batch {cache.max_batch} x max_len {cache.max_len}"
    lower = "cache_tokens, max_batch" if cache.paged else "max_batch, max_len"
    return (
        f"{what}: weights {gib(weights)}, cache {gib(cache.size)} ({size}), "
        f"prefill of {prefill_tokens} tokens; {gib(free)} of {gib(total)} are free. Lower {lower} or prefill_tokens"
    )


@contextmanager
def lasting() -> Iterator[None]:
    """For tensors that outlive a call: an inference tensor cannot be a parameter's data, and
    autocast joins no weights of another half.
    """
    with torch.inference_mode(False), own_numbers():
        yield
