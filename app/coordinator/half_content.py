"""Makes a storable half from a decoded request: id, digest and limits. Names where two contents differ."""

import binascii
import re
from decimal import Decimal
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec

from app.clock import Clock, from_ms
from app.config import Settings
from app.coordinator.wire import HalfRequest, Message, PlainRequest
from app.errors import IdTimeSkew, Invalid, TopicReserved
from app.ids import id_ms, is_uuid7, uuid7
from app.store.coordinator.halves import Half, HalfMessage, HalfRow
from app.topic_patterns import RESERVED, is_reserved

# An escaped NUL, but not an escaped backslash before `u0000`.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000").search
# Sorted, so that the order of headers and context does not change the digest.
_canonical = msgspec.json.Encoder(order="sorted").encode


def half_of(request: HalfRequest | PlainRequest, settings: Settings, clock: Clock) -> Half:
    """Return the half of a request.

    Raises Invalid or TopicReserved. `id_skew` checks the time of a chosen id, and only if the id is new.
    """
    messages = [_message(message, index, settings) for index, message in enumerate(request.messages)]
    transaction_id = request.transaction_id
    if transaction_id is None:
        transaction_id = uuid7(clock.now())
    elif not is_uuid7(transaction_id):
        raise Invalid("`transaction_id` must be a UUIDv7 (RFC 9562).", field="transaction_id")
    if isinstance(request, PlainRequest):
        return Half(transaction_id, request.producer_group, messages, _digest(request, messages, None))
    context = _context(request, settings)
    check = request.check
    return Half(
        transaction_id,
        request.producer_group,
        messages,
        _digest(request, messages, context),
        context=context,
        policy=msgspec.json.encode(check).decode() if check is not None else None,
        immunity_s=int(check.immunity_s) if check is not None and check.immunity_s is not None else None,
    )


def id_skew(transaction_id: UUID, settings: Settings, clock: Clock) -> IdTimeSkew | None:
    """Return the problem of an id whose time is too far from the coordinator's, or None."""
    skew_s = id_ms(transaction_id) / 1000 - clock.time()
    if abs(skew_s) <= settings.id_skew_s:
        return None
    try:
        id_time = from_ms(id_ms(transaction_id)).isoformat()
    except OverflowError:
        id_time = "beyond year 9999"
    return IdTimeSkew(
        f"The id's time is {skew_s:+.0f} s from the coordinator's; {settings.id_skew_s} s are allowed. "
        "Set the producer's clock.",
        coordinator_time=clock.now().isoformat(),
        id_time=id_time,
        skew_s=round(skew_s, 3),
    )


def _message(message: Message, index: int, settings: Settings) -> HalfMessage:
    if is_reserved(message.topic):
        raise TopicReserved(
            f"Topics that begin with `{RESERVED}` are Halfnote's own.", field=f"messages[{index}].topic"
        )
    if isinstance(message.body, msgspec.Raw):
        body, content_type = bytes(message.body), message.content_type or "application/json"
    else:
        body, content_type = _decoded(message, index), message.content_type or "application/octet-stream"
    after = message.deliver_after_s
    if after is not None and after > settings.delay_limit_s:
        raise Invalid(
            f"`deliver_after_s` is at most {settings.delay_limit_s}.", field=f"messages[{index}].deliver_after_s"
        )
    headers = None
    if message.headers:
        size = sum(len(name) + len(value.encode()) for name, value in message.headers.items())
        if size > settings.headers_limit_bytes:
            raise Invalid(
                f"`headers` take {size} bytes; {settings.headers_limit_bytes} are allowed.",
                field=f"messages[{index}].headers",
            )
        headers = _canonical(message.headers).decode()
    return HalfMessage(
        message.topic, message.key, message.tag, headers, content_type, body, sha256(body).digest(), after
    )


def _decoded(message: Message, index: int) -> bytes:
    text = message.body_base64 or ""
    field = f"messages[{index}].body_base64"
    # The decoder accepts superfluous padding.
    if len(text) % 4:
        raise Invalid("`body_base64` is not base64: its length is not a multiple of 4.", field=field)
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise Invalid(f"`body_base64` is not base64: {error}.", field=field) from None


def _context(request: HalfRequest, settings: Settings) -> str | None:
    if not isinstance(request.context, msgspec.Raw):
        return None
    # Stored by value, not by bytes: a check sends the same JSON value, not the same text.
    try:
        value = msgspec.json.decode(request.context)
    except (msgspec.DecodeError, RecursionError) as error:
        # It is JSON that Postgres cannot store by value: numbers out of range, or nesting too deep.
        raise Invalid(f"`context` cannot be stored: {error}.", field="context") from None
    context = _canonical(value).decode()
    if len(context.encode()) > settings.context_limit_bytes:
        raise Invalid(f"`context` is at most {settings.context_limit_bytes} bytes of JSON.", field="context")
    if _NUL(context):
        raise Invalid("`context` holds a NUL character, which cannot be stored.", field="context")
    return context


def _digest(request: HalfRequest | PlainRequest, messages: list[HalfMessage], context: str | None) -> bytes:
    """Digest a request's content: fields by value, bodies byte for byte, without fields at their default."""
    check = None if isinstance(request, PlainRequest) else request.check
    rows = [(m.topic, m.key, m.tag, m.headers, m.content_type, m.body_digest, m.deliver_after_s) for m in messages]
    plain = isinstance(request, PlainRequest)
    return sha256(_canonical((plain, request.producer_group, rows, context, check))).digest()


def first_difference(stored: list[HalfRow], half: Half) -> str:
    """Name the first field in which a repeat differs from what is stored, as a path like `messages[0].key`."""
    first = stored[0]
    if first.producer_group != half.producer_group:
        return "producer_group"
    if len(stored) != len(half.messages):
        return "messages"
    for index, (old, new) in enumerate(zip(stored, half.messages, strict=True)):
        for name in ("topic", "key", "tag", "content_type", "body", "deliver_after_s"):
            if getattr(old, name) != getattr(new, name):
                return f"messages[{index}].{name}"
        if _value(old.headers) != _value(new.headers):
            return f"messages[{index}].headers"
    same_check = _value(first.policy) == _value(half.policy)
    # A request of the other endpoint has no context. If nothing else is left, the context differs before it is stored.
    if not _same_json(first.context, half.context) or (same_check and half.context is not None):
        return "context"
    return "endpoint" if same_check else "check"


def _same_json(stored: str | None, sent: str | None) -> bool:
    """Return whether two contexts are the same as Postgres stores them: `1`, `1.0` and `true` are three values."""
    one, other = _value(stored), _value(sent)
    return bool(one == other) and _canonical(one) == _canonical(other)


def _value(text: str | None) -> Any:
    return None if text is None else _read(text)


def _number(text: str) -> int | Decimal:
    """Return a number as Postgres writes it: all of its digits, those after the point too, and no negative zero."""
    number = abs(Decimal(text)) if not Decimal(text) else Decimal(text)
    written = format(number, "f")
    return Decimal(written) if "." in written else int(number)


_read = msgspec.json.Decoder(float_hook=_number).decode
