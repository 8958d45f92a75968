"""Runs a launch: binds the arguments to the program and runs the blocks one after another."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from . import cutile
from .allocations import Allocations, Unwritten
from .arrays import Array, Buffer
from .checks import Watch
from .codegen import compile_program
from .denormals import denormals_kept
from .errors import KernelError
from .formats import CONTAINER
from .memory import Machine
from .past import Past
from .program import Program
from .schedule import STEPS, Order, Schedule, blocks
from .threads import choose_threads_once
from .trace import Recorder, Trace

INT32_MAX = (1 << 31) - 1
OPPOSITE: dict[Order, Order] = {"forward": "reverse", "reverse": "forward"}


@dataclass(frozen=True, slots=True)
class Options:
    races: bool = False
    order: Order = "forward"
    strict: bool = True
    debug: bool = False
    strict_bounds: bool = False
    steps: int = STEPS
    marks: list[Unwritten] | None = None


DEFAULTS = Options()
_options: ContextVar[Options] = ContextVar("tilewright.interpret.options", default=DEFAULTS)


def _tensors(name: str, given: object) -> tuple[torch.Tensor, ...]:
    """The tensors that an option names; none for True."""
    if isinstance(given, bool):
        return ()
    if not isinstance(given, (tuple, list)) or not all(map(cutile.is_array, given)):
        raise TypeError(f"{name} must be True, False or a tuple of tensors, got {type(given).__name__}")
    return tuple(given)


@contextmanager
def checking(
    *,
    races: bool | None = None,
    order: Order | None = None,
    uninitialised: bool | tuple[torch.Tensor, ...] = (),
    unwritten: bool | tuple[torch.Tensor, ...] = (),
    strict: bool | None = None,
    strict_bounds: bool | None = None,
    steps: int | None = None,
    debug: bool | None = None,
) -> Iterator[None]:
    """Sets how launches inside the context are interpreted.

    An option that is not given keeps its outer value. Outside of all contexts it has the first
    value named below.

    Args:
        races: False, or True to raise if two blocks access the same element with no order between
            them.
        order: of blocks: "forward", "reverse", or a seed that shuffles the blocks and their turns
            at waiting points.
        uninitialised: tensors whose elements must not be read before a kernel or PyTorch has
            written them inside the context (see also `mark_uninitialised`). True: all that
            torch.empty and similar functions return inside the context, in ops too. They are kept
            until its end.
        unwritten: tensors whose every element must be written by the end of the context; otherwise
            it raises KernelError. True: all that torch.empty and similar functions return inside
            the context, if a kernel may write to them and they still exist at the end.
        strict: True: a tile entirely outside its array is an error and UNDETERMINED padding is
            poison (NaN for floats). False: both read 0.
        strict_bounds: False, or True to raise if a gather, scatter or atomic has an index outside
            of its array in a lane that its mask turns on, even though the lane would read padding
            or be dropped.
        steps: the most waiting points that a block may pass while it changes memory. With more, its
            loop is taken as endless.
        debug: True runs code with the kernel's own lines and variables, for breakpoints and
            stepping.
    """
    if order is not None and order not in ("forward", "reverse") and not isinstance(order, int):
        raise ValueError(f'order must be "forward", "reverse" or a seed, got {order!r}')
    given: dict[str, Any] = {"races": races, "order": order, "strict": strict, "strict_bounds": strict_bounds, "steps": steps, "debug": debug}
    changed = replace(_options.get(), **{name: value for name, value in given.items() if value is not None})
    marks = changed.marks
    for name in ("races", "strict", "strict_bounds", "debug"):
        if given[name] is not None and not isinstance(given[name], bool):
            raise ValueError(f"{name} must be True, False or None, got {given[name]!r:.80}")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps must be an int of at least 1, got {steps!r:.80}")
    early, missing = _tensors("uninitialised", uninitialised), _tensors("unwritten", unwritten)
    if marks is None or early or missing:
        named = {id(tensor): tensor for tensor in (*early, *missing)}
        chosen = [{id(tensor) for tensor in tensors} for tensors in (early, missing)]
        marks = [*(marks or ()), *(Unwritten(t, early=i in chosen[0], missing=i in chosen[1]) for i, t in named.items())]
    before = len(marks)
    token = _options.set(replace(changed, marks=marks))
    watched = uninitialised is True or unwritten is True
    try:
        with Allocations(marks, early=uninitialised is True, missing=unwritten is True) if watched or early or missing else nullcontext():
            yield
    finally:
        _options.reset(token)
    for mark in marks:
        if mark.missing and any(mark.tensor is t for t in missing):
            mark.require_written()
    for mark in marks[before:] if unwritten is True else ():  # not those of an outer context: its end has not come
        if mark.name and mark.is_output():
            mark.require_written()


def mark_uninitialised(*tensors: torch.Tensor) -> None:
    """Until the surrounding `checking` ends, reading an element of these tensors that no kernel
    wrote raises KernelError.

    What PyTorch writes counts too if `checking` was given `uninitialised` or `unwritten`.
    """
    options = _options.get()
    if options.marks is None:
        raise RuntimeError("mark_uninitialised must be called inside `with checking(...)`")
    options.marks.extend(Unwritten(tensor, early=True, missing=False) for tensor in tensors)


# ----------------------------------------------------------------------------------- specialisation
_programs: dict[tuple[Any, ...], Program] = {}
_parameters: dict[Any, tuple[Any, ...]] = {}


def compiled_count() -> int:
    """How many specialisations of kernels were compiled so far."""
    return len(_programs)


def source(kernel: Any, args: tuple[Any, ...]) -> str:
    """The Python that a launch with these arguments runs, one statement per tile operation."""
    return _program(kernel, args, _options.get().debug).source


def written_by(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays among the arguments that the kernel may write, those of tuples and lists too."""
    program = _program(kernel, args, _options.get().debug)
    found: list[Any] = []
    for index in sorted(program.written):
        argument = program.parameters[index].of(args)
        found += argument if isinstance(argument, list) else [argument] if cutile.is_array(argument) else []
    return tuple(found)


