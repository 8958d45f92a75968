"""Processes that leave Ctrl-C to the one that started them, and end with it however it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

_WATCH = """
import contextlib, os, sys
for pid in [] if sys.stdin.read() else sys.argv[1:]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), 9)
"""


def end_with_parent() -> None:
    """In a child: ends this process once its parent has ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile ignore Ctrl-C from their first import on.

    In a thread but the main one, which cannot arrange that, they don't.
    """
    alone = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if alone else None
    try:
        yield
    finally:
        if alone:
            signal.signal(signal.SIGINT, before)


class _Spawned(ProcessPoolExecutor):
    """Its calls start the processes."""

    def submit(self, *call: Any, **named: Any) -> Any:
        with ignoring_interrupts():
            return super().submit(*call, **named)


@contextmanager
def spawned_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes of their own imports, for long calls. Ctrl-C in the block ends them at once, also
    while they import, where each would print a traceback.
    """
    with _Spawned(jobs, multiprocessing.get_context("spawn"), initializer=end_with_parent) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.kill()
            raise


@contextmanager
def postponing_interrupts() -> Iterator[None]:
    """Ctrl-C does at the end what it would have done meanwhile, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *given: heard.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard and callable(before):
        before(*heard[0])


@contextmanager
def ended_with_this(pids: Iterable[int]) -> Iterator[None]:
    """In their parent: kills processes if this one ends before the block does.

    A process of its own waits for that. The children may import for many seconds before they could
    look for their parent. Where a fork server is that, Linux' signal for it does not come.
    """
    command = [sys.executable, "-ISc", _WATCH, *map(str, pids)]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True) as watch:
        try:
            yield
        finally:
            watch.communicate(b"done")
