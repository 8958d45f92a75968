"""Compiles, times and checks configs on this machine's GPU."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

from ..bench.timer import Timing, input_sets, time_interleaved, time_many, time_roughly
from ..compile import Compiled
from ..compile.ahead import Ahead, Built
from ..launch import Device
from ..launch.identity import cache_folder, compiler
from ..testing import Accuracy, check_op, run_op

INPUT_BYTES = 8 << 30
KEPT_BYTES = 64 << 30  # of freed memory that the next problem may use again
MOST_SPILL_BYTES = 256  # of stack: a few spilled registers cost little, which timing shows
# Shared memory of an SM that one block may take, as cuobjdump counts it: from sm_90 on with the
# 1 KiB that the driver reserves in each block.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_120": 100 << 10, "sm_121": 100 << 10}
MOST_SHARED_BYTES = 228 << 10  # sm_90, sm_100, sm_103


def unfit(made: Compiled, device: Device) -> str:
    """Why a binary is not worth running, or ""."""
    if made.error:
        return made.error
    if made.resources is None:
        return ""
    if made.resources.stack_bytes > MOST_SPILL_BYTES:
        return f"spills ({made.resources.stack_bytes} bytes of stack)"
    limit = SHARED_BYTES.get(device.arch, MOST_SHARED_BYTES)
    return f"{made.resources.shared_bytes} bytes of shared memory, must be at most {limit}" if made.resources.shared_bytes > limit else ""


class Gpu:
    """A Workbench on a CUDA device. Use as a context: it holds compiler processes.

    submit: runs a function in the background, as `ProcessPoolExecutor.submit` does. By default in
        one process per core but one.
    sharers: processes that share the GPU's memory with this one.
    """

    def __init__(self, where: torch.device, *, jobs: int | None = None, submit: Callable[..., Built] | None = None, sharers: int = 0) -> None:
        self.where = where
        self._kept_bytes = KEPT_BYTES // (1 + sharers)
        self.device = Device.of(torch.empty(0, device=where))
        self._ahead = Ahead(self.device, jobs=jobs, submit=submit)
        self.compiler = compiler()
        self._asked: dict[tuple[str, Any], list[list[Built] | str]] = {}  # prepared, not yet ready
        self._spills: dict[tuple[str, Any, Any], int] = {}

    def __enter__(self) -> "Gpu":
        return self

    def __exit__(self, *unused: object) -> None:
        self._ahead.__exit__()

    def prepare(self, op: ModuleType, problem: Any, configs: Sequence[Any]) -> None:
        self._asked[op.__name__, problem] = self._ahead.ask(op, problem, configs)

    def done(self, op: ModuleType, problem: Any) -> bool:
        return all(future.done() for futures in self._asked[op.__name__, problem] if not isinstance(futures, str) for future in futures)

    def spill_bytes(self, op: ModuleType, problem: Any, config: Any) -> int:
        return self._spills.get((op.__name__, problem, config), 0)

    def ready(self, op: ModuleType, problem: Any, configs: Sequence[Any]) -> Iterator[tuple[int, str]]:
        reasons: dict[int, str] = {}
        waiting: dict[int, list[Built]] = {}
        asked = self._asked.pop((op.__name__, problem), None)
        for i, futures in enumerate(asked or self._ahead.ask(op, problem, configs)):
            if isinstance(futures, str):
                reasons[i] = futures
            else:
                waiting[i] = futures
        yield from reasons.items()
        while waiting:
            done = [i for i, futures in waiting.items() if all(f.done() for f in futures)]
            if not done:
                wait([f for futures in waiting.values() for f in futures if not f.done()], return_when=FIRST_COMPLETED)
            for i in done:
                made = [future.result() for future in waiting.pop(i)]
                stack = sum(m.resources.stack_bytes for m in made if m.resources)
                if stack:
                    self._spills[op.__name__, problem, configs[i]] = stack
                yield i, next(filter(None, (unfit(m, self.device) for m in made)), "")

    @contextmanager
    def clock(self, op: ModuleType, problem: Any) -> Iterator["GpuClock"]:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        alone = FileLock(folder / f"timing-{torch.cuda.get_device_properties(self.where).uuid}.lock")
        with torch.inference_mode():
            yield GpuClock(op, problem, self.where, self.device, alone)
        if torch.cuda.memory_reserved(self.where) > self._kept_bytes:
            torch.cuda.empty_cache()

    def check(self, op: ModuleType, problem: Any, config: Any) -> list[Accuracy]:
        torch.cuda.empty_cache()
        with torch.inference_mode():
            return check_op(op, problem, self.where, config)

    def alive(self) -> bool:
        try:
            torch.cuda.synchronize(self.where)
        except RuntimeError:
            return False
        return True


def least_us(problem: Any, device: Device) -> float:
    """The time that a problem takes at the device's peak rates."""
    return float(max(problem.cost().times_us(device.memory_gbs, device.tflops)))


class GpuClock:
    """Times configs of one problem on inputs that rotate through more than the L2 cache.

    alone: a lock. Two tuners at once would time each other's kernels.
    """

    def __init__(self, op: ModuleType, problem: Any, where: torch.device, device: Device, alone: AbstractContextManager[Any]) -> None:
        self._op, self._least_us, self._alone = op, least_us(problem, device), alone
        self._sets = input_sets(lambda: problem.inputs(where), problem.cost().size_bytes, device.l2_bytes, limit_bytes=INPUT_BYTES)

    def rough(self, config: Any, give_up_us: float) -> float:
        with self._alone:
            return time_roughly(self._call(config), self._sets, give_up_us)

    def race(self, configs: Sequence[Any]) -> list[Timing]:
        with self._alone:
            times = time_interleaved({str(i): self._call(config) for i, config in enumerate(configs)}, self._sets)
        return [times[str(i)] for i in range(len(configs))]

    def many(self, configs: Sequence[Any]) -> list[Timing | str]:
        # First launches keep the host busy for longer than the passes take, so others may time
        # meanwhile.
        return time_many([self._call(config) for config in configs], self._sets, self._least_us, self._alone)

    def _call(self, config: Any) -> Callable[..., Any]:
        return lambda **inputs: run_op(self._op, inputs, config)