def _program(kernel: Any, args: tuple[Any, ...], debug: bool, traced: bool = False) -> Program:
    nodes = _parameters.get(kernel)
    if nodes is None:
        nodes = _parameters[kernel] = tuple(cutile.parameters_of(kernel).values())
    key: tuple[Any, ...] | None = None
    if len(nodes) == len(args):
        key = (kernel._pyfunc, debug, traced, *[_type(value, node) for value, node in zip(args, nodes, strict=True)])
        program = _programs.get(key)
        if program is not None:
            return program
    program = compile_program(kernel, cutile.constraints_of(kernel, args), debug=debug, traced=traced)
    if key is not None:
        _programs[key] = program
    return program


def _type(value: Any, node: Any) -> Any:
    """Everything that the front end may look at in one argument, as a hashable value."""
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
        argument = parameter.of(args)
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
            for buffer in own:
                buffer.target = True
                if not buffer.window.flags.writeable:
                    raise ValueError(f"{buffer.name} must be writable, as the kernel writes it, got a read-only array: write {buffer.name}.copy()")
    for buffer in buffers:
        if not buffer.copies:
            buffer.copies = any(np.may_share_memory(buffer.window, target.window) for target in targets)
    return values, buffers


def _check_extents(buffer: Buffer) -> None:
    window = buffer.window
    if max((*window.shape, *window.strides, 0)) <= INT32_MAX:
        return
    for what, values in (("shape", window.shape), ("strides", cutile.array_strides(window))):
        if values and max(values) > INT32_MAX:
            raise OverflowError(f"{what} of {buffer} do not fit int32; annotate the parameter with ct.IndexedWithInt64")


