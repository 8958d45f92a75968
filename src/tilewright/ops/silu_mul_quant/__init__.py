"""Gated activation straight to fp8: codes, scale = quantize_fp8(silu(gate) * up).

With gelu_tanh of gelu(gate) * up.

    silu(g) = g * sigmoid(g)        gelu(g) = g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 * g**3))

Source    Shazeer 2020, arXiv:2002.05202, eq. 6 (SwiGLU, GEGLU); scales for rows or groups of 128
          columns: DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2.
Numerics  As silu_mul, but its result stays in fp32: it is rounded once, to the code. Scales:
          fp8.py.
Bound     Memory: gate and up read once, codes written once.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from ...launch import Device, as_rows, check_bools, torch_op
from .. import silu_mul
from ..common.fp8 import GROUPS, ROW, Block, check_format, dequantized, quantized, results_for
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space

BLOCKS = (ROW, GROUPS)


def reference(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    gelu_tanh: bool = False,
    block: Block = ROW,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition, at least in fp32. In float64 the codes are not rounded."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    gate, up = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (gate, up))
    return quantized(silu_mul.reference(gate, up, gelu_tanh=gelu_tanh), block, dtype, power_of_two_scales)


def comparable(result: tuple[Tensor, Tensor], *, gate: Tensor, block: Block, **inputs: Any) -> tuple[Tensor, Tensor]:
    """What the accuracy rule can judge: the values that the codes stand for, and the scales.

    Scales in gate's dtype: a row's is one number, the last fp32 bits of which are those of one
    exponential.
    """
    codes, scale = result
    return dequantized(codes, scale, block), scale.to(gate.dtype)


DECISION = CHOICES.decision(Problem, plan, ("gate", "up", "codes", "scale"))


@torch_op(mutates=("codes", "scale"))
def silu_mul_quant_out(
    gate: Tensor, up: Tensor, gelu_tanh: bool, group: Optional[int], power_of_two_scales: bool, codes: Tensor, scale: Tensor
) -> None:
    """`silu_mul_quant` into `codes`, like gate and up [rows, cols], and `scale`,
    [column groups, rows]; group: columns of one, None for all.

    No checks, no sync: safe under graph capture.
    """
    rows, cols = codes.shape
    launches = DECISION.launches(
        Device.of(gate),
        rows=rows,
        cols=cols,
        dtype=gate.dtype,
        block=(1, group),
        codes=codes.dtype,
        power_of_two_scales=power_of_two_scales,
        fused=gate.stride(0) == 2 * cols,
        gelu_tanh=gelu_tanh,
    )
    launches.run(gate, up, codes, scale)


def silu_mul_quant(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    gelu_tanh: bool = False,
    block: tuple[int | None, int | None] = ROW,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two_scales: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, or gelu(gate) * up, rounded to fp8 codes with scales: the activation of a
    SwiGLU or GEGLU layer before an fp8 product.

    Args:
        gate: [..., cols], or [..., 2 * cols] holding (gate, up) when `up` is not given; bf16, fp16
            or fp32; stride 1 in the last axis. Copied if its leading axes do not fold into one, as
            is `up`.
        up: [..., cols], shape, dtype and device of gate; may be a view of the same tensor.
        gelu_tanh: GELU in its tanh form instead of SiLU.
        block: rows and columns that share a scale: (1, None) a row, or (1, 128).
        dtype: of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        power_of_two_scales: round the scales up to powers of two.
        out: where the result goes: (codes, scale), both laid out as below, no element in common
            with an input or each other; default new tensors.
    Returns: (codes, scale): codes [..., cols], contiguous; scale fp32, [...] or [..., ceil(cols /
        128)] with stride 1 along the rows. A group of zeros has the scale 2**-126. A group with a
        NaN or an infinity has NaN for its scale and all its codes.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(gelu_tanh=gelu_tanh, power_of_two_scales=power_of_two_scales)
    shape = silu_mul.checked_shape(gate, up)
    check_format(block, dtype, BLOCKS)
    codes, scale, scales = results_for(out, shape, dtype, block, gate, up)
    if scales is not None:
        gate = as_rows(gate)
        gate, up = gate.chunk(2, -1) if up is None else (gate, as_rows(up))
        silu_mul_quant_out(gate, up, gelu_tanh, block[1], power_of_two_scales, as_rows(codes), scales)
    return codes, scale
