"""Running a launch: its program, its arguments, its blocks in turn."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from . import cutile
from .checks import Allocations, Unwritten, Watch
from .codegen import compile_program
from .errors import Deadlock, KernelError
from .formats import CONTAINER
from .memory import Array, Buffer, Machine
from .program import Program

TURN = 64  # waiting points a block may pass before the next block's turn
INT32_MAX = (1 << 31) - 1
PATIENCE = 30_000  # waiting points per block, with no change of memory in between, before the launch counts as deadlocked

Order = str | int


@dataclass(frozen=True, slots=True)
class Options:
    races: bool = False
    order: Order = "forward"
    strict: bool = True
    debug: bool = False
    unwritten: list[Unwritten] | None = None


DEFAULTS = Options()
_options: ContextVar[Options] = ContextVar("tilewright.interpret.options", default=DEFAULTS)


@contextmanager
def checking(
    *,
    races: bool | None = None,
    order: Order | None = None,
    uninitialised: bool | tuple[torch.Tensor, ...] = (),
    strict: bool | None = None,
    debug: bool | None = None,
) -> Iterator[None]:
    """Sets how launches inside the context are interpreted.

    An option that is not given keeps its outer value; outside of all contexts it has the first
    value named below.

    Args:
        races: False, or True to raise on accesses of different blocks that nothing orders.
        order: of blocks: "forward", "reverse", or a seed that shuffles the blocks and their turns
            at waiting points.
        uninitialised: tensors whose elements may not be read before a kernel wrote them (see also
            `mark_uninitialised`). True: all that torch.empty and its kin return inside the context,
            in ops too, kept until its end.
        strict: True: a tile entirely outside its array is an error and UNDETERMINED padding is
            poison (NaN for floats). False: both read 0.
        debug: True runs code with the kernel's own lines and variables, for breakpoints and
            stepping.
    """
    if order is not None and order not in ("forward", "reverse") and not isinstance(order, int):
        raise ValueError(f'order must be "forward", "reverse" or a seed, got {order!r}')
    given: dict[str, Any] = {"races": races, "order": order, "strict": strict, "debug": debug}
    changed = replace(_options.get(), **{name: value for name, value in given.items() if value is not None})
    marks = changed.unwritten
    if marks is None or (isinstance(uninitialised, tuple) and uninitialised):
        marks = [*(marks or ()), *map(Unwritten, uninitialised if isinstance(uninitialised, tuple) else ())]
    token = _options.set(replace(changed, unwritten=marks))
    try:
        with Allocations(marks) if uninitialised is True else nullcontext():
            yield
    finally:
        _options.reset(token)


def mark_uninitialised(*tensors: torch.Tensor) -> None:
    """Until the surrounding `checking` ends, reading an element of these tensors that no kernel
    wrote raises KernelError.
    """
    options = _options.get()
    if options.unwritten is None:
        raise RuntimeError("mark_uninitialised must be called inside `with checking(...)`")
    options.unwritten.extend(map(Unwritten, tensors))


# ----------------------------------------------------------------------------------- specialisation
_programs: dict[tuple[Any, ...], Program] = {}
_parameters: dict[Any, tuple[Any, ...]] = {}


def compiled_count() -> int:
    """How many specialisations of kernels were compiled so far."""
    return len(_programs)


def source(kernel: Any, args: tuple[Any, ...]) -> str:
    """The Python that a launch with these arguments runs, one statement per tile operation."""
    return _program(kernel, args, _options.get().debug).source


def _program(kernel: Any, args: tuple[Any, ...], debug: bool) -> Program:
    nodes = _parameters.get(kernel)
    if nodes is None:
        nodes = _parameters[kernel] = tuple(cutile.parameters_of(kernel).values())
    key: tuple[Any, ...] | None = None
    if len(nodes) == len(args):
        key = (kernel._pyfunc, debug, *[_type(value, node) for value, node in zip(args, nodes, strict=True)])
        program = _programs.get(key)
        if program is not None:
            return program
    program = compile_program(kernel, cutile.constraints_of(kernel, args), debug=debug)
    if key is not None:
        _programs[key] = program
    return program


def _type(value: Any, node: Any) -> Any:
    """All that the front end may look at in one argument, hashable and quick to make."""
    kind = type(value)
    if kind is int or kind is float or kind is bool:
        return (kind, repr(value)) if getattr(node, "constant", False) else kind
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _array_type(value, getattr(node, "array", None))
    if kind is tuple:
        return tuple([_type(item, child) for item, child in zip(value, cutile.child_nodes(value, node), strict=True)])
    if kind is list:
        element = node.list.element if node.list is not None else None
        types = {_array_type(item, element) for item in value}
        return (list, *sorted(types, key=str))
    return kind, repr(value)


def _array_type(value: Any, node: Any) -> tuple[Any, ...]:
    if node is None or not (node.static_shape_dims or node.static_stride_dims):
        return value.dtype, value.ndim
    rank, strides = value.ndim, cutile.array_strides(value)
    shape = tuple(value.shape[d] for d in node.static_shape_dims if -rank <= d < rank)
    return value.dtype, rank, shape, tuple(strides[d] for d in node.static_stride_dims if -rank <= d < rank)


# ---------------------------------------------------------------------------------------- arguments
def _bind(program: Program, args: tuple[Any, ...]) -> tuple[list[Any], list[Buffer]]:
    """The values of the program's parameters, and every buffer among them."""
    values: list[Any] = []
    buffers: list[Buffer] = []
    targets: list[Buffer] = []
    for index, parameter in enumerate(program.parameters):
        argument = args[parameter.path[0]]
        for item in parameter.path[1:]:
            argument = argument[item]
        if parameter.kind == "scalar":
            values.append(CONTAINER[parameter.dtype](argument))
            continue
        written = index in program.written
        if parameter.kind == "array":
            own = [Buffer(argument, parameter.name, written)]
            values.append(Array.argument(own[0]))
            if parameter.dtype == "int32":
                _check_extents(own[0])
        else:
            own = [Buffer(item, f"{parameter.name}[{i}]") for i, item in enumerate(argument)]
            values.append([Array.argument(buffer) for buffer in own])
        buffers += own
        if written:
            targets += own
    for buffer in buffers:
        if not buffer.copies:
            buffer.copies = any(np.may_share_memory(buffer.window, target.window) for target in targets)
    return values, buffers