def extents(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """The grid with all three axes. Raises ValueError for one that no GPU would launch."""
    if len(grid) > 3:
        raise ValueError(f"grid must have at most 3 entries, got {grid}")
    for axis, (n, most) in enumerate(zip(grid, cutile.MOST_BLOCKS, strict=False)):
        if not 0 <= n <= most:
            mend = ": use several launches, or an axis with a higher limit" if n > most else ""
            raise ValueError(f"grid[{axis}] must be in 0..{most}, got {n}{mend}")
    x, y, z = (*grid, 1, 1, 1)[:3]
    return x, y, z


# ------------------------------------------------------------------------------------------- blocks
def execute(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], trace: Trace | None = None) -> None:
    """Runs a kernel on CPU tensors, block by block, as the context says. `interpret` checks first.

    Blocks that wait for one another take turns. trace: records what each block did.
    """
    choose_threads_once()
    axes = extents(grid)
    options = _options.get()
    program = _program(kernel, args, options.debug, trace is not None)
    values, buffers = _bind(program, args)
    late = options.races and program.cooperative and not options.debug
    again = (options.order, OPPOSITE[options.order]) if late and options.order in OPPOSITE else ()
    targets = [buffer.window for buffer in buffers if buffer.target and again]
    before = [window.copy() for window in targets]
    _run(program, options, axes, values, buffers, trace, late=late and not again)
    untraced = program if trace is None or not again else _program(kernel, args, options.debug)
    results = [window.copy() for window in targets]
    for order in again:
        _put(targets, before)
        with redirect_stdout(io.StringIO()):  # it printed once
            _run(untraced, replace(options, order=order), axes, values, buffers, None, late=True)
    _put(targets, results)


def _put(targets: list[np.ndarray], contents: list[np.ndarray]) -> None:
    for window, content in zip(targets, contents, strict=True):
        window[...] = content


def _run(
    program: Program, options: Options, axes: tuple[int, int, int], values: list[Any], buffers: list[Buffer], trace: Trace | None, late: bool = False
) -> None:
    machine = Machine(axes, options.strict, strict_bounds=options.strict_bounds)
    if options.races or options.marks:
        marks = [mark for mark in options.marks or () if _touches(mark, buffers)]
        machine.watch = watch = Watch(buffers, axes, races=options.races, marks=marks, code=program.code, places=program.places)
        machine.past = Past(watch.released) if late else None
    if trace is not None:
        machine.watch = Recorder(trace, program, axes, buffers, machine.watch)
    try:
        # Not under the caller's autocast: it would change the dtype of products behind our back.
        with np.errstate(all="ignore"), denormals_kept(), torch.autocast("cpu", enabled=False):
            if program.cooperative:
                Schedule(program, machine, values, options.order, options.steps).run(_enter)
            else:
                for bid in blocks(axes, options.order):
                    _enter(machine, bid)
                    program.function(machine, *values)
    except Exception as error:
        _locate(error, program, machine)
        raise


def _touches(mark: Unwritten, buffers: list[Buffer]) -> bool:
    """Whether a launch uses the memory of a mark. If so, the mark gets the name of the launch's
    parameter.
    """
    found = [buffer for buffer in buffers if mark.overlaps(buffer)]
    for buffer in found:
        if buffer.target and not mark.name:
            mark.name = buffer.name
    return bool(found)


def _enter(machine: Machine, bid: tuple[int, ...]) -> None:
    machine.bid = bid
    if machine.watch is not None:
        x, y, _ = machine.grid
        machine.watch.block = block = bid[0] + x * (bid[1] + y * bid[2])
        if machine.past is not None:
            machine.past.enter(block, machine.progress)


def _locate(error: Exception, program: Program, machine: Machine) -> None:
    """Adds the place in the kernel and the block to an error."""
    line = _line(error.__traceback__, program)
    places = program.places(line)
    if isinstance(error, KernelError):
        error.place(program.name, places, machine.bid, machine.grid)
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
