"""Attention of many queries (prefill): out = softmax(scale * q k^T + mask) v, per head, in one pass over the keys.

With n keys and q_len queries in a sequence, query i sees key j where (causal) j <= i + n - q_len and (window W) j > i + n - q_len - W.
A row that sees no key gives 0 and lse -inf.

Source    Dao et al. 2022, arXiv:2205.14135 (tiles, running softmax); Milakov and Gimelshein 2018, arXiv:1805.02867, alg. 3 (the recurrence).
Numerics  Scores, running maximum, denominator and accumulator in fp32; weights rounded to the dtype of v before their product with v; out
          rounded once. Exponentials in base 2, scale * log2(e) folded into one fma. Masked scores are -inf; the running maximum starts at a
          finite floor, so that a tile with every key masked adds exp2(-inf) = 0 and never computes -inf - -inf.
Bound     Compute, 4 * head_dim flops per visible score; at head_dim 64 the exponentials are nearly as long as the products.
"""

import math
from typing import Any, Optional

import torch
from torch import Tensor

from ...launch import Device, best_plan, check_tensor, launch, must, torch_op
from ..attention_common import DTYPES, LOG2E, check_heads, check_int32, check_scale_and_window
from .decision import Config, Problem, plan, space
from .kernel import attention_kernel

__all__ = ["Config", "Problem", "attention", "attention_kernel", "attention_out", "plan", "reference", "space"]

REFERENCE_SCORES = 1 << 26  # that the reference holds at a time


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, sequence by sequence: products in the dtype, softmax at least in fp32, as Hugging Face's eager attention does."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        rows = list(map(slice, cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:]))
        keys = list(map(slice, cu_seqlens_kv.tolist(), cu_seqlens_kv.tolist()[1:]))
        parts = [
            _one(q[r].transpose(0, 1), k[s].transpose(0, 1), v[s].transpose(0, 1), causal, scale, window) for r, s in zip(rows, keys, strict=True)
        ]
        out = torch.cat([o for o, _ in parts], dim=1).transpose(0, 1)
        lse = torch.cat([x for _, x in parts], dim=1)
    else:
        starts = [0] * len(q) if kv_start is None else kv_start.tolist()
        stops = [k.shape[2]] * len(q) if kv_len is None else kv_len.tolist()
        parts = [_one(q[i], k[i, :, a:b], v[i, :, a:b], causal, scale, window) for i, (a, b) in enumerate(zip(starts, stops, strict=True))]
        out = torch.stack([o for o, _ in parts])
        lse = torch.stack([x for _, x in parts])
    return (out, lse) if return_lse else out


