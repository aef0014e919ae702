"""The IP addresses that callbacks and brokers must not have unless a setting opens their network. Pure.

An explicit list, from IANA's registries of special-purpose addresses (RFC 6890 and its updates) and from clouds'
metadata services: `ipaddress.is_global` misses several. In IPv6 everything but global unicast (2000::/3) is denied.
"""

import ipaddress
from collections.abc import Callable, Sequence
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# These services hand out the machine's credentials. Only the address itself opens one, never a network around it:
# 100.64.0.0/10 and fd00::/8 are the pods' networks of some clusters.
METADATA: tuple[tuple[str, str], ...] = (
    ("169.254.169.254", "AWS, Azure, Google, OpenStack, Oracle, DigitalOcean, Hetzner"),
    ("169.254.170.2", "AWS ECS"),
    ("169.254.170.23", "AWS EKS"),
    ("169.254.0.23", "Tencent"),
    ("169.254.42.42", "Scaleway"),
    ("100.100.100.200", "Alibaba"),
    ("168.63.129.16", "Azure"),
    ("192.0.0.192", "Oracle"),
    ("fd00:ec2::254", "AWS"),
    ("fd00:ec2::23", "AWS EKS"),
    ("fd20:ce::254", "Google"),
    ("fd00:42::42", "Scaleway"),
    ("fd00:a9fe:a9fe::254", "Azure, Oracle, OpenStack"),
    ("fe80::a9fe:a9fe", "OpenStack"),
)

# The first match gives the name, so the narrower network comes first.
DENIED: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "shared by carriers (CGNAT)"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "for the IETF's protocols"),
    ("192.0.2.0/24", "for documentation"),
    ("192.31.196.0/24", "AS112's, which answers for private names"),
    ("192.52.193.0/24", "a multicast relay (AMT)"),
    ("192.88.99.0/24", "a 6to4 relay"),
    ("192.168.0.0/16", "private"),
    ("192.175.48.0/24", "AS112's, which answers for private names"),
    ("198.18.0.0/15", "for benchmarks"),
    ("198.51.100.0/24", "for documentation"),
    ("203.0.113.0/24", "for documentation"),
    ("224.0.0.0/4", "multicast"),
    ("255.255.255.255/32", "broadcast"),
    ("240.0.0.0/4", "reserved"),
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("::/96", "IPv4-compatible"),
    ("::ffff:0:0/96", "IPv4-mapped"),
    ("::ffff:0:0:0/96", "IPv4-translated (SIIT)"),
    ("64:ff9b::/96", "IPv4-translated (NAT64)"),
    ("64:ff9b:1::/48", "IPv4-translated (local NAT64)"),
    ("100::/64", "for discarding"),
    ("100:0:0:1::/64", "for nothing (dummy prefix)"),
    ("2001::/32", "Teredo"),
    ("2001:2::/48", "for benchmarks"),
    ("2001:10::/28", "an ORCHID"),
    ("2001:20::/28", "an ORCHIDv2"),
    ("2001::/23", "for the IETF's protocols"),
    ("2001:db8::/32", "for documentation"),
    ("2002::/16", "6to4"),
    ("2620:4f:8000::/48", "AS112's, which answers for private names"),
    ("3ffe::/16", "of the 6bone, which is over"),
    ("3fff::/20", "for documentation"),
    ("5f00::/16", "an SRv6 segment"),
    ("fc00::/7", "unique local (private)"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "site-local"),
    ("ff00::/8", "multicast"),
    ("::/3", "no global unicast address"),
    ("4000::/2", "no global unicast address"),
    ("8000::/1", "no global unicast address"),
)

_LOW = 0xFFFF_FFFF
_IPV4 = ipaddress.IPv4Address
# IPv6 networks whose addresses embed an IPv4 address. In a local NAT64 prefix it is the last 32 bits, as with the usual
# length /96 (RFC 6052 has other lengths, and an address does not show which).
_INNER: tuple[tuple[ipaddress.IPv6Network, Callable[[int], Sequence[int]]], ...] = (
    (ipaddress.IPv6Network("::/96"), lambda bits: [bits & _LOW]),
    (ipaddress.IPv6Network("::ffff:0:0/96"), lambda bits: [bits & _LOW]),
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), lambda bits: [bits & _LOW]),
    (ipaddress.IPv6Network("64:ff9b::/96"), lambda bits: [bits & _LOW]),
    (ipaddress.IPv6Network("64:ff9b:1::/48"), lambda bits: [bits & _LOW]),
    (ipaddress.IPv6Network("2002::/16"), lambda bits: [bits >> 80 & _LOW]),
    # The server, and the client behind a NAT with inverted bits (RFC 4380).
    (ipaddress.IPv6Network("2001::/32"), lambda bits: [bits >> 64 & _LOW, ~bits & _LOW]),
)
# ISATAP's interface identifiers (RFC 5214) may follow any prefix.
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)

_metadata = {ipaddress.ip_address(address): clouds for address, clouds in METADATA}
_denied: tuple[tuple[Network, str], ...] = tuple((ipaddress.ip_network(network), name) for network, name in DENIED)


def denied_reason(address: str, opened: Sequence[Network], closed: Sequence[Network] = ()) -> str | None:
    """Return why an address is denied ("private", "loopback" …), or None if it is allowed.

    `opened` networks override the list and the `closed` networks, which extend it. An address that embeds an IPv4
    address (mapped, 6to4, NAT64 …) is allowed only if both are. Raises ValueError for a text that is not an address.
    """
    whole = ipaddress.ip_address(address.partition("%")[0])
    outer = _denial(whole, opened, closed)
    if outer is not None:
        return outer
    for inner in inner_addresses(whole):
        found = _denial(inner, opened, closed)
        if found is not None:
            return f"{found} by the {inner} within"
    return None


def inner_addresses(address: Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses within an IPv6 address: none, one, or Teredo's two."""
    if isinstance(address, ipaddress.IPv4Address) or address in _NONE_WITHIN:
        return []
    bits = int(address)
    found = [_IPV4(inner) for network, inners in _INNER if address in network for inner in inners(bits)]
    if bits >> 32 & _LOW in _ISATAP:
        found.append(_IPV4(bits & _LOW))
    return found


# They lie in ::/96, but mean no IPv4 address.
_NONE_WITHIN = (ipaddress.IPv6Address("::"), ipaddress.IPv6Address("::1"))


def _denial(address: Address, opened: Sequence[Network], closed: Sequence[Network]) -> str | None:
    clouds = _metadata.get(address)
    if clouds is not None:
        named = any(network.num_addresses == 1 and address in network for network in opened)
        return None if named else f"a cloud's metadata service ({clouds})"
    if any(address in network for network in opened):
        return None
    for network, name in _denied:
        if address in network:
            return name
    return "in HALFNOTE_DENY_NETWORKS" if any(address in network for network in closed) else None
