"""Product with a quantised weight: out = x @ weight.T + bias, weight = (code - zero) * scale

x may be rows that are normed first, or the gate and the up of an MLP: the launch that makes pieces
of x computes these too. x and out are bf16; codes have 4 or 8 bits (ops/common/weight_formats.py).

Source    Weight-only quantisation, as in GPTQ (Frantar et al. 2022, arXiv:2210.17323) and AWQ (Lin
          et al. 2023, arXiv:2306.00978); MXFP4: OCP Microscaling Formats 1.0; numbers from bits by
          one AND: Kim et al. 2022, arXiv:2211.10017.
Numerics  A norm is fp32: its weight multiplies x, its division the sums over k. Codes less their
          zero points are exact in bf16. Scales of rows, and of groups of 128 where x has few rows,
          multiply sums in fp32; others the weights, which are then rounded to bf16
          (those of mxfp4 and nvfp4 exactly). Few rows of x become pairs of e4m3 numbers, which keep
          8 bits of each (ops/common/pieces.py); their products are summed over up to 128 k by the
          tensor cores' 8-bit instruction. Products and sums in fp32, rounded once.
Bound     Memory up to about 64 rows of x: the words are read once. Then compute; a weight takes 2
          to 3 instructions to decode.
"""

from typing import Any, Optional, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import Bound, Device, argument_error, as_rows, check_bools, check_finite, check_positive, check_tensor, out_or_new, torch_op
from ...launch.values import Claims
from .. import rms_norm, silu_mul
from ..common.weight_formats import check_weight, dequantized, format_named, scale_claims
from .candidates import CHOICES as CHOICES, DECISION as DECISION, space as space
from .decision import LEFT, Config as Config, Problem as Problem, plan as plan


