"""Attention of many queries (prefill): out = softmax(scale * q k^T + mask) v, per head, in one pass
over the keys.

With n keys and q_len queries in a sequence, query i sees key j where (causal) j <= i + n - q_len
and (window W) j > i + n - q_len - W, or (window (A, B)) where i - A <= j - n + q_len <= i + B.
A row that sees no key gives 0 and lse -inf. With softcap c a score s becomes c tanh(s / c) before
the mask; a sink adds exp(sink) to the denominator of each row of its head, and nothing to its lse.
Codes of 8 bits stand for code * scale of their head.

Source    Dao et al. 2022, arXiv:2205.14135 (tiles, running softmax); Milakov and Gimelshein 2018,
          arXiv:1805.02867, alg. 3 (the recurrence).
Numerics  Scores, running maximum, denominator and accumulator in fp32; weights rounded to the dtype
          of v before their product with v; out rounded once. Exponentials in base 2, scale *
          log2(e) folded into one fma. Masked scores are -inf; the running maximum starts at a
          finite floor, so that a tile with every key masked adds exp2(-inf) = 0 and never computes
          -inf - -inf. The maximum of scaled scores is rounded, so weights are off by a common
          factor, which the denominator takes out. Beyond 2**25 it is large enough for weights of 8
          bits to saturate, beyond 2**28 for fp16 and beyond 2**31 for all to become infinite.
          Weights of 8 bits are relative to 2**-8 of the largest, which uses the format's range; on
          tensor cores their sums have 14 bits within 128 keys.
Bound     Compute, 4 * head_dim flops per visible score; at head_dim 64 the exponentials are nearly
          as long as the products.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, check_bools, check_integers, check_out, check_tensor, next_pow2, torch_op
from ...launch.values import Claims, positive, rising, spans
from ..common.prefill import Config as Config
from ..common.scaling import FP8
from ..common.sequences import near
from ..common.softmax_tiles import (
    FARTHEST,
    MAX_HEAD_DIM,
    check_heads,
    check_int32,
    check_scale_and_window,
    check_scales,
    check_sinks,
    check_softcap,
    check_starts,
    no_keys,
)
from ..common.tiles import LOG2E
from .decision import CHOICES as CHOICES, Problem as Problem, plan as plan, space as space

MAX_HEAD_DIM_EIGHT = 128  # in 8 bits each step's sums stand in registers beside the running ones
Window = int | tuple[int | None, int | None] | None
REFERENCE_SCORES = 1 << 26  # that the reference holds at a time


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, sequence by sequence: products in the dtype, softmax at least in fp32, as
    Hugging Face's eager attention does.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    causal, window, ahead = _sides(causal, window)
    options = (causal, scale, window, ahead, softcap, sinks, q_scale, k_scale, v_scale)
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        rows = list(map(slice, cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:]))
        keys = list(map(slice, cu_seqlens_kv.tolist(), cu_seqlens_kv.tolist()[1:]))
        parts = [_one(q[r].transpose(0, 1), k[s].transpose(0, 1), v[s].transpose(0, 1), *options) for r, s in zip(rows, keys, strict=True)]
        out = torch.cat([o for o, _ in parts], dim=1).transpose(0, 1)
        lse = torch.cat([x for _, x in parts], dim=1)
    else:
        starts = [0] * len(q) if kv_start is None else kv_start.tolist()
        stops = [k.shape[2]] * len(q) if kv_len is None else kv_len.tolist()
        parts = [_one(q[i], k[i, :, a:b], v[i, :, a:b], *options) for i, (a, b) in enumerate(zip(starts, stops, strict=True))]
        out = torch.stack([o for o, _ in parts])
        lse = torch.stack([x for _, x in parts])
    return (out, lse) if return_lse else out


def _one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    ahead: int,
    softcap: float | None,
    sinks: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [q_heads, q_len, head_dim], k [kv_heads, n, head_dim], v [kv_heads, n,
    v_dim]; out like q with v_dim, lse [q_heads, q_len].

    Codes of 8 bits are multiplied as fp32 (weights are rounded to their format all the same), their
    scales applied to the products.
    """
    (q_heads, q_len, _), n, group = q.shape, k.shape[1], q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    weight_dtype, wide = v.dtype, torch.promote_types(q.dtype if q.dtype.itemsize > 1 else torch.float32, torch.float32)
    out_scale: Tensor | float = 1.0
    if q_scale is not None and k_scale is not None and v_scale is not None:
        q, k, v = (x.to(wide) for x in (q, k, v))
        q = q * (q_scale * k_scale.repeat_interleave(group))[:, None, None]
        out_scale = v_scale.repeat_interleave(group)[:, None, None]
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.bfloat16 if weight_dtype in FP8 else q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    step = max(1, REFERENCE_SCORES // max(1, q_heads * n))
    for first in range(0, q_len if n else 0, step):
        rows = slice(first, min(first + step, q_len))
        last_key = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + n - q_len
        key = torch.arange(n, device=q.device)
        seen = torch.ones(rows.stop - rows.start, n, dtype=torch.bool, device=q.device)
        if causal:
            seen &= key <= last_key + ahead
        if window is not None:
            seen &= key > last_key - window
        scores = q[:, rows] @ k.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.to(wide).masked_fill(~seen, -torch.inf)
        lse[:, rows] = scores.logsumexp(-1)
        if sinks is not None:  # one more score, whose value is nothing
            scores = torch.cat((scores, sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)), -1)
        weights = scores.softmax(-1)[..., :n].masked_fill(~seen.any(-1, keepdim=True), 0.0)
        out[:, rows] = (weights.to(weight_dtype).to(v.dtype) @ v * out_scale).to(out.dtype)
    return out, lse


