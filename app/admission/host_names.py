"""The syntax of a `Host` header and of an origin: the host's name without anything beside it."""

import re

# RFC 3986 also permits percent-encoding and punctuation in a name; no host is called that.
_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z._~-]+))(?::[0-9]{0,5})?")
_ORIGIN = re.compile(rb"https?://(.*)", re.IGNORECASE)


def host_name(host: bytes) -> str | None:
    """Return the name or address of `host[:port]` in lower case, or None if it has another form."""
    found = _HOST.fullmatch(host)
    return None if found is None else (found[1] or found[2]).decode().lower()


def origin_name(origin: bytes) -> str | None:
    """Return the name or address of an http or https origin in lower case, or None if it is another."""
    found = _ORIGIN.fullmatch(origin)
    return None if found is None else host_name(found[1])
