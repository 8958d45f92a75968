"""How FlashInfer is called: by its batch wrappers where it has them, else by its functions.

A wrapper is planned once for the lengths. Norms and rotation are in place.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .inputs import kept
from .library_calls import module, wide

PAGE = 16  # tokens, for a cache without pages: FlashInfer splits a sequence only between pages
WORKSPACE_BYTES = 256 << 20
TENSOR_CORES_FROM = 4  # query heads of a key head, as engines choose


@lru_cache(maxsize=8)
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, residual: Tensor | None = None, **unused: Any) -> Any:
    lib = module("flashinfer")
    if residual is None:
        return (lib.gemma_rmsnorm if weight_offset else lib.rmsnorm)(x, weight, eps)
    (lib.gemma_fused_add_rmsnorm if weight_offset else lib.fused_add_rmsnorm)(x, residual, weight, eps)  # in place
    return x, residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return module("flashinfer.norm").layernorm(x, wide(weight), wide(bias), eps)


def silu_mul(gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False) -> Any:
    lib = module("flashinfer")
    return (lib.gelu_tanh_and_mul if gelu_tanh else lib.silu_and_mul)(gate)


@kept
def _angles(cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """FlashInfer's table of cosines and sines, and the place of each token in it."""
    return torch.cat((cos[0], sin[0]), -1).float(), torch.arange(cos.shape[1], dtype=torch.int32, device=cos.device).repeat(batch)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, **unused: Any) -> Any:
    table, positions = _angles(cos, sin, len(q))
    rows = (x.transpose(1, 2).view(len(positions), -1) for x in (q, k))
    module("flashinfer").apply_rope_with_cos_sin_cache_inplace(positions, *rows, q.shape[3], table, is_neox=not interleaved)
    return q, k


# ---------------------------------------------------------------------------------------- attention
@kept
def _rows(x: Tensor, lengths: list[int] | None = None) -> Tensor:
    """[batch, heads, tokens, columns] as [all tokens, heads, columns]."""
    sequences = [one[:, :n] for one, n in zip(x, lengths or [x.shape[2]] * len(x), strict=True)]
    return torch.cat([one.transpose(0, 1) for one in sequences]).contiguous()


@kept
def _joined_rows(x: Tensor, rope: Tensor, lengths: list[int] | None = None) -> Tensor:
    return _rows(torch.cat((x, rope.expand(-1, x.shape[1], -1, -1)), -1), lengths)


@kept
def _on_host(lengths: Tensor) -> list[int]:
    known: list[int] = lengths.tolist()
    return known


def _lengths(kv_len: Tensor | None, batch: int, longest: int) -> list[int]:
    return [longest] * batch if kv_len is None else _on_host(kv_len)


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@kept
def _planned_prefill(q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor, causal: bool, scale: float | None) -> Any:
    wrapper = module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device))
    heads_and_columns = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    wrapper.plan(q_starts.cpu(), kv_starts.cpu(), *heads_and_columns, causal=causal, sm_scale=scale, q_data_type=q.dtype)
    return wrapper


