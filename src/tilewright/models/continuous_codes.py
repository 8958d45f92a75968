"""Pages of transformers' continuous batching that hold e4m3 and, for each token and key head, a
scale.

    a page of a layer: codes of keys [tokens, heads, head_dim], codes of values,
                       scales of keys [heads, tokens], scales of values

transformers hands pages out and counts them as before: these are its allocators with another
layout. A step of one token a request appends to the pages and reads them where they are
(`continuous`). A step with prompts rounds its keys too, so that what a prompt sees does not depend
on whether it was read at once, in parts, or found in the pages of another one.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch import argument_error, dtype_name
from ..ops.common.fp8 import ROW
from ..ops.quantize_fp8 import quantize_fp8
from .scope import with_our_functions

KV_DTYPE = "tilewright_kv_dtype"  # attribute of a patched model
SCALE = torch.float32


def check_kv_dtype(kv_dtype: str | None, model: Any) -> None:
    """Raises ValueError unless the model's keys and values can be cached in that kind."""
    if kv_dtype is None:
        return
    if kv_dtype != "fp8":
        raise argument_error("kv_dtype", 'None or "fp8"', repr(kv_dtype))
    if model.dtype not in (torch.bfloat16, torch.float16):
        raise argument_error("the model's dtype", 'bfloat16 or float16 with kv_dtype "fp8"', dtype_name(model.dtype))
    head_dims = {getattr(module, "head_dim", 0) for name, module in model.named_modules() if name.endswith("self_attn") or hasattr(module, "k_proj")}
    for rule, kept in (
        ("of a model with keys and values of heads, as latents are cached in 16 bits", not hasattr(model.config, "kv_lora_rank")),
        ("of heads with a multiple of 4 elements, at most 256", all(n % 4 == 0 and n <= 256 for n in head_dims)),
    ):
        if not kept:
            raise argument_error("kv_dtype", f"None, or {rule}", '"fp8"')


def token_bytes(head_dim: int) -> int:
    """Of the keys or the values of a token and head."""
    return head_dim + SCALE.itemsize


class Pages(NamedTuple):
    """Keys or values of a layer. codes: [pages, tokens, heads, head_dim]. scales: [pages, heads,
    tokens].
    """

    codes: Tensor
    scales: Tensor

    def read(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [tokens, heads, head_dim] by their place: page * tokens of a page + token."""
        page, token = self._place(index)
        return _wide(self.codes.view(torch.uint8)[page, token].view(self.codes.dtype), self.scales[page, :, token], dtype)

    def write(self, index: Tensor, codes: Tensor, scales: Tensor) -> None:
        page, token = self._place(index)
        self.codes.view(torch.uint8)[page, token] = codes.view(torch.uint8)
        self.scales[page, :, token] = scales

    def _place(self, index: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.codes.shape[1]
        return index // tokens, index % tokens


def _wide(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype).mul_(scales[..., None])  # codes are exact in 16 bits; the product is rounded once


class _Coded:
    """What an allocator of codes has in place of transformers' own."""

    rows_per_token = 1  # so that a row's place says its page and its token
    tokens_per_page: int
    bytes_per_page: int
    layer_indices: list[int]
    num_key_value_heads: int
    head_dim: int

    @classmethod
    def get_bytes_per_page(cls, num_key_value_heads: int, head_dim: int, cache_dtype: torch.dtype, page_size: int) -> int:
        return 2 * num_key_value_heads * token_bytes(head_dim) * page_size

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any) -> None:
        this: Any = self
        this.bytes_per_sector = bytes_per_sector
        this._copy_view = cache_tensor.view(-1, this.bytes_per_block)
        this._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        tokens, heads, dim = self.tokens_per_page, self.num_key_value_heads, self.head_dim
        pages = cache_tensor.view(-1, self.bytes_per_page)
        parts = pages.split([tokens * heads * dim] * 2 + [tokens * heads * SCALE.itemsize] * 2, 1)
        codes = [part.view(torch.float8_e4m3fn).unflatten(1, (tokens, heads, dim)) for part in parts[:2]]
        scales = [part.view(SCALE).unflatten(1, (heads, tokens)) for part in parts[2:]]
        both = list(zip(codes, scales, strict=True))
        # A block has a page for each layer, and a table the first of them.
        self._pages = {layer: tuple(Pages(c[i:], s[i:]) for c, s in both) for i, layer in enumerate(self.layer_indices)}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Tensor, write_index: Tensor) -> tuple[Tensor, ...]:
        """As transformers': writes [tokens, heads, head_dim], and returns what the step reads."""
        this: Any = self
        ring, found = hasattr(self, "sliding_window"), []
        for states, pages in zip((key_states, value_states), self._pages[layer_idx], strict=True):
            codes, scales = quantize_fp8(states, block=ROW)
            rows = _wide(codes, scales, states.dtype)
            if read_index.numel() and ring:  # its new rows may take the places of those it reads
                old = pages.read(read_index, states.dtype)
                rows = old.masked_scatter_((read_index == this.sentinel_index)[:, None, None], rows)
            pages.write(write_index, codes, scales)
            if read_index.numel() and not ring:
                rows = pages.read(read_index, states.dtype)
            found.append(rows)
        return tuple(found)

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[Pages, ...]:
        return self._pages[layer_idx]


@cache
def coded_allocators() -> dict[str, Any]:
    """By the kind of attention, as transformers' `ATTN_TYPE_TO_ALLOCATOR`."""
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR

    return {kind: type(f"Coded{stock.__name__}", (_Coded, stock), {}) for kind, stock in ATTN_TYPE_TO_ALLOCATOR.items()}


@cache
def coded_batch_processor() -> Any:
    """`ContinuousBatchingManager._create_batch_processor` with pages of codes."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

    made = with_our_functions(
        PagedAttentionCache.__init__, ATTN_TYPE_TO_ALLOCATOR=coded_allocators(), FullAttentionCacheAllocator=coded_allocators()["full_attention"]
    )
    coded = type("CodedPagedAttentionCache", (PagedAttentionCache,), {"__init__": made})
    return with_our_functions(ContinuousBatchingManager._create_batch_processor, PagedAttentionCache=coded)
