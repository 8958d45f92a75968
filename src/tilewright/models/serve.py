"""`tilewright serve`: OpenAI's interface in front of one model on our kernels."""

import asyncio
import atexit
import ipaddress
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..launch import argument_error, check_bools
from . import chat_template
from .load import Loaded
from .patch import patch

if TYPE_CHECKING:
    import uvicorn

    from .server.worker import Worker

BODY_BYTES = 2**21  # some 500,000 tokens of English
REQUESTS = 256
DRAIN_SECONDS = 30.0
TRANSFORMERS = (5, 23)  # its continuous batching has what `worker` builds on
CLOSE_SECONDS = 5  # for the last answers to reach their clients
QUIET_SECONDS = 0.5  # without a request, before the server stops listening


@dataclass
class Running:
    """A server. server: uvicorn's. worker: the thread with the model."""

    server: "uvicorn.Server"
    worker: "Worker"

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.server.servers[0].sockets[0].getsockname()[:2]
        return host, port

    def drain(self, seconds: float, hurry: threading.Event | None = None) -> None:
        """Refuses new requests with 503 and lets the others finish; ends those that take longer
        with an error. hurry: ends them as soon as it is set.
        """
        from .server.protocol import Refusal

        worker, loop = self.worker, self.worker.loop
        leaving = Refusal(503, "the server is stopping", code="stopping", headers={"retry-after": str(CLOSE_SECONDS), "connection": "close"})
        loop.call_soon_threadsafe(worker.refuse, leaving)
        end = time.monotonic() + seconds
        while worker.open and time.monotonic() < end and not (hurry is not None and hurry.is_set()) and worker.failure is None:
            time.sleep(0.02)
        loop.call_soon_threadsafe(worker.abort, leaving)
        self._tell_late(hurry)

    def _tell_late(self, hurry: threading.Event | None) -> None:
        """Goes on refusing until no request has come for a while. Some are under way, in a
        connection that nobody has accepted yet or behind an answer: closing resets them.
        """
        state, answered = self.server.server_state, -1
        since = begin = time.monotonic()
        while since > time.monotonic() - QUIET_SECONDS and time.monotonic() < begin + CLOSE_SECONDS and not (hurry is not None and hurry.is_set()):
            if state.total_requests != answered:
                answered, since = state.total_requests, time.monotonic()
            time.sleep(0.02)


@contextmanager
def serving(  # noqa: PLR0913 options by keyword
    loaded: Loaded,
    *,
    host: str = "localhost",
    port: int = 8000,
    max_batch_tokens: int | None = None,
    cache_pages: int | None = None,
    max_requests: int = REQUESTS,
    max_body_bytes: int = BODY_BYTES,
    api_key: str | None = None,
    prefix_reuse: bool = True,
    kv_dtype: str | None = None,
    begin: Callable[[], None] | None = None,
) -> Iterator[Running]:
    """Patches a model and serves it while the block runs; its end undoes both.

    Args:
        loaded: a model with its tokenizer. Requests name it as `served_name(loaded)`.
        host, port: where to listen; port 0 takes a free one.
        max_batch_tokens: tokens of a step, over all requests; default 8192, on a CPU 128.
        cache_pages: pages of 256 tokens for all requests together; default: a tenth of the
            available memory on a CPU, what transformers finds free on a GPU.
        max_requests: that wait and run at once; others get 429.
        max_body_bytes: of a request; longer ones get 413.
        api_key: what clients have to send; None: nothing.
        prefix_reuse: whether a prompt shares the whole pages of another one's beginning.
        kv_dtype: as in `patch`.
        begin: is called once the model is known to run, before anybody can reach the server.
    Raises: ImportError: the packages of a server are missing. ValueError: the model has no
        tokenizer, or one in Python, or is none that `patch` knows; an argument.
    """
    tokenizer = _checked_tokenizer(loaded)
    check_options(
        host=host,
        port=port,
        api_key=api_key,
        max_batch_tokens=max_batch_tokens,
        cache_pages=cache_pages,
        max_requests=max_requests,
        max_body_bytes=max_body_bytes,
    )
    check_bools(prefix_reuse=prefix_reuse)
    import uvicorn

    from .server.app import Answers, application
    from .server.connection import Connection
    from .server.unsaid import unsaid
    from .server.worker import Worker

    if tokenizer.chat_template:
        chat_template.begin()
    with patch(loaded.model, kv_dtype=kv_dtype):
        worker = Worker(loaded.model, most_requests=max_requests, batch_tokens=max_batch_tokens, pages=cache_pages, prefix_reuse=prefix_reuse)
        try:
            names = (served_name(loaded), loaded.source)
            answers = Answers(worker, loaded.model, tokenizer, names)
            app = application(answers, api_key=api_key, most_bytes=max_body_bytes, most_inside=2 * max_requests + 64)
            how: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", "timeout_graceful_shutdown": CLOSE_SECONDS}
            config = uvicorn.Config(app, host=host, port=port, http=Connection, ws="none", **how)
            server = uvicorn.Server(config)
            thread = threading.Thread(target=_run, args=(server, worker), name="server")
            if begin is not None:
                begin()
            try:
                with unsaid("uvicorn.error") as reasons:
                    thread.start()
                    while not server.started:
                        thread.join(0.02)
                        if not thread.is_alive():
                            why = "; ".join(record.getMessage() for record in reasons)
                            raise argument_error("host and port", "an address of this machine with a free port, or port 0", f"{host}:{port}: {why}")
                yield Running(server, worker)
            finally:
                server.should_exit = True
                thread.join()
        finally:
            worker.stop()


