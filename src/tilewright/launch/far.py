"""Arrays whose strides do not fit 32 bits, as the caches of very long contexts have.

cuTile passes shapes and strides as int32, and raises OverflowError for others. Only then does a
call come here: no other call pays for it, and no kernel changes. An axis itself stays below 2**31
elements: kernels count along it in 32 bits.
"""

from collections.abc import Iterable
from functools import cache
from types import FunctionType
from typing import Any

import cuda.tile as ct
from torch import Tensor

from .check import INT32_MAX, argument_error
from .launches import Values

LONGEST = INT32_MAX - (1 << 20)  # of an axis: its last tile, of 2**20 elements at most, ends below 2**31


def with_int64_indices(kernel: Any, args: Values) -> tuple[Any, Values]:
    """What to launch after an OverflowError: the kernel with 64-bit shapes and strides, if an array
    needs them, and its arguments. Raises that error again if no array is why; ValueError for an
    axis that is too long.

    The stride of an axis of one element means nothing, but cuTile looks at it too. Where only such
    strides were too large, the kernel stays as it is.
    """
    if not any(map(is_far, args)):
        raise  # what the caller is handling
    from ..interpret.cutile import parameter_kinds  # loaded with the first plan, not by the import

    check_lengths((name.lower() for name in parameter_kinds(kernel)), args)
    args = tuple([_near(value) if is_far(value) else value for value in args])
    return (_widened(kernel) if any(map(is_far, args)) else kernel), args


def is_far(value: Any) -> bool:
    """Whether it is an array whose shape or strides do not fit 32 bits."""
    return isinstance(value, Tensor) and any(n > INT32_MAX for n in (*value.shape, *value.stride()))


def check_lengths(names: Iterable[str], args: Values) -> None:
    """Raises ValueError for an array that has an axis along which 32 bits cannot count."""
    for name, x in zip(names, args, strict=False):
        if isinstance(x, Tensor) and max(x.shape, default=0) > LONGEST:
            raise argument_error(f"{name}.shape", f"at most {LONGEST} along each axis (call the op on parts of it)", tuple(x.shape))


def check_near(x: Tensor, name: str) -> None:
    """Raises ValueError for an array that `with_int64_indices` would have to see, in an op whose
    kernel takes lists of arrays: they have 32 bits only.
    """
    if is_far(x):
        was = f"strides {x.stride()} for shape {tuple(x.shape)}"
        raise argument_error(f"{name}.stride()", "below 2**31 elements (call .contiguous(), or split the tensor)", was)


def _near(x: Tensor) -> Tensor:
    """x, its axes of one element with the largest stride of the others, which keeps what the
    compiler knows of divisibility.
    """
    most = max((stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1), default=1)
    return x.as_strided(x.shape, [stride if n > 1 else most for n, stride in zip(x.shape, x.stride(), strict=True)])


@cache
def _widened(kernel: Any) -> Any:
    """The kernel, its hints included, with all arrays indexed by 64 bits: one more binary for each
    kernel that meets such an array.
    """
    from ..interpret.cutile import parameter_kinds, python_function, with_function

    function = python_function(kernel)
    wide = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    wide.__kwdefaults__, wide.__qualname__, wide.__module__ = function.__kwdefaults__, function.__qualname__, function.__module__
    arrays = [name for name, kind in parameter_kinds(kernel).items() if kind == "array"]
    wide.__annotations__ = {**function.__annotations__, **dict.fromkeys(arrays, ct.IndexedWithInt64)}
    return with_function(kernel, wide)
