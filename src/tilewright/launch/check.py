"""Checks for the public functions. Every message names the argument, what it must be, and what it
was.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

Sizes = tuple[int, ...]
INT32_MAX = (1 << 31) - 1
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)  # dtypes that most ops take
SMALLEST, LARGEST = 2.0**-126, 2.0**128 - 2.0**104  # normal numbers of fp32


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
    any_strides: bool = False,
) -> None:
    """Raises TypeError or ValueError unless `tensor` fits the description.

    It must be a strided CPU or CUDA tensor that needs no gradient.

    like: a tensor whose device it must share, and whose dtype unless there are `dtypes`.
    contiguous: the whole tensor must be; otherwise its last axis must have stride 1, but for
        any_strides.
    """
    # Each call of an op comes by, once for each tensor: every question is the cheapest there is.
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if dtypes is None:
        dtypes = (tensor.dtype if like is None else like.dtype,)
    if tensor.dtype not in dtypes:
        names = list(dict.fromkeys(map(dtype_name, dtypes)))  # "q's or float32" is one dtype for q in float32
        raise argument_error(f"{name}.dtype", "one of " * (len(names) > 1) + ", ".join(names), dtype_name(tensor.dtype))
    if like is not None:
        if tensor.device != like.device:
            raise argument_error(f"{name}.device", like.device, tensor.device)
    elif not (tensor.is_cuda or tensor.is_cpu or tensor.is_meta):
        raise argument_error(f"{name}.device", "a CUDA or CPU device", tensor.device)
    # torch.compile has no is_neg; there the dispatcher resolves such views.
    if tensor.layout is not torch.strided or (not is_compiling() and tensor.is_neg()):
        raise _layout_error(tensor, name)
    if ndim is not None and tensor.dim() != ndim:
        raise argument_error(f"{name}.dim()", ndim, tensor.dim())
    if shape is not None and tensor.shape != shape:
        raise argument_error(f"{name}.shape", tuple(shape), tuple(tensor.shape))
    if not any_strides and not tensor.is_contiguous() and (contiguous or (tensor.stride()[-1] != 1 and tensor.shape[-1] > 1)):
        raise _stride_error(tensor, name, contiguous)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise argument_error(f"{name}.requires_grad", "False", "True: this op has no backward, so call it under torch.no_grad()")


def _layout_error(tensor: Tensor, name: str) -> ValueError:
    if tensor.layout is not torch.strided:
        return argument_error(f"{name}.layout", "torch.strided", tensor.layout)
    return argument_error(name, "what its memory holds (call its resolve_neg())", "a view of the negated values")


def _stride_error(tensor: Tensor, name: str, contiguous: bool) -> ValueError:
    if contiguous:
        return argument_error(name, "contiguous", f"strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    mend = f": give {name}.contiguous(), a copy"
    if name in ("a", "b") and tensor.dim() >= 2 and tensor.stride(-2) == 1:  # the commonest mistake: matmul(x, weight.t())
        mend = f", a transposed view: give {name}.contiguous(), a copy; or {name}.mT and the other trans_{name}, if the op has it"
    return argument_error(f"{name}.stride(-1)", 1, f"{tensor.stride(-1)}{mend}")


def out_or_new(
    out: Tensor | None, shape: Sizes, dtype: torch.dtype, x: Tensor, *others: Tensor | None, name: str = "out", contiguous: bool = True
) -> Tensor:
    """Where a public function that reads x and others writes its result: `out` if it fits
    (`check_out`), by default a new tensor, contiguous.
    """
    if out is None:
        if shape == x.shape and dtype is x.dtype and x.is_contiguous():
            return torch.empty_like(x, memory_format=torch.contiguous_format)  # in half of the time
        return x.new_empty(shape, dtype=dtype)
    return check_out(out, shape, dtype, (x, *others), name=name, contiguous=contiguous)


def each_out(out: tuple[Tensor, ...] | None, *names: str) -> tuple[Any, ...]:
    """The `out` of a function that returns several tensors: one for each name, or None for each.

    Raises: TypeError unless it is a tuple of so many tensors.
    """
    if out is None:
        return (None,) * len(names)
    if not isinstance(out, tuple) or len(out) != len(names) or not all(isinstance(x, Tensor) for x in out):
        kinds = ", ".join(type(x).__name__ for x in out) if isinstance(out, tuple) else ""
        raise TypeError(f"out must be a tuple of tensors ({', '.join(names)}), got {f'({kinds})' if kinds else type(out).__name__}")
    return out


def check_out(
    out: Tensor,
    shape: Sizes,
    dtype: torch.dtype,
    inputs: Iterable[Tensor | None],
    *,
    name: str = "out",
    contiguous: bool = False,
    padded: bool = False,
) -> Tensor:
    """`out` itself: where a public function may write its result, in place of a tensor of its own.

    inputs: what the op reads, the first always given, and its other outputs; `out` lies on the
        device of the first and has no element in common with any of them.
    contiguous: `out` must be; otherwise its elements fill their memory in any order of axes, as
        those of `x.transpose(1, 2)` do, and its last axis has stride 1.
    padded: each out[i] must be contiguous, and there may be gaps between them.
    Raises: TypeError or ValueError naming `out`, what it must be, and what it was.
    """
    given = [x for x in inputs if x is not None]
    check_tensor(out, name, shape=shape, dtypes=(dtype,), contiguous=contiguous)
    if out.device != given[0].device:
        raise argument_error(f"{name}.device", given[0].device, out.device)
    axes = [axis for axis in zip(out.stride(), out.shape, strict=True) if axis[1] > 1] if out.numel() else []
    if padded and axes and len(out) > 1:
        if axes[0][0] < out[0].numel():
            raise argument_error(f"{name}.stride(0)", f"at least {out[0].numel()}, the elements of {name}[0]", axes[0][0])
        axes = axes[1:]
    dense = 1
    for stride, size in axes[::-1] if padded else _by_stride(axes):
        if stride != dense:
            order = "with gaps along its first axis alone" if padded else "its axes in any order"
            raise argument_error(f"{name}.stride()", f"that of a contiguous tensor of shape {tuple(shape)}, {order}", out.stride())
        dense *= size
    if any(overlap(out, x) for x in given):
        raise argument_error(name, "in memory of its own", "a tensor that overlaps another argument")
    return out


def check_writable(x: Tensor, name: str, other: Tensor | None = None, other_name: str = "") -> None:
    """Raises ValueError unless an op may write into x: two indices never mean the same element, and
    none of x is an element of `other`, which the op writes into too.
    """
    if not x.is_contiguous():
        shape, strides = x.shape, x.stride()
        folded = _folded.__wrapped__ if is_compiling() else _folded  # sizes that are traced have no hash
        if folded(shape, strides):
            be = "free of broadcast axes, because it is written in place" + ("" if 0 in strides else ", and of others that meet")
            raise argument_error(name, be, f"strides {strides} for shape {tuple(shape)}")
    if other is not None and overlap(x, other):
        raise argument_error(name, f"free of elements of {other_name}, because both are written in place", "tensors that overlap")


@lru_cache(maxsize=1 << 12)
def _folded(shape: Sizes, strides: Sizes) -> bool:
    """Whether two indices may mean the same element: the stride of an axis is shorter than the
    extent of the axes inside it.
    """
    inside = 0
    for stride, size in _by_stride([(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]):
        if stride <= inside:
            return 0 not in shape
        inside += stride * (size - 1)
    return False


def _by_stride(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Strides and sizes in the order of the strides. torch.compile sorts no sizes that change."""
    ordered: list[tuple[int, int]] = []
    for stride, size in axes:
        ordered.insert(len([other for other, _ in ordered if other <= stride]), (stride, size))
    return ordered


