"""The rules of a request's head that the parser does not check (RFC 9110, RFC 9112), for every path.

The parser rejects bad syntax and a `Content-Length` beside `Transfer-Encoding`. What it accepts and two readers could
understand differently is refused here, before the service sees the request.
"""

import re
from functools import lru_cache
from typing import TypeAlias

from app.admission.host_names import host_name
from app.errors import BadRequest, MethodNotAllowed

Headers: TypeAlias = list[tuple[bytes, bytes]]

# A second line of one of these would let two readers choose different values.
SINGLE = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"host",
        b"origin",
        b"transfer-encoding",
    }
)
# Of the service as a whole.
METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE"
# Longer than a DNS name with a port.
HOST_MAX_BYTES = 300
_ABSOLUTE = re.compile(rb"https?://([^/?]+)(.*)", re.IGNORECASE)
# Remembers hosts, so that an ordinary request costs one lookup. Bounded, because the caller chooses the header.
_is_host = lru_cache(maxsize=256)(lambda host: host == b"" or host_name(host) is not None)


def check_head(version: str, target: bytes, headers: Headers) -> None:
    """Check a head. Raises BadRequest. Names are in lower case; a value has no spaces at its end."""
    if version not in ("1.1", "1.0"):
        raise BadRequest(f"HTTP/{version} is not served. Send HTTP/1.1.")
    if b"#" in target:
        raise BadRequest("The request target must be a path, without a fragment.")
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in SINGLE:
            if name in seen:
                raise BadRequest(f"The header {name.decode()} is given twice. Send it once.")
            seen[name] = value
    host = seen.get(b"host")
    if host is None:
        # Before HTTP/1.1 a request needed no Host. The request guard decides about it.
        if version == "1.1":
            raise BadRequest("The request has no Host header.")
    elif len(host) > HOST_MAX_BYTES or not _is_host(host):
        raise BadRequest("The Host header must be a name or an address, and optionally a port.")
    coding = seen.get(b"transfer-encoding")
    if coding is not None and (coding.lower() != b"chunked" or version == "1.0" or b"content-length" in seen):
        raise BadRequest("Transfer-Encoding may only be `chunked`, in HTTP/1.1 and without Content-Length.")


def origin_form(method: bytes, target: bytes, headers: Headers) -> bytes:
    """Return an absolute target as a path, with its authority as the `Host` (RFC 9112 §3.2.2).

    Raises BadRequest, and MethodNotAllowed for `OPTIONS *`, which asks about the server itself (RFC 9110 §9.3.7).
    """
    if target == b"*" and method == b"OPTIONS":
        raise MethodNotAllowed("OPTIONS is not served.", allow=METHODS)
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise BadRequest("The request target must be a path.")
    authority, path = absolute.groups()
    headers[:] = [(name, authority if name == b"host" else value) for name, value in headers]
    return path if path.startswith(b"/") else b"/" + path


def head_bytes(target: bytes, headers: Headers) -> int:
    """Return about how many bytes a head took on the wire."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers)


def framing_head(headers: Headers, *, keeps_alive: bool) -> bytes:
    """Return a head that frames the same body as `headers` do, and asks for nothing else."""
    lines = [b"%s: %s\r\n" % one for one in headers if one[0] in (b"content-length", b"transfer-encoding")]
    if not keeps_alive:
        lines.append(b"connection: close\r\n")
    return b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n"
