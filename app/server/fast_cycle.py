"""One request of the fast path and its answer, without the parts of uvicorn's cycle that the fast path does not need.

The request takes the same steps as under any other ASGI server, and the answer has the same bytes. Left out are most of
the ASGI scope, the checks of headers that only this service writes, and the separate write of the head.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from app.server.coalescing_transport import CoalescingTransport
from app.server.fast_path import FastPath

Headers = list[tuple[bytes, bytes]]
CLOSE = (b"connection", b"close")
# Answers a request: takes a scope, `receive` and `send`.
Respond = Callable[..., Any]


def fast_routes(app: object) -> dict[bytes, Respond]:
    """Return what answers a POST to each target of an app's fast path; empty for another app."""
    if not isinstance(app, FastPath):
        return {}
    return {path.encode(): partial(app.pipeline.run, route) for path, route in app.routes.items()}


class FastCycle(RequestResponseCycle):
    """One request and its answer. The protocol fills `body`, and sets `more_body` and `disconnected`."""

    def __init__(
        self,
        target: bytes,
        headers: Headers,
        client: tuple[str, int] | None,
        transport: CoalescingTransport,
        flow: FlowControl,
        logger: Any,
        default_headers: Headers,
        on_response: Callable[[], None],
        *,
        keep_alive: bool,
    ) -> None:
        # The request pipeline reads only these parts of a scope.
        self.scope = {"method": "POST", "path": target.decode(), "headers": headers, "client": client}  # type: ignore[typeddict-item]
        self.transport = cast(asyncio.Transport, transport)
        self._write_whole = transport.write_whole
        self.flow, self.logger, self.on_response = flow, logger, on_response
        self.default_headers, self.keep_alive = default_headers, keep_alive
        self.message_event = asyncio.Event()
        self.body, self.more_body = bytearray(), True
        self.disconnected = self.response_started = self.response_complete = False
        self._head = b""

    async def receive(self) -> Any:
        """Return the received part of the body, or that the client disconnected."""
        if self.more_body and not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        """Keep the head until the body comes, then write both."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self.response_started = True
            headers: Headers = message["headers"]
            if not self.keep_alive:
                headers.append(CLOSE)
            elif CLOSE in headers:
                self.keep_alive = False
            self._head = _head(message["status"], self.default_headers, headers)
            return
        assert message["type"] == "http.response.body"
        self._write_whole(self._head + message["body"])
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def _head(status: int, default_headers: Headers, headers: Headers) -> bytes:
    return b"".join(
        [STATUS_LINE[status], _lines_of(default_headers), *[b"%s: %s\r\n" % header for header in headers], b"\r\n"]
    )


# uvicorn makes a new list of default headers once a second, for `date`.
_default_lines: tuple[Headers, bytes] = ([], b"")


def _lines_of(default_headers: Headers) -> bytes:
    global _default_lines
    known, lines = _default_lines
    if known is not default_headers:
        lines = b"".join([b"%s: %s\r\n" % header for header in default_headers])
        _default_lines = default_headers, lines
    return lines
