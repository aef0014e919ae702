"""An endpoint in a web framework: as an ASGI app, a WSGI app or a Django view.

The endpoint's logic is a generator that yields the user's function as a `Call` and returns the answer, so one
implementation serves plain and async functions.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from halfnote.exchange import Call, Raised, Returned

T = TypeVar("T")

BODY_MAX_BYTES = 16 * 1024 * 1024
JSON = "application/json"

Scope: TypeAlias = MutableMapping[str, Any]
Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]
StartResponse: TypeAlias = Callable[[str, list[tuple[str, str]]], Any]


@dataclass(frozen=True)
class Reply:
    """The answer of an endpoint."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def all_headers(self) -> list[tuple[str, str]]:
        """Return its headers and those derived from the body."""
        found = dict(self.headers)
        if self.body:
            found.setdefault("content-type", JSON)
        if self.status != 204:
            found["content-length"] = str(len(self.body))
        return list(found.items())


Answering: TypeAlias = Generator[Call, Any, Reply]


class Endpoint(Protocol):
    """An endpoint to host. `calls_async`: the user's function must be awaited."""

    @property
    def calls_async(self) -> bool: ...

    def answering(self, headers: Mapping[str, str], body: bytes) -> Answering:
        """Answer a POST; names of headers are in lower case."""


class AsgiApp:
    """For Starlette and FastAPI: `app.add_route("/path", endpoint.asgi())`. Plain functions run on a thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise ValueError(f"this is an endpoint for HTTP, not for {scope['type']}: mount it at a path of an app")
        reply = _not_post(scope["method"])
        if reply is None:
            body = await _read(receive)
            if body is None:
                return
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            reply = _too_large(body) or await self._answer(headers, body)
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.all_headers()]
        await send({"type": "http.response.start", "status": reply.status, "headers": pairs})
        await send({"type": "http.response.body", "body": reply.body})

    async def _answer(self, headers: Mapping[str, str], body: bytes) -> Reply:
        return await answered_async(self._endpoint, headers, body)


async def answered_async(endpoint: Endpoint, headers: Mapping[str, str], body: bytes) -> Reply:
    """Answer a POST on an event loop."""
    answering = endpoint.answering(headers, body)
    try:
        call = next(answering)
        while True:
            call = answering.send(await called_async(call, calls_async=endpoint.calls_async))
    except StopIteration as stop:
        reply: Reply = stop.value
        return reply


def answered_sync(endpoint: Endpoint, headers: Mapping[str, str], body: bytes) -> Reply:
    """Answer a POST on this thread."""
    answering = endpoint.answering(headers, body)
    try:
        call = next(answering)
        while True:
            call = answering.send(_called(call))
    except StopIteration as stop:
        reply: Reply = stop.value
        return reply


async def called_async(call: Call, *, calls_async: bool) -> Returned | Raised:
    """Call the user's function without blocking the event loop."""
    try:
        if calls_async:
            return Returned(await call.function())
        value = await asyncio.to_thread(call.function)
        # A plain function may return an awaitable, as a wrapper does.
        return Returned(await value if inspect.isawaitable(value) else value)
    except Exception as error:
        return Raised(error)


def wsgi_app(endpoint: Endpoint, inner: Callable[..., Iterable[bytes]] | None, path: str) -> Callable[..., Any]:
    """Return a WSGI app that answers at `path`, and leaves the rest to `inner`. Raises TypeError if it must await."""
    _refuse_async(endpoint)

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if inner is not None and environ.get("PATH_INFO") != path:
            return inner(environ, start_response)
        reply = _not_post(environ["REQUEST_METHOD"])
        if reply is None:
            body = environ["wsgi.input"].read(_length(environ))
            reply = _too_large(body) or answered_sync(endpoint, _headers(environ), body)
        start_response(f"{reply.status} Halfnote", reply.all_headers())
        return [reply.body]

    return app


