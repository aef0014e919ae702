"""Transaction ids: UUIDv7 (RFC 9562 §5.7), whose first 48 bits are a Unix time in milliseconds."""

import os
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from msgspec import to_builtins

_VERSION = 7 << 76
_VARIANT = 2 << 62
_RANDOM = ~((0xF << 76) | (3 << 62)) & ((1 << 80) - 1)


def uuid7(now: datetime) -> UUID:
    """Return a new UUIDv7 with the time `now`: 48 bits of milliseconds, 74 bits of randomness."""
    milliseconds = int(now.timestamp() * 1000)
    random = int.from_bytes(os.urandom(10), "big") & _RANDOM
    return UUID(int=(milliseconds << 80) | _VERSION | _VARIANT | random)


def is_uuid7(value: UUID) -> bool:
    """Return whether `value` has version 7 and the RFC's variant."""
    number = value.int
    return (number >> 76) & 0xF == 7 and (number >> 62) & 3 == 2


def id_ms(value: UUID) -> int:
    """Return the Unix time in milliseconds that a UUIDv7 carries."""
    return value.int >> 80


def id_day(value: UUID) -> date:
    """Return the UTC day (and so the partition) of a UUIDv7."""
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=id_ms(value))).date()
    except OverflowError:
        return date.max


def day_bounds(day: date) -> tuple[UUID, UUID]:
    """Return the lowest UUID of the UTC day and the lowest one of the next: a partition's half-open range."""
    start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000
    return UUID(int=start << 80), UUID(int=(start + 86_400_000) << 80)


def lowest_id(at: datetime, shift_s: float = 0.0) -> UUID:
    """Return the lowest id of the time `at` moved by `shift_s`, clamped to 48 bits of milliseconds."""
    milliseconds = int((at.timestamp() + shift_s) * 1000)
    return UUID(int=min(max(milliseconds, 0), (1 << 48) - 1) << 80)


def message_id(transaction_id: UUID, position: int) -> str:
    """Return the message's id: `<transaction_id>-<position>`, positions from 0."""
    # Each answer and each delivery names its messages. `str` of the standard library takes four times as long as the
    # encoder; that of asyncpg's own class takes less.
    text = to_builtins(transaction_id) if type(transaction_id) is UUID else str(transaction_id)
    return f"{text}-{position}"


def parse_id(value: str) -> tuple[UUID, int | None] | None:
    """Read a transaction's id (its position is None) or a message's id, as 36 characters and a position; else None."""
    if len(value) == 36:
        try:
            found = UUID(value)
        except ValueError:
            return None
        # The constructor also takes dashes in other places.
        return (found, None) if str(found) == value.lower() else None
    return parse_message_id(value)


def parse_message_id(value: str) -> tuple[UUID, int] | None:
    """Split a message id into its transaction and position; None if it is not one."""
    head, dash, tail = value.rpartition("-")
    if not dash or len(head) != 36 or not tail.isascii() or not tail.isdigit() or len(tail) > 3:
        return None
    try:
        return UUID(head), int(tail)
    except ValueError:
        return None
