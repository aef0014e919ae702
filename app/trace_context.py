"""W3C Trace Context: taken in with a request, kept with its messages and passed on, whether we trace or not.

A context is one text, as `half.traceparent` keeps it: `traceparent`, and after a space `tracestate` if there is one.
What is malformed is dropped, as if it had not come (https://www.w3.org/TR/trace-context/).
"""

import re
from collections.abc import Iterable
from contextvars import ContextVar

# The context of the request or delivery that this code runs for; log lines name it.
current: ContextVar[str | None] = ContextVar("halfnote_trace_context", default=None)

_parent = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<ids>[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?"
).fullmatch
_member = re.compile(
    r"([a-z0-9][a-z0-9_*/@-]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)

MEMBERS_MAX = 32
# What must be passed on at least; of more, long members go first and then the last ones (§3.3.1.5).
STATE_MAX, LONG_MEMBER = 512, 128
_PARENT_LENGTH = 55


def incoming(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the context that a request's headers name, or None."""
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
    """Return the context of both headers' values, None if `traceparent` is malformed."""
    found = _parent(parent)
    if found is None:
        return None
    version, flags = found["version"], found["flags"]
    if version == "00":
        if found["more"] is not None:
            return None
    else:
        # Of a later version we know the sampled flag alone, and speak our own.
        flags = f"{int(flags, 16) & 1:02x}"
    kept = _state(state) if state is not None else None
    return f"00-{found['ids']}-{flags} {kept}" if kept else f"00-{found['ids']}-{flags}"


def trace_headers(context: str | None) -> dict[str, str]:
    """Return the headers that pass a context on; empty without one."""
    if context is None:
        return {}
    parent, _, state = context.partition(" ")
    return {"traceparent": parent, "tracestate": state} if state else {"traceparent": parent}


def is_sampled(context: str | None) -> bool:
    """Tell whether a context asks that what belongs to it be recorded."""
    return context is not None and context[_PARENT_LENGTH - 1] in "13579bdf"


def log_fields(context: str | None) -> dict[str, str]:
    """Return what a log line says of a context."""
    return {} if context is None else {"trace_id": context[3:35], "span_id": context[36:52]}


def _state(text: str) -> str | None:
    """Return `tracestate` in one line and not too long, None if it is malformed."""
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
