"""The signature that cuTile's compiler derives from a launch, without GPU or driver."""

from collections.abc import Sequence
from typing import Any

from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ListConstraint, TupleConstraint

from ..interpret.cutile import constraints_of, python_function


def kernel_signature(kernel: Any, args: Sequence[Any]) -> KernelSignature:
    """The signature with which `ct.launch(stream, grid, kernel, args)` compiles `kernel`, with its
    symbol.

    Binaries made for it land in cuTile's disk cache under the key that the launch will look up.

    Args:
        kernel: a cuTile kernel.
        args: all its arguments, constants included. Tensors may be on any device, also meta; their
            storage counts as aligned.
    Raises: TypeError, ValueError or OverflowError as the launch would.
    """
    parameters = constraints_of(kernel, tuple(args), jit=True)
    newer = any(map(_needs_v2, parameters))
    convention = CallingConvention.cutile_python_v2() if newer else CallingConvention.cutile_python_v1()
    return KernelSignature(parameters, convention).with_mangled_symbol(python_function(kernel).__name__)


def _needs_v2(parameter: Any) -> bool:
    """Whether version 1 of the calling convention cannot express it.

    The launcher takes the oldest that can.
    """
    if isinstance(parameter, ListConstraint):
        parameter = parameter.element
    constant_shape = isinstance(parameter, ArrayConstraint) and any(n is not None for n in parameter.shape_constant)
    return constant_shape or isinstance(parameter, TupleConstraint)
