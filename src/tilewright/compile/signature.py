"""What cuTile's just-in-time compiler would assume of a launch, worked out with no GPU.

`KernelSignature.from_kernel_args` does the same for a launch that is about to happen, but needs the CUDA driver. Here meta tensors are
enough; tests/gpu hold both against each other. The rules, per array of at most five axes: shape 1 and stride 1 become constants, shapes
divisible by 16 and strides divisible by 16 bytes are known to be, and so is a base address divisible by 16. Nothing aliases.
"""

import inspect
import typing
from collections.abc import Sequence
from typing import Annotated, Any, get_args, get_origin

import cuda.tile as ct
import torch
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ListConstraint,
    ParameterConstraint,
    ScalarConstraint,
    TupleConstraint,
)
from torch import Tensor

TMA_MAX_AXES = 5
DIVISOR = 16  # of shapes in elements, of strides and base addresses in bytes
INT32_MAX = (1 << 31) - 1
(SCALAR_INT64,) = get_args(ct.ScalarInt64[int])[1:]


def kernel_signature(kernel: ct.kernel, args: Sequence[Any]) -> KernelSignature:
    """The signature with which `ct.launch(stream, grid, kernel, args)` would compile `kernel`, its symbol filled in.

    Args:
        kernel: a cuTile kernel.
        args: all its arguments, constants included; tensors on any device, meta too, whose storage is taken to start at an aligned address.
    Raises: TypeError or OverflowError where the launch would.
    """
    function = kernel._pyfunc
    hints = typing.get_type_hints(function, include_extras=True)
    names = inspect.signature(function).parameters
    if len(names) != len(args):
        raise TypeError(f"{function.__name__} takes {len(names)} arguments, got {len(args)}")
    parameters = [_constraint(arg, hints.get(name), name) for name, arg in zip(names, args, strict=True)]
    newer = any(_needs_v2(p) for p in parameters)
    convention = CallingConvention.cutile_python_v2() if newer else CallingConvention.cutile_python_v1()
    return KernelSignature(parameters, convention).with_mangled_symbol(function.__name__)


def _constraint(arg: Any, annotation: Any, name: str) -> ParameterConstraint:
    inner, notes = (get_args(annotation)[0], get_args(annotation)[1:]) if get_origin(annotation) is Annotated else (annotation, ())
    if isinstance(arg, tuple):
        items = get_args(inner) if get_origin(inner) is tuple else ()
        if len(items) == 2 and items[1] is Ellipsis:
            items = items[:1] * len(arg)
        if items and len(items) != len(arg):
            raise TypeError(f"{name} must be a tuple of {len(items)}, got {len(arg)}")
        # An annotation around a tuple holds for each of its items, unless the item has its own.
        return TupleConstraint(tuple(_constraint(a, _noted(items[i] if items else None, notes), f"{name}[{i}]") for i, a in enumerate(arg)))
    if any(isinstance(note, ct.ConstantAnnotation) for note in notes) or not isinstance(arg, (Tensor, bool, int, float, list)):
        return ConstantConstraint(arg)
    if isinstance(arg, Tensor):
        return _array([arg], next((n for n in notes if isinstance(n, ct.ArrayAnnotation)), None), name)
    if isinstance(arg, list):
        element = next((n.element for n in notes if isinstance(n, ct.ListAnnotation)), None)
        return ListConstraint(_array(arg, element, name), alias_groups=(), elements_may_alias=True)
    if isinstance(arg, bool):
        return ScalarConstraint(ct.bool_)
    if isinstance(arg, int):
        if SCALAR_INT64 in notes:
            return ScalarConstraint(ct.int64)
        if not -INT32_MAX - 1 <= arg <= INT32_MAX:
            raise OverflowError(f"{name} must fit int32 (or be annotated ct.ScalarInt64), got {arg}")
        return ScalarConstraint(ct.int32)
    return ScalarConstraint(ct.float32)


def _noted(annotation: Any, notes: tuple) -> Any:
    for note in notes:
        annotation = Annotated[annotation, note]
    return annotation


def _array(arrays: Sequence[Tensor], annotation: ct.ArrayAnnotation | None, name: str) -> ArrayConstraint:
    """The assumptions that hold for every one of `arrays`: one tensor, or the items of a list argument."""
    annotation = annotation or ct.ArrayAnnotation()
    first = arrays[0]
    ndim, item = first.dim(), first.element_size()
    if any(a.dtype != first.dtype or a.dim() != ndim for a in arrays):
        raise TypeError(f"{name} must hold tensors of one dtype and rank")
    if annotation.index_dtype != ct.int64 and any(n > INT32_MAX for a in arrays for n in (*a.shape, *a.stride())):
        raise OverflowError(f"{name}: a shape or stride must fit int32 (or be annotated ct.IndexedWithInt64)")
    fixed_shape = {axis % ndim for axis in annotation.static_shape_dims or ()}
    fixed_stride = {axis % ndim for axis in annotation.static_stride_dims or ()}
    shape: list[int | None] = [None] * ndim
    stride: list[int | None] = [None] * ndim
    shape_divisor, stride_divisor = [1] * ndim, [1] * ndim
    for i in range(ndim):
        sizes, strides = {a.shape[i] for a in arrays}, {a.stride(i) for a in arrays}
        if i in fixed_shape or (ndim <= TMA_MAX_AXES and not fixed_shape and sizes == {1}):
            (shape[i],) = sizes
        if i in fixed_stride or (ndim <= TMA_MAX_AXES and not fixed_stride and strides == {1}):
            (stride[i],) = strides
        if ndim <= TMA_MAX_AXES:
            if all(n % DIVISOR == 0 for n in sizes):
                shape_divisor[i] = DIVISOR
            if all(n * item % DIVISOR == 0 for n in strides):
                stride_divisor[i] = max(1, DIVISOR // item)
    return ArrayConstraint(
        _dtype(first.dtype),
        ndim,
        index_dtype=annotation.index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=not all(_disjoint(a) for a in arrays),
        stride_constant=stride,
        shape_constant=shape,
        stride_divisible_by=stride_divisor,
        shape_divisible_by=shape_divisor,
        base_addr_divisible_by=DIVISOR if all(a.storage_offset() * item % DIVISOR == 0 for a in arrays) else 1,
    )


def _disjoint(array: Tensor) -> bool:
    """Whether no two elements share memory, by cuTile's sufficient test on the axes in the order of their strides."""
    axes = sorted(zip(array.stride(), array.shape, strict=True))
    if not axes:
        return True
    return axes[0][0] > 0 and all(outer[0] >= inner[0] * inner[1] for inner, outer in zip(axes, axes[1:], strict=False))


def _dtype(dtype: torch.dtype) -> Any:
    name = str(dtype).removeprefix("torch.")
    found = getattr(ct, {"bool": "bool_"}.get(name, name), None)
    if found is None:
        raise TypeError(f"dtype must be one that cuTile has, got {dtype}")
    return found


def _needs_v2(parameter: ParameterConstraint) -> bool:
    if isinstance(parameter, ListConstraint):
        parameter = parameter.element
    return isinstance(parameter, TupleConstraint) or (
        isinstance(parameter, ArrayConstraint) and any(n is not None for n in parameter.shape_constant)
    )
