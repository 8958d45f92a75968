"""Checks of the public functions. Every message says what, what it must be, and what it was."""

import torch
from torch import Tensor


def must(what: str, be: object, was: object) -> ValueError:
    """The error to raise: `raise must("eps", "positive", eps)`."""
    return ValueError(f"{what} must be {be}, got {was}")


def check_tensor(
    tensor: Tensor,
    name: str,
    *,
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    like: Tensor | None = None,
    contiguous: bool = False,
) -> None:
    """Raises TypeError or ValueError unless `tensor` is a strided CPU or CUDA tensor that needs no gradient and fits the description.

    like: a tensor whose dtype and device it must share.
    contiguous: the whole tensor must be; otherwise its last axis must have stride 1.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise must(f"{name}.dtype", "one of " + ", ".join(map(dtype_name, dtypes)), dtype_name(tensor.dtype))
    if like is not None:
        if tensor.dtype != like.dtype:
            raise must(f"{name}.dtype", dtype_name(like.dtype), dtype_name(tensor.dtype))
        if tensor.device != like.device:
            raise must(f"{name}.device", like.device, tensor.device)
    elif tensor.device.type not in ("cuda", "cpu", "meta"):
        raise must(f"{name}.device", "a CUDA or CPU device", tensor.device)
    if tensor.layout is not torch.strided:
        raise must(f"{name}.layout", "torch.strided", tensor.layout)
    if ndim is not None and tensor.dim() != ndim:
        raise must(f"{name}.dim()", ndim, tensor.dim())
    if shape is not None and tensor.shape != shape:
        raise must(f"{name}.shape", tuple(shape), tuple(tensor.shape))
    if contiguous:
        if not tensor.is_contiguous():
            raise must(name, "contiguous", f"strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    elif tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise must(f"{name}.stride(-1)", 1, tensor.stride(-1))
    if tensor.requires_grad and torch.is_grad_enabled():
        raise must(f"{name}.requires_grad", "False, or the call under torch.no_grad(): this op has no backward", True)


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as [rows, columns], its leading axes folded: itself if it is that already; a copy only if one stride cannot span them."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16, as messages have it."""
    return str(dtype).removeprefix("torch.")
