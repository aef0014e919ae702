"""One request of the fast path and its answer, without the parts of uvicorn's cycle that the fast path does not need.

The request takes the same steps as under any other ASGI server, and the answer has the same bytes. Left out are most of
the ASGI scope, the checks of headers that only this service writes, and the separate write of the head. A request that
needs only its lane has no task either: the callback of the lane's future answers it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.coordinator.lane_call import JsonAnswer, LaneCall
from app.database.errors import problem_of
from app.server.coalescing_transport import CoalescingTransport
from app.server.fast_path import FastPath
from app.server.known_heads import KnownHeads
from app.server.request_pipeline import (
    JSON_HEADERS,
    Headers,
    PipelineRequest,
    PipelineRoute,
    RequestPipeline,
    answer,
    send_answer,
)

CLOSE = (b"connection", b"close")


class FastRoute:
    """A route of the fast path, with its target as text and the pipeline of its app."""

    __slots__ = ("path", "pipeline", "route")

    def __init__(self, path: str, pipeline: RequestPipeline, route: PipelineRoute) -> None:
        self.path, self.pipeline, self.route = path, pipeline, route


class FastRoutes:
    """What answers a POST to each target of an app's fast path, and the heads of such requests that were parsed."""

    __slots__ = ("heads", "routes")

    def __init__(self, routes: dict[bytes, FastRoute]) -> None:
        self.routes = routes
        self.heads: KnownHeads[FastRoute] = KnownHeads()


_fast_routes: WeakKeyDictionary[FastPath, FastRoutes] = WeakKeyDictionary()
NONE = FastRoutes({})


def fast_routes(app: object) -> FastRoutes:
    """Return the routes of an app's fast path; none for another app."""
    if not isinstance(app, FastPath):
        return NONE
    found = _fast_routes.get(app)
    if found is None:
        routes = {path.encode(): FastRoute(path, app.pipeline, route) for path, route in app.routes.items()}
        found = _fast_routes[app] = FastRoutes(routes)
    return found


class _Event(Protocol):
    def set(self) -> None: ...


class Unwatched:
    """In place of an event that nothing waits for."""

    def set(self) -> None:
        """Wake nothing."""


UNWATCHED = Unwatched()


class FastCycle(RequestResponseCycle):
    """One request and its answer. The protocol fills `body`, and sets `more_body` and `disconnected`.

    The protocol starts it in one of two ways: by `begin` if the whole request is there, else by `respond` in a task.
    """

    message_event: _Event  # type: ignore[assignment]
    transport: CoalescingTransport  # type: ignore[assignment]

    def __init__(self, connection: HttpToolsProtocol, route: FastRoute, *, keep_alive: bool) -> None:
        # The request pipeline reads only these parts of a scope.
        self.scope = {  # type: ignore[typeddict-item]
            "method": "POST",
            "path": route.path,
            "headers": connection.headers,
            "client": connection.client,
        }
        self.route, self._loop, self._tasks = route, connection.loop, connection.tasks
        # The protocol has wrapped it.
        self.transport = cast(CoalescingTransport, connection.transport)
        self.flow, self.logger = connection.flow, connection.logger
        self.on_response: Callable[[], None] = connection.on_response_complete
        self.default_headers, self.keep_alive = connection.server_state.default_headers, keep_alive
        self.message_event = UNWATCHED
        self.body, self.more_body = bytearray(), True
        self.disconnected = self.response_started = self.response_complete = False
        self._start: dict[str, Any] = {}

    def begin(self) -> None:
        """Answer a whole request without a task, unless it must await more than its lane."""
        # As a task has one: what is set here is not seen by the other requests of this connection.
        self._context = copy_context()
        self._context.run(self._begin)

    async def respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request in a task."""
        await self.route.pipeline.run(self.route.route, scope, receive, send)

    def _begin(self) -> None:
        self._request: PipelineRequest | None = None
        try:
            self._request = request = self.route.pipeline.request(self.route.route, cast(Scope, self.scope))
            # The cycle lasts as long as the connection is idle, so it must not keep the content of the request.
            body, self.body = bytes(self.body), bytearray()
            begun = request.begin(body)
            if not isinstance(begun, LaneCall):
                self._await(begun)
                return
            future: asyncio.Future[Any] = begun.lane.enqueue(begun.request)
        except Exception as error:
            self._fail(error)
            return
        # The server waits for it before it stops, as for a task.
        self._tasks.add(future)  # type: ignore[arg-type]
        future.add_done_callback(partial(self._committed, begun.answer), context=self._context)

    def _committed(self, answer_of: Callable[[Any], Any], future: asyncio.Future[Any]) -> None:
        self._tasks.discard(future)
        if future.cancelled():
            self._await(future)
            return
        # Not raised, because a traceback would keep the future and its error in memory until a collection.
        error = future.exception()
        if error is not None:
            self._fail(error)
            return
        try:
            found = answer_of(future.result())
        except Exception as defect:
            self._fail(defect)
            return
        if isinstance(found, tuple):
            self._finish(found[0], JSON_HEADERS, found[1])
        else:
            self._await(found)

    def _await(self, response: Awaitable[JsonAnswer]) -> None:
        """Answer in a task."""

        async def rest(scope: Scope, receive: Receive, send: Send) -> None:
            assert self._request is not None
            await answer(self._request, response, send)

        self._start_task(rest)

    def _fail(self, error: BaseException) -> None:
        # A lane sets Problems alone.
        problem = problem_of(cast(Exception, error))
        self._finish(problem.status, problem.headers(), problem.body())

    def _finish(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the answer and count it. If the client does not read, a task waits until it does."""
        request = self._request
        if request is not None:
            request.release()
        if self.flow.write_paused and not self.disconnected:
            self._start_task(partial(self._finish_later, status, headers, body))
            return
        self._write(status, [*headers, (b"content-length", str(len(body)).encode())], body)
        if request is not None:
            request.count(status)

    async def _finish_later(
        self, status: int, headers: Headers, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            await send_answer(status, headers, body, send)
        finally:
            if self._request is not None:
                self._request.count(status)

    def _start_task(self, app: Callable[[Scope, Receive, Send], Any]) -> None:
        task = self._loop.create_task(self.run_asgi(app), context=self._context)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def receive(self) -> Any:
        """Return the received part of the body, or that the client disconnected."""
        if self.more_body and not self.body and not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            self.message_event = event = asyncio.Event()
            await event.wait()
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
            self._start = message
            return
        assert message["type"] == "http.response.body"
        self._write(self._start["status"], self._start["headers"], message["body"])

    def _write(self, status: int, headers: Headers, body: bytes) -> None:
        """Write the whole answer, if the client is there. `headers` is changed."""
        if self.disconnected:
            self.on_response = _nothing
            return
        if not self.keep_alive:
            headers.append(CLOSE)
        elif CLOSE in headers:
            self.keep_alive = False
        if not self.transport.is_closing():
            self.transport.write_whole(_head(status, self.default_headers, headers) + body)
        self.response_started = self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        on_response, self.on_response = self.on_response, _nothing
        on_response()


def _nothing() -> None:
    """In place of a callback that was called."""


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
