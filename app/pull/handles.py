"""PURE: receipt handles: what a consumer gets with a message, and sends back to settle it.

A handle says which message it is for, in which claim or at which epoch of its row, at which attempt, and what was
handed out. It is signed by the key of its subscription, so a consumer cannot make one.
"""

import struct
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from hmac import compare_digest
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
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# The alphabet of base64 that needs no escape in addresses: base64's own functions for it take twice as long.
# Each handle has one form: the other characters of base64 become one that it does not have.
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_+/", b"+/!!")


def handle_of(message: HeldMessage, key: UUID) -> str:
    """Return the handle of a message."""
    packed = _layout.pack(
        VERSION,
        message.subscription_id,
        message.replay,
        message.epoch,
        message.place,
        message.attempt,
        message.position,
        message.offset,
        (message.at - _EPOCH) // _MICROSECOND,
        message.transaction_id.bytes,
        message.digest,
    )
    return b2a_base64(packed + _signature(packed, key) + _PADDING, newline=False).translate(_TO_URL).decode()


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
    if version != VERSION or key is None or not compare_digest(signature, _signature(packed, key)):
        return None
    transaction_id = FastUUID(transaction_id)
    at = _EPOCH + at * _MICROSECOND
    return HeldMessage(subscription_id, replay, epoch, place, attempt, transaction_id, position, offset, at, digest)


def _signature(packed: bytes, key: UUID) -> bytes:
    return blake2b(packed, digest_size=_SIGNATURE_BYTES, key=key.bytes).digest()
