"""How a planned kernel reaches a processor. The only file that calls ct.launch."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import cuda.tile as ct
import torch

from .device import Device
from .plan import Plan


def launch(plan: Plan, *args) -> None:
    """Run one kernel on the device of its first argument: CUDA compiled, CPU interpreted.

    On CUDA: enqueued on the current stream of that device, no synchronisation. Meta tensors run nothing; they are recorded by `traced`.
    """
    device = args[0].device
    if _watchers:
        for watch in _watchers:
            watch(plan, args)
    if device.type == "cuda":
        index = device.index
        if index == torch._C._cuda_getDevice():
            _enqueue(plan, args, index)
        else:
            with torch.cuda.device(index):
                _enqueue(plan, args, index)
    elif device.type == "cpu":
        from ..interpret import interpret  # numpy code generation: loaded by the first CPU launch, not by the import

        interpret(plan.grid, plan.hinted_kernel, args + plan.constants)


def _enqueue(plan: Plan, args: tuple, index: int) -> None:
    stream, early = torch._C._cuda_getCurrentRawStream(index), plan.early and _launches_early(index)
    ct.launch(stream, plan.grid, plan.hinted_kernel, args + plan.constants, programmatic_dependent_launch=early)


@cache
def _launches_early(index: int) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return torch.cuda.get_device_capability(index) >= (9, 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was traced: the plan, and the arguments before its constants (meta tensors and scalars)."""

    plan: Plan
    args: tuple


_watchers: list[Callable[[Plan, tuple], None]] = []
_tracing_for: list[Device] = []


@contextmanager
def _watching(watch: Callable[[Plan, tuple], None]) -> Iterator[None]:
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


@contextmanager
def counted() -> Iterator[Counter]:
    """Counts launches by kernel name while the context is open."""
    counts: Counter = Counter()

    def count(plan: Plan, args: tuple) -> None:
        counts[plan.name] += 1

    with _watching(count):
        yield counts


@contextmanager
def traced(device: Device) -> Iterator[list[Launch]]:
    """Collects what ops called on meta tensors would launch on `device`. Runs nothing, needs no such device."""
    launches: list[Launch] = []

    def record(plan: Plan, args: tuple) -> None:
        launches.append(Launch(plan, args))

    _tracing_for.append(device)
    try:
        with _watching(record):
            yield launches
    finally:
        _tracing_for.pop()


def traced_device() -> Device:
    if not _tracing_for:
        raise ValueError("device of a meta tensor must be given by `with traced(Device.named(...))`, got no such context")
    return _tracing_for[-1]


def is_tracing() -> bool:
    return bool(_tracing_for)
