"""W3C Trace Context: read from a request, stored with its messages and passed on, with tracing on or off.

A context is one text, as in `half.traceparent`: `traceparent`, then a space and `tracestate` if there is one. A
malformed header is ignored (https://www.w3.org/TR/trace-context/).
"""

import re
from collections.abc import Iterable
from contextvars import ContextVar

# The context of the current request or delivery; log lines name it.
current: ContextVar[str | None] = ContextVar("halfnote_trace_context", default=None)

_parent = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<ids>[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?"
).fullmatch
_member = re.compile(
    r"([a-z0-9][a-z0-9_*/@-]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)

MEMBERS_MAX = 32
# Characters of `tracestate` that are passed on. Long members are dropped first, then the last ones (§3.3.1.5).
STATE_MAX, LONG_MEMBER = 512, 128
_PARENT_LENGTH = 55


def incoming(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the context in a request's headers, or None."""
    parent: bytes | None = None
    states: list[bytes] | None = None
    for name, value in headers:
        if name == b"traceparent":
            if parent is not None:
                return None
            parent = value
        elif name == b"tracestate":
            states = [*(states or ()), value]
    if parent is None:
        return None
    return context_of(parent.decode("latin-1"), b",".join(states).decode("latin-1") if states else None)


def context_of(parent: str, state: str | None = None) -> str | None:
    """Return the context of the two headers' values; None if `traceparent` is malformed."""
    found = _parent(parent)
    if found is None:
        return None
    version, flags = found["version"], found["flags"]
    if version == "00":
        if found["more"] is not None:
            return None
    else:
        # Only the sampled flag of a later version is known. Version 00 is passed on.
        flags = f"{int(flags, 16) & 1:02x}"
    valid_state = _state(state) if state is not None else None
    return f"00-{found['ids']}-{flags} {valid_state}" if valid_state else f"00-{found['ids']}-{flags}"


def trace_headers(context: str | None) -> dict[str, str]:
    """Return the headers that carry a context; none for None."""
    if context is None:
        return {}
    parent, _, state = context.partition(" ")
    return {"traceparent": parent, "tracestate": state} if state else {"traceparent": parent}


def is_sampled(context: str | None) -> bool:
    """Return whether the context's sampled flag is set."""
    return context is not None and context[_PARENT_LENGTH - 1] in "13579bdf"


def log_fields(context: str | None) -> dict[str, str]:
    """Return the fields of a context in a log line."""
    return {} if context is None else {"trace_id": context[3:35], "span_id": context[36:52]}


def _state(text: str) -> str | None:
    """Return `tracestate` in one line and shortened to STATE_MAX; None if it is malformed."""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    keys = {found[1] for member in members if (found := _member.fullmatch(member))}
    if len(keys) != len(members) or len(members) > MEMBERS_MAX:
        return None
    if _length(members) > STATE_MAX:
        members = [member for member in members if len(member) <= LONG_MEMBER]
    while _length(members) > STATE_MAX:
        members.pop()
    return ",".join(members)


def _length(members: list[str]) -> int:
    return sum(len(member) + 1 for member in members) - 1
