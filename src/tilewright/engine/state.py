"""What changes from step to step, all on the device: tokens, positions, cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..launch import argument_error, check_finite, check_integers, check_number
from ..ops.argmax import argmax_out
from ..ops.sample import sample_out
from .advance import advance
from .layers import Decoder
from .pages import Pages
from .program import Call, Emit, StepBuffers

SLOTS = 64  # the cache's length is a multiple: the kernels' fast loads want 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn, as in `tilewright.sample`.

    temperature: 0 takes the likeliest. top_k: 0 for all. top_p: 1 for all. seed: equal seeds draw
        equal tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_integers(top_k=self.top_k, seed=self.seed)
        check_finite(self.temperature, "temperature")
        check_number(self.top_p, "top_p")
        if not -(2**63) <= self.seed < 2**63:
            raise argument_error("seed", "a number of 64 bits", self.seed)
        if self.temperature < 0:
            raise argument_error("temperature", "0 or more", self.temperature)
        if self.top_k < 0:
            raise argument_error("top_k", "0 (all) or more", self.top_k)
        if not 0 < self.top_p <= 1:
            raise argument_error("top_p", "above 0 and at most 1", self.top_p)


class State:
    """The device tensors that a decode program reads and writes.

    tokens: int64 [batch], the last token of each sequence.
    counters: int32 [2, batch], its position, and the number of keys once it is appended.
    recent: int64 [rows, batch], the tokens chosen since the host last read them.
    clock: int64 [2], the next row of `recent`, and the number of draws.
    caches: the cache of each layer.
    stacks: with `stacked`, all layers' caches of one sequence as two tensors [layers, kv_heads,
        max_len, head_dim]; `caches` are views of them.
    pages: for caches in pages, the pages of each sequence.
    """

    stacks: tuple[Tensor, Tensor]

    def __init__(self, model: Decoder, batch: int, max_len: int, rows: int, *, pages: Pages | None = None, stacked: bool = False) -> None:
        device, dtype = model.embedding.device, model.embedding.dtype
        padded = -(-batch // 16) * 16  # aligned rows
        self.tokens = torch.zeros(padded, dtype=torch.int64, device=device)
        self.counters = torch.zeros(2, padded, dtype=torch.int32, device=device)
        self.recent = torch.zeros(rows, padded, dtype=torch.int64, device=device)
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.temperature = torch.ones(1, device=device)
        self.top_k = torch.zeros(1, dtype=torch.int32, device=device)
        self.top_p = torch.ones(1, device=device)
        # Zeros: an unwritten key is masked, but a NaN in its value would survive a weight of 0.
        self.max_len, self.pages = max_len, pages
        if stacked:
            (shape, _) = model.layers[0].attention.cache_shapes(1, max_len)
            keys, values = (torch.zeros(len(model.layers), *shape[1:], dtype=dtype, device=device) for _ in range(2))
            self.stacks = keys, values
            self.caches: list[tuple[Tensor, ...]] = [(k[None], v[None]) for k, v in zip(keys, values, strict=True)]
            return
        sizes = (batch, max_len) if pages is None else (pages.count, pages.page_size)
        self.caches = [
            tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in layer.attention.cache_shapes(*sizes)) for layer in model.layers
        ]

    def block_table(self, batch: int) -> Tensor | None:
        """The block table of the first `batch` sequences; None for a cache without pages."""
        return None if self.pages is None else self.pages.table[:batch]

    def buffers(self, batch: int) -> StepBuffers:
        """One token for each of the first `batch` sequences."""
        positions, kv_len = self.counters[0, :batch, None], self.counters[1, :batch]
        return StepBuffers(batch, 1, positions, kv_len, self.max_len, self.caches[0][0].dtype, self.tokens.device, self.block_table(batch))

    def begin(self, lengths: list[int], sampling: Sampling) -> None:
        """Sets the state for prompts of these lengths, before their first new token is chosen."""
        self.counters.zero_()
        self.counters[:, : len(lengths)].copy_(torch.tensor([[n - 1 for n in lengths], lengths]))
        self.clock.zero_()
        self.seed.fill_(sampling.seed)
        self.temperature.fill_(sampling.temperature)
        self.top_k.fill_(sampling.top_k)
        self.top_p.fill_(sampling.top_p)

    def choose_calls(self, buffers: StepBuffers, vocab: int, sampling: Sampling | None) -> Emit:
        """Chooses a token from the step's logits, notes it, and moves on by one position."""
        logits, tokens = buffers.tensor("logits", buffers.batch, vocab), self.tokens[: buffers.batch]
        if sampling is None or sampling.temperature == 0:
            yield Call.of("argmax", argmax_out, x=logits, out=tokens)
        else:
            top_k, top_p = self.top_k if sampling.top_k else None, self.top_p if sampling.top_p < 1 else None
            how = {"seed": self.seed, "offset": self.clock[1:], "temperature": self.temperature, "top_k": top_k, "top_p": top_p}
            yield Call.of("sample", sample_out, logits=logits, out=tokens, **how)
        yield Call.of("advance", advance, tokens=self.tokens, recent=self.recent, counters=self.counters, clock=self.clock)


def cache_bytes(model: Decoder, batch: int, max_len: int) -> int:
    size = model.embedding.dtype.itemsize
    shapes = (shape for layer in model.layers for shape in layer.attention.cache_shapes(batch, max_len))
    return sum(size * torch.Size(shape).numel() for shape in shapes)
