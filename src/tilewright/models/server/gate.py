"""What a request passes before anything of it is kept: its key, and the size of its body."""

import asyncio
import hmac
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .protocol import Refusal

BODY_SECONDS = 30.0  # in which a body has to arrive
LINGER_SECONDS = 10.0  # in which the rest of one that was refused is thrown away
OPEN_PATHS = ("/health",)


class Gate:
    """ASGI middleware. api_key: None lets everyone pass. most_bytes: of a body. most_inside:
    requests at once, each of which may hold a body.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, most_bytes: int, most_inside: int) -> None:
        self.app, self.most_bytes, self.most_inside = app, most_bytes, most_inside
        self._inside = 0
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._pass(scope, receive, send)
        finally:
            self._inside -= 1

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if "transfer-encoding" in headers and "content-length" in headers:  # where it ends is a matter of opinion
                raise Refusal(400, "the headers should have Transfer-Encoding or Content-Length, and not both")
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            if self._inside > self.most_inside:
                raise Refusal(
                    429, f"the server has {self.most_inside} connections already: try again", code="queue_full", headers={"retry-after": "1"}
                )
            body = await self._body(headers, receive)
        except Refusal as refusal:
            await _refuse_and_linger(refusal, scope, receive, send)
            return
        if body is None:  # the client left
            return
        given = [body]

        async def replay() -> Message:
            return {"type": "http.request", "body": given.pop(), "more_body": False} if given else await receive()

        await self.app(scope, replay, send)

    def _check_key(self, headers: Headers) -> None:
        kind, _, key = headers.get("authorization", "").partition(" ")
        if self._key is not None and not (kind.lower() == "bearer" and hmac.compare_digest(key.strip(" \t").encode("latin-1"), self._key)):
            raise Refusal(
                401,
                "the header Authorization should be 'Bearer KEY' with this server's key",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body. Raises Refusal before it holds more than the limit."""
        too_long = Refusal(413, f"the body should have at most {self.most_bytes} bytes", code="body_too_large")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.most_bytes:
            raise too_long
        held = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    held += message.get("body", b"")
                    if len(held) > self.most_bytes:
                        raise too_long
                    if not message.get("more_body", False):
                        return bytes(held)
        except TimeoutError:
            raise Refusal(408, f"the body should arrive within {BODY_SECONDS:.0f} seconds") from None


async def _refuse_and_linger(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once, then throws away what still arrives: a client that is closed upon while it
    writes may never read the answer.
    """
    response = JSONResponse(refusal.body, refusal.status, headers={**(refusal.headers or {}), "connection": "close"})

    async def open_end(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await response(scope, receive, open_end)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
