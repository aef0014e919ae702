"""Make connections to receivers: resolve the name, check each address, connect, TLS, and the proxy.

An address is checked after it was resolved and before the connection to it, so DNS rebinding cannot lead elsewhere.
"""

import asyncio
import os
import socket
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast
from urllib.parse import unquote, urlsplit

from aiohappyeyeballs import AddrInfoType, start_connection

from app.egress.http_connection import HEADER_BYTES, HttpConnection
from app.egress.network_policy import AddressRefused, NetworkPolicy
from app.egress.resolver import NoAddress
from app.egress.urls import PORTS

# The time after which the next address is tried as well (RFC 8305, "Connection Attempt Delay").
NEXT_ADDRESS_S = 0.25


class NotConnected(OSError):
    """There is no connection: no address, no server at the address, or the proxy did not open a tunnel."""


class Origin(NamedTuple):
    """A receiver's scheme, host and port: requests to it share connections."""

    encrypted: bool
    host: str
    port: int

    @property
    def authority(self) -> str:
        """Return `host:port`, the port always, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Proxy:
    """HALFNOTE_PROXY_URL. `authorization`: the value of `proxy-authorization`, or None."""

    host: str
    port: int
    authorization: str | None

    @classmethod
    def of(cls, url: str) -> Self:
        """Return the proxy of http://[user:password@]host:port."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        authorization = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = "Basic " + b64encode(pair.encode()).decode()
        return cls(parts.hostname, parts.port or PORTS["http"], authorization)

    @property
    def header(self) -> str:
        """Return the header line that authorizes this service, or an empty text."""
        return f"proxy-authorization: {self.authorization}\r\n" if self.authorization else ""


class Connector:
    """Connects to origins by the rules of a network policy."""

    def __init__(self, network_policy: NetworkPolicy) -> None:
        self._network_policy = network_policy
        self.proxy = None if network_policy.proxy is None else Proxy.of(network_policy.proxy)

    async def connect(self, origin: Origin, protocol: Callable[[], HttpConnection]) -> HttpConnection:
        """Connect to an origin, or to the proxy, which then connects to the origin.

        Raises OSError: AddressRefused, NotConnected, or the error of a failed TLS handshake.
        """
        if self.proxy is not None:
            return await self._connect_by_proxy(self.proxy, origin, protocol)
        addresses = self._allowed(await self._addresses(origin.host), origin)
        connected = await _connected_socket(addresses, origin)
        tls = self._network_policy.tls if origin.encrypted else None
        name = origin.host.rstrip(".") if origin.encrypted else None
        _, connection = await asyncio.get_running_loop().create_connection(
            protocol, sock=connected, ssl=tls, server_hostname=name
        )
        return connection

    def _allowed(self, addresses: Sequence[str], origin: Origin) -> list[str]:
        """Return the allowed addresses. Raises AddressRefused if there is none."""
        port_fault = self._network_policy.port_fault(origin.port)
        if port_fault is not None:
            raise AddressRefused(f"{origin.authority} {port_fault}")
        faults = {address: self._network_policy.address_fault(address) for address in addresses}
        allowed = [address for address, fault in faults.items() if fault is None]
        if not allowed:
            raise AddressRefused(
                ", ".join(f"{address} {fault}" for address, fault in faults.items()) or f"{origin.host} has no address"
            )
        return allowed

    async def _addresses(self, host: str) -> Sequence[str]:
        """Return the addresses of a host. Raises NotConnected."""
        try:
            return await self._network_policy.resolver.addresses(host)
        except NoAddress as failure:
            raise NotConnected(str(failure)) from failure

    async def _connect_by_proxy(
        self, proxy: Proxy, origin: Origin, protocol: Callable[[], HttpConnection]
    ) -> HttpConnection:
        """Connect to the proxy, whose address the operator set; for TLS by a tunnel (RFC 9110 §9.3.6)."""
        loop = asyncio.get_running_loop()
        at = Origin(False, proxy.host, proxy.port)
        connected = await _connected_socket(await self._addresses(proxy.host), at)
        if not origin.encrypted:
            _, connection = await loop.create_connection(protocol, sock=connected)
            return connection
        transport, tunnel = await loop.create_connection(_Tunnel, sock=connected)
        try:
            transport.write(
                f"CONNECT {origin.authority} HTTP/1.1\r\nhost: {origin.authority}\r\n{proxy.header}\r\n".encode()
            )
            status = await tunnel.status
            if not 200 <= status < 300:
                raise NotConnected(f"HALFNOTE_PROXY_URL answered {status}")
            connection = protocol()
            inner = await loop.start_tls(
                transport, connection, self._network_policy.tls, server_hostname=origin.host.rstrip(".")
            )
        except BaseException:
            transport.abort()
            raise
        assert inner is not None
        connection.attach(inner)
        return connection


class _Tunnel(asyncio.Protocol):
    """Reads a proxy's answer to CONNECT; after it the connection speaks TLS."""

    def __init__(self) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self.status.done():
            return
        if b"\r\n\r\n" in self._received:
            self._judge()
        elif len(self._received) > HEADER_BYTES:
            self._refuse(f"HALFNOTE_PROXY_URL answered with more than {HEADER_BYTES} bytes of headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._refuse("HALFNOTE_PROXY_URL closed the connection")

    def _judge(self) -> None:
        version, _, rest = self._received.partition(b" ")
        code = rest[:3]
        if not version.startswith(b"HTTP/1.") or not code.isdigit() or len(code) < 3:
            self._refuse("HALFNOTE_PROXY_URL did not answer with HTTP/1.1")
            return
        # A receiver of TLS waits for the client, so nothing follows the proxy's answer.
        if code.startswith(b"2") and not self._received.endswith(b"\r\n\r\n"):
            self._refuse("HALFNOTE_PROXY_URL sent data before TLS began")
            return
        self.status.set_result(int(code))

    def _refuse(self, reason: str) -> None:
        if not self.status.done():
            self.status.set_exception(NotConnected(reason))
            # The caller may have left.
            self.status.exception()


async def _connected_socket(addresses: Sequence[str], origin: Origin) -> socket.socket:
    """Connect to the first address that answers (RFC 8305, "Happy Eyeballs"). Raises OSError."""
    try:
        return await start_connection(
            [_address_info(address, origin.port) for address in addresses],
            happy_eyeballs_delay=NEXT_ADDRESS_S,
            interleave=1,
            loop=asyncio.get_running_loop(),
        )
    except OSError as error:
        raise NotConnected(f"no connection to {origin.authority}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _address_info(address: str, port: int) -> AddrInfoType:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    at: tuple[Any, ...] = (address, port, 0, 0) if family == socket.AF_INET6 else (address, port)
    return cast(AddrInfoType, (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", at))
