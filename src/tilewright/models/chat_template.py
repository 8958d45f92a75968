"""A model's chat template, which a stranger may have written, applied within bounds of time and
memory.

transformers runs it in a sandbox, which denies it files and code and nothing else. One line can
ask for ten gigabytes, or for minutes in code that no thread can stop. So a process of its own runs
it, and the operating system limits that process.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

# For one prompt. Each grows with the messages.
SECONDS = 2  # of processor time
BYTES = 1 << 29  # of memory, beyond what the process begins with
LONGEST = 1 << 20  # characters of the text
PATIENCE_S = 120.0  # until an answer, however busy the machine is

# It imports transformers and nothing of this package, whose imports take seconds.
_PROCESS = """
import json, resource, sys
from multiprocessing.connection import Connection
asked = Connection(int(sys.argv[1]))
sys.path[:] = json.loads(asked.recv_bytes())
from transformers.utils.chat_template_utils import render_jinja_template
def limit(what, soft):
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
with open("/proc/self/statm") as held:
    begun = int(held.read().split()[0]) * resource.getpagesize()
while True:
    what, seconds, size, longest = json.loads(asked.recv_bytes())
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)
    limit(resource.RLIMIT_AS, begun + size)
    try:
        text = render_jinja_template(**what)[0][0]
        told = [text, ""] if len(text) <= longest else ["", f"a chat template that writes {len(text)} characters, more than {longest}"]
    except MemoryError:
        told = ["", f"a chat template that takes more than {size >> 20} MiB"]
    except Exception as error:
        told = ["", str(error)[:1000] or type(error).__name__]
    asked.send_bytes(json.dumps(told).encode())
"""


class _Renderer:
    """The process. It begins at the first use, and again after one that ended."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child, because the process is its parent's."""
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def begin(self) -> None:
        """Lets it import while this process does other work."""
        with self._lock:
            self._begun()

    def text(self, what: dict[str, Any]) -> str:
        size = len(json.dumps(what["conversations"]))
        limits = SECONDS + (size >> 22), BYTES + 32 * size, LONGEST + 4 * size
        with self._lock:
            process, connection = self._begun()
            late = threading.Timer(PATIENCE_S, process.kill)  # also of one that was stopped: long messages wait until they are read
            late.daemon = True
            late.start()
            try:
                connection.send_bytes(json.dumps((what, *limits)).encode())
                text, problem = json.loads(connection.recv_bytes())
            except (OSError, EOFError):
                text, problem = "", self.end()
            finally:
                late.cancel()
        if problem:
            raise ValueError(problem)
        return str(text)

    def end(self) -> str:
        """Ends it, or says how it has ended."""
        if self._running is None:
            return ""
        process, connection = self._running
        self._running = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        connection.close()
        process.kill()
        code = process.wait()
        how = f"takes more than {SECONDS} seconds" if code == -signal.SIGXCPU else f"ends its process with code {code}"
        return f"a chat template that {how}"

    def _begun(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        if self._running is None:
            ours, its = Pipe()
            command = [sys.executable, "-c", _PROCESS, str(its.fileno())]
            nowhere = subprocess.DEVNULL
            env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # each thread would take address space
            # In a session of its own: it has to answer while a server drains after Ctrl-C.
            process = subprocess.Popen(
                command, pass_fds=[its.fileno()], env=env, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere
            )
            its.close()
            ours.send_bytes(json.dumps(sys.path).encode())
            self._running = process, ours
        return self._running


_renderers = (_Renderer(), _Renderer())  # of short and of long messages
for _renderer in _renderers:
    atexit.register(_renderer.end)
    os.register_at_fork(after_in_child=_renderer.forget)
begin = _renderers[0].begin


def applied(tokenizer: Any, messages: list[dict[str, str]], *, long: bool = False) -> str:
    """The text of messages, up to where the model's answer begins.

    long: they may take their time, and others do not wait for them.
    Raises: ValueError: the template does not take them, or takes too long or too much.
    """
    special = {name: token if isinstance(token, list) else str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _renderers[long].text(
        {**special, "conversations": [messages], "chat_template": tokenizer.get_chat_template(), "add_generation_prompt": True}
    )
