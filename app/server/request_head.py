"""The parts of a request's head that frame its body."""

from typing import TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]


def framing_head(headers: Headers, *, keeps_alive: bool) -> bytes:
    """Return a head that frames the same body as `headers` do, and asks for nothing else."""
    lines = [b"%s: %s\r\n" % one for one in headers if one[0] in (b"content-length", b"transfer-encoding")]
    if not keeps_alive:
        lines.append(b"connection: close\r\n")
    return b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n"
