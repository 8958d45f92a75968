"""Watching what libraries do in threads of their own."""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def threads_inherit() -> Iterator[None]:
    """Threads that are started inside begin with the context of who starts them.

    Python 3.14 does so with -X thread_inherit_context.

    So `counted` and `decisions` around it see the kernels of transformers' batching threads.
    """
    start = threading.Thread.start

    def inheriting(thread: threading.Thread) -> None:
        context, run = contextvars.copy_context(), thread.run
        thread.run = lambda: context.run(run)
        start(thread)

    with patch.object(threading.Thread, "start", inheriting):
        yield
