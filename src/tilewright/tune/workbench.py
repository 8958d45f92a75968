"""The GPU at hand as a place to compile, time and check configs."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

from ..bench.timer import Timing, input_sets, time_interleaved, time_roughly
from ..compile import Compiled
from ..compile.build import cores, worker_pool
from ..compile.disassemble import usage
from ..compile.job import Job, one_line
from ..launch import Device, traced
from ..launch.identity import cache_folder, compiler
from ..testing import Accuracy, check_op, run_op

INPUT_BYTES = 8 << 30
# What one block may take of a multiprocessor as cuobjdump counts it: from sm_90 on with the 1 KiB that the driver keeps in each block.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_120": 100 << 10, "sm_121": 100 << 10}
MOST_SHARED_BYTES = 228 << 10  # sm_90, sm_100, sm_103


def compile_one(job: Job) -> Compiled:
    """Builds: the binary then lies in cuTile's own cache, where the launch in the parent process finds it. Of the report only what `unfit` asks."""
    try:
        cubin = job.build()
        try:
            return Compiled(usage(cubin), len(cubin))
        except (OSError, RuntimeError):  # no cuobjdump, or one that is older than the compiler: the clock decides alone
            return Compiled(cubin_bytes=len(cubin))
    except Exception as error:  # whatever is wrong with one config, the others are still to be timed
        return Compiled(error=one_line(error))


def unfit(made: Compiled, device: Device) -> str:
    """Why a binary is not worth running, "" if it is."""
    if made.error:
        return made.error
    if made.resources is None:
        return ""
    if made.resources.spills:
        return f"spills ({made.resources.stack_bytes} bytes of stack)"
    limit = SHARED_BYTES.get(device.arch, MOST_SHARED_BYTES)
    return f"{made.resources.shared_bytes} bytes of shared memory, must be at most {limit}" if made.resources.shared_bytes > limit else ""


class Gpu:
    """A Workbench on a CUDA device. Use as a context: it holds compiler processes.

    submit: runs a function in the background, as `ProcessPoolExecutor.submit` does; by default in one process per core but one.
    """

    def __init__(self, where: torch.device, *, jobs: int | None = None, submit: Callable[..., Future] | None = None) -> None:
        self.where = where
        self._pool: ProcessPoolExecutor | None = None
        if submit is None:
            self._pool = worker_pool(jobs or max(1, cores() - 1))  # first: it starts while the driver does
            submit = self._pool.submit
        self._submit = submit
        self.device = Device.of(torch.empty(0, device=where))
        self.compiler = compiler()
        self._futures: dict[tuple, Future] = {}
        self._asked: dict[tuple[str, Any], list[list[Future] | str]] = {}  # prepared, not yet ready

    def __enter__(self) -> "Gpu":
        return self

    def __exit__(self, *unused: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def prepare(self, op: ModuleType, problem: Any, configs: Sequence[Any]) -> None:
        self._asked[op.__name__, problem] = self._ask(op, problem, configs)

    def _ask(self, op: ModuleType, problem: Any, configs: Sequence[Any]) -> list[list[Future] | str]:
        """Asks for the binaries of every config; of each its futures, or why its launch cannot even be planned."""
        asked: list[list[Future] | str] = []
        for config in configs:
            try:
                with traced(self.device) as launches, torch.inference_mode():
                    run_op(op, problem.inputs(torch.device("meta")), config)
                asked.append([self._compiled(Job.of(launch, self.device.arch)) for launch in launches])
            except Exception as error:  # as for a kernel that does not compile
                asked.append(one_line(error))
        return asked

    def ready(self, op: ModuleType, problem: Any, configs: Sequence[Any]) -> Iterator[tuple[int, str]]:
        reasons: dict[int, str] = {}
        waiting: dict[int, list[Future]] = {}
        asked = self._asked.pop((op.__name__, problem), None)
        for i, futures in enumerate(asked or self._ask(op, problem, configs)):
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
                yield i, next(filter(None, (unfit(future.result(), self.device) for future in waiting.pop(i))), "")

    @contextmanager
    def clock(self, op: ModuleType, problem: Any) -> Iterator["GpuClock"]:
        # Two tuners at once would time each other's kernels.
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"timing-{torch.cuda.get_device_properties(self.where).uuid}.lock"), torch.inference_mode():
            yield GpuClock(op, problem, self.where, self.device)
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

    def _compiled(self, job: Job) -> Future:
        if job.identity not in self._futures:
            self._futures[job.identity] = self._submit(compile_one, job)
        return self._futures[job.identity]


class GpuClock:
    """Times configs of one problem on inputs that rotate through more than the L2 cache."""

    def __init__(self, op: ModuleType, problem: Any, where: torch.device, device: Device) -> None:
        self._op = op
        self._sets = input_sets(lambda: problem.inputs(where), problem.cost().size_bytes, device.l2_bytes, limit_bytes=INPUT_BYTES)

    def rough(self, config: Any, give_up_us: float) -> float:
        return time_roughly(self._call(config), self._sets, give_up_us)

    def race(self, configs: Sequence[Any]) -> list[Timing]:
        times = time_interleaved({str(i): self._call(config) for i, config in enumerate(configs)}, self._sets)
        return [times[str(i)] for i in range(len(configs))]

    def _call(self, config: Any) -> Callable[..., Any]:
        return lambda **inputs: run_op(self._op, inputs, config)