def _prefill(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool, scale: float | None) -> Any:
    """Of rows. lengths: keys of each sequence; all have the same number of queries."""
    starts = _starts([len(q) // len(lengths)] * len(lengths)), _starts(lengths)
    return _planned_prefill(q, k, v, *starts, causal, scale).run(q, k, v).unflatten(0, (len(lengths), -1)).transpose(1, 2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    **unused: Any,
) -> Any:
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        return _planned_prefill(q, k, v, cu_seqlens_q, cu_seqlens_kv, causal, scale).run(q, k, v)
    lengths = _lengths(kv_len, len(k), k.shape[2])
    return _prefill(_rows(q), _rows(k, lengths), _rows(v, lengths), lengths, causal, scale)


def mla(
    q_nope: Tensor,
    q_rope: Tensor,
    *,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    kv_len: Tensor | None = None,
    **unused: Any,
) -> Any:
    lengths = _lengths(kv_len, len(v), v.shape[2])
    return _prefill(_joined_rows(q_nope, q_rope), _joined_rows(k_nope, k_rope, lengths), _rows(v, lengths), lengths, causal, scale)


def _pages_of(lengths: list[int], page_size: int, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's lists: where a sequence's pages begin, page numbers, tokens in the last page."""
    counts = [-(-n // page_size) for n in lengths]
    numbers = torch.cat([row[:count] for row, count in zip(table.cpu(), counts, strict=True)]).int()
    last = torch.tensor([n - page_size * max(0, count - 1) for n, count in zip(lengths, counts, strict=True)], dtype=torch.int32)
    return _starts(counts), numbers, last


def _page_size(tokens: int) -> int:
    return PAGE if tokens % PAGE == 0 else 1


def _paged(block_table: Tensor | None, batch: int, tokens: int, heads: int = 1) -> tuple[int, int, Tensor]:
    """Tokens of a page, the most of a sequence, and the block table, of a cache without pages too.

    Pages of a sequence are consecutive there, and those of the next one begin after all heads.
    """
    if block_table is not None:
        return tokens, tokens * block_table.shape[1], block_table
    page = _page_size(tokens)
    return page, tokens, torch.arange(tokens // page)[None] + heads * tokens // page * torch.arange(batch)[:, None]


def _as_pages(cache: Tensor) -> Tensor:
    """[batch, heads, tokens, columns] as overlapping pages [pages, heads, page, columns].

    A head lies `tokens` rows after the one before.
    """
    batch, heads, tokens, columns = cache.shape
    page = _page_size(tokens)
    count = ((batch - 1) * heads + 1) * tokens // page
    return cache.as_strided((count, heads, page, columns), (page * columns, tokens * columns, columns, 1))


@kept
def _planned_decode(q: Tensor, k: Tensor, kv_len: Tensor | None, block_table: Tensor | None, scale: float | None) -> Any:
    (batch, q_heads, q_len, head_dim), (_, kv_heads, tokens, _) = q.shape, k.shape
    tensor_cores = q_len > 1 or q_heads >= TENSOR_CORES_FROM * kv_heads
    wrapper = module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(_workspace(q.device), "HND", use_tensor_cores=tensor_cores)
    page, longest, table = _paged(block_table, batch, tokens, kv_heads)
    pages = _pages_of(_lengths(kv_len, batch, longest), page, table)
    wrapper.plan(*pages, q_heads, kv_heads, head_dim, page, q_data_type=q.dtype, sm_scale=scale, q_len_per_req=q_len)
    return wrapper


def attention_decode(
    q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None = None, *, block_table: Tensor | None = None, scale: float | None = None, **unused: Any
) -> Any:
    wrapper = _planned_decode(q, k, kv_len, block_table, scale)
    caches = (k, v) if block_table is not None else (_as_pages(k), _as_pages(v))
    return wrapper.run(_rows(q), caches).unflatten(0, (len(q), -1)).transpose(1, 2)


@kept
def _planned_mla_decode(q_latent: Tensor, q_rope: Tensor, cache: Tensor, kv_len: Tensor | None, block_table: Tensor | None, scale: float) -> Any:
    lib = module("flashinfer.mla")
    (batch, heads, q_len, latent), tokens = q_latent.shape, cache.shape[1]
    page, longest, table = _paged(block_table, batch, tokens)
    lengths = _lengths(kv_len, batch, longest)
    starts, numbers, _ = _pages_of(lengths, page, table)
    metadata = lib.MLAPlanMetadata.csr(_starts([q_len] * batch), starts, numbers, torch.tensor(lengths, dtype=torch.int32))
    wrapper = lib.BatchMLAPagedAttentionWrapper(_workspace(cache.device))
    wrapper.plan(
        metadata=metadata,
        num_heads=heads,
        head_dim_ckv=latent,
        head_dim_kpe=q_rope.shape[3],
        page_size=page,
        causal=q_len > 1,
        sm_scale=scale,
        q_data_type=cache.dtype,
        kv_data_type=cache.dtype,
        query_layout="split",
        kv_cache_layout="packed",
    )
    return wrapper


def mla_decode(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, kv_len: Tensor | None = None, *, scale: float, block_table: Tensor | None = None, **unused: Any
) -> Any:
    wrapper = _planned_mla_decode(q_latent, q_rope, cache, kv_len, block_table, scale)
    pages = cache if block_table is not None else cache.view(-1, _page_size(cache.shape[1]), cache.shape[2])
    out = wrapper.run(query=(_rows(q_latent), _rows(q_rope)), kv_cache=pages)
    return out.unflatten(0, (len(q_latent), -1)).transpose(1, 2)


@kept
def _by_row(x: Tensor) -> Tensor:
    """[states, rows, ..] as [rows, states, 1 head, ..]."""
    return x.transpose(0, 1).unsqueeze(2).clone(memory_format=torch.contiguous_format)


def merge_states(states: Tensor, states_lse: Tensor, **unused: Any) -> Any:
    merged, total = module("flashinfer").merge_states(_by_row(states), _by_row(states_lse))
    return merged[:, 0], total[:, 0]
