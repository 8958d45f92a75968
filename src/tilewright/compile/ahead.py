"""Kernels that calls will need, compiled in the background while the GPU is busy with others."""

import multiprocessing
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from types import ModuleType
from typing import Any

import torch

from ..interpret.threads import cores
from ..launch import Device, traced
from ..testing import run_op
from .build import worker_pool
from .disassemble import usage
from .job import Compiled, Job, one_line

Built = Future[Compiled]


def compile_one(job: Job) -> Compiled:
    """Builds: the binary then lies in cuTile's own cache, where the parent's launch finds it.

    The report holds only registers and memory.
    """
    try:
        cubin = job.build()
        try:
            return Compiled(usage(cubin), len(cubin))
        except (OSError, RuntimeError):  # no cuobjdump, or one that is older than the compiler: the clock decides alone
            return Compiled(cubin_bytes=len(cubin))
    except Exception as error:  # whatever is wrong with one config, the others are still to be timed
        return Compiled(error=one_line(error))


class Ahead:
    """Compiles what configs of problems launch on `device`, each binary once.

    Use as a context: it holds compiler processes.

    submit: runs a function in the background, as `ProcessPoolExecutor.submit` does. By default in
        one process per core but one.
    """

    def __init__(self, device: Device, *, jobs: int | None = None, submit: Callable[..., Built] | None = None) -> None:
        self.device = device
        self._pool: ProcessPoolExecutor | None = None
        if submit is None:
            self._pool = worker_pool(jobs or max(1, cores() - 1))
            submit = self._pool.submit
        self._submit = submit
        self._futures: dict[Hashable, Built] = {}

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *unused: object) -> None:
        if self._pool is not None:
            # A child process that ends closes the queue of its workers before they are told to end,
            # and then waits for them for ever.
            self._pool.shutdown(wait=multiprocessing.parent_process() is not None, cancel_futures=True)

    def ask(self, op: ModuleType, problem: Any, configs: Sequence[Any] = (None,)) -> list[list[Built] | str]:
        """Of each config the futures of its binaries, or why its launch cannot even be planned.

        A config that is None is what a call takes.
        """
        asked: list[list[Built] | str] = []
        inputs = problem.inputs(torch.device("meta"))
        for config in configs:
            try:
                with traced(self.device) as launches, torch.inference_mode():
                    run_op(op, inputs, config)
                asked.append([self._compiled(Job.of(launch, self.device.arch)) for launch in launches])
            except Exception as error:  # as for a kernel that does not compile
                asked.append(one_line(error))
        return asked

    def _compiled(self, job: Job) -> Built:
        if job.identity not in self._futures:
            self._futures[job.identity] = self._submit(compile_one, job)
        return self._futures[job.identity]
