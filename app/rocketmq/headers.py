"""User properties and system properties of RocketMQ's messages as headers of Halfnote's, and back.

A property becomes the header of its name, so that subscriptions can filter by it and webhooks show it. What HTTP
does not allow as a header, as a name with a space or a value with a line break, goes into the header
`rocketmq-properties`, as JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from app.field_rules import has_control_character

PREFIX = "rocketmq-"
MESSAGE_ID = "rocketmq-message-id"
KEYS = "rocketmq-keys"
GROUP = "rocketmq-message-group"
# The key is that of the queue to which a remoting client sent the message.
QUEUE = "rocketmq-queue"
TYPE = "rocketmq-message-type"
DELIVERY = "rocketmq-delivery-timestamp"
TRACE = "rocketmq-trace-context"
BORN_HOST = "rocketmq-born-host"
PROPERTIES = "rocketmq-properties"

TRANSACTION_WORD = "transaction"

_header_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch


def is_header(name: str) -> bool:
    """Return whether a property of this name is stored as a header of its own."""
    return _header_name(name) is not None and not name.lower().startswith(PREFIX)


def of_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of user properties."""
    headers: dict[str, str] = {}
    others: dict[str, str] = {}
    taken: set[str] = set()
    for name, value in sorted(properties.items()):
        # Header names that differ only by case are one header in HTTP.
        if is_header(name) and name.lower() not in taken and not has_control_character(value):
            taken.add(name.lower())
            headers[name] = value
        else:
            others[name] = value
    if others:
        headers[PROPERTIES] = json.dumps(others, sort_keys=True)
    return headers


def to_properties(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the user properties in headers, of a message that any producer sent."""
    properties = {name: value for name, value in headers.items() if not name.lower().startswith(PREFIX)}
    others = _read(headers.get(PROPERTIES, ""))
    if isinstance(others, dict):
        properties.update({str(name): str(value) for name, value in others.items()})
    return properties


def of_keys(keys: Sequence[str], key: str | None, group: str | None) -> dict[str, str]:
    """Return the header of a message's keys; none if `key`, by which Halfnote orders it, says all of them.

    `group`: its message group or sharding key, which then is `key` and says nothing of the keys.
    """
    return {KEYS: json.dumps(list(keys))} if keys and (group or list(keys) != [key]) else {}


def to_keys(headers: Mapping[str, str], key: str | None) -> list[str]:
    """Return the keys of a message."""
    keys = _read(headers.get(KEYS, ""))
    if isinstance(keys, list):
        return [str(one) for one in keys]
    # The key of a message with a message group is the group, and that of a message without keys may be its queue.
    return [] if key is None or GROUP in headers or QUEUE in headers else [key]


def _read(text: str) -> object:
    """Return the JSON in a header, which any producer can set; None: it is none that a client can be told."""
    try:
        # Other than `json`, this refuses an escape of half a character, which UTF-8 does not have.
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
