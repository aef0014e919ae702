"""Make signed checks, pings and deliveries like those of Halfnote: headers and a body, for your own endpoint."""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote
from uuid import UUID

from halfnote.message import Message
from halfnote.signatures import sign

# Only for tests: this secret is public.
SECRET = "whsec_" + base64.b64encode(b"for tests alone, known to everybody").decode()

Signed = tuple[dict[str, str], bytes]
_JSON = {"content-type": "application/json"}
_PRINTABLE = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"


def signed_check(
    transaction_id: UUID,
    group: str,
    *,
    secret: str = SECRET,
    check: int = 1,
    max_checks: int = 15,
    born_at: datetime | None = None,
    context: Any = None,
    messages: Sequence[Mapping[str, Any]] = (),
    at: float | None = None,
) -> Signed:
    """Return a check. `at`: the time of its signature, in seconds since 1970 (default: now)."""
    asked = {
        "type": "halfnote.check",
        "transaction_id": str(transaction_id),
        "producer_group": group,
        "check": check,
        "max_checks": max_checks,
        "born_at": _time(born_at or datetime.now(timezone.utc)),
        "context": context,
        "messages": list(messages),
    }
    body = json.dumps(asked).encode()
    return {**_JSON, **sign(secret, f"chk_{transaction_id}-{check}", body, at)}, body


def signed_ping(group: str, *, secret: str = SECRET, at: float | None = None) -> Signed:
    """Return a ping of a producer group's check URL."""
    body = json.dumps({"type": "halfnote.ping", "producer_group": group, "at": _time(datetime.now(timezone.utc))})
    return {**_JSON, **sign(secret, "ping_1", body.encode(), at)}, body.encode()


def signed_delivery(message: Message, *, secret: str = SECRET, at: float | None = None) -> Signed:
    """Return a delivery of a message, in CloudEvents' binary mode."""
    found = {
        "ce-specversion": "1.0",
        "ce-id": message.message_id,
        "ce-source": f"/producer-groups/{quote(message.group or '', safe='')}",
        "ce-type": message.topic,
        "ce-subject": message.key,
        "ce-time": None if message.committed_at is None else _time(message.committed_at),
        "halfnote-transaction": message.transaction_id,
        "halfnote-offset": None if message.offset is None else str(message.offset),
        "halfnote-attempt": str(message.attempt),
        "halfnote-subscription": message.subscription,
        "halfnote-tag": message.tag,
        "halfnote-replay": message.replay,
        **{f"halfnote-h-{name}": value for name, value in message.headers.items()},
    }
    headers = {name: quote(value, safe=_PRINTABLE) for name, value in found.items() if value is not None}
    headers["content-type"] = message.content_type
    trace = {"traceparent": message.traceparent, "tracestate": message.tracestate}
    headers.update({name: value for name, value in trace.items() if value is not None})
    return {**headers, **sign(secret, message.message_id, message.body, at)}, message.body


def _time(at: datetime) -> str:
    return at.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
