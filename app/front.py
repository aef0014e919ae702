"""What stands between the hot paths and FastAPI: the door's rules, bounded bodies, metrics, and error handlers."""

from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any

import asyncpg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from app.database_problems import problem_of
from app.decoding import check_json
from app.door import READING, AsgiApp, AsgiMessage, ClientGone, Receive, Scope, Send, read_body
from app.errors import BadRequest, InternalError, Invalid, MethodNotAllowed, NotFound, NotReady, Problem
from app.rules import OPEN, SCRAPERS, RouteRules
from app.runtime import Runtime
from app.trace_context import current, incoming

log = structlog.get_logger(__name__)

# Asked every few seconds by machines: nothing to trace.
PROBES = ("/livez", "/readyz", "/metrics")

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Front:
    """ASGI middleware of every path but the hot ones."""

    def __init__(self, app: AsgiApp, state: State, rules: RouteRules) -> None:
        self._app = app
        self._state = state
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        runtime: Runtime | None = getattr(self._state, "runtime", None)
        if runtime is None:
            await _send_problem(NotReady("The service is starting.", retry_after_s=1), send)
            return
        started = perf_counter()
        status, gone = 500, False
        trace, traced = incoming(scope["headers"]), None
        if runtime.tracing is not None and scope["path"] not in PROBES:
            traced = runtime.tracing.request(scope["method"], scope["path"], trace)
            trace = trace if traced is None else traced.context
        current.set(trace)

        async def note(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            authorization = runtime.door.check(scope)
            roles = self._rules.of(scope["method"], scope["path"])
            scope["caller"] = runtime.gate.admit(scope, authorization, roles)
            if roles is OPEN or roles is SCRAPERS:
                # Who looks whether all is well is answered also when it is not.
                await self._app(scope, receive, note)
            else:
                await self._read_and_pass(runtime, scope, receive, note)
        except ClientGone:
            gone = True
            return
        except Problem as problem:
            await _send_problem(problem, note)
        finally:
            # Also after a defect, which the framework answers and raises again.
            route = getattr(scope.get("route"), "path", "(none)")
            if traced is not None:
                traced.answered(None if gone else status, route)
        runtime.metrics.observe_request(route, status, perf_counter() - started)

    async def _read_and_pass(self, runtime: Runtime, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a body whole, see that it is JSON as the hot paths take it, and let the framework answer.

        The framework's own reader takes NaN, lone surrogates and endless nesting. Raises Overloaded, TooManyRequests,
        BodyTooLarge, MalformedJson or ClientGone.
        """
        share, body = runtime.load.take(scope["caller"]), b""
        try:
            if scope["method"] not in READING:
                body = await read_body(receive, runtime.door, runtime.load)
                if body:
                    check_json(body)
                receive = _again(body, receive)
            await self._app(scope, receive, send)
        finally:
            runtime.load.give(share, len(body))


def _again(body: bytes, receive: Receive) -> Receive:
    """Hand a body that was read to the framework, and then what comes after it."""
    unread = True

    async def replay() -> AsgiMessage:
        nonlocal unread
        if not unread:
            return await receive()
        unread = False
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _send_problem(problem: Problem, send: Send) -> None:
    body = problem.body()
    headers = [*problem.headers(), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def problem_response(problem: Problem) -> Response:
    """Return a problem as a Starlette response."""
    headers = {name.decode(): value.decode() for name, value in problem.headers()}
    return Response(problem.body(), problem.status, headers=headers)


def install_error_handlers(api: FastAPI) -> None:
    """Turn every error into problem+json, in one place."""

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return problem_response(error)

    async def on_database(request: Request, error: Exception) -> Response:
        return problem_response(problem_of(getattr(error, "orig", None) or error))

    async def on_defect(request: Request, error: Exception) -> Response:
        log.error("defect", path=request.url.path, exc_info=error)
        return problem_response(InternalError("Halfnote made a mistake; its log has the trace."))

    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        Problem: on_problem,
        RequestValidationError: _on_validation,
        HTTPException: _on_http,
        asyncpg.PostgresError: on_database,
        asyncpg.InterfaceError: on_database,
        asyncpg.InternalClientError: on_database,
        SQLAlchemyError: on_database,
        OSError: on_database,
        Exception: on_defect,
    }
    for kind, handler in handlers.items():
        api.add_exception_handler(kind, handler)


async def _on_validation(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    source, *where = first["loc"]
    if source == "body":
        where = _in_body(where, error.body, missing=first["type"] == "missing")
    field = _field(where) or "(body)"
    return problem_response(Invalid(f"`{field}`: {first['msg'].removeprefix('Value error, ')}.", field=field))


def _in_body(where: Sequence[str | int], body: Any, *, missing: bool) -> list[str | int]:
    """Leave out of a place what the body does not have: pydantic also names the variants of a union it tried."""
    kept: list[str | int] = []
    for part in where:
        if _has(body, part):
            body = body[part]
        elif not (missing and part == where[-1]):
            continue
        kept.append(part)
    return kept


def _has(body: Any, part: str | int) -> bool:
    return part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)


def _field(where: Sequence[str | int]) -> str:
    """Write a place as the hot paths do: `messages[0].topic`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")


async def _on_http(request: Request, error: HTTPException) -> Response:
    if error.status_code == 405:
        return problem_response(
            MethodNotAllowed(f"{request.method} is not for this path.", allow=", ".join(_methods(request)))
        )
    if error.status_code == 404:
        return problem_response(NotFound("No such path; GET /openapi.json lists what there is."))
    return problem_response(BadRequest(str(error.detail)))


def _methods(request: Request) -> list[str]:
    """Return the methods that a path has; the framework names those of one of its routes alone."""
    return [
        method
        for method in METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.router.routes
        )
    ]
