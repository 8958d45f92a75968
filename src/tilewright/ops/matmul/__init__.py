"""Matrix product: out = a @ b + bias

Source    Tiles in L2-sized bands. What is left of the last round of tiles is split along k, so that every SM has its share: stream-K
          (Osama et al. 2023, arXiv:2301.03598) with equal parts, and with a second launch for the sum, so that its order, and so every
          bit, is the same on each run.
Numerics  Products and sums in fp32, partial tiles in fp32, bias added in fp32, rounded once. float32 operands are multiplied exactly as
          float32 (CUDA cores); only `tf32=True` rounds them to TF32 (10-bit mantissa) for the tensor cores.
Bound     Compute from a few hundred rows on; below that memory: the weights are read once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import Device, as_rows, best_plan, check_tensor, launch, must, torch_op
from .candidates import space
from .decision import Config, Problem, plan
from .kernels import matmul_kernel, matmul_reduce_kernel, matmul_uneven_kernel

__all__ = ["Config", "Problem", "matmul", "matmul_kernel", "matmul_out", "matmul_reduce_kernel", "matmul_uneven_kernel", "plan", "reference", "space"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def reference(a: Tensor, b: Tensor, bias: Tensor | None = None, *, trans_a: bool = False, trans_b: bool = False, tf32: bool = False) -> Tensor:
    """The definition; with tf32 a GPU may use TF32, as ours does."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return F.linear(a.mT if trans_a else a, b if trans_b else b.mT, bias)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@torch_op(mutates=("out",))
def matmul_out(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, trans_a: bool, trans_b: bool, tf32: bool) -> None:
    """`matmul` into `out`, all operands 2-D. No checks, no sync: safe under graph capture."""
    m, n = out.shape
    k = a.shape[0] if trans_a else a.shape[1]
    p = best_plan(space, plan, Device.of(a), Problem, m, n, k, a.dtype, trans_a, trans_b, bias is not None, tf32)
    # The kernels do not touch a bias or a workspace that the plan does not name; `out` stands in for them.
    partial = p.scratch(a.device)[0] if p.workspace else out
    bias = out if bias is None else bias
    if p.kernel is matmul_uneven_kernel:
        launch(p, a, b, bias, out)
    else:
        launch(p, a, b, bias, partial, out)
    if p.then is not None:
        launch(p.then, partial, out)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, trans_a: bool = False, trans_b: bool = False, tf32: bool = False) -> Tensor:
    """Matrix product with an optional bias; `matmul(x, weight, bias, trans_b=True)` is torch.nn.functional.linear.

    Args:
        a: [..., m, k] or [k]; [k, m] if trans_a. bf16, fp16 or fp32, stride 1 in the last axis.
        b: [k, n], or [n, k] if trans_b; dtype and device of a, stride 1 in the last axis.
        bias: [n], dtype and device of a.
        trans_a, trans_b: the operand is stored transposed.
        tf32: let float32 operands be rounded to TF32 (10-bit mantissa) for the tensor cores.
    Returns: [..., m, n], contiguous, dtype of a. No rows or columns: empty, nothing launched. k = 0: the bias, or zeros.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(a, "a", dtypes=DTYPES)
    check_tensor(b, "b", ndim=2, like=a)
    if a.dim() == 0 or (trans_a and a.dim() != 2):
        raise must("a.dim()", "2 with trans_a" if trans_a else "at least 1", a.dim())
    if tf32 and a.dtype is not torch.float32:
        raise must("tf32", f"False for {a.dtype}", tf32)
    k, n = b.shape[::-1] if trans_b else b.shape
    if a.shape[0 if trans_a else -1] != k:
        raise must(f"a.shape[{0 if trans_a else -1}]", f"{k}, the k of b {tuple(b.shape)}", a.shape[0 if trans_a else -1])
    if bias is not None:
        check_tensor(bias, "bias", shape=(n,), like=a)
    out = torch.empty((a.shape[1], n) if trans_a else (*a.shape[:-1], n), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    if k == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    matmul_out(as_rows(a), b, bias, as_rows(out), trans_a, trans_b, tf32)
    return out
