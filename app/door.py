"""What every request must pass before its route is looked at: host, origin, content type and size.

Called by the hot paths and by the middleware in front of FastAPI, so that there is one place for each rule.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from app.config import Settings
from app.errors import BadRequest, BodyTooLarge, ForeignOrigin, HostNotAllowed, WrongContentType
from app.load import Load

Scope: TypeAlias = MutableMapping[str, Any]
AsgiMessage: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[AsgiMessage]]
Send: TypeAlias = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# In a request's `extensions`, where the server has it: answers with a status and JSON at once, False if it can't.
ANSWER = "halfnote.answer"

READING = ("GET", "HEAD", "OPTIONS")
# Names remembered as allowed; bounded, because the header is the caller's.
HOSTS_REMEMBERED = 100


class ClientGone(Exception):
    """The client went away before its request was read; nobody is there to answer."""


class Door:
    """The rules of one process, from its settings."""

    def __init__(self, settings: Settings) -> None:
        self.limit_bytes = settings.body_limit_bytes
        self._allowed = {host.lower().strip("[]") for host in (*settings.allowed_hosts, settings.host)}
        # A page of a foreign name may lead a browser to loopback; where keys are asked for that is of no use to it.
        self._any_host = settings.auth == "keys" and "allowed_hosts" not in settings.model_fields_set
        self._seen: set[bytes] = set()

    def check(self, scope: Scope) -> bytes | None:
        """Refuse a foreign host or origin, a body that is not JSON, and one that says it is too large.

        Return the `Authorization` header. Raises HostNotAllowed, ForeignOrigin, WrongContentType, BodyTooLarge or
        BadRequest.
        """
        host = content_type = origin = authorization = None
        length = 0
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"content-type":
                content_type = value
            elif name == b"authorization":
                authorization = value
            elif name == b"content-length":
                length = _length(value)
            elif name == b"transfer-encoding":
                length = -1
            elif name == b"origin":
                origin = value
        if host not in self._seen:
            self._check_host(host)
        if scope["method"] in READING:
            return authorization
        if origin is not None:
            self._check_origin(origin, host)
        if length and content_type != b"application/json":
            _check_content_type(content_type)
        if length > self.limit_bytes:
            raise self.too_large()
        return authorization

    def too_large(self) -> BodyTooLarge:
        """Return the refusal of a body over the limit."""
        return BodyTooLarge(f"The body is over {self.limit_bytes} bytes.", limit_bytes=self.limit_bytes)

    def _check_host(self, host: bytes | None) -> None:
        name = None if host is None else _host_name(host.decode("latin-1"))
        if host is None or not name or (name not in self._allowed and not self._any_host):
            raise HostNotAllowed("This Host is not answered; HALFNOTE_ALLOWED_HOSTS lists those that are.")
        if len(self._seen) < HOSTS_REMEMBERED:
            self._seen.add(host)

    def _check_origin(self, origin: bytes, host: bytes | None) -> None:
        name = _host_name(origin.decode("latin-1").partition("://")[2])
        own = self._any_host and host is not None and name == _host_name(host.decode("latin-1"))
        if not name or (name not in self._allowed and not own):
            raise ForeignOrigin("A page of another origin asked for this; Halfnote answers services alone.")


def _length(value: bytes) -> int:
    if not value.isdigit():
        raise BadRequest("Content-Length is not a number.")
    return int(value)


def _host_name(host: str) -> str | None:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return None


def _check_content_type(content_type: bytes | None) -> None:
    kind, _, parameters = (content_type or b"").decode("latin-1").lower().partition(";")
    if kind.strip() != "application/json" or parameters.strip() not in ("", "charset=utf-8", 'charset="utf-8"'):
        raise WrongContentType("Send the body as `Content-Type: application/json`, in UTF-8.")


async def read_body(receive: Receive, door: Door, load: Load) -> bytes:
    """Read a request's body whole; `load` counts its bytes until they are given back.

    Raises BodyTooLarge as soon as it is over the limit, Overloaded as soon as there is no room, and ClientGone if it
    breaks off; then nothing of it is counted any more.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        return await _read_rest(receive, door, load, body)
    if len(body) > door.limit_bytes:
        raise door.too_large()
    load.hold(len(body))
    return body


async def _read_rest(receive: Receive, door: Door, load: Load, first: bytes) -> bytes:
    parts, held = [first], 0
    try:
        load.hold(len(first))
        held, more = len(first), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            if held + len(parts[-1]) > door.limit_bytes:
                raise door.too_large()
            load.hold(len(parts[-1]))
            held += len(parts[-1])
            more = message.get("more_body", False)
    except BaseException:
        load.release(held)
        # The traceback would keep them for as long as the error is kept.
        parts.clear()
        raise
    return b"".join(parts)
