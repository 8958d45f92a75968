"""Product of block-scaled operands: out = out_scale * (a * scale_a) @ (b * scale_b).T + bias

Both operands are quantised (`quantize_mx`): mxfp8, mxfp4 or nvfp4 (ops/common/mx.py). Compiled for
Blackwell and never timed there.

Source    OCP Microscaling Formats 1.0, 2023; nvfp4: NVIDIA 2025, arXiv:2509.25149.
Numerics  Blackwell's tensor cores scale the products themselves. Elsewhere codes times scales
          become bf16, which has all their bits. Sums and all behind them in fp32, rounded once.
Bound     Compute from a few hundred rows on; below that memory: the weights are read once.
          Without block-scaled tensor cores, operands of many rows become bf16 in memory first. So
          it is no faster than bf16 there: `quantized_matmul` rounds no activations.
"""

from typing import Optional

import torch
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, as_rows, check_tensor, dtype_name, out_or_new, torch_op
from ..common.mx import bits_of, check_factor, check_scale, dequantized, format_of, mx_named
from .decision import CHOICES as CHOICES, DECISION as DECISION, Config as Config, Problem as Problem, plan as plan, space as space


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The definition; on a GPU by bf16 tensor cores, as the values of codes are exact in bf16."""
    x, w = dequantized(a, scale_a), dequantized(b, scale_b)
    if x.is_cuda and x.dtype is torch.float32:
        y = torch.bmm(as_rows(x)[None].bfloat16(), w[None].mT.bfloat16(), out_dtype=torch.float32).view(*x.shape[:-1], len(w))
    else:
        y = x @ w.mT
    y = y if out_scale is None else y * out_scale
    y = y if bias is None else y + bias
    return y if y.dtype is torch.float64 else y.to(out_dtype)


@torch_op(mutates=("out",))
def mx_matmul_out(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Optional[Tensor],
    out_scale: Optional[Tensor],
    mx_format: str,
    out: Tensor,
) -> None:
    """`mx_matmul` of rows a into `out`; e8m0 scales as bytes. No checks, no sync: safe under graph
    capture.
    """
    m, n = out.shape
    k = a.shape[1] * 8 // mx_named(mx_format).bits
    options = {"mx_format": mx_format, "dtype": out.dtype, "bias": bias is not None, "out_scale": out_scale is not None}
    launches = DECISION.launches(Device.of(a), m=m, n=n, k=k, **options)
    launches.run(a, b, scale_a, scale_b, bias, None if out_scale is None else out_scale.view(1), out)


def mx_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """a @ b.T of operands in mxfp8, mxfp4 or nvfp4, as `quantize_mx` makes them.

    Args:
        a: codes [..., k] float8_e4m3fn, or [..., k / 2] uint8, two e2m1 codes in a byte.
        b: codes of [n, k], such as a weight of torch.nn.Linear; dtype and device of a.
        scale_a, scale_b: [..., k / 32] and [n, k / 32] float8_e8m0fnu (mxfp8, mxfp4), or [..., k /
            16] and [n, k / 16] float8_e4m3fn (nvfp4), row-major.
        bias: [n], out_dtype; added last.
        out_scale: fp32 [], on the device of a: factor of the product; for nvfp4 the `factor` of a
            times that of b.
        out_dtype: bf16, fp16 or fp32.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [..., n], contiguous. Without rows it is empty, and nothing is launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was. An A100
        has no 8-bit floats; there `quantized_matmul` takes weights of 4 bits.
    """
    of = format_of(a, scale_a)
    check_tensor(b, "b", ndim=2, like=a)
    if a.shape[-1] != b.shape[1]:
        raise argument_error("a.shape[-1]", f"{b.shape[1]}, that of b {tuple(b.shape)}", a.shape[-1])
    check_scale(scale_a, a, "a", of)
    check_scale(scale_b, b, "b", of)
    if out_dtype not in FLOATS:
        raise argument_error("out_dtype", "one of bfloat16, float16, float32", dtype_name(out_dtype))
    out = out_or_new(out, (*a.shape[:-1], len(b)), out_dtype, a, b, scale_a, scale_b, bias, out_scale)
    if bias is not None:
        check_tensor(bias, "bias", shape=(len(b),), like=out)
    if out_scale is not None:
        check_factor(out_scale, a, "out_scale")
    if out.numel():
        mx_matmul_out(as_rows(a), b, bits_of(as_rows(scale_a)), bits_of(scale_b), bias, out_scale, of.name, as_rows(out))
    return out
