"""The egress policy: which addresses and ports this service may connect to, and whether TLS is required.

The checked address is the connected one, so a name that resolves differently the second time (DNS rebinding) does not
help an attacker. Brokers' clients get a checked address instead of the name.
"""

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from app.config import Settings
from app.egress.denied_addresses import Network, denied_reason
from app.egress.resolver import Lookup, Resolver, system_addresses

C = TypeVar("C", bound=ssl.SSLContext)

NO_PORTS: frozenset[int] = frozenset()


class AddressRefused(OSError):
    """The address, the port or a connection without TLS is not allowed; the text names the setting."""


class NamedTls(ssl.SSLContext):
    """TLS that verifies the server's `name`, for clients that connect by address."""

    name: str

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Send the name (SNI), and check the certificate against it."""
        return super().wrap_bio(incoming, outgoing, server_side, self.name, session)


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """The rules. `opened` overrides the list of denied networks, and `closed` extends it.

    `ca_file`, `cert_file` and `key_file` are PEM: further CAs to trust, and this service's certificate. `proxy`: the
    URL of the proxy for HTTP callbacks. `own_ports` of a kind of broker are its usual ports.
    """

    opened: tuple[Network, ...] = ()
    closed: tuple[Network, ...] = ()
    denied_ports: frozenset[int] = NO_PORTS
    encrypted_only: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    proxy: str | None = None
    lookup: Lookup = system_addresses
    resolver: Resolver = field(init=False)
    tls: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolver", Resolver(self.lookup))
        object.__setattr__(self, "tls", self._tls(ssl.SSLContext))

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the rules of the settings."""
        return cls(
            opened=tuple(map(ipaddress.ip_network, settings.opened_networks)),
            closed=tuple(map(ipaddress.ip_network, settings.deny_networks)),
            denied_ports=frozenset(settings.deny_ports),
            encrypted_only=settings.https_only,
            ca_file=settings.tls_ca_file,
            cert_file=settings.tls_cert_file,
            key_file=settings.tls_key_file,
            proxy=settings.proxy_url.get_secret_value() if settings.proxy_url else None,
        )

    def address_fault(self, address: str) -> str | None:
        """Return what is wrong with a numeric address, or None."""
        found = denied_reason(address, self.opened, self.closed)
        return None if found is None else f"is {found}, and HALFNOTE_ALLOW_NETWORKS does not open it"

    def port_fault(self, port: int, own_ports: frozenset[int] = NO_PORTS) -> str | None:
        """Return what is wrong with a port, or None."""
        if port in self.denied_ports - own_ports:
            return f"names port {port}, which HALFNOTE_DENY_PORTS keeps"
        return None

    def plain_fault(self) -> str | None:
        """Return what is wrong with a connection without TLS, or None."""
        return "is without TLS, which HALFNOTE_HTTPS_ONLY demands" if self.encrypted_only else None

    async def resolved(
        self, host: str, port: int, *, own_ports: frozenset[int] = NO_PORTS, encrypted: bool
    ) -> list[str]:
        """Return the allowed addresses of a broker in the resolver's order; at least one.

        The name is looked up for each connection, because a failover may have moved it. Raises AddressRefused if none
        of its addresses is allowed, NoAddress if it has none.
        """
        fault = self.port_fault(port, own_ports) or (None if encrypted else self.plain_fault())
        if fault is not None:
            raise AddressRefused(f"{host}:{port} {fault}")
        addresses = await self.resolver.addresses(host, fresh=True)
        faults = {address: self.address_fault(address) for address in addresses}
        good = [address for address in addresses if faults[address] is None]
        if not good:
            reasons = ", ".join(f"{address} {fault}" for address, fault in faults.items())
            raise AddressRefused(reasons if list(faults) == [host] else f"{host}: {reasons or 'has no address'}")
        return good

    def named_tls(self, name: str) -> NamedTls:
        """Return TLS that verifies this name, for clients that connect by address."""
        context = self._tls(NamedTls)
        context.name = name
        return context

    def _tls(self, kind: type[C]) -> C:
        """Return a client's TLS: the system's CAs, the configured CAs and certificate. Raises OSError."""
        context = kind(ssl.PROTOCOL_TLS_CLIENT)
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if self.ca_file is not None:
            context.load_verify_locations(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


# The brokers' usual ports, which HALFNOTE_DENY_PORTS does not deny to their own kind.
OWN_PORTS = {
    "rabbitmq": frozenset({5672, 5671}),
    "nats": frozenset({4222}),
    "kafka": frozenset({9092}),
    "redis": frozenset({6379}),
}
