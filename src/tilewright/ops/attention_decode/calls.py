"""What `attention_decode` and `mla_decode` have in common around their launches."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...launch import FLOATS, argument_error, check_tensor
from ...launch.values import Claims, pages, spans
from ..common.softmax_tiles import check_int32, check_sinks

MOST_TOKENS, MOST_LAUNCHES = 4, 64  # tokens of a launch; launches of a call
LARGEST_TILE = 256  # keys: smaller pages may be gathered
TMA_BYTES = 16


def claims_of_cache(cache: Tensor, kv_len: Tensor | None, block_table: Tensor | None, kv_start: Tensor | None) -> Claims:
    """Keys lie in the cache, or in its pages [pages, .., page_size, columns]."""
    yield from spans(kv_start, kv_len, cache.shape[-2] * (1 if block_table is None else block_table.shape[1]))
    yield from pages(block_table, kv_len, cache.shape[0], cache.shape[-2])


def check_queries(q: Tensor) -> None:
    """Raises TypeError or ValueError unless q is [batch, q_heads, q_len, head_dim] of sizes that
    `attention_decode` takes.
    """
    check_tensor(q, "q", ndim=4, dtypes=FLOATS)
    _, _, q_len, head_dim = q.shape
    if not 1 <= q_len <= MOST_TOKENS * MOST_LAUNCHES:
        raise argument_error("q.shape[2]", f"in 1..{MOST_TOKENS * MOST_LAUNCHES}", q_len)
    if not (1 <= head_dim <= 512 or head_dim == 576):
        raise argument_error("q.shape[-1]", "in 1..512, or 576", head_dim)
    if q.dtype == torch.float32 and head_dim > 256:
        raise argument_error("q.shape[-1]", "in 1..256 in float32", head_dim)


def check_page_size(page_size: int) -> None:
    if page_size < 16 or page_size & (page_size - 1):
        raise argument_error("the page size", "a power of two, at least 16", page_size)


def check_decode(q: Tensor, page_size: int, kv_len: Tensor | None, block_table: Tensor | None, kv_start: Tensor | None, sinks: Tensor | None) -> None:
    """Raises TypeError or ValueError unless what is given fits q [batch, q_heads, ...]; page_size
    counts only with a block_table.
    """
    batch, q_heads, *_ = q.shape
    if block_table is not None:
        check_int32(block_table, "block_table", q, (batch, None))
        check_page_size(page_size)
    for name, given in (("kv_len", kv_len), ("kv_start", kv_start)):
        if given is not None:
            check_int32(given, name, q, (batch,))
    check_sinks(sinks, q, q_heads)


def check_gathered(page_size: int, **caches: Tensor | None) -> None:
    """Raises ValueError for pages that are gathered and lie where the TMA unit cannot read them:
    the compiler uses it without looking at strides. Rows of other widths are not gathered.
    """
    given = {name: x for name, x in caches.items() if x is not None}
    if page_size >= LARGEST_TILE or any(x.shape[-1] * x.element_size() % TMA_BYTES for x in given.values()):
        return
    for name, x in given.items():
        if not _begin_at_multiples(x, TMA_BYTES):
            must = f"multiples of {TMA_BYTES // x.element_size()} elements with pages of fewer than {LARGEST_TILE} tokens (call .contiguous())"
            raise argument_error(f"{name}'s strides and offset", must, (x.stride(), x.storage_offset()))


def tokens_by_launch(q: Tensor, kv_len: Tensor | None, longest: int) -> Iterator[tuple[slice, Tensor]]:
    """The tokens of each launch, and where the keys of each sequence end for the last of them."""
    q_len = q.shape[2]
    ends = torch.full((len(q),), longest, dtype=torch.int32, device=q.device) if kv_len is None else kv_len.clamp(0, longest)
    for first in range(0, q_len, MOST_TOKENS):
        yield slice(first, first + MOST_TOKENS), (ends - max(0, q_len - first - MOST_TOKENS)).clamp_min(0)


def check_codes(q: Tensor, most: int, **caches: Tensor) -> None:
    """Raises ValueError unless words of four codes can be read, of so many columns at most."""
    if q.dtype == torch.float32:
        raise argument_error("q.dtype", "bfloat16 or float16 with k in float8_e4m3fn", "float32")
    for name, x in caches.items():
        if x.shape[-1] % 4 or x.shape[-1] > most:
            raise argument_error(f"{name}.shape[-1]", f"a multiple of 4, at most {most}, in float8_e4m3fn", x.shape[-1])
        if not _begin_at_multiples(x, 4):
            raise argument_error(f"{name}'s strides and offset", "multiples of 4 in float8_e4m3fn", (x.stride(), x.storage_offset()))


def _begin_at_multiples(x: Tensor, size: int) -> bool:
    """Whether a tensor and all its rows begin at multiples of so many bytes."""
    start = 0 if is_compiling() else x.data_ptr()  # a traced tensor has no address
    return start % size == 0 and all(stride * x.element_size() % size == 0 for stride in x.stride()[:-1])
