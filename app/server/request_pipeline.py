"""The steps of every HTTP request: trace, guard, authenticate, admit, answer, count.

`FastPath` and `ProblemMiddleware` run the same steps. They differ in the route that they pass. `FastCycle` takes the
same steps without awaiting.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias
from urllib.parse import parse_qsl

from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from app.admission.load_limits import KeyUsage
from app.admission.request_guard import READING, ClientGone, hold_body, read_body, read_small_body
from app.admission.route_roles import Roles
from app.coordinator.lane_call import Begun
from app.database.errors import problem_of
from app.errors import Invalid, MethodNotAllowed, NotReady, Problem
from app.observability.trace_context import current, incoming
from app.permissions import Caller
from app.runtime.state import Runtime

# Gets the runtime, the caller, the whole body, and the trace context (see app.observability.trace_context). Returns a
# status and a JSON body. A body of None means that the response is already sent.
Respond: TypeAlias = Callable[[Runtime, Caller, bytes, str | None], Awaitable[tuple[int, bytes | None]]]

# A respond without its await, for routes that need only a lane (see app.coordinator.lane_call).
Begin: TypeAlias = Callable[[Runtime, Caller, bytes, str | None], Begun]
# Returns the caller of a request. Raises Problem.
Identify: TypeAlias = Callable[[Runtime, Scope], Caller]
Headers: TypeAlias = list[tuple[bytes, bytes]]

# The key in the scope's `state` of what counts the connection as idle while the body of this scope's request comes
# (app/server/http_protocol.py). A server without connection limits sets none.
COUNT_AS_IDLE = "count_as_idle"

JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class PipelineRoute:
    """One route as the pipeline sees it.

    `roles`: None if no route matches. `template`: the metrics label; None if only the framework knows it. `method`: the
    only method that the route answers; None if the framework checks methods. `is_limited`: the request counts toward
    the load limits. `is_probe`: the request is not traced. `is_framework`: the framework answers defects, then raises.
    `begin`: does the same as `respond` up to the lane, without awaiting; None if the route needs more than a lane.
    `identify`: finds the caller; None if the `Authorization` header names the caller. `takes_forms`: a body is a form.
    `unknown_body_bytes`: the most bytes of a body that is read from an unknown caller; 0: respond without a body.
    """

    respond: Respond
    roles: Roles | None
    template: str | None = None
    method: str | None = None
    is_limited: bool = True
    is_probe: bool = False
    is_framework: bool = False
    begin: Begin | None = None
    identify: Identify | None = None
    takes_forms: bool = False
    unknown_body_bytes: int = 0


class PipelineRequest:
    """One request on its way through the steps."""

    __slots__ = (
        "_authorization",
        "_held",
        "_is_admitted",
        "_is_counted",
        "_route",
        "_runtime",
        "_scope",
        "_started",
        "_usage",
        "trace",
        "traced",
    )

    def __init__(self, route: PipelineRoute, runtime: Runtime, scope: Scope) -> None:
        self._started = perf_counter()
        self._route, self._runtime, self._scope = route, runtime, scope
        self._is_admitted, self._is_counted, self._held = False, False, 0
        self._usage: KeyUsage | None = None
        trace, traced = incoming(scope["headers"]), None
        if runtime.tracing is not None and not route.is_probe:
            traced = runtime.tracing.request(scope["method"], scope["path"], trace)
            trace = trace if traced is None else traced.context
        current.set(trace)
        self.trace, self.traced = trace, traced

    async def respond(self, receive: Receive) -> tuple[int, bytes | None]:
        """Check, authenticate and admit the request, then let its route respond.

        Raises Problem, ClientGone, and what the route raises.
        """
        runtime, route, body = self._runtime, self._route, b""
        caller = self._check()
        has_body = route.is_limited and self._scope["method"] not in READING
        if has_body and not caller.known:
            body, has_body = await self._body_of_unknown(receive), False
            caller = self._identify()
        self._take(caller)
        self._scope["admitted"] = self
        if has_body:
            body = await read_body(receive, runtime.guard, runtime.load_limits)
            self._held = len(body)
            # The body may take long, and the key may have been revoked meanwhile.
            caller = self._identify()
        return await route.respond(runtime, caller, body, self.trace)

    def begin(self, body: bytes) -> Begun:
        """Do the same for a route with `begin` and for a body that is there. Raises as `respond` does."""
        runtime, begin = self._runtime, self._route.begin
        assert begin is not None
        caller = self._check()
        self._take(caller)
        hold_body(body, runtime.guard, runtime.load_limits)
        self._held = len(body)
        return begin(runtime, caller, body, self.trace)

    def _check(self) -> Caller:
        runtime, route, scope = self._runtime, self._route, self._scope
        self._authorization = runtime.guard.check(scope, takes_forms=route.takes_forms)
        caller = self._identify()
        if route.method is not None and scope["method"] != route.method:
            raise MethodNotAllowed(f"{scope['method']} is not for this path.", allow=route.method)
        # A request with a query comes by ASGI (app/server/http_protocol.py).
        if route.begin is not None and (query := scope.get("query_string")):
            raise _without_query(query)
        return caller

    def _take(self, caller: Caller) -> None:
        if self._route.is_limited:
            self._usage = self._runtime.load_limits.take(caller)
            self._is_admitted = True

    async def _body_of_unknown(self, receive: Receive) -> bytes:
        """Return the small body that the route takes from a caller that is not known.

        It counts toward no load limit: otherwise anyone could use up the limits that callers with keys share.
        """
        limit = self._route.unknown_body_bytes
        if not limit:
            return b""
        count_as_idle = self._scope.get("state", {}).get(COUNT_AS_IDLE)
        if count_as_idle is not None:
            count_as_idle(self._scope)
        return await read_small_body(receive, limit)

    def _identify(self) -> Caller:
        runtime, route = self._runtime, self._route
        if route.identify is None:
            return runtime.authenticator.admit(self._scope, self._authorization, route.roles)
        return route.identify(runtime, self._scope)

    def release(self) -> None:
        """Subtract the request from the load limits; before its answer is sent."""
        if self._is_admitted:
            self._is_admitted = False
            self._runtime.load_limits.give(self._usage, self._held)

    def begin_stream(self) -> None:
        """Count the request as answered, and subtract it from the load limits: its answer has no end to wait for."""
        self.release()
        self.count(200)

    def count(self, status: int | None) -> None:
        """Count the answer, once. None: there is none, because the client left or the request was canceled."""
        if self._is_counted:
            return
        self._is_counted = True
        template = self._route.template
        if template is None:
            template = getattr(self._scope.get("route"), "path", "(none)")
        if status is not None:
            self._runtime.metrics.http.observe_request(template, status, perf_counter() - self._started)
        if self.traced is not None:
            self.traced.answered(status, template)


def _without_query(query: bytes) -> Invalid:
    """Return the problem of a query string on the fast path, whose routes have no parameters."""
    given = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    name = given[0][0] if given else ""
    return Invalid(f"`{name}`: this request has no such query parameter; it has none.", field=name)


class RequestPipeline:
    """Runs the steps; `state.runtime` is set while the service runs."""

    def __init__(self, state: State) -> None:
        self._state = state

    def request(self, route: PipelineRoute, scope: Scope) -> PipelineRequest:
        """Return a request that begins. Raises NotReady before the service has started."""
        runtime: Runtime | None = getattr(self._state, "runtime", None)
        if runtime is None:
            raise NotReady("The service is starting.", retry_after_s=1)
        return PipelineRequest(route, runtime, scope)

    async def run(self, route: PipelineRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises only defects that the framework has answered."""
        try:
            request = self.request(route, scope)
        except NotReady as problem:
            await _send_problem(problem, send)
            return
        await answer(request, request.respond(receive), send, is_framework=route.is_framework)


async def answer(
    request: PipelineRequest,
    response: Awaitable[tuple[int, bytes | None]],
    send: Send,
    *,
    is_framework: bool = False,
) -> None:
    """Await a response, send it or the problem in its place, and count it."""
    status: int | None = None
    try:
        try:
            status, body = await response
        finally:
            request.release()
        if body is not None:
            await send_answer(status, JSON_HEADERS, body, send)
    except ClientGone:
        pass
    except Exception as error:
        if status is not None or (is_framework and not isinstance(error, Problem)):
            status = status or 500
            raise
        problem = problem_of(error)
        status = problem.status
        await _send_problem(problem, send)
        # Break the cycle of error, traceback and frame. Otherwise the body stays in memory until a collection.
        del problem
    finally:
        request.count(status)


async def _send_problem(problem: Problem, send: Send) -> None:
    await send_answer(problem.status, problem.headers(), problem.body(), send)


async def send_answer(status: int, headers: Headers, body: bytes, send: Send) -> None:
    """Send an answer as ASGI messages."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
