"""Checks of the public functions. Every message says what, what it must be, and what it was."""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

Sizes = tuple[int, ...]


def argument_error(what: str, be: object, was: object) -> ValueError:
    """The error to raise: `raise argument_error("eps", "positive", eps)`."""
    return ValueError(f"{what} must be {be}, got {was}")


def check_tensor(
    tensor: Tensor,
    name: str,
    *,
    ndim: int | None = None,
    shape: Sizes | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    like: Tensor | None = None,
    contiguous: bool = False,
) -> None:
    """Raises TypeError or ValueError unless `tensor` fits the description.

    It must be a strided CPU or CUDA tensor that needs no gradient.

    like: a tensor whose dtype and device it must share.
    contiguous: the whole tensor must be; otherwise its last axis must have stride 1.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise argument_error(f"{name}.dtype", "one of " + ", ".join(map(dtype_name, dtypes)), dtype_name(tensor.dtype))
    if like is not None:
        if tensor.dtype != like.dtype:
            raise argument_error(f"{name}.dtype", dtype_name(like.dtype), dtype_name(tensor.dtype))
        if tensor.device != like.device:
            raise argument_error(f"{name}.device", like.device, tensor.device)
    elif tensor.device.type not in ("cuda", "cpu", "meta"):
        raise argument_error(f"{name}.device", "a CUDA or CPU device", tensor.device)
    if tensor.layout is not torch.strided:
        raise argument_error(f"{name}.layout", "torch.strided", tensor.layout)
    if ndim is not None and tensor.dim() != ndim:
        raise argument_error(f"{name}.dim()", ndim, tensor.dim())
    if shape is not None and tensor.shape != shape:
        raise argument_error(f"{name}.shape", tuple(shape), tuple(tensor.shape))
    _check_strides(tensor, name, contiguous)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise argument_error(f"{name}.requires_grad", "False, or the call under torch.no_grad(): this op has no backward", True)


def _check_strides(tensor: Tensor, name: str, contiguous: bool) -> None:
    if contiguous:
        if not tensor.is_contiguous():
            raise argument_error(name, "contiguous", f"strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    elif tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise argument_error(f"{name}.stride(-1)", 1, tensor.stride(-1))


def check_out(
    out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, inputs: Iterable[Tensor | None], *, name: str = "out", contiguous: bool = False
) -> Tensor:
    """`out` itself: where a public function may write its result, in place of a tensor of its own.

    inputs: what the op reads, the first always given; `out` lies on its device and has no element
        in common with any of them.
    contiguous: `out` must be; otherwise its elements fill their memory in any order of axes, as
        those of `x.transpose(1, 2)` do, and its last axis has stride 1.
    Raises: TypeError or ValueError naming `out`, what it must be, and what it was.
    """
    given = [x for x in inputs if x is not None]
    check_tensor(out, name, shape=shape, dtypes=(dtype,), contiguous=contiguous)
    if out.device != given[0].device:
        raise argument_error(f"{name}.device", given[0].device, out.device)
    dense = 1
    for stride, size in sorted((stride, size) for stride, size in zip(out.stride(), out.shape, strict=True) if size > 1):
        if stride != dense and out.numel():
            raise argument_error(f"{name}.stride()", f"that of a contiguous tensor of shape {tuple(shape)}, its axes in any order", out.stride())
        dense *= size
    if any(overlap(out, x) for x in given):
        raise argument_error(name, "memory of its own", "a tensor that overlaps one of the inputs")
    return out


def check_writable(x: Tensor, name: str, other: Tensor | None = None, other_name: str = "") -> None:
    """Raises ValueError unless an op may write into x: two indices never mean the same element, and
    none of x is an element of `other`, which the op writes into too.
    """
    shape, strides = x.shape, x.stride()
    if 0 in strides and any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        raise argument_error(name, "free of broadcast axes, being written in place", f"strides {strides} for shape {tuple(shape)}")
    if other is not None and overlap(x, other):
        raise argument_error(name, f"free of elements of {other_name}, both being written in place", "tensors that overlap")


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have an element in common. False while torch.compile traces.

    Views beside each other, such as q and k of one projection, share no element.
    """
    if torch.compiler.is_compiling() or x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    return _meet(y.storage_offset() - x.storage_offset(), x.shape, x.stride(), y.shape, y.stride())


@lru_cache(maxsize=1 << 12)
def _meet(apart: int, shape: Sizes, strides: Sizes, other_shape: Sizes, other_strides: Sizes) -> bool:
    """Whether a tensor and another that begins `apart` elements behind it have an element in
    common.
    """
    if 0 in shape or 0 in other_shape:
        return False
    # Some count of steps along each axis must add up to `apart`. Axes of one stride are one term,
    # so q and k of one projection have four.
    terms: dict[int, tuple[int, int]] = {}
    for sign, sizes, steps in ((1, shape, strides), (-1, other_shape, other_strides)):
        for size, step in zip(sizes, steps, strict=True):
            low, high = terms.get(step, (0, 0))
            terms[step] = (low, high + size - 1) if sign > 0 else (low - size + 1, high)
    ordered = sorted(terms.items(), reverse=True)

    def reached(rest: int, n: int) -> bool:
        if n == len(ordered):
            return rest == 0
        step, (low, high) = ordered[n]
        least = sum(s * a for s, (a, _) in ordered[n + 1 :])
        most = sum(s * b for s, (_, b) in ordered[n + 1 :])
        first, last = max(low, -((most - rest) // step)), min(high, (rest - least) // step)
        return any(reached(rest - step * count, n + 1) for count in range(first, last + 1))

    return reached(apart, 0)


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as [rows, columns], its leading axes folded.

    It is copied only if one stride cannot span those axes.
    """
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16, as messages have it."""
    return str(dtype).removeprefix("torch.")
