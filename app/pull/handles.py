"""PURE: receipt handles: what a consumer gets with a message, and sends back to settle it.

A handle says which message it is for, in which claim or at which epoch of its row, at which attempt, and what was
handed out. It is signed by the key of its subscription, so a consumer cannot make one.
"""

import struct
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from hmac import compare_digest
from typing import TypeAlias
from uuid import UUID

# Made from bytes ten times as fast as the standard library's; the rows that asyncpg returns have it as well.
from asyncpg.pgproto.pgproto import UUID as FastUUID

from app.store.pull.claims import HeldMessage

VERSION = 1
_SIGNATURE_BYTES = 16
# Version, subscription, replay, epoch, place, attempt, position, offset, time in microseconds, transaction, digest.
_layout = struct.Struct(">BIIQHHHQQ16s32s")
# Of every handle: a multiple of 3 bytes needs no padding in base64.
_BYTES = _layout.size + _SIGNATURE_BYTES
LENGTH = -(-_BYTES // 3) * 4
_PADDING = b"\0" * (-_BYTES % 3)
# The same with the signature and the padding.
_record = struct.Struct(f"{_layout.format}{_SIGNATURE_BYTES}s{len(_PADDING)}s")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# The alphabet of base64 that needs no escape in addresses: base64's own functions for it take twice as long.
# Each handle has one form: the other characters of base64 become one that it does not have.
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_+/", b"+/!!")

# What a handle has of its message: replay, epoch, place, attempt, position, offset, time (see `at_of`), transaction id
# and digest.
Packed: TypeAlias = tuple[int, int, int, int, int, int, int, bytes, bytes]


def handles_of(messages: Iterable[Packed], subscription_id: int, key: UUID) -> list[str]:
    """Return the handles of messages of one subscription, in their order."""
    secret = key.bytes
    parts: list[bytes] = []
    for message in messages:
        packed = _layout.pack(VERSION, subscription_id, *message)
        parts += packed, _signature(packed, secret), _PADDING
    text = b2a_base64(b"".join(parts), newline=False).translate(_TO_URL).decode()
    return [text[n : n + LENGTH] for n in range(0, len(text), LENGTH)]


def at_of(time: datetime) -> int:
    """Return the time of a claim as a handle has it."""
    return (time - _EPOCH) // _MICROSECOND


def opened_together(handles: Sequence[str], subscription_id: int, key: UUID) -> list[HeldMessage] | None:
    """Return what the handles of one subscription say, in a third of the time of `opened` for each.

    None if Halfnote has not made one of them: `opened` says which.
    """
    if not handles or any(len(handle) != LENGTH for handle in handles):
        return None
    try:
        whole = a2b_base64("".join(handles).encode("ascii").translate(_FROM_URL))
    except (ValueError, Error):
        return None
    # Characters that base64 does not have are left out, and then bytes are missing.
    if len(whole) != len(handles) * _record.size:
        return None
    secret, size = key.bytes, _layout.size
    expected = [_signature(whole[start : start + size], secret) for start in range(0, len(whole), _record.size)]
    columns = zip(*_record.iter_unpack(whole), strict=True)
    versions, named, replays, epochs, places, attempts, positions, offsets, times, ids, digests, *end = columns
    signatures, paddings = end
    # Nothing else is done with what is not signed.
    if not compare_digest(b"".join(signatures), b"".join(expected)):
        return None
    if {*versions} != {VERSION} or {*named} != {subscription_id} or {*paddings} != {_PADDING}:
        return None
    at = {time: _EPOCH + time * _MICROSECOND for time in set(times)}
    transactions, claimed_at = map(FastUUID, ids), map(at.__getitem__, times)
    return list(
        map(
            HeldMessage,
            named,
            replays,
            epochs,
            places,
            attempts,
            transactions,
            positions,
            offsets,
            claimed_at,
            digests,
        )
    )


def opened(handle: str, key_of: Callable[[int], UUID | None]) -> HeldMessage | None:
    """Return what a handle says; None if Halfnote has not made it.

    `key_of` returns the key of a subscription, None if it is not the one of the request.
    """
    if len(handle) != LENGTH:
        return None
    try:
        whole = a2b_base64(handle.encode("ascii").translate(_FROM_URL))
    except (ValueError, Error):
        return None
    if whole[_BYTES:] != _PADDING:
        return None
    packed, signature = whole[: _layout.size], whole[_layout.size : _BYTES]
    fields = _layout.unpack(packed)
    version, subscription_id, replay, epoch, place, attempt, position, offset, at, transaction_id, digest = fields
    key = key_of(subscription_id)
    if version != VERSION or key is None or not compare_digest(signature, _signature(packed, key.bytes)):
        return None
    transaction_id = FastUUID(transaction_id)
    at = _EPOCH + at * _MICROSECOND
    return HeldMessage(subscription_id, replay, epoch, place, attempt, transaction_id, position, offset, at, digest)


def _signature(packed: bytes, key: bytes) -> bytes:
    return blake2b(packed, digest_size=_SIGNATURE_BYTES, key=key).digest()
