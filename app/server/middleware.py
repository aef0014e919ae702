"""The ASGI middleware in front of FastAPI, and FastAPI's error handlers."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import asyncpg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.admission.request_guard import READING
from app.admission.route_roles import OPEN, RULES, SCRAPERS, Roles, RouteRules
from app.coordinator.decoding import check_json
from app.database.errors import problem_of
from app.errors import BadRequest, InternalError, Invalid, MalformedJson, MethodNotAllowed, NotFound, Problem
from app.field_rules import NAME_MAX, SUBSCRIPTION_NAME_FORM, is_subscription_name
from app.permissions import Caller
from app.runtime.state import Runtime
from app.server.request_pipeline import PipelineRoute, RequestPipeline, Respond

log = structlog.get_logger(__name__)

# Machines call these every few seconds, so they are not traced.
PROBES = ("/livez", "/readyz", "/metrics")

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

# The collections whose names a PUT chooses, and the form of a name.
_SEGMENT_FORM = f"1 to {NAME_MAX} characters, none of them `/` or a control character"
NAMED = {"subscriptions": SUBSCRIPTION_NAME_FORM, "producer-groups": _SEGMENT_FORM, "topics": _SEGMENT_FORM}


# Answers a POST to a path with one name, without the framework: gets the runtime, the caller, the name, the body, and
# what tells whether the client has left. Returns the JSON body of a 200, or None: the framework must answer, because
# the request is not as it is nearly always sent. Raises Problem and what the database raises.
DirectAnswer: TypeAlias = Callable[
    [Runtime, Caller, str, bytes, Callable[[], Awaitable[bool]]], Awaitable[bytes | None]
]


class ProblemMiddleware:
    """ASGI middleware for every path that is not on the fast path: passes requests through `RequestPipeline`.

    `direct` has routes of the framework, by template, that are called so often that most of their time would be its.
    """

    def __init__(self, app: ASGIApp, state: State, rules: RouteRules, direct: Mapping[str, DirectAnswer]) -> None:
        self._app = app
        self._pipeline = RequestPipeline(state)
        self._rules = rules
        # The first and the last segment of the path stand for it.
        self._direct = {
            (first, last): _DirectRoute(answer, path, RULES["POST", path])
            for path, answer in direct.items()
            for _, first, _, last in (path.split("/"),)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "POST":
            call = self._direct_call(scope, receive, send)
            if call is not None:
                direct, respond = call
                route = PipelineRoute(respond, direct.roles, template=direct.path, is_framework=True)
                await self._pipeline.run(route, scope, receive, send)
                return
        roles = self._rules.of(scope["method"], scope["path"])
        route = PipelineRoute(
            FrameworkCall(self._app, scope, receive, send).respond,
            roles,
            # Probes and scrapers get an answer under overload too.
            is_limited=roles is not OPEN and roles is not SCRAPERS,
            is_probe=scope["path"] in PROBES,
            is_framework=True,
        )
        await self._pipeline.run(route, scope, receive, send)

    def _direct_call(self, scope: Scope, receive: Receive, send: Send) -> "tuple[_DirectRoute, Respond] | None":
        parts = scope["path"].split("/")
        if len(parts) != 4 or not is_subscription_name(parts[2]):
            return None
        direct = self._direct.get((parts[1], parts[3]))
        # The framework refuses a query.
        if direct is None or scope["query_string"]:
            return None
        framework = FrameworkCall(self._app, scope, receive, send)

        async def respond(runtime: Runtime, caller: Caller, body: bytes, trace: str | None) -> tuple[int, bytes | None]:
            try:
                is_gone = Request(scope, receive).is_disconnected
                answer = await direct.answer(runtime, caller, parts[2], body, is_gone)
            except Exception as error:
                # What is no Problem would count as one that the framework has answered.
                raise problem_of(error) from None
            return await framework.respond(runtime, caller, body, trace) if answer is None else (200, answer)

        return direct, respond


@dataclass(frozen=True, slots=True)
class _DirectRoute:
    answer: DirectAnswer
    path: str
    roles: Roles


class FrameworkCall:
    """Passes one admitted request to the framework and notes the status of its answer."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._status = 500

    async def respond(self, runtime: Runtime, caller: Caller, body: bytes, trace: str | None) -> tuple[int, None]:
        """Check that a body is JSON by the rules of the fast path, then let the framework answer.

        The framework's own parser accepts NaN, lone surrogates and unlimited nesting. Raises MalformedJson.
        """
        self._scope["caller"] = caller
        receive = self._receive
        if self._scope["method"] not in READING:
            if body:
                check_json(body)
            receive = _with_body(body, receive)
        await self._app(self._scope, receive, self._note_status)
        return self._status, None

    async def _note_status(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read, then what follows it."""
    is_unread = True

    async def replay() -> Message:
        nonlocal is_unread
        if not is_unread:
            return await receive()
        is_unread = False
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


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
        return problem_response(problem_of(error))

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
    """Return the parts of an error's location that the body has: pydantic also names the union variants it tried."""
    found: list[str | int] = []
    for part in where:
        if _has(body, part):
            body = body[part]
        elif not (missing and part == where[-1]):
            continue
        found.append(part)
    return found


def _has(body: Any, part: str | int) -> bool:
    return part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)


def _field(where: Sequence[str | int]) -> str:
    """Write a location as the fast path does: `messages[0].topic`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")


async def _on_http(request: Request, error: HTTPException) -> Response:
    if error.status_code == 405:
        return problem_response(
            MethodNotAllowed(f"{request.method} is not for this path.", allow=", ".join(_methods(request)))
        )
    if error.status_code == 404:
        return problem_response(_no_such_path(request))
    # The body is JSON that Python's own parser does not take. The fast path answers it likewise.
    if isinstance(error.__cause__, RecursionError):
        return problem_response(MalformedJson("The body is nested too deeply."))
    if isinstance(error.__cause__, ValueError):
        # An integer of more than 4,300 digits (sys.set_int_max_str_digits).
        return problem_response(Invalid("Number out of range.", field="(body)"))
    return problem_response(BadRequest(str(error.detail)))


def _no_such_path(request: Request) -> Problem:
    """Return the problem of a path that no route has, such as that of a name with a slash, percent-encoded or not."""
    collection, _, name = request.url.path.removeprefix("/").partition("/")
    form = NAMED.get(collection)
    if request.method == "PUT" and form is not None:
        wrong = f"`{name}` is not a name of one path segment" if name else "the name is empty"
        return Invalid(f"`name`: {wrong}; a name has {form}.", field="name")
    return NotFound("No such path; GET /openapi.json lists what there is.")


def _methods(request: Request) -> list[str]:
    """Return the methods of a path; the framework names only those of one of the path's routes."""
    return [
        method
        for method in METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.router.routes
        )
    ]
