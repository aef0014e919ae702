"""One HTTP/1.1 connection to a receiver: it sends a request and reads the answer within limits.

llhttp (through httptools) parses the answers. A connection has at most one request under way. It serves the next one
only if the request was sent whole, the answer was whole, the receiver keeps the connection open, and nothing followed
the answer.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, cast

import httptools

from app.egress.reply import REPLY_LIMIT_BYTES

# A longer body is written in pieces, so that one slow receiver of large bodies does not delay the others.
PIECE_BYTES = 256 * 1024
# Limits of an answer's head and trailers; more is a failure.
HEADERS_MAX = 128
HEADER_BYTES = 8 * 1024
# The most bytes of one answer that are parsed: interim answers (1xx), the head, the chunks' framing and the trailers.
ANSWER_BYTES = 1024 * 1024

_NO_BODY = (204, 304)


class ConnectionLost(ConnectionError):
    """The connection ended before the whole answer. `answered`: a part of the answer was received."""

    def __init__(self, cause: BaseException | None, answered: bool) -> None:
        part = "within the answer" if answered else "before it answered"
        super().__init__(f"the receiver closed the connection {part}{f': {cause}' if cause else ''}")
        self.answered = answered


class InvalidAnswer(ValueError):
    """The answer is not HTTP/1.1, or its head is larger than the limits."""


class Answer(NamedTuple):
    """One answer. `headers` have names in lower case; `truncated`: `body` is only the first 16 KiB, or the limit."""

    status: int
    headers: dict[str, str]
    body: bytes
    truncated: bool


class HttpConnection(asyncio.Protocol):
    """A client's end of one connection. `on_idle` gets it when it can take a request, `on_closed` at its end."""

    def __init__(
        self,
        on_idle: Callable[["HttpConnection"], None],
        on_closed: Callable[["HttpConnection"], None],
    ) -> None:
        # The most bytes that are kept of the body of the answer under way.
        self._limit = REPLY_LIMIT_BYTES
        self._on_idle, self._on_closed = on_idle, on_closed
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sent_whole = True
        self.closed = False
        # The loop's time since when the connection is idle.
        self.idle_since = 0.0
        self._writable: asyncio.Future[None] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._fault: str | None = None
        # Of the answer: its status, the number of headers, the size of the body, and all bytes received.
        self._status = self._number = self._size = self._received = 0
        # `_keep`: the connection can serve another request.
        self._head_complete = self._complete = self._keep = False

    async def exchange(self, head: bytes, body: bytes, deadline: float, limit: int = REPLY_LIMIT_BYTES) -> Answer:
        """Send a request and return its answer, by `deadline` (the loop's time), with `limit` bytes of its body.

        Raises TimeoutError, ConnectionLost and InvalidAnswer; then, and if the caller is canceled, the connection is
        closed.
        """
        assert self._transport is not None
        assert self._waiter is None
        if self.closed:
            raise ConnectionLost(None, answered=False)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Answer] = loop.create_future()
        self._waiter, self._limit = waiter, limit
        self._begin()
        timer = loop.call_at(deadline, self._expire, waiter)
        try:
            if len(body) <= PIECE_BYTES:
                self._transport.write(head + body if body else head)
            else:
                await self._send_in_pieces(self._transport, head, body, waiter)
            return await waiter
        finally:
            timer.cancel()
            # Only a canceled caller leaves before the answer. Afterwards the connection may already serve another one.
            if self._waiter is waiter:
                self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self.closed = True
        self._waiter = None
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Exception) -> None:
        """Close the connection at once; the call that waits for its answer raises `error`."""
        waiter = self._waiter
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def close(self) -> None:
        """Close an idle connection."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()
            # `close` has sent TLS's alert, and would wait for the receiver's.
            self._transport.abort()

    def attach(self, transport: asyncio.Transport) -> None:
        """Use another transport: TLS on top of the first one."""
        self._transport = transport
        if self.closed:
            # The receiver sent data right after the handshake, so `abort` had no transport to close.
            transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse a part of the answer."""
        if self._waiter is None:
            # Data without a request: what follows could be taken for the answer to the next request.
            self.abort()
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # After the whole answer the error is about what follows: another answer, or another protocol (101).
            self._keep = False
            if not self._complete:
                self.fail(InvalidAnswer(self._fault or f"the answer is not HTTP: {error}"))
                return
        if self._complete:
            self._finish()
        elif self._size > self._limit or self._received > ANSWER_BYTES:
            self._cut()

    def eof_received(self) -> None:
        """Close the connection; a body without a length ends here."""
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what waits for this connection."""
        self._end(exc)
        self._allow_writing()
        self._on_closed(self)

    def pause_writing(self) -> None:
        """Make `_send_in_pieces` wait."""
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Let `_send_in_pieces` go on."""
        self._allow_writing()

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Begin an answer. Raises InvalidAnswer after the final answer, so that the parts of two do not mix."""
        if self._complete:
            raise InvalidAnswer

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header. Trailers count toward the limits, but they are not headers (RFC 9110 §6.5.1)."""
        self._number += 1
        if self._number > HEADERS_MAX or len(name) + len(value) > HEADER_BYTES:
            self._fault = f"the answer has more than {HEADERS_MAX} headers or one longer than {HEADER_BYTES} bytes"
            raise InvalidAnswer(self._fault)
        if not self._head_complete:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Note the status."""
        self._status = self._parser.get_status_code()
        self._head_complete = not 100 <= self._status < 200 or self._status == 101

    def on_body(self, body: bytes) -> None:
        """Collect a part of the body."""
        if self._size <= self._limit:
            self._body.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        """Note that the answer is whole. After an interim answer (1xx) the final one follows."""
        if not self._head_complete:
            self._headers.clear()
            self._number = 0
            return
        self._keep = self._parser.should_keep_alive()
        self._complete = True

    def _begin(self) -> None:
        self._headers, self._body, self._fault = [], [], None
        self._status = self._number = self._size = self._received = 0
        self._head_complete = self._complete = self._keep = False

    def _answer(self, truncated: bool) -> Answer:
        headers: dict[str, str] = {}
        for name, value in self._headers:
            # Of a repeated header the first counts.
            headers.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "replace"))
        body = b"".join(self._body) if self._body else b""
        return Answer(self._status, headers, body[: self._limit], truncated)

    def _finish(self) -> None:
        """Give the caller the answer, and the connection to the next request if it can serve one."""
        waiter, self._waiter = self._waiter, None
        assert waiter is not None
        truncated = self._size > self._limit
        if not waiter.done():
            waiter.set_result(self._answer(truncated))
        if self._keep and not self.closed and self._is_sent():
            self._on_idle(self)
        else:
            self.abort()

    def _is_sent(self) -> bool:
        """Return whether nothing of the request waits. A receiver that answers but does not read would fill memory."""
        assert self._transport is not None
        return self._sent_whole and not self._transport.get_write_buffer_size()

    def _cut(self) -> None:
        """Give the caller what was read of an answer that is too long."""
        if not self._head_complete:
            self.fail(InvalidAnswer(f"the answer's head has more than {ANSWER_BYTES} bytes"))
            return
        waiter, self._waiter = self._waiter, None
        assert waiter is not None
        if not waiter.done():
            waiter.set_result(self._answer(truncated=True))
        self.abort()

    def _end(self, cause: Exception | None) -> None:
        self.closed = True
        if self._waiter is None:
            return
        if cause is None and self._head_complete and self._ends_with_the_connection():
            self._keep = False
            self._finish()
        else:
            self.fail(ConnectionLost(cause, answered=self._received > 0))

    def _ends_with_the_connection(self) -> bool:
        """Return whether the answer has no length of its own (RFC 9112 §6.3)."""
        names = {name.lower() for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"} and self._status not in _NO_BODY

    def _expire(self, waiter: asyncio.Future[Answer]) -> None:
        # The caller may not have run since its answer, and the connection may be idle or serve another caller.
        if self._waiter is waiter:
            self.fail(TimeoutError())

    async def _send_in_pieces(
        self, transport: asyncio.Transport, head: bytes, body: bytes, waiter: asyncio.Future[Answer]
    ) -> None:
        """Write a long body as fast as the receiver reads it; stop when the receiver answers before the end."""
        self._sent_whole = False
        transport.write(head)
        for start in range(0, len(body), PIECE_BYTES):
            if self._writable is not None:
                await asyncio.wait((self._writable, waiter), return_when=asyncio.FIRST_COMPLETED)
            if waiter.done():
                return
            transport.write(body[start : start + PIECE_BYTES])
        self._sent_whole = True

    def _allow_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)
