"""Values as fp8 codes and scales: what quantize_fp8, rms_norm_quant and silu_mul_quant share.

    value = code * scale
    scale = max |value| of a group / largest code        code = round(value / scale)

`block` says which rows and columns make a group; the scales' shapes and their layout are those of
scaling.py:

    (None, None)   []                                   the tensor
    (1, None)      [rows]                               a row
    (1, 128)       [rows, ceil(cols / 128)]             128 columns of a row
    (128, 128)     [ceil(rows / 128), ceil(cols / 128)] a square

A scale is a normal number of fp32: the group's maximum counts as no less than largest code *
2**-126, so a group of zeros has codes 0 and scale 2**-126. A NaN or an infinity makes the scale and
all codes of its group NaN. Scales that are powers of two are the next one up, exactly, by the
exponent's bits.
"""

import cuda.tile as ct
import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import argument_error, check_out, each_out, out_or_new
from .scaling import FP8, GROUP, Scaling, empty_scales

Block = tuple[int | None, int | None]
TENSOR: Block = (None, None)
ROW: Block = (1, None)
GROUPS: Block = (1, GROUP)
SQUARES: Block = (GROUP, GROUP)
TINY = 2.0**-126  # the smallest normal fp32
APPROX = ct.RoundingMode.APPROX


def largest_code(dtype: torch.dtype) -> int:
    """448 for e4m3fn, 57344 for e5m2."""
    return int(torch.finfo(dtype).max)


def check_format(block: Block, dtype: torch.dtype, blocks: tuple[Block, ...]) -> None:
    """Raises ValueError unless an op that takes `blocks` can make such codes."""
    if not isinstance(block, tuple) or block not in blocks:
        raise argument_error("block", "one of " + ", ".join(map(str, blocks)), block)
    if dtype not in FP8:
        raise argument_error("dtype", "torch.float8_e4m3fn or torch.float8_e5m2", dtype)


