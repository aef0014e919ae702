"""How Halfnote dials out: by aiohttp, to allowed addresses only, with a bounded answer.

Not by httpx, even on aiohttp's transport: its layers take three quarters of a call's time on this side.

The address is judged where the socket is made (`app.dialling`), so neither DNS rebinding nor redirects lead elsewhere.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from time import perf_counter
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from app.callback_urls import url_fault
from app.dialling import AddressRefused, Dialling, Lookup

try:
    import resource
except ImportError:  # Windows has none, and no such limit
    resource = None  # type: ignore[assignment]

# Less than the 5 s after which many servers close an idle connection, perhaps just as the next request goes out on it.
KEEPALIVE_S = 4.0
AGENT = "halfnote"
# A longer body is written piece by piece, so that one slow receiver of large bodies does not hold up the others.
PIECE_BYTES = 256 * 1024
# What is read of an answer; a longer one is cut and its connection closed.
REPLY_LIMIT_BYTES = 16 * 1024
# Connecting may take a little less than the whole time, so that it is known what took too long.
CONNECT_PART = 0.9

# What is read of the head of an answer; one that is longer is a failure. Interim answers (1xx) count as time only.
HEADERS_MAX = 128
HEADER_BYTES = 8 * 1024


NO_CONNECTION = (
    AddressRefused,
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.ClientHttpProxyError,
    aiohttp.InvalidUrlClientError,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a call: `status` and `body` (cut at 16 KiB, then `truncated`), or `error` if no answer came.

    `unreachable`: not even a connection came about, so nothing was sent.
    """

    status: int | None
    headers: Mapping[str, str]
    body: bytes
    truncated: bool
    error: str | None
    duration_ms: int
    timed_out: bool = False
    unreachable: bool = False

    @property
    def text(self) -> str:
        """The body as text a person can read, at most 1,000 characters, without NUL."""
        return self.body[:4000].decode("utf-8", "replace").replace("\x00", "\ufffd")[:1000]

    def retry_after_s(self, now: datetime) -> float | None:
        """Return `Retry-After` in seconds from now (RFC 9110: seconds or a date), or None."""
        value = self.headers.get("retry-after", "").strip()
        if value.isascii() and value.isdigit():
            return float(min(int(value[:9]), 259_200))
        try:
            return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
        except (ValueError, TypeError):
            return None


class CallbackClient:
    """Makes calls; the one seam between Halfnote and the network of callbacks."""

    def __init__(self, session: aiohttp.ClientSession, dialling: Dialling) -> None:
        self._session, self._dialling = session, dialling

    async def call(
        self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, method: str = "POST"
    ) -> Reply:
        """Send a request and read at most 16 KiB of the answer, all within `timeout_s`; no redirect is followed.

        Failures are outcomes, not exceptions.
        """
        started = perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                status, answered, content, truncated = await self._exchange(method, url, body, headers, timeout_s)
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            # aiohttp's own timeouts are TimeoutErrors as well, and those are OSErrors.
            unreachable = isinstance(failure, NO_CONNECTION)
            timed_out = isinstance(failure, TimeoutError)
            return Reply(
                None, {}, b"", False, _error_of(failure, timeout_s), _ms_since(started), timed_out, unreachable
            )
        return Reply(status, answered, content, truncated, None, _ms_since(started))

    def _scheme_fault(self, url: str) -> str | None:
        return None if url.startswith("https:") else self._dialling.plain_fault()

    async def _exchange(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, Mapping[str, str], bytes, bool]:
        """Return status, headers, body, and whether that was cut; a connection with more to read is closed."""
        proxy = self._dialling.proxy
        # A proxy makes the connection to the receiver, so it is the URL alone that can be judged here.
        fault = url_fault(url, self._dialling) if proxy else self._scheme_fault(url)
        if fault is not None:
            raise AddressRefused(f"the URL {fault}")
        async with self._session.request(
            method,
            URL(url, encoded=True),
            data=_content(body),
            headers=_headers(body, headers),
            allow_redirects=False,
            timeout=_timeout(timeout_s),
            proxy=proxy,
        ) as response:
            content = b""
            while piece := await response.content.readany():
                content += piece
                if len(content) > REPLY_LIMIT_BYTES:
                    return response.status, response.headers, content[:REPLY_LIMIT_BYTES], True
            return response.status, response.headers, content, False


class Names(AbstractResolver):
    """The addresses of a name, for aiohttp, by the one look-up that all dialling goes by."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return all addresses, in the order in which they are to be tried. Raises OSError."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._lookup(host, port)
        ]

    async def close(self) -> None:
        """Nothing is held."""


@asynccontextmanager
async def callback_client(dialling: Dialling) -> AsyncIterator[CallbackClient]:
    """Yield a client that dials allowed addresses only, follows no redirect and takes no proxy from the environment."""

    def make_socket(address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, (host, port, *_) = address
        # The only address that is dialled with a proxy is the proxy's, which the operator named.
        if dialling.proxy is None:
            dialling.refuse(host, port)
        return socket.socket(family, kind, protocol)

    allow_many_sockets()
    # No limit here: each group and each subscription has one of its own, so that one that hangs keeps no other waiting.
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=KEEPALIVE_S,
        socket_factory=make_socket,
        ttl_dns_cache=10,
        resolver=Names(dialling.lookup),
        ssl=dialling.tls,
    )
    # Never decompressed: an answer is shown to people as it came, and a small one may unpack to gigabytes.
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        read_bufsize=REPLY_LIMIT_BYTES,
        auto_decompress=False,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
        max_headers=HEADERS_MAX,
    )
    async with session:
        yield CallbackClient(session, dialling)


def allow_many_sockets() -> None:
    """Let this process have as many open files as the system allows it: a common default is 1,024, sockets included."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems name a hard limit that they do not grant.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _error_of(failure: Exception, timeout_s: float) -> str:
    if isinstance(failure, aiohttp.ConnectionTimeoutError):
        # Its own text holds the URL whole, and so perhaps a token.
        return f"no connection within {timeout_s * CONNECT_PART:g} s"
    if isinstance(failure, aiohttp.ClientHttpProxyError):
        return f"HALFNOTE_PROXY_URL answered {failure.status}"
    if isinstance(failure, TimeoutError):
        return f"no whole answer within {timeout_s:g} s"
    reason = failure.os_error if isinstance(failure, aiohttp.ClientConnectorError) else None
    if isinstance(reason, AddressRefused):
        return str(reason)
    added = f" {reason}" if reason is not None and reason.strerror is None else ""
    return f"{type(failure).__name__}: {failure}{added}"[:500]


def _ms_since(started: float) -> int:
    return round((perf_counter() - started) * 1000)


@lru_cache(maxsize=64)
def _timeout(timeout_s: float) -> aiohttp.ClientTimeout:
    """Return what bounds connecting alone; aiohttp is not to round it up to whole seconds."""
    return aiohttp.ClientTimeout(connect=timeout_s * CONNECT_PART, ceil_threshold=timeout_s)


def _headers(body: bytes, headers: Mapping[str, str]) -> dict[str, str]:
    # An answer is shown to people as it came, so it must not be packed.
    return {"user-agent": AGENT, "accept-encoding": "identity", "content-length": str(len(body)), **headers}


def _content(body: bytes) -> bytes | AsyncIterator[bytes] | None:
    if len(body) <= PIECE_BYTES:
        return body or None

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]

    return pieces()
