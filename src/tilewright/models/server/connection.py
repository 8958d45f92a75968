"""A connection of a client that may be slow, or gone."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # in which the head of a request has to arrive; its body has as long (gate.py)
READ_SECONDS = 30.0  # in which a client has to read some of what waits for it


class Connection(H11Protocol):
    """uvicorn's, which would wait for the head of a request, and for a client to read, for ever."""

    _timer: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Writes(transport, self.loop))  # type: ignore[arg-type]
        self._wait_for_head()

    def on_response_complete(self) -> None:
        done = self.cycle
        super().on_response_complete()  # which begins with the next request, if that is there
        self._wait_for_head(done)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self._client_reads()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._client_reads()

    def _client_reads(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def _wait_for_head(self, after: Any = None) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_unless_begun, after)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close_unless_begun(self, after: Any) -> None:
        if self.cycle is after:
            self.transport.close()


class _Writes:
    """A transport that drops what it is given once it closes: asyncio would log each attempt. It
    closes although its client does not read the rest.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop

    def close(self) -> None:
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(READ_SECONDS, self._transport.abort)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