ARGUMENTS = (
    *("q", "k", "v", "out", "lse", "kv_start", "kv_len", "cu_seqlens_q", "cu_seqlens_kv"),
    *("sinks", "q_scale", "k_scale", "v_scale", "window", "ahead", "scale", "cap"),
)
DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


def _claims(
    q: Tensor,
    k: Tensor,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Claims:
    if cu_seqlens_q is None:
        yield from spans(kv_start, kv_len, k.shape[2])
    yield from rising("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    yield from rising("cu_seqlens_kv", cu_seqlens_kv, k.shape[0])
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        yield from positive(name, scale)


@torch_op(mutates=("out", "lse"), claims=_claims)
def attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_start: Optional[Tensor],
    kv_len: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_kv: Optional[Tensor],
    sinks: Optional[Tensor],
    q_scale: Optional[Tensor],
    k_scale: Optional[Tensor],
    v_scale: Optional[Tensor],
    scale: float,
    causal: bool,
    window: Optional[int],
    ahead: int,
    max_q_len: Optional[int],
    softcap: Optional[float],
    out: Tensor,
    lse: Optional[Tensor],
) -> None:
    """`attention` into `out` and, if given, `lse`. No checks, no sync: safe under graph capture."""
    varlen = cu_seqlens_q is not None
    keys_last = v.stride(-1) != 1 and v.shape[-1] > 1
    if varlen:
        q, k, v, out = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, out))
        lse = None if lse is None else lse.unsqueeze(0)
    (batch, q_heads, q_len, head_dim), kv_heads, kv_tokens, v_dim = q.shape, k.shape[1], k.shape[2], v.shape[3]
    if cu_seqlens_q is not None:
        batch = cu_seqlens_q.shape[0] - 1
    # What hides nothing is left out: the kernel's 32-bit sums would not hold every such number.
    if window is not None and window >= kv_tokens:
        window = None
    if ahead >= q_len:
        causal, ahead = False, 0
    # Each step of a server has sizes of its own. The queries and the batch make the grid, whose
    # blocks behind the last tile end at once; the keys only tell which config is best.
    if varlen:
        batch, q_len, kv_tokens = near(batch, 3), near(q_len, 4), near(kv_tokens, 3)
    launches = DECISION.launches(
        Device.of(q),
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_tokens,
        head_dim=head_dim,
        dtype=q.dtype,
        causal=causal,
        window=window,
        has_start=kv_start is not None,
        has_len=kv_len is not None,
        varlen=varlen,
        return_lse=lse is not None,
        v_dim=0 if v_dim == head_dim else v_dim,
        softcap=softcap,
        has_sinks=sinks is not None,
        keys_last=keys_last,
        longest=0 if max_q_len is None else next_pow2(max_q_len),
        ahead=ahead,
    )
    to_base_2, cap = (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)
    v = v.mT if keys_last else v
    sequences = (kv_start, kv_len, cu_seqlens_q, cu_seqlens_kv)
    launches.run(q, k, v, out, lse, *sequences, sinks, q_scale, k_scale, v_scale, (window or 0) + ahead, ahead, to_base_2, cap)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention; query head h reads key and value head h // (q_heads // kv_heads).

    Args:
        q: [batch, q_heads, q_len, head_dim]; bf16, fp16, fp32 or float8_e4m3fn; head_dim 1..256, in
            float8_e4m3fn 1..128; any strides with stride 1 in the last axis.
        k: [batch, kv_heads, max_len, head_dim], dtype and device of q; kv_heads divides q_heads.
        v: [batch, kv_heads, max_len, v_dim], likewise, v_dim in the range of head_dim. In
            float8_e4m3fn the axis of the keys may have stride 1 instead, which is faster: tensor
            cores need 8-bit values to be contiguous along the keys.
        causal: query i sees keys up to i + n - q_len of its sequence's n keys, so the last query
            sees all of them. For a chunk of a long prompt, pass the queries of the chunk, the
            cache, and a kv_len that includes the chunk.
        scale: of q k^T; positive; default head_dim ** -0.5.
        window: a query sees at most this many keys, its own included. A window as long as the keys
            has no effect. Without causal, also (before, behind): how many keys before and behind
            its own key a query sees; None for all.
        kv_start: [batch] int32; the first key of each sequence (left padding). With causal, queries
            before it see nothing; otherwise they see what all others do.
        kv_len: [batch] int32; where the keys of each sequence end, at most max_len; default
            max_len. Memory past it may hold anything.
        cu_seqlens_q, cu_seqlens_kv: [sequences + 1] int32, where each sequence begins and the last
            one ends. With them q is [total_q, q_heads, head_dim], and k and v are [total_kv,
            kv_heads, ...]. They exclude kv_start and kv_len.
        max_q_len: the number of queries of the longest sequence in cu_seqlens_q. It only affects
            the choice of tiles; default total_q.
        return_lse: also return the natural log of the softmax denominator.
        softcap: positive; scores become softcap * tanh(score / softcap), after `scale` and before
            the mask.
        sinks: [q_heads] fp32; an extra score in the softmax denominator of every row of a head,
            without a value; comparable with the scaled scores (natural log).
        q_scale: [q_heads] fp32, positive; required with float8_e4m3fn, else not allowed. A value of
            q is its code times its head's scale.
        k_scale, v_scale: [kv_heads] fp32, likewise.
        out: where the result goes: of its shape, dtype and device, its axes in any order in
            memory; default a new tensor.
    Returns: out [batch, q_heads, q_len, v_dim], contiguous as [batch, q_len, q_heads, v_dim] (with
        cu_seqlens as [total_q, q_heads, v_dim]), in q's dtype, for float8_e4m3fn in bf16; with
        return_lse the tuple (out, lse), lse fp32 [batch, q_heads, q_len] (with cu_seqlens [q_heads,
        total_q]), without the sink. A row that sees no key is 0, its lse -inf.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(causal=causal, return_lse=return_lse)
    varlen = cu_seqlens_q is not None
    check_tensor(q, "q", ndim=3 if varlen else 4, dtypes=(*FLOATS, torch.float8_e4m3fn))
    check_tensor(k, "k", ndim=q.dim(), like=q)
    _, q_heads, *_, head_dim = q.shape
    kv_heads, eight_bits = k.shape[1], q.dtype in FP8
    check_heads(q, k, MAX_HEAD_DIM_EIGHT if eight_bits else MAX_HEAD_DIM)
    if isinstance(window, tuple):
        check_sides(causal, window)
    scale = check_scale_and_window(scale, None if isinstance(window, tuple) else window, head_dim)
    causal, window, ahead = _sides(causal, window)
    check_softcap(softcap)
    check_sinks(sinks, q, q_heads)
    check_scales(q, q_scale=(q_scale, (q_heads,)), k_scale=(k_scale, (kv_heads,)), v_scale=(v_scale, (kv_heads,)))
    stored = torch.bfloat16 if eight_bits else q.dtype
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    if cu_seqlens_q is not None:
        check_tensor(k, "k", shape=(k.shape[0], kv_heads, head_dim), like=q)
        _check_packing(q, kv_start, kv_len, cu_seqlens_q, cu_seqlens_kv)
        if max_q_len is not None:
            check_integers(max_q_len=max_q_len)
            if max_q_len < 1 <= q.shape[0]:
                raise argument_error("max_q_len", "at least 1", max_q_len)
        _check_values(k, v)
        out_shape = (*q.shape[:2], v.shape[-1])
        lse_shape = (q.shape[1], q.shape[0])
    else:
        batch, _, q_len, _ = q.shape
        kv_batch, _, kv_tokens, kv_dim = k.shape
        if kv_batch != batch or kv_dim != head_dim:
            raise argument_error("k.shape", (batch, kv_heads, kv_tokens, head_dim), tuple(k.shape))
        if cu_seqlens_kv is not None:
            raise argument_error("cu_seqlens_kv", "given only with cu_seqlens_q", type(cu_seqlens_kv).__name__)
        if max_q_len is not None:
            raise argument_error("max_q_len", "given only with cu_seqlens_q", type(max_q_len).__name__)
        for name, given in (("kv_start", kv_start), ("kv_len", kv_len)):
            if given is not None:
                check_int32(given, name, q, (batch,))
        _check_values(k, v)
        out_shape = (batch, q_heads, q_len, v.shape[-1])
        lse_shape = (batch, q_heads, q_len)
    optional = (kv_start, kv_len, cu_seqlens_q, cu_seqlens_kv, sinks, q_scale, k_scale, v_scale)
    if out is not None:
        check_out(out, out_shape, stored, (q, k, v, *optional))
    elif varlen:
        out = torch.empty(out_shape, dtype=stored, device=q.device)
    else:  # as the projection behind it reads it
        v_dim = out_shape[-1]
        out = q.new_empty_strided(out_shape, (q_len * q_heads * v_dim, v_dim, q_heads * v_dim, 1), dtype=stored)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel() and k.numel() and (cu_seqlens_q is None or len(cu_seqlens_q) > 1):
        attention_out(q, k, v, *optional, scale, causal, window, ahead, max_q_len, softcap, out, lse)
    else:
        no_keys(out, lse)
    return out if lse is None else (out, lse)


