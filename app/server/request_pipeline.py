"""The steps of every HTTP request: trace, guard, authenticate, admit, answer, count.

`FastPath` and `ProblemMiddleware` run the same steps. They differ in the route that they pass.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from app.admission.request_guard import READING, ClientGone, read_body
from app.admission.route_roles import Roles
from app.database.errors import problem_of
from app.errors import MethodNotAllowed, NotReady, Problem
from app.observability.trace_context import current, incoming
from app.permissions import Caller
from app.runtime.state import Runtime

# Gets the runtime, the caller, the whole body, and the trace context (see app.observability.trace_context). Returns a
# status and a JSON body. A body of None means that the response is already sent.
Respond: TypeAlias = Callable[[Runtime, Caller, bytes, str | None], Awaitable[tuple[int, bytes | None]]]

JSON_HEADERS = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class PipelineRoute:
    """One route as the pipeline sees it.

    `roles`: None if no route matches. `template`: the metrics label; None if only the framework knows it. `method`: the
    only method that the route answers; None if the framework checks methods. `is_limited`: the request counts toward
    the load limits. `is_probe`: the request is not traced. `is_framework`: the framework answers defects, then raises.
    """

    respond: Respond
    roles: Roles | None
    template: str | None = None
    method: str | None = None
    is_limited: bool = True
    is_probe: bool = False
    is_framework: bool = False


class RequestPipeline:
    """Runs the steps; `state.runtime` is set while the service runs."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def run(self, route: PipelineRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises only defects that the framework has answered."""
        started = perf_counter()
        runtime: Runtime | None = getattr(self._state, "runtime", None)
        if runtime is None:
            await _send_problem(NotReady("The service is starting.", retry_after_s=1), send)
            return
        trace, traced = incoming(scope["headers"]), None
        if runtime.tracing is not None and not route.is_probe:
            traced = runtime.tracing.request(scope["method"], scope["path"], trace)
            trace = trace if traced is None else traced.context
        current.set(trace)
        # None: there is no answer, because the client left or the request was canceled.
        status: int | None = None
        try:
            status, body = await _answer(route, runtime, scope, receive, trace)
            if body is not None:
                await _send(status, JSON_HEADERS, body, send)
        except ClientGone:
            pass
        except Exception as error:
            if status is not None or (route.is_framework and not isinstance(error, Problem)):
                status = status or 500
                raise
            problem = problem_of(error)
            status = problem.status
            await _send_problem(problem, send)
            # Break the cycle of error, traceback and frame. Otherwise the body stays in memory until a collection.
            del problem
        finally:
            template = route.template
            if template is None:
                template = getattr(scope.get("route"), "path", "(none)")
            if status is not None:
                runtime.metrics.http.observe_request(template, status, perf_counter() - started)
            if traced is not None:
                traced.answered(status, template)


async def _answer(
    route: PipelineRoute, runtime: Runtime, scope: Scope, receive: Receive, trace: str | None = None
) -> tuple[int, bytes | None]:
    """Check, authenticate and admit a request, then let its route respond.

    Raises Problem, ClientGone, and what the route raises.
    """
    authorization = runtime.guard.check(scope)
    caller = runtime.authenticator.admit(scope, authorization, route.roles)
    if route.method is not None and scope["method"] != route.method:
        raise MethodNotAllowed(f"{scope['method']} is not for this path.", allow=route.method)
    if not route.is_limited:
        return await route.respond(runtime, caller, b"", trace)
    usage, body = runtime.load_limits.take(caller), b""
    try:
        if scope["method"] not in READING:
            body = await read_body(receive, runtime.guard, runtime.load_limits)
        return await route.respond(runtime, caller, body, trace)
    finally:
        runtime.load_limits.give(usage, len(body))


async def _send_problem(problem: Problem, send: Send) -> None:
    await _send(problem.status, problem.headers(), problem.body(), send)


async def _send(status: int, headers: list[tuple[bytes, bytes]], body: bytes, send: Send) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
