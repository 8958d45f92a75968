"""The only file of Tilewright that uses private names of cuda-tile, apart from launch/run.py (the
launcher) and front_end.py (a faster front end).

A kernel and its arguments -> the signature that the front end types -> typed IR, or a signature to
compile. The rest of the project asks here about an IR value (its dtype, its shape, whether it is a
pointer). So a new cuda-tile release changes one file.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import FunctionType
from typing import Any

import cuda.tile as ct
import numpy as np
import torch
from cuda.tile import _annotated_function as annotated, _compile as compiler, compilation
from cuda.tile._ir import ir, ops as ir_ops
from cuda.tile._ir.ops import tile_impl_registry
from cuda.tile._ir.type import ArrayValue, GatherScatterViewTy, ListValue, StridedViewTy, TensorLikeTy, TokenTy
from cuda.tile._passes.ast2hir import HirMode, get_function_hir
from cuda.tile._passes.hir2ir import hir2ir

from . import front_end

CALLING_CONVENTION = compilation.CallingConvention.cutile_python_v2()
BYTECODE_VERSION = compiler._SUPPORTED_VERSIONS[-1]
MOST_BLOCKS = ((1 << 24) - 1, 65535, 65535)  # of a grid along x (cuTile's limit), y and z (CUDA's)
MAX_SPECIALISED_RANK = 5  # the JIT assumes nothing about the shape of arrays of higher rank
Constraint = Any  # one of the public classes of cuda.tile.compilation


def compiler_banner() -> str:
    """The version line of the compiler that cuda-tile would call; "" if there is none."""
    try:
        return compiler._get_compiler_version_string() or ""
    except FileNotFoundError:
        return ""


def python_function(kernel: Any) -> FunctionType:
    """The function that @ct.kernel decorated."""
    function: FunctionType = kernel._pyfunc
    return function


def with_function(kernel: Any, function: FunctionType) -> Any:
    """Another function as a kernel with the same hints."""
    return ct.kernel(function, **dataclasses.asdict(kernel._compiler_options))


def parameters_of(kernel: Any) -> dict[str, Any]:
    """Parameter name -> annotation node, in order."""
    function = kernel._annotated_function
    return dict(zip(function.pysig.parameters, function.parameter_annotations, strict=True))


@cache
def parameter_kinds(kernel: Any) -> dict[str, str]:
    """Parameter name -> "constant" (ct.Constant), "scalar" (annotated as one) or "array", in
    order.
    """
    signature = kernel._annotated_function.pysig.parameters
    return {name: _kind(node, signature[name].annotation) for name, node in parameters_of(kernel).items()}


def _kind(node: Any, annotation: Any) -> str:
    if isinstance(node, annotated.LeafAnnotationNode):
        return "constant" if node.constant else "scalar" if node.scalar is not None or annotation in (bool, int, float) else "array"
    return _kind(node.each if isinstance(node, annotated.HomogeneousTupleNode) else node.items[0], annotation)


# --------------------------------------------------------------------------- arguments -> signature
def constraints_of(kernel: Any, args: tuple[Any, ...], *, jit: bool = False) -> list[Constraint]:
    """The types the front end gives to `args`.

    Args:
        kernel: a function decorated with @ct.kernel.
        args: its arguments. Arrays may be on any device, also "meta"; no element is read.
        jit: assume of an array what the JIT on a GPU assumes: unit strides, extents of 1,
            divisibility by 16, alignment. Otherwise only what the kernel's annotations ask for, so
            one signature serves every shape.
    Raises: TypeError, ValueError or OverflowError as a launch would.
    """
    nodes = parameters_of(kernel)
    if len(nodes) != len(args):
        expects = f"{len(nodes)} argument{'s' * (len(nodes) != 1)}"
        raise TypeError(f"Kernel expects {expects} but {len(args)} {'was' if len(args) == 1 else 'were'} given")
    places = [f"kernel argument #{i}" for i in range(len(args))]
    return [_constraint(value, node, jit, place) for value, node, place in zip(args, nodes.values(), places, strict=True)]


def is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def child_nodes(value: tuple[Any, ...], node: Any) -> list[Any]:
    """The annotation of each item of a tuple argument."""
    if isinstance(node, annotated.HomogeneousTupleNode):
        return [node.each] * len(value)
    if isinstance(node, annotated.HeterogeneousTupleNode):
        if len(node.items) != len(value):
            raise TypeError(f"Received a tuple of length {len(value)} for a parameter annotated as a tuple of length {len(node.items)}.")
        return list(node.items)
    return [node] * len(value)


def scalar_dtype(value: bool | int | float, node: Any) -> str:
    """The dtype of a runtime scalar argument."""
    if isinstance(value, bool):
        return "bool_"
    if isinstance(value, float):
        return "float32"
    return node.scalar.dtype.name if node.scalar is not None else "int32"


def check_integer(value: int, dtype: str) -> None:
    bits = int(dtype.lstrip("uint"))
    low, high = (0, 1 << bits) if dtype[0] == "u" else (-(1 << bits - 1), 1 << bits - 1)
    if not low <= value < high:
        raise OverflowError(f"kernel argument {value} does not fit {dtype}; annotate the parameter with ct.ScalarInt64")


def _constraint(value: Any, node: Any, jit: bool, place: str) -> Constraint:
    if type(value) is tuple:
        children = enumerate(zip(value, child_nodes(value, node), strict=True))
        return compilation.TupleConstraint([_constraint(item, child, jit, f"item #{i} of {place}") for i, (item, child) in children])
    if not isinstance(node, annotated.LeafAnnotationNode):
        raise TypeError("Received a non-tuple argument for a parameter annotated as a tuple")
    kind = type(value).__name__
    if isinstance(value, tuple):
        raise TypeError(f"Invalid {place}: '{kind}' is a subclass of 'tuple'. Only plain tuples are accepted.")
    if node.constant:
        if not isinstance(value, (bool, int, float)):
            raise TypeError(f"Invalid {place}: Could not interpret object of type '{kind}' as a constant.")
        return compilation.ConstantConstraint(value)
    if is_array(value):
        return _array_constraint([value], node.array, jit)
    if isinstance(value, list):
        if not value:
            raise ValueError(f"Invalid {place}: a list must hold at least one array, got an empty one")
        element = node.list.element if node.list is not None else None
        return compilation.ListConstraint(_array_constraint(value, element, jit), alias_groups=(), elements_may_alias=jit)
    if isinstance(value, (bool, int, float)):
        dtype = scalar_dtype(value, node)
        if type(value) is int:
            check_integer(value, dtype)
        return compilation.ScalarConstraint(getattr(ct, dtype))
    raise TypeError(f"Invalid {place}: Objects of type '{kind}' are not supported.")


def array_dtype(array: Any) -> str:
    """cuda-tile's name for the dtype of a tensor or numpy array."""
    return _dtype_name(array.dtype)


