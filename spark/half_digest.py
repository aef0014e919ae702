"""Computes the digest of a half message again from its stored rows, as the service did when it was posted.

The service has its own code in app/coordinator/half_content.py, which this package must not import. A test verifies
that both agree.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import product
from typing import Any, NamedTuple

import msgspec

# Halfnote publishes operational messages itself. The digest of their half is the digest of the body.
RESERVED = "halfnote."
# The most numbers of one context that are tried in both forms.
MOST_TRIED = 8
# From here on, JSON has a float in a form with an exponent, and jsonb keeps it as a whole number.
WITH_EXPONENT = 10**16

_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.decode


class StoredMessage(NamedTuple):
    """A row of `half` without its body; `headers`, `context` and `policy` are JSON text.

    `digest`, `context` and `policy` are null on all positions but 0.
    """

    transaction_id: str
    position: int
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: str | None
    content_type: str
    body_digest: bytes
    deliver_after_s: float | None
    context: str | None
    policy: str | None
    digest: bytes | None


def digest_of(messages: Sequence[StoredMessage], *, plain: bool = False, context: Any = None) -> bytes:
    """Return the digest of a half with these messages, in the order of their positions.

    `plain`: it was posted to `/messages`. `context` replaces the stored one.
    """
    first = messages[0]
    rows = [
        (m.topic, m.key, m.tag, m.headers and _canonical(m.headers), m.content_type, m.body_digest, m.deliver_after_s)
        for m in messages
    ]
    text = None if context is None else _encode(context).decode()
    if context is None and first.context is not None:
        text = _canonical(first.context)
    policy = None if first.policy is None else _decode(first.policy)
    return sha256(_encode((plain, first.producer_group, rows, text, policy))).digest()


def is_altered(messages: Sequence[StoredMessage]) -> bool:
    """Return whether the stored messages of a transaction, by position, are not those that the digest covers."""
    first = messages[0]
    for place, message in enumerate(messages):
        if message.position != place or message.producer_group != first.producer_group:
            return True
    if digest_of(messages) == first.digest:
        return False
    if first.context is None:
        return not (_is_plain(messages) or _is_operational(messages))
    return all(digest_of(messages, context=one) != first.digest for one in _meant(_decode(first.context)))


def _is_plain(messages: Sequence[StoredMessage]) -> bool:
    return messages[0].policy is None and digest_of(messages, plain=True) == messages[0].digest


def _is_operational(messages: Sequence[StoredMessage]) -> bool:
    first = messages[0]
    return first.topic.startswith(RESERVED) and len(messages) == 1 and first.digest == first.body_digest


def _canonical(text: str) -> str:
    return _encode(_decode(text)).decode()


def _meant(context: Any) -> Iterator[Any]:
    """Return the values that a producer may have posted for a stored context.

    jsonb keeps the value of a number and not its form: 1e16 becomes a whole number, and -0.0 becomes 0.0.
    """
    forms: list[tuple[Any, Any]] = []
    _collect(context, forms)
    for chosen in product(*forms[:MOST_TRIED]):
        yield _with(context, iter([*chosen, *(first for first, _ in forms[MOST_TRIED:])]))


def _collect(value: Any, forms: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _collect(inner, forms)
    elif _is_ambiguous(value):
        forms.append((value, float(value) if value else -0.0))


def _with(value: Any, chosen: Iterator[Any]) -> Any:
    if isinstance(value, dict):
        return {name: _with(inner, chosen) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with(inner, chosen) for inner in value]
    return next(chosen) if _is_ambiguous(value) else value


def _is_ambiguous(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) >= WITH_EXPONENT
    return isinstance(value, float) and value == 0.0