def _check_extents(buffer: Buffer) -> None:
    window = buffer.window
    if max((*window.shape, *window.strides, 0)) <= INT32_MAX:
        return
    for what, values in (("shape", window.shape), ("strides", [s // window.itemsize for s in window.strides])):
        if values and max(values) > INT32_MAX:
            raise OverflowError(f"{what} of {buffer} do not fit int32; annotate the parameter with ct.IndexedWithInt64")


def _extents(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """The grid with all three axes. Raises ValueError for one that no GPU would launch."""
    if len(grid) > 3:
        raise ValueError(f"grid must have at most 3 entries, got {grid}")
    for axis, (n, most) in enumerate(zip(grid, cutile.MOST_BLOCKS, strict=False)):
        if not 0 <= n <= most:
            raise ValueError(f"grid[{axis}] must be in 0..{most}, got {n}: use several launches, or an axis with a higher limit")
    x, y, z = (*grid, 1, 1, 1)[:3]
    return x, y, z


# ------------------------------------------------------------------------------------------- blocks
def interpret(grid: tuple[int, ...], kernel: Any, args: tuple[Any, ...]) -> None:
    """Runs a kernel on CPU tensors, block by block.

    Blocks that wait for one another take turns.

    Args:
        grid: number of blocks along 1 to 3 axes.
        kernel: a function decorated with @ct.kernel; its hints are ignored.
        args: its arguments: CPU tensors or numpy arrays, lists and tuples of them, bool, int,
            float.
    Raises: cuda-tile's own errors for code that does not type; KernelError if the kernel did
        something undefined.
    """
    extents = _extents(grid)
    options = _options.get()
    program = _program(kernel, args, options.debug)
    values, buffers = _bind(program, args)
    machine = Machine(extents, options.strict)
    if options.races or options.unwritten:
        marks = [mark for mark in options.unwritten or () if any(map(mark.overlaps, buffers))]
        machine.watch = Watch(buffers, extents, races=options.races, unwritten=marks, code=program.code, places=program.places)
    try:
        with np.errstate(all="ignore"):
            if program.cooperative:
                _run_together(program, machine, values, options.order)
            else:
                for bid in _blocks(extents, options.order):
                    _enter(machine, bid)
                    program.function(machine, *values)
    except Exception as error:
        _locate(error, program, machine)
        raise


def _enter(machine: Machine, bid: tuple[int, ...]) -> None:
    machine.bid = bid
    if machine.watch is not None:
        x, y, _ = machine.grid
        machine.watch.block = bid[0] + x * (bid[1] + y * bid[2])


def _blocks(grid: tuple[int, int, int], order: Order) -> Iterator[tuple[int, int, int]]:
    x, y, z = grid
    if order == "forward":
        return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))
    blocks = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    if order == "reverse":
        blocks.reverse()
    else:
        random.Random(order).shuffle(blocks)
    return iter(blocks)


def _run_together(program: Program, machine: Machine, values: list[Any], order: Order) -> None:
    """Blocks take turns at waiting points, so that locks, flags and barriers make progress."""
    live = deque((bid, program.function(machine, *values)) for bid in _blocks(machine.grid, order))
    dice = random.Random(order) if isinstance(order, int) else None
    waited, progress = 0, machine.progress
    while live:
        if dice is not None:
            live.rotate(dice.randrange(len(live)))
        bid, block = live.popleft()
        _enter(machine, bid)
        turn = TURN if dice is None else dice.randint(1, TURN)
        ended = _advance(block, turn)
        if not ended:
            live.append((bid, block))
            waited += turn
        if ended or machine.progress != progress:
            waited, progress = 0, machine.progress
        if waited > PATIENCE * (len(live) + 1):
            who = f"{len(live)} blocks wait, and none has" if len(live) > 1 else "the only block left loops, and has not"
            raise Deadlock(f"deadlock: {who} changed memory for {waited} rounds")


def _advance(block: Iterator[None], points: int) -> bool:
    """Runs a block past so many waiting points. Returns whether it has ended."""
    for _ in range(points):
        try:
            next(block)
        except StopIteration:
            return True
    return False


def _locate(error: Exception, program: Program, machine: Machine) -> None:
    """Adds the place in the kernel and the block to an error."""
    line = _line(error.__traceback__, program)
    places = program.places(line)
    if isinstance(error, KernelError):
        error.kernel, error.places, error.block, error.grid = program.name, places, machine.bid, machine.grid
    else:
        file, number, _ = places[0] if places else ("?", 0, "")
        error.add_note(f"in {program.name}, block {machine.bid} of {machine.grid}, {file}:{number}")


def _line(traceback: TracebackType | None, program: Program) -> int:
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_globals is program.code:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