def results_for(
    out: tuple[Tensor, Tensor] | None, shape: tuple[int, ...], dtype: torch.dtype, block: Block, x: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes and scales for values of `shape`, those of the caller's `out` if they fit, and the
    scales once more as kernels take them, [groups, rows].

    Where there are no values, the scales are those of zeros, and the last is None: nothing is to
    be launched.
    """
    codes, scale = each_out(out, "codes", "scale")
    codes = out_or_new(codes, shape, dtype, x, *others, name="out[0]")
    rows = 1
    for n in shape[:-1]:
        rows *= n
    groups = -(-shape[-1] // GROUP)
    if block in (TENSOR, ROW):
        scale = out_or_new(scale, () if block == TENSOR else shape[:-1], torch.float32, x, *others, codes, name="out[1]")
        seen = scale.view(1, -1)
    else:
        high = -(-rows // GROUP) if block == SQUARES else rows
        outer = (high,) if block == SQUARES else shape[:-1]
        if scale is None:
            scale = empty_scales((high, groups), codes.device, scaling=Scaling.BLOCK)
            scale = scale if len(outer) == 1 else scale.view(*outer, groups)
        else:
            by_group = scale.movedim(-1, 0) if scale.dim() else scale
            check_out(by_group, (groups, *outer), torch.float32, (x, *others, codes), name="out[1].movedim(-1, 0)", padded=True)
        seen = scale.T if len(outer) == 1 else scale.view(high, groups).T
    if rows == 0 or shape[-1] == 0:
        return codes, scale.fill_(TINY), None
    return codes, scale, seen


# --- the definition, in plain torch


def quantized(values: Tensor, block: Block, dtype: torch.dtype, power_of_two_scales: bool, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 or float64 values [..., cols].

    In float64 the codes are not rounded: code * scale is the value itself, from which every
    rounding is a distance.
    """
    largest = largest_code(dtype)
    if scale is None:
        grouped = _grouped(values.abs(), block)
        amax = grouped.amax((1, 3)).clamp(min=largest * TINY)
        scale = amax / largest
        if power_of_two_scales:
            scale = power_of_two(scale)
        scale = torch.where(amax.isfinite(), scale, torch.nan)
        scale = _as_caller_sees(scale, values, block)
    each = _each(scale, values, block)
    codes = values / each if values.dtype is torch.float64 else values * (1.0 / each)
    codes = codes.clamp(-largest, largest)  # a given scale may be too small
    return (codes if values.dtype is torch.float64 else codes.to(dtype)), scale


def power_of_two(scale: Tensor) -> Tensor:
    """Rounded up to one."""
    mantissa, exponent = torch.frexp(scale)
    with torch.cuda.device_of(scale):  # torch.ldexp launches on the current one (pytorch issue 189567)
        return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def dequantized(codes: Tensor, scale: Tensor, block: Block) -> Tensor:
    """code * scale, fp32 or float64; any leading axes."""
    return (codes if codes.dtype is torch.float64 else codes.float()) * _each(scale, codes, block)


def _grouped(x: Tensor, block: Block) -> Tensor:
    """[row groups, rows, column groups, columns], filled up with zeros."""
    x = x.reshape(-1, x.shape[-1])
    high, wide = block[0] or max(1, x.shape[0]), block[1] or max(1, x.shape[1])
    x = F.pad(x, (0, -x.shape[1] % wide, 0, -x.shape[0] % high))
    return x.view(x.shape[0] // high, high, -1, wide)


def _as_caller_sees(scale: Tensor, values: Tensor, block: Block) -> Tensor:
    """Scales [row groups, column groups] in the shape that `block` gives them."""
    if block == TENSOR:
        return scale.view(())
    return scale.view(values.shape[:-1]) if block == ROW else scale.view(*values.shape[:-1], -1) if block == GROUPS else scale


def _each(scale: Tensor, values: Tensor, block: Block) -> Tensor:
    """The scale of each value."""
    if block in (TENSOR, ROW):
        return scale if block == TENSOR else scale[..., None]
    each = scale.repeat_interleave(GROUP, -1)[..., : values.shape[-1]]
    return each.repeat_interleave(GROUP, -2)[: values.shape[-2]] if block == SQUARES else each


# --- tile code


def scale_of(amax, LARGEST, POWER_OF_TWO):
    """The scale of groups of which `amax` is the largest magnitude."""
    amax = ct.maximum(amax, LARGEST * TINY, propagate_nan=True)
    # The quotient rounded to nearest, with no branch for the numbers that cannot be here, as a
    # division has: it keeps the groups of a tile apart. Both lines below are one fused
    # multiply-add. An infinity gives inf - inf.
    near = amax * (1.0 / LARGEST)
    scale = (amax - near * LARGEST) * (1.0 / LARGEST) + near
    if POWER_OF_TWO:
        raised = ct.bitcast((ct.bitcast(scale, ct.int32) + 0x7FFFFF) & 0x7F800000, ct.float32)
        scale = ct.where(ct.isnan(scale), scale, raised)
    return scale


def codes_of(values, scale, dtype):
    """Rounded, and kept within the format by the conversion itself, which saturates."""
    # The approximate reciprocal is off by an ulp of fp32, which moves only what lies that close to
    # the middle of two codes.
    return (values * ct.truediv(1.0, scale, rounding_mode=APPROX, flush_to_zero=True)).astype(dtype)


def group_codes(values, dtype, GROUP_M, GROUP_N, LARGEST, POWER_OF_TWO):
    """Codes of a tile of values [M, N], and the scales [N / GROUP_N, M / GROUP_M] of its groups;
    GROUP_M is 1 or M.
    """
    M, N = values.shape
    groups = values.reshape((M, N // GROUP_N, GROUP_N))
    # In the format of the values: two 16-bit ones are compared at once.
    if GROUP_M == M and GROUP_N == N:
        amax = ct.max(ct.abs(values).reshape((M * N,)), propagate_nan=True).reshape((1, 1, 1))  # one exchange between threads, not one a row
    else:
        amax = ct.max(ct.abs(groups), axis=2, keepdims=True, propagate_nan=True)
        if GROUP_M > 1:
            amax = ct.max(amax, axis=0, keepdims=True, propagate_nan=True)
    scale = scale_of(amax.astype(ct.float32), LARGEST, POWER_OF_TWO)
    codes = codes_of(groups.astype(ct.float32), scale, dtype).reshape((M, N))
    return codes, ct.transpose(scale.reshape((M // GROUP_M, N // GROUP_N)))