def check_apart(written: Mapping[str, Tensor | None], /, **read: Tensor | None) -> None:
    """Raises ValueError if a tensor that an op writes into has an element of one that it reads."""
    if is_compiling():
        return
    memory = [(name, x, _storage(x)) for name, x in written.items() if x is not None]
    for other_name, other in read.items():
        if other is not None:
            storage = _storage(other)
            for name, x, own in memory:
                if own == storage and overlap(x, other):
                    raise argument_error(name, f"free of elements of {other_name}, because it is written in place", "tensors that overlap")


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have an element in common. False while torch.compile traces.

    Views beside each other, such as q and k of one projection, share no element.
    """
    if is_compiling() or _storage(x) != _storage(y):
        return False
    if x.dtype.itemsize == y.dtype.itemsize:
        return _meet(y.storage_offset() - x.storage_offset(), x.shape, x.stride(), y.shape, y.stride())
    (start, *own), (other_start, *others) = _in_bytes(x), _in_bytes(y)
    return _meet(other_start - start, *own, *others)


def _storage(x: Tensor) -> int:
    """The identity of a tensor's storage, the same for all views of it. Inside torch.func's
    transforms, which an op refuses, no two tensors share one.
    """
    try:
        storage: int = x.untyped_storage()._cdata
        return storage
    except NotImplementedError:
        return id(x)


def _in_bytes(x: Tensor) -> tuple[int, Sizes, Sizes]:
    """Where a tensor begins, its shape and its strides as a tensor of bytes."""
    size = x.dtype.itemsize
    return int(x.storage_offset()) * size, (*x.shape, size), (*(stride * size for stride in x.stride()), 1)


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


def check_positive(value: float, name: str) -> None:
    """Raises TypeError or ValueError unless it is a positive number in fp32, as kernels take it:
    1e-50 is 0 there.
    """
    if type(value) is not float:
        check_number(value, name)
    if not SMALLEST <= value <= LARGEST:
        raise argument_error(name, "a normal number of float32" if value > 0 else "positive", value)


def check_finite(value: float, name: str) -> None:
    """Raises TypeError or ValueError for a NaN, and for what is infinite in fp32."""
    if type(value) is not float:
        check_number(value, name)
    if not -LARGEST <= value <= LARGEST:
        raise argument_error(name, "finite in float32" if abs(value) < math.inf else "finite", value)


def check_number(value: object, name: str) -> None:
    """Raises TypeError unless it is a Python number: a tensor's would be read on the device, and
    True is none. ValueError for an integer that a kernel's int32 does not hold.
    """
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) or isinstance(value, bool):
        was = "a tensor" if isinstance(value, Tensor) else f"{value!r:.80}"
        raise TypeError(f"{name} must be a Python number, got {was}")
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise argument_error(name, "an integer in -2**31..2**31 - 1, or a float", f"{value!r:.80}")


def check_bools(**flags: object) -> None:
    """Raises ValueError unless each is True or False: "no" would count as True."""
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise argument_error(name, "True or False", f"{flag!r:.80}")


def check_integers(**values: object) -> None:
    """Raises TypeError unless each is a Python integer, which True is not."""
    for name, value in values.items():
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a Python integer, got {value!r:.80}")


MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def as_rows(tensor: MaybeTensor) -> MaybeTensor:
    """The tensor as [rows, columns], its leading axes folded; None for None.

    It is copied only if one stride cannot span those axes, or none of 32 bits.
    """
    if tensor is None:
        return None
    rows = tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride()[0] <= INT32_MAX else rows.contiguous()


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16, as messages have it."""
    return str(dtype).removeprefix("torch.")


def checked_device(device: Any) -> torch.device:
    """A device on which kernels run or are interpreted. Raises: ValueError for any other."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise argument_error("device", "cpu, cuda or cuda:N", repr(device)) from None
    if found.type not in ("cpu", "cuda"):
        raise argument_error("device", "cpu, cuda or cuda:N", repr(device))
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise argument_error("device", f"a GPU of this machine, which has {count}", repr(str(found)))
    return found
