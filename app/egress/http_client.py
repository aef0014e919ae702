"""The HTTP client of check-back and webhooks: aiohttp, allowed addresses only, bounded answers.

Not httpx, even on aiohttp's transport: its layers take three quarters of a call's time in this process.

The address is checked when the socket is made (`app.egress.network_policy`), so DNS rebinding and redirects cannot
lead elsewhere.
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

from app.egress.network_policy import AddressRefused, Lookup, NetworkPolicy
from app.egress.urls import url_fault

try:
    import resource
except ImportError:  # Windows has none, and no such limit
    resource = None  # type: ignore[assignment]

# Less than the 5 s after which many servers close an idle connection, so that no request races the close.
KEEPALIVE_S = 4.0
AGENT = "halfnote"
# A longer body is written in pieces, so that one slow receiver of large bodies does not delay the others.
PIECE_BYTES = 256 * 1024
# The most bytes of an answer that are read. A longer answer is cut and its connection closed.
REPLY_LIMIT_BYTES = 16 * 1024
# Connecting gets a little less than the whole time, so that the error names what took too long.
CONNECT_PART = 0.9

# The longest `Retry-After` that is believed: three days.
RETRY_AFTER_MAX_S = 259_200.0

# Limits of an answer's head; a longer head is a failure. Interim answers (1xx) only use up time.
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
    """The result of a call: `status` and `body` (cut at 16 KiB, then `truncated`), or `error` without an answer.

    `unreachable`: no connection was made, so nothing was sent.
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
        """The body as text for people, at most 1,000 characters, without NUL."""
        return self.body[:4000].decode("utf-8", "replace").replace("\x00", "\ufffd")[:1000]

    def retry_after_s(self, now: datetime) -> float | None:
        """Return `Retry-After` (RFC 9110) in seconds from now, at most RETRY_AFTER_MAX_S, or None."""
        value = self.headers.get("retry-after", "").strip()
        if value.isascii() and value.isdigit():
            return min(float(value), RETRY_AFTER_MAX_S)
        try:
            return min(max(0.0, (parsedate_to_datetime(value) - now).total_seconds()), RETRY_AFTER_MAX_S)
        except (ValueError, TypeError):
            return None


class EgressClient:
    """Makes calls to check URLs and webhooks."""

    def __init__(self, session: aiohttp.ClientSession, network_policy: NetworkPolicy) -> None:
        self._session, self._network_policy = session, network_policy

    async def call(
        self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, method: str = "POST"
    ) -> Reply:
        """Send a request and read at most 16 KiB of the answer, within `timeout_s`. Redirects are not followed.

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
        return None if url.startswith("https:") else self._network_policy.plain_fault()

    async def _exchange(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, Mapping[str, str], bytes, bool]:
        """Return status, headers, body, and whether the body was cut; then the connection is closed."""
        proxy = self._network_policy.proxy
        # A proxy connects to the receiver, so only the URL can be checked here.
        fault = url_fault(url, self._network_policy) if proxy else self._scheme_fault(url)
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


class PolicyResolver(AbstractResolver):
    """Resolves names for aiohttp with the network policy's own lookup."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return all addresses in the order to try them. Raises OSError."""
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
        """Do nothing: the resolver holds no resources."""


@asynccontextmanager
async def callback_client(network_policy: NetworkPolicy) -> AsyncIterator[EgressClient]:
    """Yield a client that connects to allowed addresses only, without redirects and the environment's proxies."""

    def make_socket(address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, (host, port, *_) = address
        # With a proxy the only address is the proxy's own, which the operator set.
        if network_policy.proxy is None:
            network_policy.refuse(host, port)
        return socket.socket(family, kind, protocol)

    allow_many_sockets()
    # No limit here: each group and each subscription has its own, so that a hanging one does not block the others.
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=KEEPALIVE_S,
        socket_factory=make_socket,
        ttl_dns_cache=10,
        resolver=PolicyResolver(network_policy.lookup),
        ssl=network_policy.tls,
    )
    # Never decompressed: people see the answer unchanged, and a small one may unpack to gigabytes.
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
        yield EgressClient(session, network_policy)


def allow_many_sockets() -> None:
    """Raise this process's limit of open files, sockets included, to the hard limit: a common default is 1,024."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems report a hard limit that they do not grant.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _error_of(failure: Exception, timeout_s: float) -> str:
    if isinstance(failure, aiohttp.ConnectionTimeoutError):
        # Its text contains the whole URL, which may hold a token.
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
    """Return the limit for connecting; `ceil_threshold` keeps aiohttp from rounding it up to whole seconds."""
    return aiohttp.ClientTimeout(connect=timeout_s * CONNECT_PART, ceil_threshold=timeout_s)


def _headers(body: bytes, headers: Mapping[str, str]) -> dict[str, str]:
    # People see the answer unchanged, so it must not be compressed.
    return {"user-agent": AGENT, "accept-encoding": "identity", "content-length": str(len(body)), **headers}


def _content(body: bytes) -> bytes | AsyncIterator[bytes] | None:
    if len(body) <= PIECE_BYTES:
        return body or None

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]

    return pieces()
