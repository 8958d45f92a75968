"""The indexer of DeepSeek sparse attention: for each token the cache rows of the topk keys with the
largest scores, the lists that `sparse_decode` attends to.

    score[t, s] = scale[s] * sum over heads h of weights[t, h] * max(0, q[t, h] . key[s])

Token t of the q_len newest sees the keys from kv_start to kv_len - q_len + t. Of equal scores the
earlier key is chosen. A NaN counts as the largest score. The score of a key or a query with an
infinity may be one: its products with zeros that fill up the heads are.

Source    DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1, equation 1 (lightning indexer).
Numerics  Products and sums in fp32; of e4m3 codes on Hopper with about 14 bits. The choice among
          these scores is exact.
Bound     Few tokens: latency, of the search. Many: compute.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, check_integers, check_tensor, next_pow2, out_or_new, torch_op
from ..attention_decode.calls import check_decode, claims_of_cache
from .decision import ARGUMENTS, CHOICES as CHOICES, CODE, Config as Config, Problem as Problem, plan as plan, space as space

MOST_HEADS, MOST_COLUMNS = 128, 256
MOST_ROWS = 2**31 - 1


def _scored(given: tuple[Any, ...], rows: Tensor, i: tuple[int, int]) -> Tensor:
    """Of one token, the scores of keys at these rows of the cache: fp32, or float64.

    given: q, cache, weights, cache_scale.
    """
    q, cache, weights, cache_scale = given
    wide = torch.promote_types(weights.dtype, torch.float32)
    products = cache.flatten(0, 1)[rows].to(wide) @ q[i].to(wide).T
    scores: Tensor = (products.clamp(min=0) * weights[i].to(wide)).sum(-1)
    return scores if cache_scale is None else scores * cache_scale.flatten()[rows].to(wide)


def _rows(q: Tensor, cache: Tensor, kv_len: Tensor | None, kv_start: Tensor | None, block_table: Tensor | None) -> Any:
    """Each token's place in q, and the cache rows of the keys that it sees, in their order."""
    (batch, q_len), page_size = q.shape[:2], cache.shape[1]
    for b in range(batch):
        table = torch.tensor([b], device=cache.device) if block_table is None else block_table[b].long()
        end = len(table) * page_size if kv_len is None else max(0, min(int(kv_len[b]), len(table) * page_size))
        start = 0 if kv_start is None else max(0, int(kv_start[b]))
        key = torch.arange(end, device=cache.device)
        rows = table[key // page_size] * page_size + key % page_size
        for t in range(q_len):
            yield (b, t), rows[start : max(0, end - q_len + 1 + t)]


def reference(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    topk: int,
    *,
    cache_scale: Tensor | None = None,
    kv_len: Tensor | None = None,
    kv_start: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """The definition, token by token, at least in fp32."""
    out = torch.full((*q.shape[:2], topk), -1, dtype=torch.int32, device=q.device)
    for i, rows in _rows(q, cache, kv_len, kv_start, block_table):
        falling = _scored((q, cache, weights, cache_scale), rows, i).sort(descending=True, stable=True).indices
        chosen = falling[:topk].sort().values
        out[i][: len(chosen)] = rows[chosen].int()
    return out


def comparable(
    result: Tensor,
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    topk: int,
    *,
    cache_scale: Tensor | None = None,
    kv_len: Tensor | None = None,
    kv_start: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """The float64 scores of each list, falling, -inf for its holes; those that differ from the
    topk-th score by no more than rounding count as that score. NaN where a list names a row that
    the token does not see, or is not in the order of the keys, holes last.
    """
    wide: Any = tuple(None if x is None else x.double() for x in (q, cache, weights, cache_scale))
    # Hopper's sums of codes have 14 bits; float64 stands for whatever made it.
    eps = 2.0**-11 if cache_scale is not None else 2.0**-19
    found = torch.full(result.shape, -torch.inf, dtype=torch.float64, device=q.device)
    position = torch.empty(cache.shape[0] * cache.shape[1], dtype=torch.int64, device=q.device)
    for i, rows in _rows(q, cache, kv_len, kv_start, block_table):
        scores = _scored(wide, rows, i)
        position.fill_(-1)
        position[rows] = torch.arange(len(rows), device=q.device)
        count = min(topk, len(rows))
        named = result[i].long()
        at = position[named[:count].clamp(0, len(position) - 1)]
        if (at < 0).any() or (named[:count] < 0).any() or (at.diff() <= 0).any() or (named[count:] != -1).any():
            found[i] = torch.nan
        elif count:
            last = scores.sort(descending=True).values[count - 1]
            slack = eps * _scored((*wide[:2], wide[2].abs(), wide[3]), rows, i).abs().amax()
            chosen = scores[at]
            found[i][:count] = torch.where((chosen - last).abs() <= slack, last, chosen).sort(descending=True).values
    return found.float()


DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


@torch_op(mutates=("out",), claims=claims_of_cache)
def sparse_index_out(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    cache_scale: Optional[Tensor],
    kv_len: Optional[Tensor],
    kv_start: Optional[Tensor],
    block_table: Optional[Tensor],
    out: Tensor,
) -> None:
    """`sparse_index` into `out`, whose last axis is topk. No checks, no sync: safe under graph
    capture.
    """
    batch, q_len, heads, head_dim = q.shape
    page_size = 0 if block_table is None else cache.shape[1]
    keys = cache.shape[1] if block_table is None else block_table.shape[1] * page_size
    launches = DECISION.launches(
        Device.of(q),
        batch=batch,
        heads=heads,
        topk=out.shape[2],
        max_len=next_pow2(keys),  # a bucket: a growing cache keeps its plan
        head_dim=head_dim,
        dtype=q.dtype,
        page_size=page_size,
        q_len=q_len,
        has_start=kv_start is not None,
        has_len=kv_len is not None,
    )
    launches.run(q, cache, cache_scale, weights, kv_len, kv_start, block_table, out, keys)


def sparse_index(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    topk: int,
    *,
    cache_scale: Tensor | None = None,
    kv_len: Tensor | None = None,
    kv_start: Tensor | None = None,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Lists the cache rows of the keys with the largest scores, for `sparse_decode`.

    Args:
        q: [batch, q_len, heads, head_dim], the newest tokens of each sequence; e4m3, bf16, fp16 or
            fp32; up to 128 heads, head_dim up to 256, of e4m3 a multiple of 16; stride 1 in the
            last axis.
        cache: keys [batch, max_len, head_dim], or with a block_table [pages, page_size, head_dim],
            page_size a power of two, at least 16; dtype and device of q; stride 1 in the last axis.
        weights: fp32 [batch, q_len, heads], stride 1 in the last axis; the weight of each head,
            times the scale of e4m3 queries and that of the scores: positive factors may be
            applied after max(0, x) as well as inside it.
        topk: entries of a list, at least 1.
        cache_scale: fp32 [batch, max_len] or [pages, page_size], stride 1 in the last axis; what
            the codes of each key are multiplied by; positive; for e4m3, required.
        kv_len: [batch] int32; keys of each sequence; default all. Read on the device.
        kv_start: [batch] int32; the first key of each sequence (behind left padding); default 0.
        block_table: [batch, max_pages] int32; the page that holds keys i * page_size onwards.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: int32 [batch, q_len, topk], each row as page * page_size + row (sequence * max_len +
        key without a block_table), in the order of the keys; -1 after the last one. A token that
        sees topk keys or fewer lists them all. The scores take a workspace of 4 bytes for each
        token and each key that a cache has room for, rounded up to a power of two: give long
        prompts in parts.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(q, "q", ndim=4, dtypes=(CODE, *FLOATS))
    batch, q_len, heads, head_dim = q.shape
    check_integers(topk=topk)
    if not 1 <= topk < 2**31:
        raise argument_error("topk", "in 1..2**31 - 1", topk)
    if not 1 <= heads <= MOST_HEADS:
        raise argument_error("q.shape[2]", f"in 1..{MOST_HEADS}", heads)
    if not 1 <= head_dim <= MOST_COLUMNS or (q.dtype == CODE and head_dim % 16):
        raise argument_error("q.shape[3]", f"in 1..{MOST_COLUMNS}, of e4m3 a multiple of 16", head_dim)
    check_tensor(cache, "cache", ndim=3, like=q)
    if cache.shape[2] != head_dim or (block_table is None and cache.shape[0] != batch):
        wanted = (cache.shape[0] if block_table is not None else batch, cache.shape[1], head_dim)
        raise argument_error("cache.shape", wanted, tuple(cache.shape))
    if cache.shape[0] * cache.shape[1] > MOST_ROWS:
        raise argument_error("cache.shape[0] * cache.shape[1]", f"at most {MOST_ROWS}", cache.shape[0] * cache.shape[1])
    check_decode(q, cache.shape[1], kv_len, block_table, kv_start, None)
    if (cache_scale is None) != (q.dtype != CODE):
        raise argument_error(
            "cache_scale", "given for e4m3 keys, and None for others", type(cache_scale).__name__ if cache_scale is not None else None
        )
    check_tensor(weights, "weights", shape=tuple(q.shape[:3]), dtypes=(torch.float32,), like=q)
    if cache_scale is not None:
        check_tensor(cache_scale, "cache_scale", shape=tuple(cache.shape[:2]), dtypes=(torch.float32,), like=q)
    out = out_or_new(out, (batch, q_len, topk), torch.int32, q, cache, weights, cache_scale, kv_len, kv_start, block_table)
    if cache.numel() and (block_table is None or block_table.numel()):
        if out.numel():
            sparse_index_out(q, cache, weights, cache_scale, kv_len, kv_start, block_table, out)
        return out
    return out.fill_(-1)
