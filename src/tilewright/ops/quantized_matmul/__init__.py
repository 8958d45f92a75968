"""Product with a quantised weight: out = x @ weight.T + bias, weight = (code - zero) * scale

x and out are bf16; codes have 4 or 8 bits (ops/common/weight_formats.py).

Source    Weight-only quantisation, as in GPTQ (Frantar et al. 2022, arXiv:2210.17323) and AWQ (Lin
          et al. 2023, arXiv:2306.00978); MXFP4: OCP Microscaling Formats 1.0; numbers from bits by
          one AND: Kim et al. 2022, arXiv:2211.10017.
Numerics  Codes less their zero points are exact in bf16. Scales of rows, and of groups of 128 where
          x has few rows, multiply sums in fp32; others the weights, which are then rounded to bf16
          (those of mxfp4 and nvfp4 exactly). Few rows of x become pairs of e4m3 numbers, which keep
          8 bits of each (ops/common/pieces.py); their products are summed over up to 128 k by the
          tensor cores' 8-bit instruction. Products and sums in fp32, rounded once.
Bound     Memory up to about 64 rows of x: the words are read once. Then compute; a weight takes 2
          to 3 instructions to decode.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import Device, argument_error, as_rows, check_tensor, out_or_new, torch_op
from ..common.weight_formats import check_weight, dequantized, format_named
from .candidates import CHOICES, DECISION, space
from .decision import Config, Problem, plan
from .kernels import quantized_matmul_kernel, quantized_matmul_sum_kernel

__all__ = [
    "CHOICES",
    "DECISION",
    "Config",
    "Problem",
    "plan",
    "quantized_matmul",
    "quantized_matmul_kernel",
    "quantized_matmul_out",
    "quantized_matmul_sum_kernel",
    "reference",
    "space",
]


def reference(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
    weight_format: str,
) -> Tensor:
    """The definition, on the weight that the words stand for, rounded to the dtype of x."""
    weight = dequantized(words, scales, zeros, factor, format_named(weight_format), x.shape[-1], x.dtype)
    return F.linear(x, weight, bias)


@torch_op(mutates=("out",))
def quantized_matmul_out(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Optional[Tensor],
    factor: Optional[Tensor],
    bias: Optional[Tensor],
    weight_format: str,
    out: Tensor,
) -> None:
    """`quantized_matmul` of rows x into `out`. No checks, no sync: safe under graph capture."""
    m, n = out.shape
    launches = DECISION.launches(Device.of(x), m=m, n=n, k=x.shape[1], weight_format=weight_format, bias=bias is not None, dtype=x.dtype)
    launches.run(x, words, scales, zeros, factor, bias, out)


def quantized_matmul(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
    weight_format: str,
    out: Tensor | None = None,
) -> Tensor:
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
        weight_format: int4-128, int4-64 or int4-32, these with -zeros, int8, int8-32, int8-16,
            e4m3, e4m3-128, mxfp4 or nvfp4.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [..., n], bf16, contiguous. Without rows it is empty, and nothing is launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=(torch.bfloat16,))
    if x.dim() == 0:
        raise argument_error("x.dim()", "at least 1", 0)
    check_weight(words, scales, zeros, factor, format_named(weight_format), x)
    n = scales.shape[1]
    out = out_or_new(out, (*x.shape[:-1], n), x.dtype, x, words, scales, zeros, factor, bias)
    if bias is not None:
        check_tensor(bias, "bias", shape=(n,), like=x)
    if out.numel():
        quantized_matmul_out(as_rows(x), words, scales, zeros, factor, bias, weight_format, as_rows(out))
    return out
