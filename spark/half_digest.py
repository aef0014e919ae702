"""Computes the digest of a half message again from its stored rows, as the service did when it was posted.

The service has its own code in app/coordinator/half_content.py, which this package must not import. A test verifies
that both agree.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import product
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

# Halfnote publishes operational messages itself. The digest of their half is the digest of the body.
RESERVED = "halfnote."
# The most numbers of one context that are tried in both forms.
MOST_TRIED = 8
# What JSON has in an escaped form.
NEEDS_ESCAPE = r'["\\\x00-\x1f]'
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


def confirmed(batch: pa.RecordBatch) -> list[bool]:
    """Return which rows of a batch are whole transactions whose digest covers what is stored.

    The batch has the columns of StoredMessage, in the order of transactions and positions, with `body_digest` in
    base64. Only the usual transaction is confirmed: one message without headers, delay, context and policy, whose texts
    need no escape in JSON. Arrow joins the text of its digest, in a quarter of the time that Python objects of the rows
    take. `is_altered` judges the others.
    """
    ids = batch["transaction_id"]
    if len(ids) < 2:
        return [False] * len(ids)
    # The next batch may go on with the last row's transaction.
    ends = pa.concat_arrays([pc.not_equal(ids[:-1], ids[1:]), pa.array([False])])
    usual = pc.and_(ends, pc.equal(batch["position"], 0))
    for name in ("headers", "deliver_after_s", "context", "policy"):
        usual = pc.and_(usual, pc.is_null(batch[name]))
    for name in ("producer_group", "topic", "key", "tag", "content_type"):
        # Most columns have few values, and each is searched once.
        values = batch[name].dictionary_encode()
        clean = pc.invert(pc.match_substring_regex(values.dictionary, NEEDS_ESCAPE))
        usual = pc.and_(usual, pc.fill_null(clean.take(values.indices), True))
    held = [False] * len(ids)
    places = pc.indices_nonzero(usual)
    for plain in (False, True):
        some = batch.take(places)
        digests = some["digest"].to_pylist()
        other = []
        for place, digest, text in zip(places.to_pylist(), digests, _usual_texts(some, plain), strict=True):
            if sha256(text).digest() == digest:
                held[place] = True
            else:
                other.append(place)
        if not other:
            break
        places = pa.array(other)
    return held


def _usual_texts(batch: pa.RecordBatch, plain: bool) -> list[bytes]:
    """Return what the digests of usual transactions are of: the JSON of `digest_of`."""

    def quoted(name: str) -> Any:
        return pc.if_else(pc.is_null(batch[name]), "null", pc.binary_join_element_wise('"', batch[name], '"', ""))

    joined = pc.binary_join_element_wise(
        f'[{"true" if plain else "false"},"',
        batch["producer_group"],
        '",[["',
        batch["topic"],
        '",',
        quoted("key"),
        ",",
        quoted("tag"),
        ',null,"',
        batch["content_type"],
        '","',
        batch["body_digest"],
        '",null]],null,null]',
        "",
    )
    return joined.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]


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
