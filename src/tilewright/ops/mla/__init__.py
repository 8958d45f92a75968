"""Prefill of multi-head latent attention: out = softmax(scale * (q_nope k_nope^T + q_rope k_rope^T)
+ mask) v, per head.

Keys and values are expanded (each head has its k_nope and v); k_rope, which carries the positions,
is one for all heads, and nothing is concatenated. With n keys in a sequence, query i sees key j
where (causal) j <= i + n - q_len; a row that sees no key gives 0 and lse -inf.

Source    DeepSeek-V2, arXiv:2405.04434, eq. 9 to 19; the loop over the keys as in `attention`.
Numerics  As in `attention`: scores of both products in one fp32 sum, weights rounded to the dtype
          of v, out rounded once.
Bound     Compute, 2 * (nope_dim + rope_dim + v_dim) flops per visible score.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from ...launch import HALVES, Device, argument_error, check_bools, check_out, check_tensor, torch_op
from ...launch.values import Claims, positive, spans
from .. import attention
from ..common.prefill import Config as Config
from ..common.scaling import FP8
from ..common.softmax_tiles import check_int32, check_scale_and_window, check_scales, no_keys
from ..common.tiles import LOG2E
from .decision import CHOICES as CHOICES, Problem as Problem, plan as plan, space as space

DTYPES = (*HALVES, torch.float8_e4m3fn)
MAX_DIM = 128  # of each of the three parts


def reference(
    q_nope: Tensor,
    q_rope: Tensor,
    *,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    kv_len: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition: `attention` of the parts concatenated."""
    q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), -1)
    k_scale = None if k_scale is None else k_scale.expand(q.shape[1])
    how: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse}
    return attention.reference(q, k, v, causal=causal, scale=scale, kv_len=kv_len, **how)


ARGUMENTS = ("q_nope", "q_rope", "k_nope", "k_rope", "v", "out", "lse", "kv_len", "q_scale", "k_scale", "v_scale", "scale")
DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


