"""uvicorn's HTTP protocol with one write for each response instead of two, and with limits on slow clients."""

import asyncio
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from app.server.coalescing_transport import CoalescingTransport
from app.server.connection_limits import HEAD_MAX_BYTES, ConnectionReaper, HttpLimits

DEFAULTS = HttpLimits()
_reapers: WeakKeyDictionary[ServerState, ConnectionReaper] = WeakKeyDictionary()


class HttpProtocol(HttpToolsProtocol):
    """The protocol of `halfnote serve`; for plain uvicorn: `--http app.server.http_protocol:HttpProtocol`.

    A request must arrive whole within `request_timeout_s` of its first byte. The first request of a connection must
    arrive whole within `request_timeout_s` of the connection. Between requests uvicorn's keep-alive timeout applies.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection. Past the limit, close idle ones for it; without idle ones, close it."""
        super().connection_made(CoalescingTransport(transport))  # type: ignore[arg-type]
        self._limits: HttpLimits = self.app_state.get("http_limits", DEFAULTS)
        now = self.loop.time()
        self.deadline: float | None = now + self._limits.request_timeout_s
        self.idle_since: float | None = now
        self.has_sent_request = False
        self._in_head = True
        self._received = 0
        reaper = _reapers.get(self.server_state)
        if reaper is None:
            reaper = _reapers[self.server_state] = ConnectionReaper(self.connections, self.loop)  # type: ignore[arg-type]
        reaper.begin()
        if len(self.connections) > self._limits.connections_max and not reaper.make_room(self._limits.connections_max):
            transport.abort()

    def give_up(self) -> None:
        """Close this connection. A client that has sent a part of a head gets 408 first."""
        if self._in_head and self._received:
            self._refuse(408)
        elif self.flow.write_paused:
            # The client does not read, so the rest of the answer cannot be sent.
            self.transport.abort()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Answer 431 or 413 if a request is too long."""
        super().data_received(data)
        if self._in_head or self.deadline is not None:
            self._received += len(data)
            most = HEAD_MAX_BYTES if self._in_head else self._limits.request_max_bytes
            if self._received > most and not self.transport.is_closing():
                self._refuse(431 if self._in_head else 413)
        if self.deadline is None and self.timeout_keep_alive_task is None and self._is_idle():
            # Blank lines between requests stop the keep-alive timeout, and begin no request.
            self.deadline = self.loop.time() + self._limits.request_timeout_s

    def on_message_begin(self) -> None:
        """Start the deadline and the byte count of a request."""
        super().on_message_begin()
        self._in_head, self._received = True, 0
        self.deadline = self.loop.time() + self._limits.request_timeout_s

    def on_headers_complete(self) -> None:
        """Start the app. Until now the connection counts as idle: a client can send a part of a head cheaply."""
        self._in_head, self.has_sent_request, self.idle_since = False, True, None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Clear the deadline: the client has sent its whole request."""
        self.deadline = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note when the connection became idle, unless another request waits."""
        if not self.pipeline:
            self.idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Set a deadline for a client that does not read, as long as for one that does not send."""
        super().pause_writing()
        self.deadline = self.loop.time() + self._limits.request_timeout_s

    def resume_writing(self) -> None:
        """Clear the deadline: the client reads again."""
        super().resume_writing()
        self.deadline = None

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int) -> None:
        if self._is_idle():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
