"""Checks that every request passes before routing: host, origin, content type and size.

The request pipeline calls them for every path.
"""

from starlette.types import Receive, Scope

from app.admission.host_names import host_name, origin_name
from app.admission.load_limits import LoadLimits
from app.config import Settings
from app.errors import BadRequest, BodyTooLarge, ContentEncoded, ForeignOrigin, HostNotAllowed, WrongContentType

READING = ("GET", "HEAD", "OPTIONS")
# Allowed `Host` values remembered. Bounded, because the caller chooses the header.
HOSTS_REMEMBERED = 100


class ClientGone(Exception):
    """The client disconnected before its request was read, so there is no answer."""


class RequestGuard:
    """The rules of one process, from its settings."""

    def __init__(self, settings: Settings) -> None:
        self.limit_bytes = settings.body_limit_bytes
        self._allowed = {host.lower().strip("[]") for host in (*settings.allowed_hosts, settings.host)}
        # DNS rebinding leads a browser's page to loopback. Where keys are required, that gives the page no access.
        self._any_host = settings.auth == "keys" and "allowed_hosts" not in settings.model_fields_set
        self._seen: set[bytes] = set()

    def check(self, scope: Scope, *, takes_forms: bool = False) -> bytes | None:
        """Refuse a foreign host or origin, a body that is encoded or of another type, and a length over the limit.

        A body is JSON, or a form if the route takes forms. Returns the `Authorization` header. Raises HostNotAllowed,
        ForeignOrigin, ContentEncoded, WrongContentType, BodyTooLarge or BadRequest.
        """
        host = content_type = origin = authorization = encoding = None
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
            elif name == b"content-encoding":
                encoding = value
        if host not in self._seen:
            self._check_host(host)
        if scope["method"] in READING:
            return authorization
        if origin is not None:
            self._check_origin(origin, host)
        if encoding is not None and encoding.lower() != b"identity":
            raise ContentEncoded("Send the body without Content-Encoding.")
        if takes_forms:
            _check_form(content_type)
        elif length and content_type != b"application/json":
            _check_content_type(content_type)
        if length > self.limit_bytes:
            raise self.too_large()
        return authorization

    def too_large(self) -> BodyTooLarge:
        """Return the refusal of a body over the limit."""
        return _too_large(self.limit_bytes)

    def _check_host(self, host: bytes | None) -> None:
        name = None if host is None else host_name(host)
        if host is None or not name or (name not in self._allowed and not self._any_host):
            raise HostNotAllowed("This Host is not allowed. Use one of HALFNOTE_ALLOWED_HOSTS, or add it there.")
        if len(self._seen) < HOSTS_REMEMBERED:
            self._seen.add(host)

    def _check_origin(self, origin: bytes, host: bytes | None) -> None:
        name = origin_name(origin)
        own = self._any_host and host is not None and name == host_name(host)
        if not name or (name not in self._allowed and not own):
            raise ForeignOrigin("The request has a foreign Origin. Halfnote answers services only, not web pages.")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over {limit} bytes.", limit_bytes=limit)


def _length(value: bytes) -> int:
    if not value.isdigit():
        raise BadRequest("Content-Length is not a number.")
    return int(value)


def _check_content_type(content_type: bytes | None) -> None:
    kind, _, parameters = (content_type or b"").decode("latin-1").lower().partition(";")
    if kind.strip() != "application/json" or parameters.strip() not in ("", "charset=utf-8", 'charset="utf-8"'):
        raise WrongContentType("Send the body as `Content-Type: application/json`, in UTF-8.")


def _check_form(content_type: bytes | None) -> None:
    if (content_type or b"").partition(b";")[0].strip().lower() != b"application/x-www-form-urlencoded":
        raise WrongContentType("Send the form as `Content-Type: application/x-www-form-urlencoded`.")


async def read_body(receive: Receive, guard: RequestGuard, limits: LoadLimits) -> bytes:
    """Read a request's whole body. `limits` counts its bytes; the caller subtracts them after the answer.

    Raises BodyTooLarge as soon as the body is over the limit, Overloaded as soon as the process holds too many bytes,
    and ClientGone if the client disconnects. After an error none of its bytes count.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        return await _read_rest(receive, guard, limits, body)
    hold_body(body, guard, limits)
    return body


async def read_small_body(receive: Receive, limit: int) -> bytes:
    """Read a whole body of at most `limit` bytes, which count toward no limit of the process.

    Raises BodyTooLarge as soon as the body is longer, and ClientGone if the client disconnects.
    """
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return bytes(body)


def hold_body(body: bytes, guard: RequestGuard, limits: LoadLimits) -> None:
    """Count the bytes of a whole body. Raises BodyTooLarge or Overloaded, and then does not count them."""
    if len(body) > guard.limit_bytes:
        raise guard.too_large()
    limits.hold(len(body))


async def _read_rest(receive: Receive, guard: RequestGuard, limits: LoadLimits, first: bytes) -> bytes:
    parts, held = [first], 0
    try:
        limits.hold(len(first))
        held, more = len(first), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            if held + len(parts[-1]) > guard.limit_bytes:
                raise guard.too_large()
            limits.hold(len(parts[-1]))
            held += len(parts[-1])
            more = message.get("more_body", False)
    except BaseException:
        limits.release(held)
        # Otherwise the traceback keeps the bytes in memory as long as the error.
        parts.clear()
        raise
    return b"".join(parts)
