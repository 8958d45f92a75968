"""`tilewright.interpret(kernel, grid, args)`: one launch of any kernel, and the checks to make."""

import linecache
from pathlib import Path
from types import FunctionType
from typing import Any

import cuda.tile as ct
import numpy as np
import torch

from .cutile import array_dtype, array_strides, is_array, parameter_kinds, parameters_of, python_function
from .run import checking, execute, extents, written_by
from .schedule import Order
from .trace import Trace

Tensors = tuple[torch.Tensor, ...]


def interpret(  # noqa: PLR0913 an option each
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...] = (),
    *,
    races: bool | None = None,
    block_order: Order | None = None,
    uninitialised: bool | Tensors = (),
    unwritten: bool | Tensors = (),
    strict: bool | None = None,
    strict_bounds: bool | None = None,
    steps: int | None = None,
    debug: bool | None = None,
    trace: bool | str | Path = False,
) -> Trace | None:
    """Runs a kernel on the CPU, block by block, without a GPU.

        tilewright.interpret(total, (4,), (x, out), races=True)

    It computes what a GPU would compute (docs/interpreter.md says how exactly). An option that is
    not given keeps the value of the surrounding `checking` context, if there is one.

    Args:
        kernel: a function decorated with @ct.kernel. Its hints have no effect.
        grid: number of blocks along 1 to 3 axes.
        args: what the kernel takes: CPU tensors or numpy arrays, lists and tuples of them, bool,
            int, float.
        races: raise if two blocks access the same element with no order between them.
        block_order: "forward", "reverse", or a seed that shuffles the blocks.
        uninitialised: tensors whose elements must not be read before the kernel has written them.
            True: all that torch.empty returns during the call.
        unwritten: tensors whose every element must be written by the end. True: every array among
            `args` that the kernel may write.
        strict: True, the default: a tile entirely outside its array is an error, and padding left
            undetermined is NaN. False: both read 0.
        strict_bounds: raise if a gather, scatter or atomic has an index outside of its array in a
            lane that its mask turns on, even though the lane would read padding or be dropped.
        steps: the most waiting points of a block that changes memory; with more, its loop is taken
            as endless.
        debug: run code with the kernel's own lines and variables, for breakpoints and stepping.
        trace: a file for an HTML page that draws what each block loaded, stored and multiplied, up
            to the error if there is one. True: only record it.
    Returns: with `trace`, what was recorded; else None.
    Raises: TypeError or ValueError for a call that cannot be made; cuda-tile's own errors for code
        that does not type; KernelError if the kernel does something undefined.
    """
    values = check_call("interpret", kernel, grid, args)
    if not isinstance(trace, (bool, str, Path)):
        raise TypeError(f"trace must be True, or the path of a page to write, got {type(trace).__name__}")
    if not isinstance(trace, bool):
        _check_page(Path(trace))
    if block_order not in (None, "forward", "reverse") and not isinstance(block_order, int):
        raise ValueError(f'block_order must be "forward", "reverse" or a seed, got {block_order!r}')
    watched = written_by(kernel, values) if unwritten is True else unwritten
    recorded = Trace(kernel_name(kernel)) if trace else None
    options: dict[str, Any] = {"races": races, "order": block_order, "strict": strict, "strict_bounds": strict_bounds, "steps": steps, "debug": debug}
    try:
        with checking(uninitialised=uninitialised, unwritten=watched, **options):
            execute(kernel, grid, values, recorded)
    finally:
        if recorded is not None and trace is not True:
            recorded.save(Path(str(trace)))
    return recorded


def _check_page(page: Path) -> None:
    """Said before the kernel runs: afterwards it would hide the kernel's error."""
    if page.is_dir():
        raise IsADirectoryError(f"trace must be the path of a page to write, got the folder {str(page)!r}")
    if not page.absolute().parent.is_dir():
        raise FileNotFoundError(f"trace must be a page in a folder that exists, got {str(page)!r}")


def kernel_name(kernel: Any) -> str:
    return python_function(kernel).__name__


