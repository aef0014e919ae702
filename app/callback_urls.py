"""What may be a check URL or a webhook's URL, as far as that can be told before it is dialled."""

import ipaddress
from urllib.parse import SplitResult, urlsplit

from app.dialling import Dialling

LONGEST_URL = 2048
PORTS = {"http": 80, "https": 443}


def url_fault(url: str, dialling: Dialling) -> str | None:
    """Say what is wrong with a callback URL, or None. A host name is judged only when it is dialled."""
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
    fault = dialling.plain_fault() if parts.scheme == "http" else None
    return fault or dialling.port_fault(port or PORTS[parts.scheme]) or literal_fault(host, dialling)


def same_origin(one: str, other: str) -> bool:
    """Tell whether two URLs lead to the same host and port by the same scheme."""
    first, second = urlsplit(one), urlsplit(other)
    return (first.scheme, first.hostname, _port(first)) == (second.scheme, second.hostname, _port(second))


def _port(parts: SplitResult) -> int | None:
    return parts.port or PORTS.get(parts.scheme)


def without_query(url: str) -> str:
    """Return a URL as it is logged, measured and recorded: its query may hold a token."""
    return url.partition("?")[0]


def literal_fault(host: str, dialling: Dialling) -> str | None:
    """Say what is wrong with a host that is a numeric address, or None."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    fault = dialling.address_fault(host)
    return None if fault is None else f"leads to an address that {fault}"
