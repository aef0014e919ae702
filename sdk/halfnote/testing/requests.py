"""Validate requests like the service: report the first fault of a request, with its field."""

import base64
import json
import re
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from halfnote.ids import id_time
from halfnote.testing.problems import Refusal, invalid

MESSAGE = {"topic", "key", "tag", "headers", "body", "body_base64", "content_type", "deliver_after_s"}
HALF = {"producer_group", "messages", "transaction_id", "context", "check"}
PLAIN = {"producer_group", "messages", "transaction_id"}
END = {"transaction_id", "producer_group", "verdict", "from_check", "reason"}
MESSAGES_MAX, TRANSACTIONS_MAX, NAME_MAX, CONTEXT_MAX_BYTES, ID_SKEW_S = 100, 500, 255, 4096, 300

_control = re.compile(r"[\x00-\x1f\x7f]").search


def read(content: bytes) -> Mapping[str, Any]:
    """Return a request's JSON object. Raises Refusal."""
    try:
        found = json.loads(content)
    except ValueError:
        raise Refusal(400, "malformed-json", "The body is not JSON.") from None
    if not isinstance(found, dict):
        raise invalid("(body)", "an object is expected")
    return found


def check_half(request: Mapping[str, Any], fields: set[str]) -> UUID | None:
    """Return the id that the producer of a half or of plain messages chose. Raises Refusal."""
    _known(request, fields, "")
    _name(request, "producer_group", "")
    messages = request.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MESSAGES_MAX:
        raise invalid("messages", f"1 to {MESSAGES_MAX} messages are expected")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    if len(json.dumps(request.get("context")).encode()) > CONTEXT_MAX_BYTES:
        raise invalid("context", f"at most {CONTEXT_MAX_BYTES} bytes of JSON")
    chosen = request.get("transaction_id")
    if chosen is None:
        return None
    transaction_id = identity(chosen)
    if transaction_id.version != 7:
        raise invalid("transaction_id", "must be a UUIDv7")
    return transaction_id


def check_end(request: Mapping[str, Any]) -> UUID:
    """Return the id of an end. Raises Refusal."""
    _known(request, END, "")
    _name(request, "producer_group", "")
    if request.get("verdict") not in ("commit", "rollback", "unknown"):
        raise invalid("verdict", "commit, rollback or unknown is expected")
    if len(request.get("reason") or "") > 1000:
        raise invalid("reason", "at most 1000 characters")
    return identity(request.get("transaction_id"))


def check_skew(transaction_id: UUID) -> None:
    """Refuse a new id whose time is more than five minutes off."""
    now = time.time()
    skew_s = id_time(transaction_id) - now
    if abs(skew_s) > ID_SKEW_S:
        raise Refusal(
            422,
            "id-time-skew",
            f"The id's time is {skew_s:+.0f} s off.",
            coordinator_time=_time(now),
            id_time=_time(id_time(transaction_id)),
            skew_s=round(skew_s, 3),
        )


def _time(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, timezone.utc).isoformat()
    except (OverflowError, ValueError):
        return "beyond year 9999"


def identity(value: Any) -> UUID:
    """Return a transaction's id. Raises Refusal."""
    try:
        return UUID(value)
    except (ValueError, TypeError, AttributeError):
        raise invalid("transaction_id", "a UUID is expected") from None


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise invalid(where, "an object is expected")
    _known(message, MESSAGE, where + ".")
    _name(message, "topic", where + ".")
    for optional in ("key", "tag"):
        if message.get(optional) is not None:
            _name(message, optional, where + ".")
    if ("body" in message) == (message.get("body_base64") is not None):
        raise invalid(where + ".body", "give exactly one of `body` and `body_base64`")
    if message.get("body_base64") is not None:
        try:
            base64.b64decode(message["body_base64"], validate=True)
        except (ValueError, TypeError):
            raise invalid(where + ".body_base64", "is not base64") from None
    if message["topic"].startswith("halfnote."):
        raise Refusal(422, "topic-reserved", "That topic is Halfnote's own.", field=where + ".topic")


def _known(given: Mapping[str, Any], fields: set[str], where: str) -> None:
    for name in given:
        if name not in fields:
            raise invalid(where + name, "unknown field")


def _name(given: Mapping[str, Any], name: str, where: str) -> None:
    value = given.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= NAME_MAX or _control(value):
        raise invalid(where + name, f"1 to {NAME_MAX} characters without control characters are expected")