def reference(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    up: Tensor | None = None,
    gelu_tanh: bool = False,
    weight_format: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, on the weight that the words stand for, rounded to the dtype of x."""
    total = None
    if norm is not None:
        found = rms_norm.reference(x, norm, eps, weight_offset=weight_offset, residual=residual)
        x, total = found if isinstance(found, tuple) else (found, None)
    if up is not None:
        x = silu_mul.reference(x, up, gelu_tanh=gelu_tanh)
    weight = dequantized(words, scales, zeros, factor, format_named(weight_format), x.shape[-1], x.dtype)
    out = F.linear(x, weight, bias)
    return out if total is None else (out, total)


def _claims(scales: Tensor) -> Claims:
    yield from scale_claims(scales=scales)


@torch_op(mutates=("out", "new_residual"), claims=_claims)
def quantized_matmul_out(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Optional[Tensor],
    factor: Optional[Tensor],
    bias: Optional[Tensor],
    norm: Optional[Tensor],
    residual: Optional[Tensor],
    up: Optional[Tensor],
    eps: float,
    weight_offset: float,
    gelu_tanh: bool,
    weight_format: str,
    out: Tensor,
    new_residual: Optional[Tensor],
) -> None:
    """`quantized_matmul` of rows x into `out` and, with a residual, `new_residual`.

    The sums over shares of k may be left to the reader: then `out` is fp32 [shares, m, n], of as
    many shares as `launches_of` it with `left` has. A residual, or x and up, may come in shares
    [shares, m, k].

    No checks, no sync: safe under graph capture.
    """
    launches = launches_of(x, norm, residual, up, bias, weight_offset, gelu_tanh, weight_format, out)
    launches.run(x, words, scales, zeros, factor, bias, out, norm, residual, up, new_residual, eps, weight_offset)


def launches_of(
    x: Tensor,
    norm: Tensor | None,
    residual: Tensor | None,
    up: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    gelu_tanh: bool,
    weight_format: str,
    out: Tensor,
    left: bool = False,
) -> Bound:
    """The launches of a call. left: of one that leaves the sums over shares of k, however many."""
    (*shares, m, n), given = out.shape, residual if up is None else x
    return DECISION.launches(
        Device.of(x),
        m=m,
        n=n,
        k=x.shape[-1],
        weight_format=weight_format,
        bias=bias is not None,
        norm=norm is not None,
        residual=residual is not None,
        weight_offset=weight_offset,
        gated=up is not None,
        gelu_tanh=gelu_tanh,
        given=0 if given is None or given.dim() == 2 else len(given),
        shares=LEFT if left else shares[0] if shares else 0,
    )


@overload
def quantized_matmul(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None = ...,
    *,
    factor: Tensor | None = ...,
    bias: Tensor | None = ...,
    norm: Tensor | None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    up: Tensor | None = ...,
    gelu_tanh: bool = ...,
    weight_format: str,
    out: Tensor | None = ...,
) -> Tensor: ...
@overload
def quantized_matmul(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None = ...,
    *,
    factor: Tensor | None = ...,
    bias: Tensor | None = ...,
    norm: Tensor,
    eps: float = ...,
    weight_offset: float = ...,
    residual: Tensor,
    weight_format: str,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def quantized_matmul(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    up: Tensor | None = None,
    gelu_tanh: bool = False,
    weight_format: str,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """x @ weight.T + bias, as torch.nn.functional.linear, with a weight [n, k] of 4 or 8 bits.

    `QuantizedWeight` packs one: `w = QuantizedWeight.of(weight, "int4-128")`, then
    `quantized_matmul(x, **w.arguments)`.

    Args:
        x: [..., k], bf16, stride 1 in the last axis.
        words: int32 [ceil(n / 64), runs, 64, 16].
        scales: [groups of k, n], in the dtype of the format; fp16 too for int4.
        zeros: bf16 or fp16, shaped like scales, for formats with zero points.
        factor: fp32 [1], for nvfp4.
        bias: bf16 [n].
        norm: bf16 [k]; then `rms_norm(x, norm, eps, ...)` is multiplied in place of x.
        eps, weight_offset: of the norm, as in `rms_norm`.
        residual: bf16, shaped like x; with a norm: x + residual is normed.
        up: bf16, shaped like x; then `silu_mul(x, up)` is multiplied. Not with a norm.
        gelu_tanh: of `up`, as in `silu_mul`.
        weight_format: int4-128, int4-64 or int4-32, these with -zeros, int8, int8-32, int8-16,
            e4m3, e4m3-128, mxfp4 or nvfp4.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [..., n], bf16, contiguous; with a residual the tuple (that, x + residual). Without
        rows it is empty, and nothing is launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(gelu_tanh=gelu_tanh)
    check_tensor(x, "x", dtypes=(torch.bfloat16,))
    if x.dim() == 0:
        raise argument_error("x.dim()", "at least 1", 0)
    check_weight(words, scales, zeros, factor, format_named(weight_format), x)
    _check_before(x, norm, eps, weight_offset, residual, up)
    n = scales.shape[1]
    out = out_or_new(out, (*x.shape[:-1], n), x.dtype, x, words, scales, zeros, factor, bias, norm, residual, up)
    total = None if residual is None else x.new_empty(x.shape)
    if bias is not None:
        check_tensor(bias, "bias", shape=(n,), like=x)
    if out.numel():
        small = words, scales, zeros, factor, bias
        how: tuple[Any, ...] = eps, weight_offset, gelu_tanh, weight_format
        quantized_matmul_out(as_rows(x), *small, norm, as_rows(residual), as_rows(up), *how, as_rows(out), as_rows(total))
    elif residual is not None:
        torch.add(x, residual, out=total)
    return out if total is None else (out, total)


def _check_before(x: Tensor, norm: Tensor | None, eps: float, weight_offset: float, residual: Tensor | None, up: Tensor | None) -> None:
    """What becomes of x first."""
    check_positive(eps, "eps")
    check_finite(weight_offset, "weight_offset")
    if norm is not None:
        check_tensor(norm, "norm", shape=x.shape[-1:], like=x)
    if residual is not None:
        if norm is None:
            raise argument_error("residual", "None without a norm", "a tensor")
        check_tensor(residual, "residual", shape=x.shape, like=x)
    if up is not None:
        if norm is not None:
            raise argument_error("up", "None with a norm", "a tensor")
        check_tensor(up, "up", shape=x.shape, like=x)
