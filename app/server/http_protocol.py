"""uvicorn's HTTP protocol with one write for each response, limits on slow clients, problems for what is not HTTP."""

import asyncio
from collections.abc import Iterator, Sized
from weakref import WeakKeyDictionary

import structlog
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.errors import BadRequest, BodyTooLarge, HeadTooLarge, Problem, RequestTimeout
from app.server.coalescing_transport import CoalescingTransport
from app.server.connection_limits import ConnectionReaper, HttpLimits
from app.server.fast_cycle import FastCycle, FastRoute, fast_routes
from app.server.known_heads import KnownHead
from app.server.request_head import check_head, framing_head, head_bytes, origin_form
from app.server.request_pipeline import COUNT_AS_IDLE

log = structlog.get_logger(__name__)

DEFAULTS = HttpLimits()
# What follows the target in the request line of the one other protocol that the parser takes for HTTP.
OTHER_PROTOCOL = b" RTSP/"
_reapers: WeakKeyDictionary[ServerState, ConnectionReaper] = WeakKeyDictionary()


class _PipelineFlow(FlowControl):
    """Reads nothing more while requests wait for the answer to an earlier one, so that they do not grow in number.

    Without this, uvicorn reads on after each answer, and one read may contain thousands of requests.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Read on, unless requests wait."""
        if not self._pipeline:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """The protocol of `halfnote serve`; for plain uvicorn: `--http app.server.http_protocol:HttpProtocol`.

    A request must arrive whole within `request_timeout_s` of its first byte. The first request of a connection must
    arrive whole within `request_timeout_s` of the connection. Between requests uvicorn's keep-alive timeout applies.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection. Past the limit, close idle ones for it; without idle ones, close it."""
        super().connection_made(CoalescingTransport(transport))  # type: ignore[arg-type]
        self._limits: HttpLimits = self.app_state.get("http_limits", DEFAULTS)
        # What other options of uvicorn do is done in its own cycle.
        is_plain = not (self.root_path or self.access_log or self.limit_concurrency is not None)
        self._fast = fast_routes(self.app if is_plain else None)
        self.flow = _PipelineFlow(self.transport, self.pipeline)
        now = self.loop.time()
        # When what the client sends must be whole, and when the client must read again.
        self._read_by: float | None = now + self._limits.request_timeout_s
        self._write_by: float | None = None
        self.idle_since: float | None = now
        self.has_sent_request = False
        self._in_head = True
        self._in_body = False
        # While the parser reads a head that stands for one that it has read already.
        self._is_replaying = False
        # A request of the fast path that starts when this read is parsed.
        self._unstarted: FastCycle | None = None
        # The request that is being answered, or was answered last. `cycle` is the one that arrived last.
        self._answering: RequestResponseCycle | None = None
        self.url, self.headers = b"", []
        # The beginning of a line that a read ended within, as long as it can be the request line.
        self._line = b""
        # Bytes of the request in earlier reads, in this read, and the size of this read.
        self._received = self._receiving = self._read = 0
        # The answer after which the connection closes. What the client sends after that is not read.
        self._refusal: bytes | None = None
        if not reaper_of(self.server_state, self.loop).admit(self, self._limits.connections_max):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the client is gone, for every request that is not answered yet."""
        super().connection_lost(exc)
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    @property
    def deadline(self) -> float | None:
        """When the client must have sent or read what is expected; None if nothing is."""
        # While requests wait, nothing is read: the client cannot be late.
        read_by = None if self.pipeline else self._read_by
        if self._write_by is None or read_by is None:
            return read_by if self._write_by is None else self._write_by
        return min(read_by, self._write_by)

    @deadline.setter
    def deadline(self, read_by: float | None) -> None:
        self._read_by = read_by

    def give_up(self) -> None:
        """Close this connection. A client that has sent a part of a request gets 408 first."""
        if self.flow.write_paused or (self._refusal is not None and self._is_idle()):
            # The client does not read, so the rest of the answer cannot be sent; or it does not close.
            self.transport.abort()
        elif self._in_body or (self._in_head and (self._received or self.has_sent_request)):
            limit = self._limits.request_timeout_s
            self._refuse(RequestTimeout(f"The request did not arrive whole within {limit:g} seconds."))
        else:
            self.transport.close()
            if self.scheme == "https":
                # `close` has sent TLS's alert, and would wait for the client's.
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Refuse what is not HTTP, and a request that is too long."""
        if self._refusal is not None:
            return
        expects = self._in_head or self._in_body or self._read_by is not None or self._write_by is not None
        begins = not expects and self._is_idle()
        known = self._fast.heads.find(data) if begins else None
        if known is not None:
            self._begin_known(*known)
            return
        self._receive(data)
        cycle, self._unstarted = self._unstarted, None
        # A request that was refused for its body is complete.
        if cycle is not None and not cycle.response_complete:
            if begins and not cycle.more_body and cycle is self.cycle and cycle.keep_alive:
                self._fast.heads.note(data, cycle.route, self.url, self.headers, bytes(cycle.body))
            self._start_fast(cycle)

    def _begin_known(self, head: KnownHead[FastRoute], length: bytes, body: bytes) -> None:
        """Answer a whole request of the fast path whose head was parsed before."""
        self._unset_keepalive_if_required()
        self.url, self.headers = head.target, head.headers(length)
        self.cycle = cycle = FastCycle(self, head.route, keep_alive=True)
        cycle.body, cycle.more_body = body, False  # type: ignore[assignment]  # nothing is added to it
        self._received = self._receiving = 0
        self.has_sent_request, self.idle_since = True, None
        cycle.begin()

    def _receive(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._receiving = self._read = len(data)
        try:
            line, self._line = self._line, b""
            if line or OTHER_PROTOCOL in data:
                self._parse_by_line(line, data)
            else:
                self._parse(data)
            if self._in_head and not self.headers:
                self._line = (line + data).rpartition(b"\n")[2]
        except BadRequest as refused:
            self._refuse(refused, has_content=self.parser.get_method() != b"HEAD")
            return
        except HttpParserError as error:
            problem = error.__context__
            if isinstance(problem, Problem):
                self._refuse(problem, has_content=self.parser.get_method() != b"HEAD")
            else:
                self._refuse(BadRequest(f"The request is not HTTP: {error}."))
            return
        if self._in_head or self._read_by is not None:
            self._received += self._receiving
            self._check_size()
        if self._read_by is None and self.timeout_keep_alive_task is None and self._is_idle():
            # Blank lines between requests stop the keep-alive timeout, and begin no request.
            self._read_by = self.loop.time() + self._limits.request_timeout_s

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse received bytes. An upgrade is ignored: the request continues as HTTP/1.1 (RFC 9110 §7.8).

        The parser stops after a head with `Upgrade`, without the body, and would take the body for another request. So
        a new parser first gets a head that frames the body.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as stop:
                data = memoryview(data)[stop.args[0] :]
            self._is_replaying, self.parser = True, HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(framing_head(self.headers, keeps_alive=self.cycle.keep_alive))
            self._is_replaying = False

    def _parse_by_line(self, earlier: bytes, data: bytes) -> None:
        """Parse received bytes that may name another protocol. Raises BadRequest if a request line names it.

        `earlier`: the beginning of the line, of earlier reads. The parser takes RTSP for HTTP, and does not say which
        one it read. So it gets what is before the name. It then knows method and target of the line, if the line is a
        request line.
        """
        text, parsed = earlier + data, 0
        for start, at in places_in_lines(text, OTHER_PROTOCOL):
            for end in (start, at):
                end = max(end - len(earlier), parsed)
                before = self.headers
                self._parse(data[parsed:end])
                parsed = end
            if not self._in_head or self.headers:
                continue
            line, request = text[start:at], self.parser.get_method() + b" " + self.url
            # Each request has a list of its own. Behind a body it begins within a line.
            if line == request or (self.headers is not before and line.endswith(request)):
                raise BadRequest("The request is RTSP. Send HTTP/1.1.")
        self._parse(data[parsed:])

    def on_message_begin(self) -> None:
        """Start the deadline and the byte count of a request."""
        if self._is_replaying:
            return
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._in_head, self._received = True, 0
        self._read_by = self.loop.time() + self._limits.request_timeout_s

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers, which follow the body, are dropped (RFC 9110 §6.5.1)."""
        if self._in_head:
            name = name.lower()
            # The parser leaves spaces at the end.
            value = value.rstrip(b" \t")
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the head and start the app. Raises HeadTooLarge or BadRequest, which the parser passes on.

        Until now the connection counts as idle: a client can send a part of a head cheaply.
        """
        if self._is_replaying:
            return
        limit = self._limits.head_limit_bytes
        if self._received + self._read > limit and head_bytes(self.url, self.headers) > limit:
            raise head_too_large(limit)
        if self.url[:1] != b"/":
            self.url = origin_form(self.parser.get_method(), self.url, self.headers)
        check_head(self.parser.get_http_version(), self.url, self.headers)
        route = self._fast.routes.get(self.url)
        if route is not None and self.parser.get_method() == b"POST" and not self.expect_100_continue:
            self._begin_fast(route)
        else:
            self._begin()
        self._in_head, self._in_body, self.has_sent_request, self.idle_since = False, True, True, None

    def _begin(self) -> None:
        """Start the app as uvicorn does. The scope is made only here, because the fast path has its own."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers[:] = headers
        self.scope["state"][COUNT_AS_IDLE] = self._count_as_idle
        super().on_headers_complete()

    def _count_as_idle(self, scope: Scope) -> None:
        """Count this connection as idle until the body of a scope's request is whole: anyone can send it slowly."""
        if self._in_body and self.cycle.scope is scope:
            self.idle_since = self.loop.time()

    def _begin_fast(self, route: FastRoute) -> None:
        """Have a request of the fast path started after this read, or queue it behind the one before it."""
        before = self.cycle
        keeps_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        self.cycle = cycle = FastCycle(self, route, keep_alive=keeps_alive)
        if before is None or before.response_complete:
            self._unstarted = cycle
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, cycle.respond))

    def _start_fast(self, cycle: FastCycle) -> None:
        """Answer a whole request without a task. For the rest of a body a task waits."""
        self._answering = cycle
        if cycle.more_body:
            super()._start_asgi_task(cycle, cycle.respond)
        else:
            cycle.begin()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start a request whose turn has come. One of the fast path starts by itself in the next turn of the loop.

        The answer of one request starts the next one, and each could be answered at once.
        """
        self._answering = cycle
        if isinstance(cycle, FastCycle):
            self.loop.call_soon(self._start_queued, cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def _start_queued(self, cycle: FastCycle) -> None:
        if not (cycle.disconnected or cycle.response_complete or self.transport.is_closing()):
            self._start_fast(cycle)

    def on_message_complete(self) -> None:
        """Clear the deadline: the client has sent its whole request."""
        if self.parser.should_upgrade():
            # The body follows.
            return
        # The rest of this read belongs to the next request, which is counted from the next read on.
        self._read_by, self._in_body, self._receiving = None, False, 0
        if not self._is_idle():
            self.idle_since = None
        super().on_message_complete()
        if not self.parser.should_keep_alive():
            # A trailer may say so as well. The parser then reads no further request.
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()

    def on_response_complete(self) -> None:
        """Note when the connection became idle, unless another request waits."""
        was_last = not self.pipeline
        if was_last:
            self.idle_since = self.loop.time()
        super().on_response_complete()
        if not (was_last or self.pipeline or self.transport.is_closing()):
            # The last request that waited has begun. The rest of its body may be missing.
            if self._read_by is not None:
                self._read_by = self.loop.time() + self._limits.request_timeout_s
            self.flow.resume_reading()
        if was_last and self._refusal is not None:
            self._send_refusal()

    def pause_writing(self) -> None:
        """Set a deadline for a client that does not read, as long as for one that does not send."""
        super().pause_writing()
        self._write_by = self.loop.time() + self._limits.request_timeout_s

    def resume_writing(self) -> None:
        """Clear the deadline: the client reads again."""
        super().resume_writing()
        self._write_by = None

    def _should_upgrade(self) -> bool:
        """Return False: there is no other protocol here, also where uvicorn finds a library for WebSockets."""
        return False

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _check_size(self) -> None:
        if self._in_head:
            limit = self._limits.head_limit_bytes
            if self._received > limit:
                self._refuse(head_too_large(limit))
        elif self._received > self._limits.request_max_bytes:
            limit = self._limits.request_max_bytes
            self._refuse(BodyTooLarge(f"The request takes more than {limit} bytes.", limit_bytes=limit))

    def _refuse(self, problem: Problem, *, has_content: bool = True) -> None:
        """Answer with a problem, after the answers to earlier requests, then close."""
        if self._refusal is not None or self.transport.is_closing():
            return
        log.info("request_refused", problem=problem.slug, detail=problem.detail)
        self._refusal = self._answer(problem, has_content=has_content)
        if self._in_body and not self._drop_request():
            # The request has its answer already.
            self.transport.close()
        elif not self.pipeline and self._is_idle():
            self._send_refusal()

    def _drop_request(self) -> bool:
        """Take back the request whose body is at fault. Return False if its answer has begun."""
        if self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
            return True
        if self.cycle.response_started:
            return False
        self.cycle.disconnected = self.cycle.response_complete = True
        self.cycle.message_event.set()
        return True

    def _answer(self, problem: Problem, *, has_content: bool) -> bytes:
        body = problem.body()
        headers = [
            *self.server_state.default_headers,
            *problem.headers(),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return b"".join([STATUS_LINE[problem.status], *lines, b"\r\n", body if has_content else b""])

    def _send_refusal(self) -> None:
        if self._refusal is None or self.transport.is_closing():
            return
        self.transport.write(self._refusal)
        # To close while the client sends resets the connection, and the answer could be lost (RFC 9112 §9.6).
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(self._limits.refusal_read_s, self.transport.abort)
        else:
            # TLS closes only both directions. The answer's `Connection: close` tells the client to close.
            self.loop.call_later(self._limits.refusal_read_s, self.transport.close)


def reaper_of(server: ServerState, loop: asyncio.AbstractEventLoop) -> ConnectionReaper:
    """Return the reaper of a server's connections."""
    reaper = _reapers.get(server)
    if reaper is None:
        reaper = _reapers[server] = ConnectionReaper(server.connections, loop)  # type: ignore[arg-type]
    return reaper


def places_in_lines(text: bytes, name: bytes) -> Iterator[tuple[int, int]]:
    """Yield each place of `name` in a text, after the place where its line begins. No byte is searched twice."""
    start = searched = 0
    at = text.find(name)
    while at >= 0:
        start = text.rfind(b"\n", searched, at) + 1 or start
        yield start, at
        searched = at
        at = text.find(name, at + 1)


def head_too_large(limit: int) -> HeadTooLarge:
    """Return the refusal of a head over the limit."""
    return HeadTooLarge(f"The request's head is over {limit} bytes.")