def check_call(function: str, kernel: Any, grid: Any, args: Any) -> tuple[Any, ...]:
    """The arguments as a tuple.

    Raises TypeError that says what to write, for a call of `function` with something else than a
    kernel, a grid and arguments; ValueError for a grid that no GPU launches.
    """
    order = f"{function}(kernel, grid, args)"
    if not isinstance(kernel, ct.kernel):
        if isinstance(grid, ct.kernel):
            raise TypeError(f"{order}: the kernel comes first. Write {function}({kernel_name(grid)}, {_as_grid(kernel)}, ...)")
        if isinstance(kernel, FunctionType):
            name = kernel.__name__
            public = kernel.__module__.startswith("tilewright.")
            mend = f"call {name} itself, with CPU tensors: it is interpreted" if public else f"write @ct.kernel above `def {name}`"
            raise TypeError(f"kernel must be a function decorated with @ct.kernel, got the plain function {name}: {mend}")
        raise TypeError(f"kernel must be a function decorated with @ct.kernel, got {type(kernel).__name__}: write {order}")
    name, file = kernel_name(kernel), python_function(kernel).__code__.co_filename
    if not linecache.getlines(file):
        raise TypeError(f"kernel must be defined in a file or a notebook cell, because cuda-tile reads its source, got {name} of {file}")
    if name == "<lambda>":
        raise TypeError(f"kernel must be a function made by `def`, because cuda-tile reads its source, got a lambda of {file}")
    if not isinstance(grid, (tuple, list)) or not grid or not all(isinstance(n, int) for n in grid):
        what = "an array" if is_array(grid) else repr(grid)
        raise TypeError(f"grid must be a tuple of 1 to 3 ints, got {what}: write {function}({name}, {_as_grid(grid)}, (...))")
    extents(tuple(grid))
    if not isinstance(args, (tuple, list)):
        was = f"{type(args).__name__}: write {function}({name}, {tuple(grid)}, (x, ...))"
        raise TypeError(f"args must be a tuple of the arguments of {name}, got {was}")
    wanted = list(parameters_of(kernel))
    if len(args) != len(wanted):
        raise TypeError(f"args must be {len(wanted)} values, as many as {name} has parameters ({', '.join(wanted)}), got {len(args)}")
    _check_kinds(kernel, args)
    return tuple(args)


def _check_kinds(kernel: Any, args: tuple[Any, ...] | list[Any]) -> None:
    """Raises TypeError for an argument of a type that no parameter of its kind takes."""
    for (name, kind), value in zip(parameter_kinds(kernel).items(), args, strict=True):
        number = isinstance(value, (bool, int, float, tuple))
        if kind == "constant" and not number:
            raise TypeError(f"{name} must be a bool, int or float, because the kernel declares it ct.Constant, got {type(value).__name__}")
        if not number and not is_array(value) and not isinstance(value, list):
            raise TypeError(f"{name} must be a tensor, a number, or a list or tuple of them, got {type(value).__name__}")
        _check_arrays(name, value)


def _check_arrays(name: str, value: Any) -> None:
    """Raises TypeError or ValueError for an array that no kernel takes, which it names."""
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if isinstance(value, list) and not is_array(item):
                raise TypeError(f"{name}[{i}] must be a tensor or a numpy array, got {type(item).__name__}")
            _check_arrays(f"{name}[{i}]", item)
    elif is_array(value):
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got one of {value.layout}: write {name}.to_dense()")
        if not hasattr(ct, array_dtype(value)) or (isinstance(value, np.ndarray) and not value.dtype.isnative):
            raise TypeError(f"{name} must be of a dtype of cuda-tile, got {value.dtype}")
        if min(array_strides(value), default=0) < 0:
            raise ValueError(f"{name} must have strides of at least 0, got {array_strides(value)}: write np.ascontiguousarray({name})")


def _as_grid(value: Any) -> str:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return repr(tuple(values)) if values and all(isinstance(n, int) for n in values) else "(4,)"