def check_options(*, host: str, port: int, api_key: str | None, **counts: int | None) -> None:
    """What a server needs beside its model, which may take minutes to load.

    counts: those of `serving`, by name.
    Raises: ImportError: packages are missing. ValueError: an argument.
    """
    for name, value in counts.items():
        if value is not None and value < 1:
            raise argument_error(name, "at least 1", value)
    if not host:  # all addresses of the machine, for uvicorn: --host "$NAME" of no value is no wish for that
        raise argument_error("host", "localhost or another address; 0.0.0.0 for all of the machine", repr(host))
    if not 0 <= port < 1 << 16:  # the system takes the low 16 bits of another
        raise argument_error("port", "0 to 65535", port)
    if api_key is not None and not api_key.strip():
        raise argument_error("api_key", "not empty", repr(api_key))
    if api_key is not None and api_key != api_key.strip():  # no header can hold it
        raise argument_error("api_key", "a text without blanks or line ends around it", "one with some")
    if api_key is not None and not api_key.isprintable():  # nor this: control characters, or bytes that are no UTF-8
        raise argument_error("api_key", "printable characters, in UTF-8", "one with others")
    if missing := [name for name in ("psutil", "pydantic", "starlette", "uvicorn") if find_spec(name) is None]:
        raise ImportError(f"a server needs {', '.join(missing)}: pip install 'tilewright[serve]'")
    if tuple(map(int, version("transformers").split(".")[:2])) < TRANSFORMERS:
        oldest = ".".join(map(str, TRANSFORMERS))
        raise ImportError(f"a server needs transformers {oldest} or newer, got {version('transformers')}: pip install 'tilewright[serve]'")


def _checked_tokenizer(loaded: Loaded) -> Any:
    if loaded.tokenizer is None:
        raise argument_error("model", "one with a tokenizer", loaded.source)
    if not hasattr(loaded.tokenizer, "backend_tokenizer"):  # of the library tokenizers, which decodes a text while it is written
        kind = type(loaded.tokenizer).__name__
        raise argument_error("the model's tokenizer", "one with a tokenizer.json (save_pretrained of a fast one writes it)", f"{kind}, in Python")
    return loaded.tokenizer


def _run(server: "uvicorn.Server", worker: "Worker") -> None:
    async def main() -> None:
        worker.attach(asyncio.get_running_loop())
        await server.serve()

    with suppress(SystemExit):  # uvicorn's, where it cannot listen; it has logged why
        asyncio.run(main())


def served_name(loaded: Loaded) -> str:
    """What requests call the model: the name of its folder or file."""
    return Path(loaded.source).name or Path(loaded.source).resolve().name


def serve_command(loaded: Loaded, *, drain_seconds: float = DRAIN_SECONDS, **options: Any) -> int:
    """Serves until SIGINT or SIGTERM. options: those of `serving`.

    Returns the exit code: 0 after a signal, 1 if the worker ended by itself.
    """
    asked_to_stop, hurry = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        (hurry if asked_to_stop.is_set() else asked_to_stop).set()

    before: dict[int, Any] = {}

    def heed() -> None:
        before.update({number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)})

    try:  # signals may come as soon as the server answers, and until it is closed
        with serving(loaded, **options, begin=heed) as running:
            _say(loaded, running, options.get("api_key"), options.get("kv_dtype"))
            while not asked_to_stop.wait(0.1) and running.worker.failure is None:
                pass
            if running.worker.failure is None:
                print(f"stopping: {running.worker.open} requests have {drain_seconds:g} seconds to finish", flush=True)
                running.drain(drain_seconds, hurry)
            worker = running.worker
            print(
                f"{worker.prompt_tokens} prompt tokens, of which {worker.reused_tokens} were in shared pages; {worker.captured_steps} steps captured",
                flush=True,
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
            atexit.register(signal.signal, number, signal.SIG_IGN)  # the interpreter takes a while to end
    if running.worker.failure is not None:
        failure = running.worker.failure
        print(f"error: the worker ended: {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
        return 1
    return 0


def _say(loaded: Loaded, running: Running, api_key: str | None, kv_dtype: str | None = None) -> None:
    worker, (host, port) = running.worker, running.address
    size = f"{'' if kv_dtype is None else f' in {kv_dtype}'}, {worker.cache_bytes / 1e9:.3g} GB ({worker.share})"
    print(f"cache: {worker.pages} pages of 256 tokens{size}; longest request {worker.longest} tokens")
    print(f'model "{served_name(loaded)}" at http://{f"[{host}]" if ":" in host else host}:{port}/v1, until Ctrl-C', flush=True)
    if api_key is None and not ipaddress.ip_address(host).is_loopback:
        print(
            f"WARNING: no API key, and {host} is reachable from other machines: anyone there can use this server.\n"
            "         Set TILEWRIGHT_API_KEY or --api-key, or listen on localhost.",
            file=sys.stderr,
            flush=True,
        )
