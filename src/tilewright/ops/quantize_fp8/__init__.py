"""fp8 codes and their scales: value = code * scale, scale = max |value| of a group / largest code

Source    Micikevicius et al. 2022, arXiv:2209.05433 (e4m3, e5m2); groups of 1x128 and blocks of
          128x128: DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2.
Numerics  Scale in fp32, rounded once. Values are multiplied by its reciprocal in fp32 and rounded
          once, to nearest even. NaN, infinities and groups of zeros: fp8.py.
Bound     Memory: x read once, codes written once. One scale for a whole tensor needs x a second
          time, of which the L2 holds the end.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, as_rows, check_bools, check_tensor, each_out, out_or_new, torch_op
from ...launch.values import Claims, positive
from ..common.fp8 import GROUPS, ROW, SQUARES, TENSOR, Block, check_format, dequantized, quantized, results_for
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space

BLOCKS = (TENSOR, ROW, GROUPS, SQUARES)


def reference(
    x: Tensor,
    *,
    block: Block = TENSOR,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two_scales: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, at least in fp32. In float64 the codes are not rounded."""
    return quantized(x.to(torch.promote_types(x.dtype, torch.float32)), block, dtype, power_of_two_scales, scale)


def comparable(result: tuple[Tensor, Tensor], *, block: Block, **inputs: Any) -> tuple[Tensor, Tensor]:
    """What the accuracy rule can judge: the values that the codes stand for, and the scales."""
    codes, scale = result
    return dequantized(codes, scale, block), scale


DECISION = CHOICES.decision(Problem, plan, ("x", "codes", "scale"))


@torch_op(mutates=("codes", "scale"))
def quantize_fp8_out(x: Tensor, block_m: Optional[int], block_n: Optional[int], power_of_two_scales: bool, codes: Tensor, scale: Tensor) -> None:
    """`quantize_fp8` into `codes`, both [rows, cols], and `scale` [column groups, row groups].

    No checks, no sync: safe under graph capture.
    """
    rows, cols = x.shape
    launches = DECISION.launches(
        Device.of(x),
        rows=rows,
        cols=cols,
        dtype=x.dtype,
        block=(block_m, block_n),
        codes=codes.dtype,
        power_of_two_scales=power_of_two_scales,
    )
    launches.run(x, codes, scale)


def _claims(scale: Tensor) -> Claims:
    yield from positive("scale.view(1, 1)", scale)


@torch_op(mutates=("codes",), claims=_claims)
def quantize_fp8_given_out(x: Tensor, scale: Tensor, codes: Tensor) -> None:
    """`quantize_fp8` by a given scale [1, 1] into `codes`.

    No checks, no sync: safe under graph capture.
    """
    rows, cols = x.shape
    launches = DECISION.launches(Device.of(x), rows=rows, cols=cols, dtype=x.dtype, codes=codes.dtype, given_scale=True)
    launches.run(x, codes, scale)


def quantize_fp8(
    x: Tensor,
    *,
    block: tuple[int | None, int | None] = TENSOR,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two_scales: bool = False,
    scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rounds x to fp8 codes with a scale for each group of values: x is about codes * scale.

    Args:
        x: [..., cols]; bf16, fp16 or fp32; stride 1 in the last axis; [rows, cols] for blocks of
            128x128. Copied if its leading axes do not fold into one.
        block: rows and columns that share a scale: (None, None) all, (1, None) a row, (1, 128) or
            (128, 128).
        dtype: of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        power_of_two_scales: round the scales up to powers of two.
        scale: [] fp32 on x's device, positive; used instead of one computed from x. Values out of
            its range, infinities included, become the largest code of their sign; NaN stays NaN.
        out: where the result goes: (codes, scale), both laid out as below, no element in common
            with an input or each other; default new tensors. If `scale` is given, out[1] must be
            the same tensor.
    Returns: (codes, scale): codes contiguous, shaped like x; scale fp32, [] or x.shape[:-1] or
        [..., ceil(cols / 128)] or [ceil(rows / 128), ceil(cols / 128)], the latter two with stride
        1 along the rows; or `scale` itself. A group of zeros, or an empty one, has the scale
        2**-126. A group with a NaN or an infinity has NaN for its scale and all its codes, because
        an infinite scale would turn finite values into 0.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(power_of_two_scales=power_of_two_scales)
    check_format(block, dtype, BLOCKS)
    check_tensor(x, "x", dtypes=FLOATS, ndim=2 if block == SQUARES else None)
    if x.dim() == 0:
        raise argument_error("x.dim()", "at least 1", 0)
    if scale is None:
        codes, scale, scales = results_for(out, tuple(x.shape), dtype, block, x)
        if scales is not None:
            quantize_fp8_out(as_rows(x), *block, power_of_two_scales, as_rows(codes), scales)
        return codes, scale
    check_tensor(scale, "scale", shape=(), dtypes=(torch.float32,), like=x)
    if block != TENSOR:
        raise argument_error("scale", f"None for block {block}", "a tensor")
    if power_of_two_scales:
        raise argument_error("power_of_two_scales", "False if scale is given", True)
    codes, given = each_out(out, "codes", "scale")
    codes = out_or_new(codes, x.shape, dtype, x, scale, name="out[0]")
    if out is not None and given is not scale:
        raise argument_error("out[1]", "scale itself, if scale is given", "another tensor")
    if codes.numel():
        quantize_fp8_given_out(as_rows(x), scale.view(1, 1), as_rows(codes))
    return codes, scale
