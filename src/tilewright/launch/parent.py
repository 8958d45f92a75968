"""Processes that end with the one that started them, however it is killed."""

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
