"""From the message id that a client chose to the transaction id in Halfnote, the same for the same message.

A version 1 id has 17 bytes in hexadecimal: version, MAC address, process, seconds since 2021, sequence number.
"""

import re
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from uuid import UUID

_EPOCH = datetime(2021, 1, 1, tzinfo=UTC)
_version_1 = re.compile(r"01[0-9A-Fa-f]{16}([0-9A-Fa-f]{8})[0-9A-Fa-f]{8}").fullmatch
# Ids whose time cannot be used get the time of the request, in steps: a repeat within a step has the same id. One that
# comes after the step is a second message. A longer step would part fewer repeats from the first, but a new id must be
# within the skew that Halfnote allows (HALFNOTE_ID_SKEW_S, 5 minutes by default).
STEP_S = 120


def made_at(message_id: str) -> datetime | None:
    """Return the time that an id carries, in whole seconds; None for an id of another form."""
    found = _version_1(message_id)
    return None if found is None else _EPOCH + timedelta(seconds=int(found[1], 16))


def step_of(now: datetime) -> datetime:
    """Return the beginning of the step that `now` is in."""
    return datetime.fromtimestamp(now.timestamp() // STEP_S * STEP_S, UTC)


def transaction_id(at: datetime, content: bytes) -> UUID:
    """Return the UUIDv7 of the time `at` whose other bits are the content's digest.

    The content has the message id in it, so a repeated send is the same transaction. Two containers may choose the
    same message id (the same MAC address, process and second); their contents differ, and so do these ids.
    """
    digest = int.from_bytes(sha256(content).digest()[:10], "big")
    number = int(at.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62
    return UUID(int=number | digest & ~(0xF << 76 | 3 << 62))
