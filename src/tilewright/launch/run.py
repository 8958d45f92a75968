"""How planned launches reach a processor. The only file that launches kernels."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Not `ct.launch`: that name is public, and a library beside us may have put a function of its own
# there, before we are imported or after.
from cuda.tile._cext import launch as launch_kernel

from .context import CONTEXT, changed
from .device import Device
from .far import check_lengths, with_int64_indices
from .launches import Launch, Step, Values, bind


class Bound:
    """The launches of one decision, bound to the op's arguments.

    Names are resolved once; each call is positional.

    launches: in order. arguments: names of what `run` takes. device: what they are planned for.
    long: an axis of an argument may be too long to count along, which `run` checks.
    """

    __slots__ = ("_count", "_long", "_ready", "_scratch", "_steps", "arguments", "launches")

    def __init__(self, launches: Sequence[Launch], arguments: Sequence[str], device: Device, *, long: bool = False) -> None:
        """Raises: ValueError naming kernel and parameter where a name is unknown, missing, given
        twice or of the wrong kind; naming the kernel where the grid is larger than a GPU launches.
        """
        self.launches, self.arguments = tuple(launches), tuple(arguments)
        self._steps, self._scratch = bind(self.launches, self.arguments)
        self._ready = [(step.kernel, step.grid, step.pick, step.constants, step.launch.pdl and device.has_pdl) for step in self._steps]
        self._count, self._long = len(self.arguments), long

    def __str__(self) -> str:
        return " -> ".join(map(str, self.launches))

    def run(self, *args: Any) -> None:
        """Runs the kernels in order on the device of the first argument, a tensor.

        CUDA: compiled, enqueued on the current stream of that device, no synchronisation.
        CPU: interpreted. Meta tensors run nothing; `traced` records them.

        Args: the op's arguments, in the order of `arguments`; None for one that no launch touches.
        Raises: TypeError for another number of them; ValueError for an axis that is too long.
        """
        if len(args) != self._count:
            raise TypeError(f"run must get {self._count} arguments ({', '.join(self.arguments)}), got {len(args)}")
        first = args[0]
        on_cuda = first.is_cuda
        if self._long and not first.is_meta:
            check_lengths(self.arguments, args)
        if on_cuda and (index := first.get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.run(*args)
        if self._scratch is not None:
            args += self._scratch.allocate(first.device)
        if CONTEXT.get() is not None:
            _tell(self._steps, args)
        if on_cuda:
            stream = torch._C._cuda_getCurrentRawStream(index)
            for kernel, grid, pick, constants, pdl in self._ready:
                values = pick(args) + constants
                try:
                    launch_kernel(stream, grid, kernel, values, programmatic_dependent_launch=pdl)
                except OverflowError:
                    launch_kernel(stream, grid, *with_int64_indices(kernel, values), programmatic_dependent_launch=pdl)
        elif first.is_cpu:
            from ..interpret.run import execute  # numpy code generation: loaded by the first CPU launch, not by the import

            for kernel, grid, pick, constants, _ in self._ready:
                values = pick(args) + constants
                try:
                    execute(kernel, grid, values)
                except OverflowError:
                    wide, values = with_int64_indices(kernel, values)
                    execute(wide, grid, values)
        return None


# -------------------------------------------------------------------------------------- who watches
def _tell(steps: Sequence[Step], args: Values) -> None:
    context = CONTEXT.get()
    for watch in context.on_launch if context else ():
        for step in steps:
            watch(step.launch, dict(zip(step.names, step.pick(args) + step.constants, strict=True)))


@dataclass(frozen=True, slots=True)
class Traced:
    """A launch that was traced.

    args: value of every parameter of the kernel, constants included, by its name and in its order.
    """

    launch: Launch
    args: dict[str, Any]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts launches by kernel name while the context is open."""
    counts: Counter[str] = Counter()

    def count(launch: Launch, args: dict[str, Any]) -> None:
        counts[launch.name] += 1

    with changed(lambda context: {"on_launch": (*context.on_launch, count)}):
        yield counts


@contextmanager
def traced(device: Device) -> Iterator[list[Traced]]:
    """Collects what ops called on meta tensors would launch on `device`.

    Runs nothing, needs no such device.
    """
    launches: list[Traced] = []

    def record(launch: Launch, args: dict[str, Any]) -> None:
        launches.append(Traced(launch, args))

    with changed(lambda context: {"on_launch": (*context.on_launch, record), "device": device}):
        yield launches
