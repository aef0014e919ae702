"""The console as ASGI: sends its paths through the request pipeline, and everything else to the framework."""

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import structlog
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from app.admission.route_roles import OPEN, RULES
from app.console import sessions, static_files
from app.console.asked_page import HOME, SIGN_IN, SIGN_OUT, sign_in_of
from app.console.openid.sign_in import BEGIN, CALLBACK
from app.console.page import Page
from app.console.site import PAGES
from app.console.visit import Visit
from app.database.errors import problem_of
from app.errors import Invalid, MethodNotAllowed, NotFound, Problem
from app.permissions import Caller
from app.runtime.state import Runtime
from app.server.request_pipeline import PipelineRoute, RequestPipeline

if TYPE_CHECKING:  # it imports Authlib, an optional dependency
    from app.console.openid.issuer import Issuer

log = structlog.get_logger(__name__)

_FIELDS_MAX = 100
# The longest key with the longest page to go on to, percent-encoded, takes about 3,200.
SIGN_IN_FORM_BYTES = 4096


class Console:
    """An ASGI app in front of the framework."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._pipeline = RequestPipeline(state)
        self._issuer: Issuer | None = None
        self._pages = [(page, *compile_path(page.path)) for page in PAGES]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == HOME or path.startswith(f"{HOME}/") or _is_browser_at_root(scope)):
            await self._app(scope, receive, send)
            return
        is_static = path.startswith(static_files.PREFIX)
        route = PipelineRoute(
            _Call(self._answer, scope, receive, send).respond,
            OPEN,
            template=static_files.PREFIX if is_static else HOME,
            is_limited=not is_static,
            identify=sessions.caller_of,
            takes_forms=True,
            unknown_body_bytes=SIGN_IN_FORM_BYTES if path in (SIGN_IN, SIGN_OUT) else 0,
        )
        await self._pipeline.run(route, scope, receive, send)

    async def _answer(self, request: Request, runtime: Runtime, caller: Caller, body: bytes) -> Response:
        path: str = request.scope["path"]
        if path == "/":
            return RedirectResponse(HOME, 303, headers={"vary": "accept"})
        if path.startswith(static_files.PREFIX):
            return static_files.answer(request)
        session = sessions.session_of(runtime, request.scope)
        visit = Visit(request, runtime, caller, session or sessions.begin(runtime), session is None)
        visit.issuer = self._issuer_of(runtime)
        if session is None and _is_led_from_another_site(request):
            visit.is_new = False
            return visit.page("again.html")
        try:
            return await self._page(visit, body)
        except Exception as error:
            problem = problem_of(error)
            if problem.status >= 500 and not isinstance(error, Problem):
                log.error("console_failed", path=path, exc_info=error)
            return visit.page("problem.html", problem.status, problem=problem)

    def _issuer_of(self, runtime: Runtime) -> "Issuer | None":
        """Return the issuer of OpenID Connect, as this process knows it. Authlib is imported only if one is set."""
        if runtime.settings.oidc_issuer is None:
            return None
        if self._issuer is None or self._issuer.runtime is not runtime:
            from app.console.openid.issuer import Issuer

            self._issuer = Issuer(runtime)
        return self._issuer

    async def _page(self, visit: Visit, body: bytes) -> Response:
        page = self._found(visit)
        if page.needs is not None:
            if not visit.caller.known:
                # The page of an act is at the path that takes its form.
                return visit.redirect(sign_in_of(visit.here(), undone=page.method == "POST"))
            visit.caller.must_be(RULES[page.needs])
        if page.method == "POST":
            visit.form = _fields(body)
            visit.session.must_match(visit.form.get("csrf", ""))
        return await page.answer(visit)

    def _found(self, visit: Visit) -> Page:
        request = visit.request
        method = "GET" if request.method == "HEAD" else request.method
        other = None
        for page, pattern, _, convertors in self._pages:
            found = pattern.match(request.scope["path"])
            if found is None:
                continue
            if page.method != method:
                other = page.method
                continue
            parameters = {name: convertors[name].convert(value) for name, value in found.groupdict().items()}
            request.scope["path_params"] = parameters
            return page
        if other is not None:
            raise MethodNotAllowed(f"{method} is not for this page.", allow=other)
        raise NotFound("The console has no such page.")


class _Call:
    """Lets the console answer one admitted request."""

    def __init__(self, answer: Callable[..., object], scope: Scope, receive: Receive, send: Send) -> None:
        self._answer = answer
        self._scope = scope
        self._receive = receive
        self._send = send

    async def respond(self, runtime: Runtime, caller: Caller, body: bytes, trace: str | None) -> tuple[int, None]:
        """Send the console's answer. Raises Problem."""
        response: Response = await self._answer(Request(self._scope), runtime, caller, body)  # type: ignore[misc]
        await response(self._scope, self._receive, self._send)
        return response.status_code, None


def _fields(body: bytes) -> dict[str, str]:
    """Return the fields of a form. Raises Invalid."""
    try:
        return dict(
            parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=_FIELDS_MAX)
        )
    except ValueError:
        raise Invalid("The form is not a valid one.", field="(body)") from None


def _is_led_from_another_site(request: Request) -> bool:
    """Return whether a link of another site led here: the browser then keeps back the session's cookie, if it has one.

    A page that loads itself again gets the cookie. Otherwise the answer would begin a session in place of that one.
    """
    is_led = (
        request.headers.get("sec-fetch-site") == "cross-site" and request.headers.get("sec-fetch-mode") == "navigate"
    )
    return is_led and request.method == "GET" and request.scope["path"] not in (BEGIN, CALLBACK)


def _is_browser_at_root(scope: Scope) -> bool:
    if scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
        return False
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