@cache
def _dtype_name(dtype: torch.dtype | np.dtype) -> str:
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    return {"bool": "bool_", "float4_e2m1fn_x2": "uint8"}.get(name, name)


def array_strides(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    if isinstance(array, np.ndarray):
        return tuple(s // array.itemsize for s in array.strides)
    return tuple(array.stride())


def _array_constraint(arrays: list[Any], node: Any, jit: bool) -> compilation.ArrayConstraint:
    """One constraint for every array of a list (a plain argument: a list of one)."""
    first, rank = arrays[0], arrays[0].ndim
    node = node if node is not None else ct.ArrayAnnotation()
    for array in arrays:
        if array.ndim != rank:
            raise TypeError("Arrays in list vary in rank")
        if array_dtype(array) != array_dtype(first):
            raise TypeError("Arrays in list vary in dtype")
    shapes, strides = [tuple(a.shape) for a in arrays], [array_strides(a) for a in arrays]
    if any(s < 0 for own in strides for s in own):
        raise ValueError("negative strides are not supported")
    name = array_dtype(first)
    if not hasattr(ct, name):
        raise TypeError(f"arrays of dtype {name} are not supported")
    assumed: dict[str, Any] = {"may_alias_internally": False}
    shape: list[int | None] = _static(shapes, node.static_shape_dims, "shape")
    stride: list[int | None] = _static(strides, node.static_stride_dims, "stride")
    if jit:
        assumed = _jit_assumptions(arrays, shapes, strides, getattr(ct, name).bitwidth)
        if not node.static_shape_dims:
            shape = _ones(shapes)
        if not node.static_stride_dims:
            stride = _ones(strides)
    return compilation.ArrayConstraint(
        getattr(ct, name),
        rank,
        index_dtype=node.index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        stride_constant=stride,
        shape_constant=shape,
        **assumed,
    )


def _static(values: list[tuple[int, ...]], dims: tuple[int, ...], what: str) -> list[int | None]:
    """The values of annotated dims, None for the others."""
    rank = len(values[0])
    static: list[int | None] = [None] * rank
    for dim in dims:
        if not -rank <= dim < rank:
            raise ValueError(f"static_{what}_dims contains axis {dim} but array rank is {rank}")
        if static[dim] is not None:
            raise ValueError(f"static_{what}_dims contains duplicate axis {dim}")
        if any(v[dim] != values[0][dim] for v in values):
            raise ValueError(f"Arrays in list vary in static {what} at axis {dim % rank} ({[v[dim] for v in values]})")
        static[dim] = values[0][dim]
    return static


def _ones(values: list[tuple[int, ...]]) -> list[int | None]:
    """1 where all arrays have it, else None."""
    rank = len(values[0])
    return [1 if rank <= MAX_SPECIALISED_RANK and all(v[d] == 1 for v in values) else None for d in range(rank)]


def _jit_assumptions(arrays: list[Any], shapes: list[tuple[int, ...]], strides: list[tuple[int, ...]], bits: int) -> dict[str, Any]:
    """What cuda-tile's launcher assumes of such arrays, by the rules of its C++ source."""
    rank, step = len(shapes[0]), 128 // bits
    known = rank <= MAX_SPECIALISED_RANK

    def disjoint(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
        axes = sorted(zip(stride, shape, strict=True))
        return not axes or (axes[0][0] > 0 and all(b[0] >= a[0] * a[1] for a, b in pairwise(axes)))

    return {
        "may_alias_internally": not all(map(disjoint, shapes, strides)),
        "shape_divisible_by": [16 if known and all(s[d] % 16 == 0 for s in shapes) else 1 for d in range(rank)],
        "stride_divisible_by": [step if known and all(s[d] % step == 0 for s in strides) else 1 for d in range(rank)],
        "base_addr_divisible_by": 16 if all(_address(a) % 16 == 0 for a in arrays) else 1,
    }


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    if array.device.type == "meta":  # as if the allocation were aligned
        return int(array.storage_offset() * array.element_size())
    return int(array.data_ptr())


# ---------------------------------------------------------------------------- signature -> typed IR
@dataclass(eq=False)
class IndexCheck(ir_ops.TileAssert, opcode="index_check", memory_effect=ir.MemoryEffect.STORE):  # type: ignore[misc, call-arg]
    """An additional operation before a gather, scatter or atomic. It is needed because later IR has
    only pointers.

    The front end's passes treat it as an assertion.

    what: the access, for a message, with {} for an index. checked: whether lanes outside of the
        array are masked.
    """

    message: str = ir.attribute(default="")
    cond: ir.Var | None = ir.operand(default=None)  # noqa: RUF009 a field
    what: str = ir.attribute()
    checked: bool = ir.attribute()
    index: tuple[ir.Var, ...] = ir.operand()
    extents: tuple[ir.Var, ...] = ir.operand()
    mask: ir.Var | None = ir.operand(default=None)  # noqa: RUF009


_interpreting: ContextVar[bool] = ContextVar("tilewright.interpret.interpreting", default=False)
_pointer_and_mask = ir_ops._gather_scatter_pointer_and_mask


def _checked_pointer_and_mask(array: ir.Var, indices: ir.Var, check_bounds: ir.Var, custom_mask: ir.Var | None = None) -> Any:
    """What the front end does for an index, and in addition an IndexCheck. No check is added where
    the kernel is compiled for a GPU.
    """
    result = _pointer_and_mask(array, indices, check_bounds, custom_mask)
    extents = array.get_aggregate().shape
    if _interpreting.get() and extents:
        several = indices.is_aggregate()
        index = tuple(ir_ops.tuple_item(indices.get_aggregate(), axis) for axis in range(len(extents))) if several else (indices,)
        mask = custom_mask if custom_mask is not None and is_tensor(custom_mask) else None
        kind = {"gather_impl": "read", "scatter_impl": "write"}.get(sys._getframe(1).f_code.co_name, "atomic")
        what = f"{kind} of element {{}} of {array.get_original_name()}: {array.get_type().dtype.name}"
        checked = check_bounds.get_constant()
        ir_ops.add_operation_variadic(IndexCheck, (), what=what, checked=checked, index=index, extents=tuple(extents), mask=mask)
    return result


ir_ops._gather_scatter_pointer_and_mask = _checked_pointer_and_mask


def typed_ir(kernel: Any, constraints: list[Constraint], *, optimised: bool = True) -> ir.Block:
    """The kernel's body as typed by cuda-tile's front end.

    Its parameters are those of `flat_parameters`.

    optimised: the IR that becomes bytecode: multiply-adds fused, loops split. Otherwise the IR
        before these passes, which still assigns to the kernel's own variables.
    Raises: cuda-tile's own errors for code that does not type.
    """
    token = _interpreting.set(True)
    try:
        with front_end.quick():
            return _typed_ir(kernel, constraints, optimised)
    finally:
        _interpreting.reset(token)


def _typed_ir(kernel: Any, constraints: list[Constraint], optimised: bool) -> ir.Block:
    signature = compilation.KernelSignature(constraints, CALLING_CONVENTION, "kernel")
    function = kernel._annotated_function
    if optimised:
        result = compiler.compile_tile(
            function,
            (signature,),
            None,  # any target
            kernel._compiler_options,
            bytecode_version=BYTECODE_VERSION,
            return_final_ir=True,
            return_cubin=False,
        )
        return result.final_ir[0]
    hir = get_function_hir(function.pyfunc, mode=HirMode.ENTRY_POINT)
    context = ir.IRContext(log_ir_on_error=False, tileiras_version=BYTECODE_VERSION, typing_hooks=compiler._TileTypingHooks())
    with ir.Builder(context, hir.body.loc) as builder, tile_impl_registry.as_current():
        names = tuple(function.pysig.parameters)
        made = compiler._create_kernel_parameters(signature.parameters, function.parameter_annotations, names, hir.param_locs, context)
        hir2ir(hir, made.aggregate_vars, context)
    body = ir.Block(context, hir.body.loc)
    body.params = sum((variables for variables, _ in made.nonconstant_flat_vars), ())
    body.extend(builder.ops)
    return body


def flat_parameters(
    names: list[str], constraints: Sequence[Constraint], path: tuple[int, ...] = ()
) -> Iterator[tuple[str, tuple[int, ...], Constraint]]:
    """(name, path, constraint) of every parameter that exists at run time, with tuples flattened,
    in the order of the IR's parameters.

    path: the argument's index, then indices into tuples.
    """
    for index, (name, constraint) in enumerate(zip(names, constraints, strict=True)):
        if isinstance(constraint, compilation.TupleConstraint):
            items = [f"{name}[{i}]" for i in range(len(constraint.items))]
            yield from flat_parameters(items, constraint.items, (*path, index))
        elif not isinstance(constraint, compilation.ConstantConstraint):
            yield name, (*path, index), constraint


# --------------------------------------------------------------------------- questions about values
def is_tensor(variable: ir.Var) -> bool:
    """Whether the value is a tile or a scalar, not a view, array, tuple, token or None."""
    return isinstance(variable.get_type_allow_invalid(), TensorLikeTy)


def is_token(variable: ir.Var) -> bool:
    return isinstance(variable.get_type_allow_invalid(), TokenTy)


def is_pointer(variable: ir.Var) -> bool:
    return is_tensor(variable) and "pointer" in str(variable.get_type().tensor_dtype())


def is_tuple(variable: ir.Var) -> bool:
    return variable.is_aggregate() and not isinstance(variable.get_aggregate(), (ArrayValue, ListValue))


def dtype_of(variable: ir.Var) -> str:
    return str(variable.get_type().tensor_dtype().name)


def shape_of(variable: ir.Var) -> tuple[int, ...]:
    return tuple(variable.get_type().tensor_shape())


def view_of(variable: ir.Var) -> dict[str, Any]:
    """Of a tiled view: tile shape, steps between tiles, axis order, sparse axis, padding mode."""
    view = variable.get_type()
    shape = tuple(view.tile_shape)
    sparse = view.sparse_dim if isinstance(view, GatherScatterViewTy) else None
    return {
        "shape": shape,
        "steps": tuple(view.traversal_steps) if isinstance(view, StridedViewTy) else shape,
        "order": tuple(range(len(shape))) if sparse is not None else tuple(view.order),
        "sparse_axis": sparse,
        "padding": view.padding_mode.name,
    }
