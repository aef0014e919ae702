"""Raw requests and what RFC 9110 and RFC 9112 demand of a server that gets them.

A form is written for one route: its request line, and a body that the route accepts. `OK` stands for any status below
300. A server does as demanded if its answers have these statuses in this order, the route had its effect as often as
`effects` says, and the connection then serves a probe (`is_open`) or is closed. None: it waits for the rest of a body.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

OK = 200
CRLF = b"\r\n"
H2_SETTINGS = b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + H2_SETTINGS
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON = b"Content-Type: application/json"
HOST = b"Host: localhost"
HEAD_MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Form:
    """One raw form. `pieces` are sent one by one. `by_app`: the rule is the service's own, not the HTTP server's."""

    kind: str
    name: str
    pieces: tuple[bytes, ...]
    statuses: tuple[int, ...]
    effects: int
    is_open: bool | None
    by_app: bool = False


@dataclass(frozen=True)
class Route:
    """A method and path, and a body that it accepts."""

    method: bytes
    path: bytes
    body: bytes

    def line(self, target: bytes | None = None, version: bytes = b"HTTP/1.1") -> bytes:
        """Return the request line."""
        return b"%s %s %s" % (self.method, self.path if target is None else target, version)

    def head(self, *headers: bytes, line: bytes | None = None, host: bytes | None = HOST) -> bytes:
        """Return a head of these headers."""
        lines = [self.line() if line is None else line, *([] if host is None else [host]), JSON, *headers]
        return CRLF.join(lines) + CRLF * 2

    def plain(self, *headers: bytes, line: bytes | None = None, host: bytes | None = HOST) -> bytes:
        """Return a request with its body and the length of it."""
        return self.head(*headers, b"Content-Length: %d" % len(self.body), line=line, host=host) + self.body

    def chunked(
        self,
        *headers: bytes,
        line: bytes | None = None,
        coding: bytes = b"Transfer-Encoding: chunked",
        trailers: bytes = b"",
        frames: bytes | None = None,
    ) -> bytes:
        """Return a request with its body in two chunks, or in `frames`."""
        if frames is None:
            first, rest = self.body[:7], self.body[7:]
            frames = b"%x\r\n%s\r\n%X\r\n%s\r\n0\r\n%s\r\n" % (len(first), first, len(rest), rest, trailers)
        return self.head(*headers, coding, line=line) + frames


def raw_forms(route: Route) -> list[Form]:
    """Return all forms for a route."""
    makers = (
        _ordinary,
        _pipelined,
        _protocols,
        _upgrades,
        _trailers,
        _hosts,
        _targets,
        _encodings,
        _lengths,
        _chunks,
        _heads,
    )
    return [form for maker in (*makers, _origins, _sizes) for form in maker(route)]


def _served(kind: str, name: str, *pieces: bytes, by_app: bool = False) -> Form:
    return Form(kind, name, pieces, (OK,), 1, True, by_app)


def _refused(kind: str, name: str, *pieces: bytes, status: int = 400) -> Form:
    return Form(kind, name, pieces, (status,), 0, False)


def _ordinary(route: Route) -> Iterator[Form]:
    kind, plain, chunked = "ordinary", route.plain(), route.chunked()
    yield _served(kind, "a length", plain)
    yield _served(kind, "chunks", chunked)
    yield _served(kind, "a length, byte by byte", *(plain[at : at + 1] for at in range(len(plain))))
    yield _served(kind, "chunks, byte by byte", *(chunked[at : at + 1] for at in range(len(chunked))))
    yield _served(kind, "a head and a body apart", route.plain()[: -len(route.body)], route.body)
    yield _served(kind, "blank lines first", CRLF * 2 + plain)
    yield _served(kind, "names of headers in capitals", plain.replace(b"Content-Length", b"CONTENT-LENGTH"))
    yield _served(kind, "no space after a colon", plain.replace(b": ", b":", 3))
    yield _served(
        kind,
        "spaces around values",
        plain.replace(b": ", b":  \t", 3).replace(CRLF, b" \t \r\n", 4).replace(b" \t \r\n", CRLF, 1),
    )
    yield _served(kind, "Expect: 100-continue", route.plain(b"Expect: 100-continue"))
    yield _served(kind, "Latin-1 in another header", route.plain(b"X-Name: caf\xe9"))
    yield Form(kind, "Connection: close", (route.plain(b"Connection: close"),), (OK,), 1, False)
    old = route.plain(line=route.line(version=b"HTTP/1.0"))
    yield Form(kind, "HTTP/1.0", (old,), (OK,), 1, False)
    without = route.plain(line=route.line(version=b"HTTP/1.0"), host=None)
    yield Form(kind, "HTTP/1.0 without a Host is no error of framing", (without,), (421,), 0, False, by_app=True)


def _pipelined(route: Route) -> Iterator[Form]:
    kind, plain, chunked = "pipelining", route.plain(), route.chunked()
    yield Form(kind, "three in one read", (plain * 3,), (OK,) * 3, 3, True)
    yield Form(kind, "chunks, then a length", (chunked + plain,), (OK,) * 2, 2, True)
    half = len(plain) // 2
    yield Form(kind, "the second in two reads", (plain + plain[:half], plain[half:]), (OK,) * 2, 2, True)
    yield Form(kind, "GET, POST, GET", (GET + plain + GET,), (OK,) * 3, 1, True)
    yield Form(kind, "garbage after a request", (plain + b"hello\r\n\r\n",), (OK, 400), 1, False)
    yield Form(
        kind, "a bad head after two requests", (plain * 2 + b"GET / HTTP/1.1\r\nA\r\n\r\n",), (OK, OK, 400), 2, False
    )
    bad = route.chunked(frames=b"x\r\n")
    yield Form(kind, "a bad body after a request", (plain + bad,), (OK, 400), 1, False)
    yield Form(kind, "nothing after Connection: close", (route.plain(b"Connection: close") + plain,), (OK,), 1, False)
    yield Form(
        kind, "nothing after HTTP/1.0", (route.plain(line=route.line(version=b"HTTP/1.0")) + plain,), (OK,), 1, False
    )
    yield Form(kind, "nothing after a refusal", (b"GET / HTTP/1.1\r\nA\r\n\r\n" + plain,), (400,), 0, False)
    large = route.plain(b"X-Fill: " + b"f" * 40_000)
    yield Form(kind, "two large heads in one read", (large + large,), (OK,) * 2, 2, True)
    begun = large[:30_000]
    yield Form(kind, "a large head begun after another", (large + begun, large[30_000:]), (OK,) * 2, 2, True)


def _upgrades(route: Route) -> Iterator[Form]:
    kind, inner = "upgrade", route.plain()
    yield _served(kind, "h2c with a length", route.plain(H2C))
    yield _served(kind, "h2c with chunks", route.chunked(H2C))
    head, body = route.plain(H2C)[: -len(route.body)], route.body
    yield _served(kind, "h2c, the body later", head, body)
    yield _served(kind, "h2c, the body in two parts", head + body[:5], body[5:])
    whole = route.plain(H2C)
    yield _served(kind, "h2c, byte by byte", *(whole[at : at + 1] for at in range(len(whole))))
    # The body is a request itself. As a body it is no JSON, so the route refuses it and keeps the connection.
    hidden = route.head(H2C, b"Content-Length: %d" % len(inner))
    yield Form(kind, "h2c, a request as the body", (hidden + inner,), (400,), 0, True, by_app=True)
    yield Form(kind, "h2c, a request as the body, later", (hidden, inner), (400,), 0, True, by_app=True)
    yield Form(kind, "h2c, then a request", (whole + inner,), (OK,) * 2, 2, True)
    yield Form(kind, "h2c three times in one read", (whole * 3,), (OK,) * 3, 3, True)
    yield Form(kind, "h2c chunks, then h2c", (route.chunked(H2C) + whole,), (OK,) * 2, 2, True)
    get = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + H2C + CRLF * 2
    yield Form(kind, "h2c of a GET, then a request", (get + inner,), (OK,) * 2, 1, True)
    websocket = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA=="
    yield _served(kind, "websocket with a length", route.plain(websocket))
    yield _served(kind, "an unknown protocol", route.plain(b"Connection: upgrade\r\nUpgrade: x/1"))
    yield _served(kind, "Upgrade without Connection", route.plain(b"Upgrade: h2c"))
    yield _served(kind, "Connection without Upgrade", route.plain(b"Connection: upgrade"))
    closing = route.plain(b"Connection: close, Upgrade\r\nUpgrade: h2c")
    yield Form(kind, "h2c and close", (closing,), (OK,), 1, False)
    yield Form(kind, "h2c and close, then a request", (closing + inner,), (OK,), 1, False)
    old = route.plain(H2C, line=route.line(version=b"HTTP/1.0"))
    yield Form(kind, "h2c in HTTP/1.0", (old,), (OK,), 1, False)
    yield _refused(kind, "h2c with a length and chunks", route.chunked(H2C, b"Content-Length: 5"))
    yield _refused(kind, "h2c with a bad chunk", route.chunked(H2C, frames=b"x\r\n"))
    yield _refused(kind, "HTTP/2 with prior knowledge", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9)
    yield _refused(kind, "CONNECT", b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n" + inner)


def _trailers(route: Route) -> Iterator[Form]:
    kind, plain = "trailers", route.plain()
    yield _served(kind, "an unknown one", route.chunked(trailers=b"X-Digest: 1\r\n"))
    yield _served(kind, "Host", route.chunked(trailers=b"Host: evil.example\r\n"))
    yield _served(kind, "Origin", route.chunked(trailers=b"Origin: https://evil.example\r\n"))
    yield _served(kind, "Authorization", route.chunked(trailers=b"Authorization: Bearer hn_1\r\n"))
    yield _served(kind, "Content-Type", route.chunked(trailers=b"Content-Type: text/plain\r\n"))
    yield _served(kind, "Content-Encoding", route.chunked(trailers=b"Content-Encoding: gzip\r\n"))
    yield _served(kind, "Upgrade", route.chunked(trailers=b"Connection: upgrade\r\nUpgrade: h2c\r\n"))
    closing = route.chunked(trailers=b"Connection: close\r\n")
    yield Form(kind, "Connection: close", (closing,), (OK,), 1, False)
    yield Form(kind, "Connection: close, then a request", (closing + plain,), (OK,), 1, False)
    missing = route.chunked(trailers=HOST + CRLF).replace(HOST + CRLF, b"", 1)
    yield _refused(kind, "the only Host", missing)
    foreign = route.chunked(trailers=HOST + CRLF).replace(HOST, b"Host: evil.example", 1)
    yield Form(kind, "an allowed Host after a foreign one", (foreign,), (421,), 0, True, by_app=True)
    page = route.chunked(b"Origin: https://evil.example", trailers=b"Origin: http://localhost\r\n")
    yield Form(kind, "an own Origin after a foreign one", (page,), (403,), 0, True, by_app=True)
    last = route.chunked(trailers=b"Host: evil.example\r\n")
    yield Form(kind, "Host, then a request", (last + plain,), (OK,) * 2, 2, True)
    yield Form(
        kind,
        "an unknown one of h2c, then a request",
        (route.chunked(H2C, trailers=b"A: b\r\n") + plain,),
        (OK,) * 2,
        2,
        True,
    )
    yield _refused(kind, "no colon", route.chunked(trailers=b"X-Digest\r\n"))
    yield _refused(kind, "a space before the colon", route.chunked(trailers=b"X-Digest : 1\r\n"))


def _protocols(route: Route) -> Iterator[Form]:
    """Other protocols. llhttp takes RTSP for HTTP."""
    kind, plain = "protocol", route.plain()
    for version in (b"RTSP/1.0", b"RTSP/1.1", b"ICE/1.0", b"HTP/1.1", b"http/1.1"):
        raw = route.plain(line=route.line(version=version))
        yield _refused(kind, version.decode(), raw)
        yield _refused(kind, f"{version.decode()}, byte by byte", *(raw[at : at + 1] for at in range(60)))
        yield Form(kind, f"{version.decode()} after a request", (plain + raw,), (OK, 400), 1, False)
    rtsp = b"RTSP/1.0\r\nHost: localhost\r\n\r\n"
    yield _refused(kind, "GET of RTSP", b"GET / " + rtsp)
    yield _refused(kind, "DESCRIBE", b"DESCRIBE / " + rtsp)
    yield _refused(kind, "OPTIONS of RTSP", b"OPTIONS * " + rtsp)
    yield _refused(kind, "RTSP after blank lines", CRLF * 2 + b"GET / " + rtsp)
    # The name elsewhere is no protocol.
    yield _served(kind, "RTSP in the first header", plain.replace(CRLF, b"\r\nX: / RTSP/1.0\r\n", 1))
    line = b"\r\nX:%s RTSP/1.0\r\n" % route.path
    yield _served(kind, "RTSP in the first header, byte by byte", *_bytes_of(plain.replace(CRLF, line, 1)))
    yield _served(kind, "RTSP in another header", route.plain(b"X-Line: POST / RTSP/1.0"))
    named = replace(route, body=route.body.replace(b"1", b'"%s / RTSP/1.0"' % route.method))
    yield _served(kind, "RTSP in a body", named.plain())
    yield _served(kind, "RTSP in chunks", named.chunked())
    yield Form(kind, "RTSP in a body, then a request", (named.plain() + plain,), (OK,) * 2, 2, True)


def _bytes_of(raw: bytes) -> Iterator[bytes]:
    return (raw[at : at + 1] for at in range(len(raw)))


def _hosts(route: Route) -> Iterator[Form]:
    kind = "host"
    for host in (
        b"localhost:8080",
        b"127.0.0.1",
        b"127.0.0.1:80",
        b"[::1]",
        b"[::1]:8080",
        b"LOCALHOST",
        b"localhost:",
    ):
        yield _served(kind, host.decode(), route.plain(host=b"Host: " + host))
    yield _refused(kind, "none", route.plain(host=None))
    yield _refused(kind, "two that are equal", route.plain(host=HOST + CRLF + HOST))
    yield _refused(kind, "an allowed one after a foreign one", route.plain(host=b"Host: evil.example\r\n" + HOST))
    yield _refused(kind, "a foreign one after an allowed one", route.plain(host=HOST + b"\r\nHost: evil.example"))
    for host in (
        b"127.0.0.1/evil",
        b"evil@127.0.0.1",
        b"user:password@localhost",
        b"localhost?a",
        b"localhost#a",
        b"localhost\\evil",
        b"localhost, evil.example",
        b"localhost evil",
        b"localhost:80:90",
        b"localhost:x",
        b"localhost:+80",
        b"[::1",
        b"::1",
        b"[::1]evil",
        b"http://localhost",
        b"localhost%00",
        b"local\x7fhost",
        b"loc\xc3\xa4lhost",
        b"l" * 301,
    ):
        yield _refused(kind, repr(host)[2:30], route.plain(host=b"Host: " + host))
    for host in (
        b"evil.example",
        b"localhost.evil.example",
        b"testserver",
        b"[::2]",
        b"2130706433",
        b"localhost.",
        b"",
    ):
        raw = route.plain(host=b"Host: " + host)
        yield Form(kind, f"{host.decode() or 'empty'} is not ours", (raw,), (421,), 0, True, by_app=True)


def _targets(route: Route) -> Iterator[Form]:
    kind = "target"

    def absolute(authority: bytes, host: bytes = HOST) -> bytes:
        return route.plain(line=route.line(b"http://" + authority + route.path), host=host)

    yield _served(kind, "absolute", absolute(b"localhost"))
    yield _served(kind, "absolute, which overrides Host", absolute(b"localhost:80", b"Host: evil.example"), by_app=True)
    foreign = Form(kind, "absolute and foreign", (absolute(b"evil.example"),), (421,), 0, True, by_app=True)
    yield foreign
    yield _refused(kind, "absolute with a user", absolute(b"user@localhost"))
    yield _refused(kind, "absolute of another scheme", route.plain(line=route.line(b"ftp://localhost" + route.path)))
    yield _refused(kind, "a fragment", route.plain(line=route.line(route.path + b"#a")))
    yield _refused(kind, "a space", route.plain(line=route.line(route.path + b" a")))
    yield _refused(kind, "no slash", route.plain(line=route.line(route.path[1:])))
    yield _refused(kind, "a control character", route.plain(line=route.line(route.path + b"\x01")))
    yield _refused(kind, "a star for another method", route.plain(line=route.line(b"*")))
    yield _refused(kind, "a star for OPTIONS", b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", status=405)
    yield _refused(kind, "a star with a query", b"OPTIONS *?a HTTP/1.1\r\nHost: localhost\r\n\r\n")
    yield _served(
        kind, "percent-encoded", route.plain(line=route.line(b"/%" + b"%02x" % route.path[1] + route.path[2:]))
    )


def _encodings(route: Route) -> Iterator[Form]:
    kind = "encoding"
    for coding in (
        b"gzip, chunked",
        b"gzip",
        b"chunked, gzip",
        b"chunked, chunked",
        b"identity",
        b"xchunked",
        b'"chunked"',
    ):
        raw = route.chunked(coding=b"Transfer-Encoding: " + coding)
        yield _refused(kind, f"Transfer-Encoding: {coding.decode()}", raw)
    for coding in (b"chunked;q=1", b"chunked\x0b", b"\x0bchunked", b"", b"chunked,", b",chunked"):
        raw = route.chunked(coding=b"Transfer-Encoding: " + coding)
        yield _refused(kind, f"Transfer-Encoding: {coding!r}", raw)
    twice = b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked"
    yield _refused(kind, "gzip, then chunked in a second line", route.chunked(coding=twice))
    yield _refused(kind, "chunked twice", route.chunked(b"Transfer-Encoding: chunked"))
    yield _refused(kind, "chunked in HTTP/1.0", route.chunked(line=route.line(version=b"HTTP/1.0")))
    yield _served(kind, "CHUNKED", route.chunked(coding=b"Transfer-Encoding: CHUNKED"))
    for coding in (b"gzip", b"br", b"deflate", b"identity, gzip", b"x"):
        raw = route.plain(b"Content-Encoding: " + coding)
        yield Form(kind, f"Content-Encoding: {coding.decode()}", (raw,), (415,), 0, True, by_app=True)
    yield _served(kind, "Content-Encoding: identity", route.plain(b"Content-Encoding: identity"))


def _lengths(route: Route) -> Iterator[Form]:
    kind, size = "length", len(route.body)
    for length in (b"+%d", b"-%d", b"%d, %d", b"%d %d", b"0x%x", b"%d_0", b"%d.0", b"%d;"):
        shown = length % ((size,) * length.count(b"%"))
        raw = route.head(b"Content-Length: " + shown) + route.body
        yield _refused(kind, length.decode().replace("%d", "n").replace("%x", "n"), raw)
    yield _refused(kind, "empty", route.head(b"Content-Length: ") + route.body)
    yield _refused(kind, "2^64 and more", route.head(b"Content-Length: 18446744073709551700") + route.body)
    one = b"Content-Length: %d" % size
    yield _refused(kind, "two that are equal", route.head(one, one) + route.body)
    yield _refused(kind, "two that differ", route.head(one, b"Content-Length: 0") + route.body)
    yield _refused(kind, "a length, then chunks", route.chunked(one))
    yield _refused(kind, "chunks, then a length", route.chunked(coding=b"Transfer-Encoding: chunked\r\n" + one))
    yield _served(kind, "zeros first", route.head(b"Content-Length: 00%d" % size) + route.body)
    get = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + one + CRLF * 2 + route.body
    yield Form(kind, "the body of a GET", (get,), (OK,), 0, True)


def _chunks(route: Route) -> Iterator[Form]:
    kind, size = "chunk", len(route.body)

    def frames(length: bytes, end: bytes = CRLF) -> bytes:
        return route.chunked(frames=length + end + route.body + end + b"0\r\n\r\n")

    yield _served(kind, "an extension", frames(b"%x;a=b" % size))
    yield _served(kind, "a quoted extension", frames(b'%x;a="b;c"' % size))
    yield _served(kind, "zeros first", frames(b"00%x" % size))
    for length in (b"0x%x", b"+%x", b"-%x", b"%x_0", b" %x", b"%x g"):
        yield _refused(kind, "size " + length.decode().replace("%x", "n"), frames(length % size))
    yield _refused(kind, "no size", frames(b""))
    yield _refused(kind, "a size of 68 bits", frames(b"f" * 17))
    yield _refused(kind, "LF alone", frames(b"%x" % size, end=b"\n"))
    yield _refused(kind, "LF alone in an extension", frames(b"%x;a\nb" % size))
    yield _refused(kind, "a chunk longer than its size", frames(b"%x" % (size - 1)))
    yield _refused(kind, "no CRLF after a chunk", route.chunked(frames=b"%x\r\n%s0\r\n\r\n" % (size, route.body)))


def _heads(route: Route) -> Iterator[Form]:
    kind, plain = "head", route.plain()
    for name, line in {
        "a folded header": b"X-A: a\r\n b",
        "a space before the colon": b"X-A : a",
        "a header that begins with a space": b" X-A: a",
        "no colon": b"X-A",
        "an empty name": b": a",
        "a name with a parenthesis": b"X(A: a",
        "NUL in a value": b"X-A: a\0b",
        "CR alone in a value": b"X-A: a\rb",
        "LF alone after a header": b"X-A: a\nX-B: b",
        "a name that is not ASCII": b"X-\xc3\xa4: a",
        "two Content-Types": b"Content-Type: text/plain",
        "two Authorizations": b"Authorization: Bearer hn_1\r\nAuthorization: Bearer hn_2",
    }.items():
        yield _refused(kind, name, route.plain(line))
    yield _refused(kind, "LF alone everywhere", plain.replace(CRLF, b"\n"))
    yield _refused(kind, "a space before the first header", plain.replace(b"\r\nHost", b"\r\n Host"))
    for version in (
        b"HTTP/0.9",
        b"HTTP/1.2",
        b"HTTP/2.0",
        b"HTTP/3.0",
        b"HTTP/1.10",
        b"http/1.1",
        b"HTTP/1,1",
        b"HTTP/11",
    ):
        yield _refused(kind, version.decode(), route.plain(line=route.line(version=version)))
    yield _refused(kind, "no version", b"GET /livez\r\n\r\n")
    yield _refused(kind, "a method in small letters", plain.replace(route.method, route.method.lower(), 1))
    yield _refused(kind, "a tab after the method", plain.replace(route.method + b" ", route.method + b"\t", 1))
    yield _refused(kind, "a hello of TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xab" * 60)
    yield _refused(kind, "no HTTP at all", b"hello\r\n\r\n")
    yield _refused(kind, "a response", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def _origins(route: Route) -> Iterator[Form]:
    kind = "origin"
    yield _served(kind, "http://localhost:8080", route.plain(b"Origin: http://localhost:8080"), by_app=True)
    for origin in (
        b"https://evil.example",
        b"null",
        b"",
        b"localhost",
        b"http://localhost.evil.example",
        b"http://evil@localhost",
        b"http://localhost/evil",
        b"http://evil.example http://localhost",
        b"file://localhost",
        b"http://testserver",
    ):
        raw = route.plain(b"Origin: " + origin)
        yield Form(kind, f"{origin.decode() or 'empty'} is foreign", (raw,), (403,), 0, True, by_app=True)
    two = b"Origin: https://evil.example\r\nOrigin: http://localhost"
    yield Form(kind, "an own one after a foreign one", (route.plain(two),), (400,), 0, False)


def _sizes(route: Route) -> Iterator[Form]:
    kind, fill = "size", b"X-Fill: " + b"f" * 70_000
    yield _served(kind, "a head of 60 kB in one read", route.plain(b"X-Fill: " + b"f" * 60_000))
    yield _refused(kind, "a head of 70 kB in one read", route.plain(fill), status=431)
    many = CRLF.join(b"X-%d: f" % number for number in range(7000))
    yield _refused(kind, "7,000 headers in one read", route.plain(many), status=431)
    yield _refused(
        kind,
        "a target of 70 kB in one read",
        route.plain(line=route.line(route.path + b"?" + b"f" * 70_000)),
        status=431,
    )
    whole = route.plain(fill)
    pieces = (whole[at : at + 10_000] for at in range(0, len(whole), 10_000))
    yield _refused(kind, "a head of 70 kB in reads of 10 kB", *pieces, status=431)
    yield Form(kind, "a head of 70 kB after a request", (route.plain() + whole,), (OK, 431), 1, False)
    yield Form(kind, "a body of 5 MiB", (route.head(b"Content-Length: 5242880"),), (413,), 0, None, by_app=True)
