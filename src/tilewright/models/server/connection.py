"""A connection of a client that may be slow, or gone."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # in which the head of a request has to arrive; its body has as long (gate.py)


class Connection(H11Protocol):
    """uvicorn's, which would wait for the head of a request for ever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Writes(transport))  # type: ignore[arg-type]
        self._wait_for_head()

    def on_response_complete(self) -> None:
        done = self.cycle
        super().on_response_complete()  # which begins with the next request, if that is there
        self._wait_for_head(done)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

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
    """A transport that drops what it is given once it closes: asyncio would log each attempt."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
