"""Attention of one query per sequence against a long cache: out = softmax(scale * q k^T + mask) v, per head.

The query heads that share a key head are the rows (or columns) of one tile, so k and v are read once. The keys of a sequence are cut into
`splits` ranges, one block each; a second kernel merges the ranges' results. The ranges come from the length that the device holds, so that
a captured graph serves any step.

Source    Dao et al. 2023, "Flash-Decoding for long-context inference" (splits); Ainslie et al. 2023, arXiv:2305.13245 (GQA); Kwon et al. 2023,
          arXiv:2309.06180 (pages).
Numerics  As attention. Partial results and their lse are fp32; merged with weights exp2(lse - max lse).
Bound     Memory: k and v of the visible keys, once.
"""

import math
from typing import Optional

import torch
from torch import Tensor

from ...launch import Device, best_plan, check_tensor, launch, must, next_pow2, torch_op
from ..attention_common import DTYPES, LOG2E, check_heads, check_int32, check_scale_and_window
from .decision import Config, Problem, plan, space
from .kernels import attention_decode_kernel, attention_decode_merge_kernel

__all__ = [
    "Config",
    "Problem",
    "attention_decode",
    "attention_decode_kernel",
    "attention_decode_merge_kernel",
    "attention_decode_out",
    "plan",
    "reference",
    "space",
]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, sequence by sequence: products in the dtype, softmax at least in fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for i in range(len(q)):
        if block_table is None:
            keys, values = k[i], v[i]
            longest = k.shape[2]
        else:
            longest = block_table.shape[1] * k.shape[2]
        end = longest if kv_len is None else int(kv_len[i])
        begin = 0 if kv_start is None else int(kv_start[i])
        if window is not None:
            begin = max(begin, end - window)
        if begin >= end:
            continue
        if block_table is not None:
            pages = block_table[i, : -(-end // k.shape[2])].long()
            keys, values = (x[pages].transpose(0, 1).flatten(1, 2) for x in (k, v))
        keys, values = (x[:, begin:end].repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (keys, values))
        scores = (q[i] @ keys.mT * scale).to(lse.dtype)
        lse[i] = scores.logsumexp(-1)
        out[i] = scores.softmax(-1).to(v.dtype) @ values
    return (out, lse) if return_lse else out


@torch_op(mutates=("out", "lse"))
def attention_decode_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Optional[Tensor],
    kv_len: Optional[Tensor],
    block_table: Optional[Tensor],
    kv_start: Optional[Tensor],
    scale: float,
    window: Optional[int],
) -> None:
    """`attention_decode` into `out` and, if given, `lse`. No checks, no sync: safe under graph capture."""
    batch, q_heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    page_size = 0 if block_table is None else k.shape[2]
    max_len = next_pow2(k.shape[2] if block_table is None else block_table.shape[1] * page_size)  # a bucket: a growing cache keeps its plan
    options = (page_size, window, kv_start is not None, kv_len is not None, lse is not None)
    chosen = best_plan(space, plan, Device.of(q), Problem, batch, q_heads, kv_heads, max_len, head_dim, q.dtype, *options)
    partial = None if chosen.then is None else chosen.scratch(q.device)[0]
    # q stands in for the arrays that the kernel's flags say are absent.
    lse = q if lse is None else lse
    launch(
        chosen,
        q,
        k,
        v,
        out if partial is None else partial,
        lse,
        q if kv_len is None else kv_len,
        q if block_table is None else block_table,
        q if kv_start is None else kv_start,
        0 if window is None else window,
        scale * LOG2E,
    )
    if chosen.then is not None:
        launch(chosen.then, partial, out, lse)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each sequence's newest token over its cache; query head h reads key head h // (q_heads // kv_heads).

    Args:
        q: [batch, q_heads, 1, head_dim]; bf16, fp16 or fp32; head_dim 1..256; stride 1 in the last axis.
        k, v: [batch, kv_heads, max_len, head_dim], dtype and device of q, any strides with stride 1 in the last axis; kv_heads divides q_heads.
            With a block_table [pages, kv_heads, page_size, head_dim], page_size a power of two, at least 16.
        kv_len: [batch] int32; the number of keys of each sequence; default all. Read on the device: nothing depends on its values here.
        block_table: [batch, max_pages] int32; the page that holds keys i * page_size onwards. Entries past kv_len may be anything.
        kv_start: [batch] int32; the first key of each sequence (left padding).
        window: only the last `window` keys are seen.
        scale: of q k^T; positive; default head_dim ** -0.5.
        return_lse: also return the natural log of the softmax denominator.
    Returns: out [batch, q_heads, 1, head_dim]; with return_lse the tuple (out, lse), lse fp32 [batch, q_heads, 1].
        A sequence with no key to see gives 0, its lse -inf. Memory outside the keys may hold anything.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(q, "q", ndim=4, dtypes=DTYPES)
    batch, q_heads, q_len, head_dim = q.shape
    if q_len != 1:
        raise must("q.shape[2]", 1, q_len)
    check_tensor(k, "k", ndim=4, like=q)
    check_heads(q, k)
    scale = check_scale_and_window(scale, window, head_dim)
    if k.shape[3] != head_dim or (block_table is None and k.shape[0] != batch):
        raise must("k.shape", (k.shape[0] if block_table is not None else batch, *k.shape[1:3], head_dim), tuple(k.shape))
    check_tensor(v, "v", shape=k.shape, like=q)
    if block_table is not None:
        check_int32(block_table, "block_table", q, (batch, None))
        if k.shape[2] < 16 or k.shape[2] & (k.shape[2] - 1):
            raise must("k.shape[2]", "a power of two, at least 16 (the page size)", k.shape[2])
    for name, given in (("kv_len", kv_len), ("kv_start", kv_start)):
        if given is not None:
            check_int32(given, name, q, (batch,))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, q_heads, 1), dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel() and k.numel() and (block_table is None or block_table.numel()):
        attention_decode_out(q, k, v, out, lse, kv_len, block_table, kv_start, scale, window)
    else:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    return out if lse is None else (out, lse)
