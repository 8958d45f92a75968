"""Matrix product: out = residual + out_scale * f(a @ b + bias), f the identity or, for silu_mul,
silu(even column) * odd column

8-bit operands come with scales (ops/common/scaling.py): for the whole matrix, for each row, or for
each 1x128 group of a and 128x128 block of b.

Source    Tiles in L2-sized bands. The tiles of the last wave are split along k, so that
          every SM has its share: stream-K (Osama et al. 2023, arXiv:2301.03598) with equal parts,
          and with a second launch for the sum, so that its order, and so every bit, is the same on
          each run. Block scales: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2.
Numerics  Products and sums in fp32, partial tiles in fp32, everything behind the product in fp32,
          rounded once. float32 operands are multiplied exactly as float32 (CUDA cores); only
          `tf32=True` rounds them to TF32 (10-bit mantissa) for the tensor cores. 8-bit operands:
          with a bf16 output Hopper's tensor cores sum up to 8192 of k with about 14 bits, as
          torch._scaled_mm does with use_fast_accum. Of a longer k fp32 adds such sums (a share of a
          block, or a run), or, as with block scales and other outputs, a fresh sum for each 128 of
          k: an rms error of 1.2e-4 (H200).
Bound     Compute from a few hundred rows on; below that memory: the weights are read once.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, as_rows, check_bools, check_tensor, out_or_new, torch_op
from ..common.scaling import FP8, dequantize, known_scaling, plain_scales, scale_views, scaling_of, torch_product
from .candidates import CHOICES as CHOICES, DECISION as DECISION, space as space
from .decision import Config as Config, Problem as Problem, plan as plan

DTYPES = (*FLOATS, *FP8)


def reference(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    tf32: bool = False,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The definition; with tf32 a GPU may use TF32, as ours does.

    8-bit operands: see `torch_product`.
    """
    x, w = a.mT if trans_a else a, b if trans_b else b.mT
    stored = out_dtype or (torch.bfloat16 if a.dtype in FP8 else a.dtype)
    if a.dtype in FP8:
        y = torch_product(as_rows(x), w, scale_a, scale_b).reshape(*x.shape[:-1], len(w))
        y = y if bias is None else y + bias
    else:
        x, w = dequantize(x, scale_a) if scale_a is not None else x, dequantize(w, scale_b) if scale_b is not None else w
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            y = F.linear(x, w, None if bias is None else bias.to(x.dtype))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    y = _behind_product(y, residual, silu_mul, out_scale)
    return y if a.dtype is torch.float64 else y.to(stored)


def _behind_product(y: Tensor, residual: Tensor | None, silu_mul: bool, out_scale: Tensor | None) -> Tensor:
    y = F.silu(y[..., 0::2]) * y[..., 1::2] if silu_mul else y
    y = y if out_scale is None else y * out_scale
    return y if residual is None else y + residual


