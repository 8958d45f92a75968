"""Attention of a few new tokens over cached rows given by lists of indices: out = softmax(scale * q
k^T, sink) v, per head.

All heads share one key head; v is the first columns of k. A token's list names rows of a paged
cache; a second list may name rows of another cache, and one softmax covers both (DeepSeek-V4: a
window, and compressed keys that an indexer chose). Two algorithms: one kernel that reads the rows
where they are; or one that brings the rows of each token together, without gaps and 16 bits wide,
in front of the kernels of attention_decode.

Source    DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1 (DeepSeek sparse attention); the layouts of
          8-bit caches are those of FlashMLA.
Numerics  As attention_decode. 8-bit columns are code * scale in fp32, rounded to bf16.
Bound     Memory: the rows that are named, once; gathered ones are written and read once more. From
          about 100 heads the products.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, check_bools, check_integers, check_out, check_positive, check_tensor, torch_op
from ...launch.values import Claims, within
from .. import attention_decode as decode
from ..common.softmax_tiles import MAX_HEAD_DIM, check_int32, check_sinks
from ..common.tiles import LOG2E
from .decision import ARGUMENTS, CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space
from .packed import CODE, COLUMNS, check_packed, pack_kv as pack_kv, parts, unpack_kv as unpack_kv

MOST_TOKENS = 65535  # of a grid's second and third axis


def reference(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    *,
    scale: float,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_length: Tensor | None = None,
    v_dim: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, token by token: attention over the rows that its lists name."""
    batch, q_heads, q_len, head_dim = q.shape
    columns = min(head_dim, 512) if v_dim is None else v_dim
    scopes = [
        ((unpack_kv(c, q.dtype) if c.dtype == torch.uint8 else c).flatten(0, 1), i, n)
        for c, i, n in ((cache, indices, topk_length), (extra_cache, extra_indices, extra_length))
        if c is not None and i is not None
    ]
    out = torch.zeros(batch, q_heads, q_len, columns, dtype=q.dtype, device=q.device)
    lse = torch.zeros(batch, q_heads, q_len, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for b in range(batch):
        for t in range(q_len):
            keys = []
            for rows, lists, lengths in scopes:
                named = lists[b, t] if lengths is None else lists[b, t, : max(0, int(lengths[b] if lengths.dim() == 1 else lengths[b, t]))]
                keys.append(rows[named[(named >= 0) & (named < len(rows))].long()])
            options: dict[str, Any] = {"v_dim": columns, "sinks": sinks, "scale": scale, "return_lse": True}
            found: Any = decode.reference(q[b : b + 1, :, t : t + 1], torch.cat(keys)[None, None], None, **options)
            out[b, :, t], lse[b, :, t] = found[0][0, :, 0], found[1][0, :, 0]
    return (out, lse) if return_lse else out


DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


def _claims(indices: Tensor, topk_length: Tensor | None, extra_indices: Tensor | None, extra_length: Tensor | None) -> Claims:
    yield from within("topk_length.view(-1)", topk_length, 0, indices.shape[1])
    if extra_indices is not None:
        yield from within("extra_length.view(-1)", extra_length, 0, extra_indices.shape[1])


@torch_op(mutates=("out", "lse"), claims=_claims)
def sparse_decode_out(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    topk_length: Optional[Tensor],
    extra_cache: Optional[Tensor],
    extra_indices: Optional[Tensor],
    extra_length: Optional[Tensor],
    sinks: Optional[Tensor],
    scale: float,
    q_len: int,
    out: Tensor,
    lse: Optional[Tensor],
) -> None:
    """`sparse_decode` into `out` and, if given, `lse`. No checks, no sync: safe under graph
    capture.

    The tokens of all sequences are one axis: q, out [tokens, q_heads, 1, columns], lse [tokens,
    q_heads, 1], indices [tokens, entries], lengths [tokens] or, one for the q_len tokens of each
    sequence, [batch]. Both lengths are given or none, as far as there are two lists.
    """
    tokens, q_heads, _, head_dim = q.shape
    launches = DECISION.launches(
        Device.of(q),
        batch=tokens // q_len,
        q_heads=q_heads,
        topk=indices.shape[1],
        more_topk=0 if extra_indices is None else extra_indices.shape[1],
        head_dim=head_dim,
        dtype=q.dtype,
        cache_dtype=CODE if cache.dtype == torch.uint8 else None,
        q_len=q_len,
        v_dim=out.shape[3],
        has_length=topk_length is not None,
        sinks=sinks is not None,
        return_lse=lse is not None,
    )
    first, second = (indices, topk_length, *_parts(cache)), (extra_indices, extra_length, *_parts(extra_cache))
    launches.run(q, *first, *second, out, lse, sinks, 0, scale * LOG2E)


def _parts(cache: Tensor | None) -> tuple[Tensor | None, ...]:
    """Keys, and of an 8-bit cache scales and rotated columns."""
    return parts(cache) if cache is not None and cache.dtype == torch.uint8 else (cache, None, None)


def sparse_decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    *,
    scale: float,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_length: Tensor | None = None,
    v_dim: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of new tokens over listed rows of one or two caches. All heads share the
    rows.

    Args:
        q: [batch, q_heads, q_len, head_dim]; bf16, fp16 or fp32; head_dim a multiple of 64 up to
            512 (fp32: 256), or 576; batch * q_len up to 65535; stride 1 in the last axis. Copied
            unless the axes batch and q_len fold into one, as they do if q was made as [batch,
            q_len, q_heads, head_dim] and transposed.
        cache: [pages, page_size, head_dim], dtype and device of q, any strides with stride 1 in the
            last axis. Or, for bf16 queries, uint8 [pages, page_size, 656] (head_dim 576) or [pages,
            page_size, 584] (head_dim 512), as `pack_kv` makes them.
        indices: [batch, q_len, topk] int32; the rows that a token sees, each as page * page_size +
            row. An index below 0, or at least pages * page_size, is a hole.
        topk_length: [batch] or [batch, q_len] int32; how many entries of a list count; default all.
            Entries after them may be anything. Read on the device; the host never looks at its
            values.
        scale: of q k^T. It depends on the model: 512 ** -0.5 for DeepSeek-V4; for absorbed queries,
            on the dimensions before absorption.
        extra_cache, extra_indices, extra_length: a second cache in the format of the first (its
            page size may differ), with its lists and lengths. The softmax is over both.
            extra_length is required if topk_length is given.
        v_dim: the number of columns of a row that are its value; at most 512; default all up to
            512.
        sinks: [q_heads] fp32; an extra score in the softmax denominator of each head, without a
            value; comparable with the scaled scores (natural log).
        return_lse: also return the natural log of the softmax denominator, without the sink.
        out: where the result goes: out.transpose(1, 2) contiguous, shape, dtype and device of the
            result, no element in common with an input; default a new tensor.
    Returns: out [batch, q_heads, q_len, v_dim], a transposed [batch, q_len, q_heads, v_dim]; with
        return_lse the tuple (out, lse), lse fp32 [batch, q_heads, q_len]. A token that sees no row
        gives 0 and lse -inf. Rows that no list names may hold anything.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(return_lse=return_lse)
    check_tensor(q, "q", ndim=4, dtypes=FLOATS)
    batch, q_heads, q_len, head_dim = q.shape
    tokens = batch * q_len
    if wanted := refused_columns(head_dim, q.dtype):
        raise argument_error("q.shape[-1]", wanted, head_dim)
    if tokens > MOST_TOKENS:
        raise argument_error("q.shape[0] * q.shape[2]", f"at most {MOST_TOKENS}", tokens)
    _check_scope(q, "cache", cache, "indices", indices, "topk_length", topk_length)
    if (extra_cache is None) != (extra_indices is None):
        raise argument_error("extra_indices", "given together with extra_cache", "only one of the two")
    if extra_cache is not None and extra_indices is not None:
        _check_scope(q, "extra_cache", extra_cache, "extra_indices", extra_indices, "extra_length", extra_length)
        if extra_cache.dtype != cache.dtype:
            raise argument_error("extra_cache.dtype", cache.dtype, extra_cache.dtype)
        if (extra_length is None) != (topk_length is None):
            raise argument_error("extra_length", "given together with topk_length", "only one of the two")
    elif extra_length is not None:
        raise argument_error("extra_length", "None without an extra_cache", type(extra_length).__name__)
    columns = min(head_dim, 512) if v_dim is None else v_dim
    check_integers(v_dim=columns)
    if not 1 <= columns <= min(head_dim, 512):
        raise argument_error("v_dim", f"in 1..{min(head_dim, 512)}", columns)
    check_positive(scale, "scale")
    check_sinks(sinks, q, q_heads)
    if out is None:
        out = torch.empty((batch, q_len, q_heads, columns), dtype=q.dtype, device=q.device).transpose(1, 2)
    else:
        given = (q, cache, indices, topk_length, extra_cache, extra_indices, extra_length, sinks)
        check_out(out, (batch, q_heads, q_len, columns), q.dtype, given)
        check_tensor(out.transpose(1, 2), "out.transpose(1, 2)", contiguous=True)
    lse = torch.empty((batch, q_len, q_heads), dtype=torch.float32, device=q.device).transpose(1, 2) if return_lse else None
    if out.numel():
        sparse_decode_out(
            q.transpose(1, 2).reshape(tokens, q_heads, 1, head_dim),
            cache,
            indices.reshape(tokens, -1),
            None if topk_length is None else topk_length.reshape(-1),
            extra_cache,
            None if extra_indices is None else extra_indices.reshape(tokens, -1),
            None if extra_length is None else extra_length.reshape(-1),
            sinks,
            scale,
            q_len,
            out.transpose(1, 2).view(tokens, q_heads, 1, columns),
            None if lse is None else lse.transpose(1, 2).view(tokens, q_heads, 1),
        )
    return out if lse is None else (out, lse)


def refused_columns(head_dim: int, dtype: torch.dtype) -> str | None:
    """What the columns of a row must be, unless they are."""
    if dtype == torch.float32:
        return None if head_dim % 64 == 0 < head_dim <= MAX_HEAD_DIM else f"a multiple of 64 up to {MAX_HEAD_DIM} for float32"
    return None if head_dim % 64 == 0 < head_dim <= 512 or head_dim == 576 else "a multiple of 64 up to 512, or 576"


def _check_scope(q: Tensor, cache_name: str, cache: Tensor, name: str, indices: Tensor, length_name: str, length: Tensor | None) -> None:
    """Raises TypeError or ValueError unless the cache, its lists and their lengths fit q."""
    batch, _, q_len, head_dim = q.shape
    if isinstance(cache, Tensor) and cache.dtype == torch.uint8:
        check_tensor(cache, cache_name, ndim=3, dtypes=(torch.uint8,), like=q)
        check_packed(cache, cache_name)
        if q.dtype != torch.bfloat16 or COLUMNS[cache.shape[2]] != head_dim:
            given = f"{tuple(cache.shape)} for {q.dtype} queries of {head_dim} columns"
            raise argument_error(f"{cache_name}.shape[2]", "656 for bf16 queries of 576 columns, 584 for those of 512", given)
    else:
        check_tensor(cache, cache_name, ndim=3, like=q)
        if cache.shape[2] != head_dim:
            raise argument_error(f"{cache_name}.shape[2]", head_dim, cache.shape[2])
    if not cache.numel():
        raise argument_error(f"{cache_name}.shape", "of at least one row", tuple(cache.shape))
    check_int32(indices, name, q, (batch, q_len, None))
    if not indices.shape[2]:
        raise argument_error(f"{name}.shape[2]", "at least 1", 0)
    if length is not None:
        per_token = isinstance(length, Tensor) and length.dim() == 2
        check_int32(length, length_name, q, (batch, q_len) if per_token else (batch,))
