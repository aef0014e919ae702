"""uvicorn's HTTP protocol with one write for a response instead of two, and with an end to its patience.

uvicorn writes a response's head and body apart: two system calls, and the caller is woken twice. Between them nothing
happens that a caller could see, so this transport keeps the head back until the body comes, in the same turn of the
event loop.
"""

import asyncio
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.door import ANSWER
from app.patience import HEAD_MAX_BYTES, HttpLimits, Sweeper

JSON_HEAD = b"content-type: application/json\r\ncontent-length: "

DEFAULTS = HttpLimits()
_sweepers: WeakKeyDictionary[ServerState, Sweeper] = WeakKeyDictionary()


class CorkedTransport:
    """A transport that joins two writes of one turn of the event loop; what is alone goes out when the turn ends."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: bytes | None = None

    def write(self, data: bytes) -> None:
        """Hold `data` back until this turn's next write or end, or send it together with what is held."""
        held, self._held = self._held, None
        if held is not None:
            self._transport.write(held + data)
        else:
            self._held = data
            self._loop.call_soon(self.flush)

    def write_whole(self, data: bytes) -> None:
        """Send what is held and `data` now: nothing follows that would belong to it."""
        held, self._held = self._held, None
        self._transport.write(data if held is None else held + data)

    def flush(self) -> None:
        """Send what is held."""
        held, self._held = self._held, None
        if held is not None:
            self._transport.write(held)

    def close(self) -> None:
        """Send what is held, then close."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        # Everything else is the transport's own.
        return getattr(self._transport, name)


def answer(cycle: RequestResponseCycle, status: int, body: bytes) -> bool:
    """Answer a request with JSON, whole; False if that must go the usual way.

    It is what uvicorn's `send` does in two calls, but for what no answer of ours needs: headers that might be wrong,
    bodies in parts, access lines.
    """
    if cycle.response_started or cycle.disconnected or not cycle.keep_alive or cycle.flow.write_paused:
        return False
    head = [STATUS_LINE[status]]
    for name, value in cycle.default_headers:
        head += (name, b": ", value, b"\r\n")
    head += (JSON_HEAD, b"%d" % len(body), b"\r\n\r\n", body)
    cycle.response_started = cycle.response_complete = True
    cycle.transport.write_whole(b"".join(head))  # type: ignore[attr-defined]
    cycle.message_event.set()
    cycle.on_response()
    return True


class CorkedHttp(HttpToolsProtocol):
    """What `halfnote serve` serves with; for plain uvicorn: `--http app.corked:CorkedHttp`.

    A request must have arrived whole within `request_timeout_s` of its first byte, a connection's first request within
    as much of the connection. Between requests uvicorn's keep-alive timeout holds.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection over a corked transport, or close others for it, or it."""
        super().connection_made(CorkedTransport(transport))  # type: ignore[arg-type]
        self._limits: HttpLimits = self.app_state.get("http_limits", DEFAULTS)
        now = self.loop.time()
        self.late_at: float | None = now + self._limits.request_timeout_s
        self.rests_since: float | None = now
        self.spoke = False
        self._in_head = True
        self._received = 0
        sweeper = _sweepers.get(self.server_state)
        if sweeper is None:
            sweeper = _sweepers[self.server_state] = Sweeper(self.connections, self.loop)  # type: ignore[arg-type]
        sweeper.begin()
        if len(self.connections) > self._limits.connections_max and not sweeper.make_room(self._limits.connections_max):
            transport.abort()

    def give_up(self) -> None:
        """Close this connection; who has begun to ask is told why."""
        if self._in_head and self._received:
            self._refuse(408)
        elif self.flow.write_paused:
            # Nothing of what is left would ever be taken.
            self.transport.abort()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take what came, as long as it is not more than a request may be."""
        super().data_received(data)
        if self._in_head or self.late_at is not None:
            self._received += len(data)
            most = HEAD_MAX_BYTES if self._in_head else self._limits.request_max_bytes
            if self._received > most and not self.transport.is_closing():
                self._refuse(431 if self._in_head else 413)
        if self.late_at is None and self.timeout_keep_alive_task is None and self._rests():
            # Blank lines between requests stop the keep-alive timeout, and begin nothing.
            self.late_at = self.loop.time() + self._limits.request_timeout_s

    def on_message_begin(self) -> None:
        """Begin to count what a request takes."""
        super().on_message_begin()
        self._in_head, self._received = True, 0
        self.late_at = self.loop.time() + self._limits.request_timeout_s

    def on_headers_complete(self) -> None:
        """Let the app begin. Until now the connection counts as resting: a head that is begun is cheap to send."""
        self._in_head, self.spoke, self.rests_since = False, True, None
        super().on_headers_complete()
        self.scope["extensions"] = {ANSWER: partial(answer, self.cycle)}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        """From here on it is not the client who is awaited."""
        self.late_at = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note since when the connection rests, if it does."""
        if not self.pipeline:
            self.rests_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait for a client that does not read for as long as for one that does not write."""
        super().pause_writing()
        self.late_at = self.loop.time() + self._limits.request_timeout_s

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self.late_at = None

    def _rests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int) -> None:
        if self._rests():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