def django_view(endpoint: Endpoint) -> Callable[..., Any]:
    """Return a Django view, async if the user's function must be awaited. Requests are signed, so it needs no CSRF.

    Raises ImproperlyConfigured before Django has its settings.
    """
    from django.db import connections, transaction
    from django.http import HttpRequest, HttpResponse

    def response(reply: Reply) -> HttpResponse:
        return HttpResponse(reply.body, status=reply.status, headers=dict(reply.all_headers()))

    def headers_of(request: HttpRequest) -> dict[str, str]:
        return {name.lower(): value for name, value in request.headers.items()}

    def body_of(request: HttpRequest) -> bytes:
        # `read` instead of `body`, because `body` has the limit for forms (DATA_UPLOAD_MAX_MEMORY_SIZE, 2.5 MB).
        return bytes(request.read(BODY_MAX_BYTES + 1))

    def view(request: HttpRequest) -> HttpResponse:
        if refused := _not_post(request.method or ""):
            return response(refused)
        body = body_of(request)
        return response(_too_large(body) or answered_sync(endpoint, headers_of(request), body))

    async def async_view(request: HttpRequest) -> HttpResponse:
        if refused := _not_post(request.method or ""):
            return response(refused)
        body = body_of(request)
        return response(_too_large(body) or await answered_async(endpoint, headers_of(request), body))

    chosen: Any = async_view if endpoint.calls_async else view
    chosen.csrf_exempt = True
    # With ATOMIC_REQUESTS a barrier or an inbox would be inside of a database transaction that ends after the answer.
    for alias in connections:
        chosen = transaction.non_atomic_requests(using=alias)(chosen)
    return chosen  # type: ignore[no-any-return]


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function's return value must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def require_barrier(barrier: Any, *, asynchronous: bool) -> None:
    """Raise TypeError unless a producer's barrier is None or of its own kind."""
    if barrier is None:
        return
    fits = hasattr(barrier, "check_local") and is_async(barrier.check_local) == asynchronous
    if not fits:
        producer, kind = (
            ("TransactionProducer", "AsyncBarrier") if asynchronous else ("SyncTransactionProducer", "Barrier")
        )
        raise TypeError(f"{producer} needs a barrier of the kind {kind}, not {type(barrier).__name__}")


def require_listener(listener: Any, *, asynchronous: bool) -> None:
    """Raise TypeError unless checks can be answered by it; a producer of threads cannot await."""
    if not callable(getattr(listener, "check_local", None)):
        raise TypeError(f"a barrier or a listener with `check_local` is expected, not {type(listener).__name__}")
    if is_async(listener.check_local) and not asynchronous:
        raise TypeError(f"SyncTransactionProducer cannot await: {type(listener).__name__} is for TransactionProducer")


def not_awaitable(value: T) -> T:
    """Return a function's return value. Raises TypeError if it is an awaitable, because its work has not run."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("a plain function returned an awaitable, which is not awaited here: pass an async function")
    return value


def _refuse_async(endpoint: Endpoint) -> None:
    if endpoint.calls_async:
        raise TypeError("a WSGI app cannot await: pass plain functions, or use the ASGI app")


def _called(call: Call) -> Returned | Raised:
    try:
        return Returned(not_awaitable(call.function()))
    except Exception as error:
        return Raised(error)


def _not_post(method: str) -> Reply | None:
    return None if method == "POST" else Reply(405, headers={"allow": "POST"})


def _too_large(body: bytes) -> Reply | None:
    return Reply(413) if len(body) > BODY_MAX_BYTES else None


async def _read(receive: Receive) -> bytes | None:
    """Return the body, at most a little more than the size limit; None if the client disconnected."""
    parts, size = [], 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if not event.get("more_body") or size > BODY_MAX_BYTES:
            return b"".join(parts)


def _length(environ: Mapping[str, Any]) -> int:
    try:
        return min(int(environ.get("CONTENT_LENGTH") or 0), BODY_MAX_BYTES + 1)
    except ValueError:
        return 0


def _headers(environ: Mapping[str, Any]) -> dict[str, str]:
    found = {name[5:].lower().replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}
    if environ.get("CONTENT_TYPE"):
        found["content-type"] = environ["CONTENT_TYPE"]
    return found