def _claims(k_nope: Tensor, kv_len: Tensor | None, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> Claims:
    yield from spans(None, kv_len, k_nope.shape[2])
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        yield from positive(name, scale)


@torch_op(mutates=("out", "lse"), claims=_claims)
def mla_out(
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    kv_len: Optional[Tensor],
    q_scale: Optional[Tensor],
    k_scale: Optional[Tensor],
    v_scale: Optional[Tensor],
    scale: float,
    causal: bool,
    out: Tensor,
    lse: Optional[Tensor],
) -> None:
    """`mla` into `out` and, if given, `lse`. No checks, no sync: safe under graph capture."""
    batch, heads, q_len, nope_dim = q_nope.shape
    keys_last = v.stride(-1) != 1 and v.shape[-1] > 1
    launches = DECISION.launches(
        Device.of(q_nope),
        batch=batch,
        heads=heads,
        q_len=q_len,
        kv_len=k_nope.shape[2],
        dtype=q_nope.dtype,
        causal=causal,
        has_len=kv_len is not None,
        return_lse=lse is not None,
        keys_last=keys_last,
        nope_dim=nope_dim,
        rope_dim=q_rope.shape[-1],
        v_dim=v.shape[-1],
    )
    v, k_scale = v.mT if keys_last else v, None if k_scale is None else k_scale.view(1)
    launches.run(q_nope, q_rope, k_nope, k_rope, v, out, lse, kv_len, q_scale, k_scale, v_scale, scale * LOG2E)


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
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose scores are the sum of two parts: one without positions, and a rotated
    one with the same keys for all heads.

    Args:
        q_nope: [batch, heads, q_len, nope_dim]; bf16, fp16 or float8_e4m3fn; any strides with
            stride 1 in the last axis.
        q_rope: [batch, heads, q_len, rope_dim], dtype and device of q_nope, already rotated.
            nope_dim, rope_dim and v_dim are 1..128.
        k_nope: [batch, heads, max_len, nope_dim], likewise.
        k_rope: [batch, 1, max_len, rope_dim], likewise, already rotated.
        v: [batch, heads, max_len, v_dim], likewise. In float8_e4m3fn the axis of the keys may have
            stride 1 instead, which is faster.
        causal: query i sees keys up to i + n - q_len of its sequence's n keys, so the last query
            sees all of them.
        scale: of the scores; positive; default (nope_dim + rope_dim) ** -0.5.
        kv_len: [batch] int32; where the keys of each sequence end, at most max_len; default
            max_len. Memory beyond may hold anything.
        q_scale, v_scale: [heads] fp32, positive; required with float8_e4m3fn, else not allowed. A
            value is its code times its head's scale.
        k_scale: [] fp32, likewise; for both k_nope and k_rope.
        return_lse: also return the natural log of the softmax denominator.
        out: where the result goes: of its shape, dtype and device, its axes in any order in
            memory; default a new tensor.
    Returns: out [batch, heads, q_len, v_dim], contiguous as [batch, q_len, heads, v_dim], in q's
        dtype, for float8_e4m3fn in bf16; with return_lse the tuple (out, lse), lse fp32 [batch,
        heads, q_len]. A row that sees no key is 0, its lse -inf.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(causal=causal, return_lse=return_lse)
    check_tensor(q_nope, "q_nope", ndim=4, dtypes=DTYPES)
    batch, heads, q_len, nope_dim = q_nope.shape
    check_tensor(q_rope, "q_rope", ndim=4, like=q_nope)
    rope_dim = q_rope.shape[-1]
    check_tensor(q_rope, "q_rope", shape=(batch, heads, q_len, rope_dim), like=q_nope)
    check_tensor(k_nope, "k_nope", ndim=4, like=q_nope)
    max_len = k_nope.shape[2]
    check_tensor(k_nope, "k_nope", shape=(batch, heads, max_len, nope_dim), like=q_nope)
    check_tensor(k_rope, "k_rope", shape=(batch, 1, max_len, rope_dim), like=q_nope)
    check_tensor(v.mT if _keys_last(v) else v, "v.mT" if _keys_last(v) else "v", ndim=4, like=q_nope)
    v_dim = v.shape[-1]
    if v.shape[:3] != (batch, heads, max_len):
        raise argument_error("v.shape", (batch, heads, max_len, v_dim), tuple(v.shape))
    for name, dim in (("q_nope.shape[-1]", nope_dim), ("q_rope.shape[-1]", rope_dim), ("v.shape[-1]", v_dim)):
        if not 1 <= dim <= MAX_DIM:
            raise argument_error(name, f"in 1..{MAX_DIM}", dim)
    scale = check_scale_and_window(scale, None, nope_dim + rope_dim)
    if kv_len is not None:
        check_int32(kv_len, "kv_len", q_nope, (batch,))
    check_scales(q_nope, q_scale=(q_scale, (heads,)), k_scale=(k_scale, ()), v_scale=(v_scale, (heads,)))
    stored = torch.bfloat16 if q_nope.dtype in FP8 else q_nope.dtype
    if out is None:
        out = torch.empty((batch, q_len, heads, v_dim), dtype=stored, device=q_nope.device).transpose(1, 2)
    else:
        check_out(out, (batch, heads, q_len, v_dim), stored, (q_nope, q_rope, k_nope, k_rope, v, kv_len, q_scale, k_scale, v_scale))
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q_nope.device) if return_lse else None
    if out.numel() and k_nope.numel():
        mla_out(q_nope, q_rope, k_nope, k_rope, v, kv_len, q_scale, k_scale, v_scale, scale, causal, out, lse)
    else:
        no_keys(out, lse)
    return out if lse is None else (out, lse)


def _keys_last(v: Any) -> bool:
    return isinstance(v, Tensor) and v.dim() == 4 and v.dtype in FP8 and v.stride(2) == 1 and v.stride(3) != 1