@torch_op(mutates=("out",))
def matmul_out(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    residual: Tensor | None,
    out_scale: Tensor | None,
    trans_a: bool,
    trans_b: bool,
    tf32: bool,
    silu_mul: bool,
    out: Tensor,
) -> None:
    """`matmul` into `out`, all operands 2-D. No checks, no sync: safe under graph capture."""
    k, n = b.shape
    if trans_b:
        n, k = k, n
    launches = DECISION.launches(
        Device.of(a),
        m=out.shape[0],
        n=n,
        k=k,
        dtype=a.dtype,
        trans_a=trans_a,
        trans_b=trans_b,
        bias=bias is not None,
        tf32=tf32,
        scaling=known_scaling(scale_a),
        out_dtype=out.dtype,
        residual=residual is not None,
        silu_mul=silu_mul,
        out_scale=out_scale is not None,
        plain_scales=plain_scales(scale_a, scale_b),
    )
    launches.run(a, b, *scale_views(scale_a, scale_b), bias, residual, None if out_scale is None else out_scale.view(1), out)


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    tf32: bool = False,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Matrix product with an optional epilogue. `matmul(x, weight, bias, trans_b=True)` is
    torch.nn.functional.linear.

    Args:
        a: [..., m, k] or [k]; [k, m] if trans_a. bf16, fp16, fp32, float8_e4m3fn or float8_e5m2,
            stride 1 in the last axis.
        b: [k, n], or [n, k] if trans_b (the faster order of 8-bit operands); dtype and device of a,
            stride 1 in the last axis.
        bias: [n], dtype of the output.
        trans_a, trans_b: the operand is stored transposed.
        tf32: round float32 operands to TF32 (10-bit mantissa) for the tensor cores.
        scale_a, scale_b: fp32 factors of 8-bit operands, on the device of a; both or neither. Per
            matrix: [] and []. Per row: [m] and [n]. Per block: [m, ceil(k / 128)] for groups of 128
            along k, and [ceil(n / 128), ceil(k / 128)] for blocks of 128x128. m: the rows of a.
        residual: shape, dtype and device of the output; added last.
        silu_mul: out[.., j] = silu(column 2 j) * column 2 j + 1 of the product, for gate and up
            projections with alternating rows; n even.
        out_scale: fp32 [], on the device of a: factor of the result before the residual.
        out_dtype: bf16, fp16 or fp32; default the dtype of a, bf16 for 8-bit operands.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [..., m, n] (n / 2 with silu_mul), contiguous. Without rows or columns it is empty, and
        nothing is launched. With k = 0 the product counts as 0.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(trans_a=trans_a, trans_b=trans_b, tf32=tf32, silu_mul=silu_mul)
    check_tensor(a, "a", dtypes=DTYPES)
    check_tensor(b, "b", ndim=2, like=a)
    sizes = a.shape
    if not sizes or (trans_a and len(sizes) != 2):
        raise argument_error("a.dim()", "2 with trans_a" if trans_a else "at least 1", len(sizes))
    if tf32 and a.dtype is not torch.float32:
        raise argument_error("tf32", f"False for {a.dtype}", tf32)
    k, n = b.shape
    if trans_b:
        n, k = k, n
    axis = 0 if trans_a else -1
    if sizes[axis] != k:
        other = "trans_b=False for a b of [k, n]" if trans_b else "trans_b=True for a b of [n, k], as torch.nn.Linear has it"
        mend = f": give {other}" if sizes[axis] == n else ""
        raise argument_error(f"a.shape[{axis}]", f"{k}, the k of b {tuple(b.shape)}", f"{sizes[axis]}{mend}")
    if out_dtype is None:
        stored = torch.bfloat16 if a.dtype in FP8 else a.dtype
    elif out_dtype in FLOATS:
        stored = out_dtype
    else:
        raise argument_error("out_dtype", "one of bfloat16, float16, float32", out_dtype)
    if silu_mul and n % 2:
        raise argument_error("n of b", "even with silu_mul", n)
    columns = n // 2 if silu_mul else n
    shape = (sizes[1], columns) if trans_a else (*sizes[:-1], columns)
    out = out_or_new(out, shape, stored, a, b, bias, scale_a, scale_b, residual, out_scale)
    if scale_a is not None or scale_b is not None:
        scaling_of(a, scale_a, scale_b, math.prod(out.shape[:-1]), n, k)
    if bias is not None:
        check_tensor(bias, "bias", shape=(n,), like=out)
    if residual is not None:
        check_tensor(residual, "residual", shape=out.shape, like=out)
    if out_scale is not None:
        check_tensor(out_scale, "out_scale", shape=(), dtypes=(torch.float32,), like=a)
    if out.numel() == 0:
        return out
    if k == 0:
        return out.copy_(_without_product(out, bias, residual, silu_mul, out_scale))
    matmul_out(as_rows(a), b, bias, scale_a, scale_b, as_rows(residual), out_scale, trans_a, trans_b, tf32, silu_mul, as_rows(out))
    return out


def _without_product(out: Tensor, bias: Tensor | None, residual: Tensor | None, silu_mul: bool, out_scale: Tensor | None) -> Tensor:
    y = torch.zeros((*out.shape[:-1], out.shape[-1] * (1 + silu_mul)), dtype=torch.float32, device=out.device)
    return _behind_product(y if bias is None else y + bias, residual, silu_mul, out_scale)
