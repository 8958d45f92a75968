"""Runs each distinct compilation once: from the disk cache, else in one process per core."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from ..interpret.threads import cores
from ..launch import Traced
from ..launch.parent import end_with_parent, ignoring_interrupts, postponing_interrupts
from .cache import ResultCache
from .job import Compiled, Job, one_line

FEW = 3  # so many compilations are over before a pool has started


def compile_launches(
    launches: Sequence[tuple[Traced, str]],
    *,
    jobs: int | None = None,
    cache: ResultCache | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Compiled]:
    """What the compiler makes of each launch, in the order given.

    Never raises for a kernel that does not compile.

    Args:
        launches: what `traced` recorded, with the target of each ("sm_90"); equal compilations are
            made once.
        jobs: processes; by default one per core at hand. 1 stays in this process.
        cache: where results are kept; by default the user's cache folder.
        on_done: called with (finished, distinct) after each distinct compilation.
    """
    cache = cache or ResultCache()
    made: dict[tuple[Any, ...], Compiled] = {}
    todo: dict[tuple[Any, ...], Job] = {}
    keys: list[tuple[Any, ...]] = []
    for position, (launch, arch) in enumerate(launches):
        try:
            job = Job.of(launch, arch)
            found = cache.get(job) if job.identity not in made and job.identity not in todo else None
        except (TypeError, OverflowError, LookupError) as error:
            keys.append((position,))
            made[keys[-1]] = Compiled(error=one_line(error))
            continue
        keys.append(job.identity)
        if found is not None:
            made[job.identity] = found
        elif job.identity not in made:
            todo[job.identity] = job
    distinct = len(made) + len(todo)
    if on_done:
        on_done(len(made), distinct)
    for identity, compiled in _run_all(todo, jobs or cores()):
        made[identity] = compiled
        cache.put(todo[identity], compiled)
        if on_done:
            on_done(len(made), distinct)
    return [made[key] for key in keys]


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Processes that compile.

    They ignore Ctrl-C, which their parent handles, and end with it, even if it is killed.
    """
    # Not by fork: this process may hold a CUDA context and threads. A fork server imports torch
    # once for all workers.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([Job.__module__])
        from multiprocessing import forkserver  # there is none on Windows

        with ignoring_interrupts():
            forkserver.ensure_running()  # it imports while this process goes on
    return _Pool(workers, mp_context=context, initializer=_prepare_worker)


class _Pool(ProcessPoolExecutor):
    """Its first call starts the processes. One whose parent ends meanwhile prints a traceback."""

    def submit(self, *call: Any, **named: Any) -> Any:
        with postponing_interrupts():
            return super().submit(*call, **named)


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _run_all(todo: dict[tuple[Any, ...], Job], workers: int) -> Iterator[tuple[tuple[Any, ...], Compiled]]:
    workers = min(workers, len(todo))
    if workers <= 1 or len(todo) <= FEW:
        for identity, job in todo.items():
            yield identity, job.run()
        return
    with worker_pool(workers) as pool:
        waiting = {pool.submit(Job.run, job): identity for identity, job in todo.items()}
        try:
            for future in as_completed(waiting):
                error = future.exception()
                yield waiting[future], Compiled(error=one_line(error)) if error else future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
