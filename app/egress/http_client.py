"""The HTTP client of check-back and webhooks: pooled HTTP/1.1, allowed addresses only, bounded answers.

It exists for the cost of a call: a general client takes several times as long for one (decision 0034).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import NamedTuple
from urllib.parse import urlsplit

from app.egress.http_connection import Answer, ConnectionLost, HttpConnection, InvalidAnswer
from app.egress.http_connector import Connector, NotConnected, Origin
from app.egress.network_policy import AddressRefused, NetworkPolicy
from app.egress.reply import REPLY_LIMIT_BYTES, Reply
from app.egress.urls import PORTS, url_fault

try:
    import resource
except ImportError:  # Windows has none, and no such limit
    resource = None  # type: ignore[assignment]

# Less than the 5 s after which many servers close an idle connection, so that few requests race the close.
KEEPALIVE_S = 4.0
AGENT = "halfnote"
# A reused connection that is lost within this time met the close of an idle one, and the request is sent again. A
# receiver that worked on it for longer may have failed because of it.
AGAIN_WITHIN_S = 1.0
# Connecting gets a little less than the whole time, so that the error names what took too long.
CONNECT_PART = 0.9
# URLs whose parts are remembered.
TARGETS_MAX = 4096

# The headers of every request, unless the caller sets them. People see the answer unchanged, so it must not be
# compressed; a small one may also unpack to gigabytes.
_DEFAULTS = {"user-agent": AGENT, "accept-encoding": "identity"}


class Unreachable(Exception):
    """No connection was made, so nothing was sent. The text says why."""


class Target(NamedTuple):
    """The parts of a URL that a request needs: whose connections it uses, and the first lines of its head."""

    origin: Origin
    first_lines: str


class EgressClient:
    """Makes calls to check URLs and webhooks. Without a limit of its own: each group and each subscription has one."""

    def __init__(self, network_policy: NetworkPolicy, reply_limit: int = REPLY_LIMIT_BYTES) -> None:
        self._network_policy = network_policy
        self._reply_limit = reply_limit
        self._connector = Connector(network_policy)
        self._targets: dict[tuple[str, str], Target] = {}
        self._idle: dict[Origin, list[HttpConnection]] = {}
        self._open: dict[HttpConnection, Origin] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def call(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        method: str = "POST",
        reply_limit: int | None = None,
    ) -> Reply:
        """Send a request and read at most `reply_limit` bytes of the answer (None: the client's), within `timeout_s`.

        Redirects are not followed. The names of `headers` are in lower case. Failures are outcomes, not exceptions.
        """
        started = perf_counter()
        try:
            limit = reply_limit or self._reply_limit
            status, answered, content, truncated = await self._exchange(method, url, body, headers, timeout_s, limit)
        except Unreachable as failure:
            return _failed(
                str(failure), started, timed_out=isinstance(failure.__cause__, TimeoutError), unreachable=True
            )
        except TimeoutError:
            return _failed(f"no whole answer within {timeout_s:g} s", started, timed_out=True)
        except (OSError, ValueError) as failure:
            return _failed(_text(failure), started)
        return Reply(status, answered, content, truncated, None, _ms_since(started))

    def close(self) -> None:
        """Close all connections. Calls that wait for an answer fail."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.fail(ConnectionAbortedError("the client was closed"))

    async def _exchange(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float, limit: int
    ) -> Answer:
        began = asyncio.get_running_loop().time()
        target = self._targets.get((method, url)) or self._target(method, url)
        head = _head(target.first_lines, headers, len(body))
        idle = self._take_idle(target.origin)
        if idle is None:
            connection = await self._connect(target.origin, began, timeout_s)
        else:
            try:
                return await idle.exchange(head, body, began + timeout_s, limit)
            except ConnectionLost as lost:
                # The receiver closed the idle connection while the request was on its way. A receiver takes deliveries
                # and checks at least once, so sending the request again is safe.
                if lost.answered or asyncio.get_running_loop().time() - began > AGAIN_WITHIN_S:
                    raise
                connection = await self._connect_again(lost, target.origin, began, timeout_s)
        return await connection.exchange(head, body, began + timeout_s, limit)

    async def _connect_again(
        self, lost: ConnectionLost, origin: Origin, began: float, timeout_s: float
    ) -> HttpConnection:
        """Connect for a request that was sent once. Raises NotConnected, because Unreachable says that none was."""
        try:
            return await self._connect(origin, began, timeout_s)
        except Unreachable as failure:
            raise NotConnected(f"{lost}; then {failure}") from failure

    async def _connect(self, origin: Origin, began: float, timeout_s: float) -> HttpConnection:
        try:
            async with asyncio.timeout_at(began + timeout_s * CONNECT_PART):
                connection = await self._connector.connect(origin, self._new_connection)
        except TimeoutError as failure:
            raise Unreachable(f"no connection within {timeout_s * CONNECT_PART:g} s") from failure
        except (OSError, ValueError) as failure:
            raise Unreachable(_text(failure)) from failure
        if not connection.closed:
            self._open[connection] = origin
        return connection

    def _new_connection(self) -> HttpConnection:
        return HttpConnection(self._keep_idle, self._forget)

    def _target(self, method: str, url: str) -> Target:
        """Return the parts of a URL, and remember them. Raises Unreachable if the policy refuses it."""
        fault = url_fault(url, self._network_policy)
        if fault is not None:
            raise Unreachable(f"the URL {fault}")
        parts = urlsplit(url)
        assert parts.hostname is not None
        origin = Origin(parts.scheme == "https", parts.hostname, parts.port or PORTS[parts.scheme])
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        authority = origin.authority if origin.port != PORTS[parts.scheme] else origin.authority.rpartition(":")[0]
        proxy = self._connector.proxy
        to_proxy = proxy is not None and not origin.encrypted
        first_lines = f"{method} {f'http://{authority}' if to_proxy else ''}{path} HTTP/1.1\r\nhost: {authority}\r\n"
        if proxy is not None and to_proxy:
            first_lines += proxy.header
        if len(self._targets) >= TARGETS_MAX:
            self._targets.clear()
        target = self._targets[method, url] = Target(origin, first_lines)
        return target

    def _take_idle(self, origin: Origin) -> HttpConnection | None:
        """Return the connection that was used last: the others become old enough to close."""
        idle = self._idle.get(origin)
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_S
        while idle:
            connection = idle.pop()
            if not connection.closed and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    def _keep_idle(self, connection: HttpConnection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(self._open[connection], []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEPALIVE_S, self._close_old)

    def _close_old(self) -> None:
        """Close what has been idle for KEEPALIVE_S, and look again if connections are left."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEPALIVE_S
        for origin, connections in list(self._idle.items()):
            young = [each for each in connections if not each.closed and each.idle_since > oldest]
            for connection in set(connections).difference(young):
                connection.close()
            if young:
                self._idle[origin] = young
            else:
                del self._idle[origin]
        self._sweep = loop.call_later(KEEPALIVE_S, self._close_old) if self._idle else None

    def _forget(self, connection: HttpConnection) -> None:
        self._open.pop(connection, None)


@asynccontextmanager
async def callback_client(
    network_policy: NetworkPolicy, reply_limit: int = REPLY_LIMIT_BYTES
) -> AsyncIterator[EgressClient]:
    """Yield a client that connects to allowed addresses only, without redirects and the environment's proxies."""
    allow_many_sockets()
    client = EgressClient(network_policy, reply_limit)
    try:
        yield client
    finally:
        client.close()


def allow_many_sockets() -> None:
    """Raise this process's limit of open files, sockets included, to the hard limit: a common default is 1,024."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems report a hard limit that they do not grant.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _head(first_lines: str, headers: Mapping[str, str], length: int) -> bytes:
    """Return the head of a request. Raises ValueError if a header holds a line break or NUL."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    lines += [f"{name}: {value}\r\n" for name, value in _DEFAULTS.items() if name not in headers]
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\x00" in text:
        raise ValueError("a header holds a line break or NUL")
    return f"{first_lines}{text}content-length: {length}\r\n\r\n".encode()


def _text(failure: Exception) -> str:
    """Return the text of a failure for people; those of libraries are clear only with their class."""
    own = isinstance(failure, AddressRefused | NotConnected | ConnectionLost | InvalidAnswer)
    return (str(failure) if own else f"{type(failure).__name__}: {failure}")[:500]


def _failed(error: str, started: float, *, timed_out: bool = False, unreachable: bool = False) -> Reply:
    return Reply(None, {}, b"", False, error, _ms_since(started), timed_out, unreachable)


def _ms_since(started: float) -> int:
    return round((perf_counter() - started) * 1000)
