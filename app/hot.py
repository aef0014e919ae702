"""Sends the three hot paths straight to their endpoints, past the framework.

The only place where speed decides the form: an endpoint takes the runtime, who calls and the body's bytes, and returns
a status and the answer's bytes. Rules and errors are the ones of every other route.
"""

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TypeAlias

import structlog
from starlette.datastructures import State

from app.access import Caller
from app.database_problems import problem_of
from app.door import ANSWER, AsgiApp, ClientGone, Receive, Scope, Send, read_body
from app.errors import MethodNotAllowed, NotReady
from app.routers.end import post_end
from app.routers.half import post_half
from app.routers.messages import post_messages
from app.rules import RULES
from app.runtime import Runtime
from app.trace_context import current, incoming

log = structlog.get_logger(__name__)

# Of the last argument, the trace's context, see app.trace_context.
Endpoint: TypeAlias = Callable[[Runtime, Caller, bytes, str | None], Awaitable[tuple[int, bytes]]]

ENDPOINTS: dict[str, Endpoint] = {"/half": post_half, "/end": post_end, "/messages": post_messages}

ROLES = {path: RULES["POST", path] for path in ENDPOINTS}

JSON_ALONE = [(b"content-type", b"application/json")]
NONE: dict[str, object] = {}


class Hot:
    """An ASGI app in front of `app`; `state.runtime` is there once the service has started."""

    def __init__(self, app: AsgiApp, state: State) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint = ENDPOINTS.get(scope["path"])
            if endpoint is not None:
                await self._answer(endpoint, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _answer(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        runtime: Runtime | None = getattr(self._state, "runtime", None)
        headers = JSON_ALONE
        trace, traced = incoming(scope["headers"]), None
        if runtime is not None and runtime.tracing is not None:
            traced = runtime.tracing.request(scope["method"], scope["path"], trace)
            trace = trace if traced is None else traced.context
        current.set(trace)
        try:
            if runtime is None:
                raise NotReady("The service is starting.", retry_after_s=1)
            authorization = runtime.door.check(scope)
            caller = runtime.gate.admit(scope, authorization, ROLES[scope["path"]])
            if scope["method"] != "POST":
                raise MethodNotAllowed(f"{scope['method']} is not for this path.", allow="POST")
            share, sent = runtime.load.take(caller), b""
            try:
                sent = await read_body(receive, runtime.door, runtime.load)
                status, body = await endpoint(runtime, caller, sent, trace)
            finally:
                runtime.load.give(share, len(sent))
        except ClientGone:
            if traced is not None:
                traced.answered(None, scope["path"])
            return
        except Exception as error:
            problem = problem_of(error)
            status, body, headers = problem.status, problem.body(), problem.headers()
            # Else it and this frame, with the body that was sent, would wait for a garbage collection.
            del problem
        answer = scope.get("extensions", NONE).get(ANSWER) if headers is JSON_ALONE else None
        if answer is None or not answer(status, body):
            headers = [*headers, (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        if runtime is not None:
            runtime.metrics.observe_request(scope["path"], status, perf_counter() - started)
        if traced is not None:
            traced.answered(status, scope["path"])