def _one(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """One sequence: q [q_heads, q_len, head_dim], k and v [kv_heads, n, head_dim]; out like q, lse [q_heads, q_len]."""
    (q_heads, q_len, _), n = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(q_heads // len(x), 0) for x in (k, v))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    step = max(1, REFERENCE_SCORES // max(1, q_heads * n))
    for first in range(0, q_len if n else 0, step):
        rows = slice(first, min(first + step, q_len))
        last_key = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + n - q_len
        key = torch.arange(n, device=q.device)
        seen = torch.ones(rows.stop - rows.start, n, dtype=torch.bool, device=q.device)
        if causal:
            seen &= key <= last_key
        if window is not None:
            seen &= key > last_key - window
        scores = (q[:, rows] @ k.mT * scale).to(lse.dtype).masked_fill(~seen, -torch.inf)
        lse[:, rows] = scores.logsumexp(-1)
        weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        out[:, rows] = weights.to(v.dtype) @ v
    return out, lse


@torch_op(mutates=("out", "lse"))
def attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Optional[Tensor],
    kv_start: Optional[Tensor],
    kv_len: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_kv: Optional[Tensor],
    scale: float,
    causal: bool,
    window: Optional[int],
    max_q_len: Optional[int],
) -> None:
    """`attention` into `out` and, if given, `lse`. No checks, no sync: safe under graph capture. max_q_len: with cu_seqlens."""
    varlen = cu_seqlens_q is not None
    if varlen:
        q, k, v, out = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, out))
        lse = None if lse is None else lse.unsqueeze(0)
    (batch, q_heads, q_len, head_dim), kv_heads, kv_tokens = q.shape, k.shape[1], k.shape[2]
    if cu_seqlens_q is not None and max_q_len is not None:
        batch, q_len = cu_seqlens_q.shape[0] - 1, max_q_len
    masks = (causal, window, kv_start is not None, kv_len is not None, varlen)
    shape = (batch, q_heads, kv_heads, q_len, kv_tokens, head_dim)
    chosen = best_plan(space, plan, Device.of(q), Problem, *shape, q.dtype, *masks, lse is not None)
    # q stands in for the arrays that the kernel's flags say are absent.
    launch(
        chosen,
        q,
        k,
        v,
        out,
        q if lse is None else lse,
        q if kv_start is None else kv_start,
        q if kv_len is None else kv_len,
        q if cu_seqlens_q is None else cu_seqlens_q,
        q if cu_seqlens_kv is None else cu_seqlens_kv,
        0 if window is None else window,
        scale * LOG2E,
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention; query head h reads key and value head h // (q_heads // kv_heads).

    Args:
        q: [batch, q_heads, q_len, head_dim]; bf16, fp16 or fp32; head_dim 1..256; any strides with stride 1 in the last axis.
        k, v: [batch, kv_heads, max_len, head_dim], dtype and device of q; kv_heads divides q_heads.
        causal: query i sees keys up to i + n - q_len of its sequence's n keys, so the last query sees all of them.
        scale: of q k^T; positive; default head_dim ** -0.5.
        window: a query sees at most this many keys, its own included.
        kv_start: [batch] int32; the first key of each sequence (left padding). Queries before it see nothing.
        kv_len: [batch] int32; where the keys of each sequence end, at most max_len; default max_len. Memory outside may hold anything.
        cu_seqlens_q, cu_seqlens_kv: [sequences + 1] int32, where each sequence begins and the last one ends. With them q is
            [total_q, q_heads, head_dim], k and v are [total_kv, kv_heads, head_dim], and there is no kv_start and kv_len.
        max_q_len: the longest sequence of cu_seqlens_q; default total_q, which launches blocks that find nothing to do.
        return_lse: also return the natural log of the softmax denominator.
    Returns: out like q, contiguous as [batch, q_len, q_heads, head_dim] (with cu_seqlens as [total_q, q_heads, head_dim]);
        with return_lse the tuple (out, lse), lse fp32 [batch, q_heads, q_len] (with cu_seqlens [q_heads, total_q]).
        A row that sees no key is 0, its lse -inf.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    varlen = cu_seqlens_q is not None
    check_tensor(q, "q", ndim=3 if varlen else 4, dtypes=DTYPES)
    check_tensor(k, "k", ndim=q.dim(), like=q)
    check_heads(q, k)
    scale = check_scale_and_window(scale, window, q.shape[-1])
    lse_shape: tuple[int, ...]
    if cu_seqlens_q is not None:
        check_tensor(k, "k", shape=(k.shape[0], k.shape[1], q.shape[-1]), like=q)
        _check_packing(q, kv_start, kv_len, cu_seqlens_q, cu_seqlens_kv)
        max_q_len = q.shape[0] if max_q_len is None else max_q_len
        if max_q_len < 1 <= q.shape[0]:
            raise must("max_q_len", "at least 1", max_q_len)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse_shape = (q.shape[1], q.shape[0])
    else:
        batch, q_heads, q_len, head_dim = q.shape
        if k.shape[0] != batch or k.shape[3] != head_dim:
            raise must("k.shape", (batch, k.shape[1], k.shape[2], head_dim), tuple(k.shape))
        if cu_seqlens_kv is not None:
            raise must("cu_seqlens_kv", "given only with cu_seqlens_q", type(cu_seqlens_kv).__name__)
        if max_q_len is not None:
            raise must("max_q_len", "given only with cu_seqlens_q", type(max_q_len).__name__)
        for name, given in (("kv_start", kv_start), ("kv_len", kv_len)):
            if given is not None:
                check_int32(given, name, q, (batch,))
        out = torch.empty((batch, q_len, q_heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
        lse_shape = (batch, q_heads, q_len)
    check_tensor(v, "v", shape=k.shape, like=q)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel() and k.numel():
        attention_out(q, k, v, out, lse, kv_start, kv_len, cu_seqlens_q, cu_seqlens_kv, scale, causal, window, max_q_len)
    else:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    return out if lse is None else (out, lse)


def _check_packing(q: Tensor, kv_start: Any, kv_len: Any, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor | None) -> None:
    for name, given in (("kv_start", kv_start), ("kv_len", kv_len)):
        if given is not None:
            raise must(name, "None with cu_seqlens_q", type(given).__name__)
    if cu_seqlens_kv is None:
        raise must("cu_seqlens_kv", "given with cu_seqlens_q", None)
    check_int32(cu_seqlens_q, "cu_seqlens_q", q, (None,))
    if not len(cu_seqlens_q):
        raise must("cu_seqlens_q.shape", "(sequences + 1,)", (0,))
    check_int32(cu_seqlens_kv, "cu_seqlens_kv", q, tuple(cu_seqlens_q.shape))