def _sides(causal: bool, window: Window) -> tuple[bool, int | None, int]:
    """A mask as a causal one or none, the keys that it leaves of those up to a query's own, and of
    those behind; each at most FARTHEST.
    """
    if not isinstance(window, tuple):
        return causal, None if window is None else min(window, FARTHEST), 0
    before, behind = window
    return behind is not None, None if before is None else min(before + 1, FARTHEST), min(behind or 0, FARTHEST)


def check_sides(causal: bool, window: tuple[int | None, int | None]) -> None:
    """Raises TypeError or ValueError for a window of two sides that is none."""
    if causal:
        raise argument_error("window", "one number with causal=True", window)
    if len(window) != 2:
        raise argument_error("window", "a number, or (before, behind)", window)
    for side in window:
        if side is not None and (not isinstance(side, (int, torch.SymInt)) or isinstance(side, bool) or side < 0):
            raise argument_error("window", "(before, behind), each an integer of at least 0, or None", window)


def _check_values(k: Tensor, v: Any) -> None:
    shape = (*k.shape[:-1], v.shape[-1]) if isinstance(v, Tensor) and v.dim() == k.dim() else k.shape
    most = MAX_HEAD_DIM_EIGHT if k.dtype in FP8 else MAX_HEAD_DIM
    if not 1 <= shape[-1] <= most:
        raise argument_error("v.shape[-1]", f"in 1..{most}", shape[-1])
    if k.dtype in FP8 and k.dim() == 4 and isinstance(v, Tensor) and v.dim() == 4 and v.stride(2) == 1:
        check_tensor(v.mT, "v.mT", shape=(*shape[:2], shape[3], shape[2]), like=k)
    else:
        check_tensor(v, "v", shape=shape, like=k)


def _check_packing(q: Tensor, kv_start: Any, kv_len: Any, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor | None) -> None:
    for name, given in (("kv_start", kv_start), ("kv_len", kv_len)):
        if given is not None:
            raise argument_error(name, "None with cu_seqlens_q", type(given).__name__)
    if cu_seqlens_kv is None:
        raise argument_error("cu_seqlens_kv", "given with cu_seqlens_q", None)
    check_starts(cu_seqlens_q, "cu_seqlens_q", q)
    check_int32(cu_seqlens_kv, "cu_seqlens_kv", q, tuple(cu_seqlens_q.shape))
