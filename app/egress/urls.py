"""Check the URLs of check endpoints and webhooks, as far as possible before a connection."""

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from app.egress.network_policy import NetworkPolicy

LONGEST_URL = 2048
PORTS = {"http": 80, "https": 443}


def url_fault(url: str, network_policy: NetworkPolicy) -> str | None:
    """Return what is wrong with a callback URL, or None. A host name is checked only when it is resolved."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError:
        return "is not a URL"
    if len(url) > LONGEST_URL or not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        return f"is longer than {LONGEST_URL} characters or holds spaces, control or non-ASCII characters"
    if parts.scheme not in PORTS or not host or port == 0:
        return "must begin with http:// or https:// and name a host"
    if parts.username or parts.password or parts.fragment:
        return "must not hold a user, a password or a fragment"
    if "%" in host and ":" not in host:
        # A proxy may decode it to an address. In IPv6 the sign begins a zone.
        return "must not percent-encode its host"
    fault = network_policy.plain_fault() if parts.scheme == "http" else None
    return fault or network_policy.port_fault(port or PORTS[parts.scheme]) or literal_fault(host, network_policy)


def same_origin(one: str, other: str) -> bool:
    """Return whether two URLs have the same scheme, host and port."""
    first, second = urlsplit(one), urlsplit(other)
    return (first.scheme, first.hostname, _port(first)) == (second.scheme, second.hostname, _port(second))


# Python's int() would also accept signs, underscores and digits of other scripts.
_is_number = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*", re.ASCII).fullmatch


def _port(parts: SplitResult) -> int | None:
    return parts.port or PORTS.get(parts.scheme)


def without_query(url: str) -> str:
    """Return a URL for logs, metrics and records: without its query, which may hold a token."""
    return url.partition("?")[0]


def literal_fault(host: str, network_policy: NetworkPolicy) -> str | None:
    """Return what is wrong with a host that is a numeric address, or None.

    A host that ends in a number is an IPv4 address (WHATWG URL, "ends in a number checker"). Only the canonical form is
    accepted: resolvers disagree about `127.1`, `0x7f.1` and `0177.0.0.1`.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        last = host.rstrip(".").rpartition(".")[2]
        return "names a host that is not a canonical IPv4 address" if _is_number(last) else None
    fault = network_policy.address_fault(host)
    return None if fault is None else f"leads to an address that {fault}"
