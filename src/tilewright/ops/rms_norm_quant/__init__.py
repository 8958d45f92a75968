"""RMSNorm straight to fp8.

    codes, scale = quantize_fp8(x / sqrt(mean(x**2, -1) + eps) * (weight_offset + weight))

Source    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; scales for rows or groups of 128
          columns: DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2.
Numerics  fp32 from load to store; the result is rounded once, to the code, and not to x's dtype
          before. x * weight comes first, so that its largest is known before the root. With
          round_before_weight the normalised x is rounded to its dtype before the weight; with a
          residual, x + residual rounded to their dtype is what is normalised, and is returned.
          Scales: fp8.py.
Bound     Memory: x read once, codes written once (with a residual two reads, two writes); the
          weight stays in L2.
"""

from typing import Any, Optional, overload

import torch
from torch import Tensor

from ...launch import Device, as_rows, check_bools, torch_op
from .. import rms_norm
from ..common.fp8 import GROUPS, ROW, Block, check_format, dequantized, quantized, results_for
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space

BLOCKS = (ROW, GROUPS)


def reference(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    block: Block = ROW,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The definition, at least in fp32 between the roundings that it has. In float64 the codes are
    not rounded.
    """
    if residual is not None:
        x = residual = x + residual
    codes, scale = quantized(rms_norm.scaled_rows(x, weight, eps, weight_offset, round_before_weight), block, dtype, power_of_two_scales)
    return (codes, scale) if residual is None else (codes, scale, residual)


def comparable(result: tuple[Tensor, ...], *, x: Tensor, block: Block, **inputs: Any) -> tuple[Tensor, ...]:
    """What the accuracy rule can judge: the values that the codes stand for, the scales, the new
    residual.

    Scales in x's dtype: a row's is one number, whose last fp32 bit the order of a sum decides.
    """
    codes, scale, *rest = result
    return dequantized(codes, scale, block), scale.to(x.dtype), *rest


DECISION = CHOICES.decision(Problem, plan, ("x", "residual", "weight", "codes", "scale", "new_residual", "eps", "weight_offset"))


@torch_op(mutates=("codes", "scale", "new_residual"))
def rms_norm_quant_out(
    x: Tensor,
    weight: Tensor,
    residual: Optional[Tensor],
    eps: float,
    group: Optional[int],
    weight_offset: float,
    round_before_weight: bool,
    power_of_two_scales: bool,
    codes: Tensor,
    scale: Tensor,
    new_residual: Optional[Tensor],
) -> None:
    """`rms_norm_quant` into `codes` and `new_residual`, [rows, cols], and `scale`,
    [column groups, rows]; group: columns of one, None for all.

    No checks, no sync: safe under graph capture.
    """
    rows, cols = x.shape
    launches = DECISION.launches(
        Device.of(x),
        rows=rows,
        cols=cols,
        dtype=x.dtype,
        block=(1, group),
        codes=codes.dtype,
        power_of_two_scales=power_of_two_scales,
        residual=residual is not None,
        round_before_weight=round_before_weight,
        weight_offset=weight_offset,
    )
    launches.run(x, residual, weight, codes, scale, new_residual, eps, weight_offset)


@overload
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    block: tuple[int | None, int | None] = ...,
    weight_offset: float = ...,
    round_before_weight: bool = ...,
    residual: None = ...,
    dtype: torch.dtype = ...,
    power_of_two_scales: bool = ...,
    out: tuple[Tensor, Tensor] | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    block: tuple[int | None, int | None] = ...,
    weight_offset: float = ...,
    round_before_weight: bool = ...,
    residual: Tensor,
    dtype: torch.dtype = ...,
    power_of_two_scales: bool = ...,
    out: tuple[Tensor, Tensor] | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    block: tuple[int | None, int | None] = ROW,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two_scales: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Scales each row of x to unit root mean square, then by the weight, and rounds the result to
    fp8 codes with scales.

    Args:
        x: [..., cols]; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its leading axes do
            not fold into one.
        weight: [cols], dtype and device of x.
        eps: positive; added to mean(x**2).
        block: rows and columns that share a scale: (1, None) a row, or (1, 128).
        weight_offset: added to the weight; 1.0 for Gemma.
        round_before_weight: round to x's dtype before the weight, as Hugging Face's Llama does.
        residual: shape, dtype and device of x; x + residual is normalised.
        dtype: of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        power_of_two_scales: round the scales up to powers of two.
        out: where the result goes: (codes, scale), both laid out as below, no element in common
            with an input or each other; default new tensors.
    Returns: (codes, scale), with a residual (codes, scale, x + residual): codes contiguous, shaped
        like x; scale fp32, x.shape[:-1] or [..., ceil(cols / 128)] with stride 1 along the rows.
        Zeros have the scale 2**-126; a NaN in a row makes all of it NaN.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(round_before_weight=round_before_weight, power_of_two_scales=power_of_two_scales)
    rms_norm.check_norm(x, weight, eps, weight_offset, residual)
    check_format(block, dtype, BLOCKS)
    codes, scale, scales = results_for(out, tuple(x.shape), dtype, block, x, weight, residual)
    new_residual = None if residual is None else x.new_empty(x.shape)
    if scales is not None:
        rms_norm_quant_out(
            as_rows(x),
            weight,
            as_rows(residual),
            eps,
            block[1],
            weight_offset,
            round_before_weight,
            power_of_two_scales,
            as_rows(codes),
            scales,
            as_rows(new_residual),
        )
    return (codes, scale) if new_residual is None else (codes, scale, new_residual)
