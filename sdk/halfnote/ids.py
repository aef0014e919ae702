"""Transaction ids: UUIDv7 (RFC 9562), so that they sort by time and show their age."""

import os
import time
from uuid import UUID

_VERSION, _VARIANT = 7 << 76, 2 << 62
_KEPT = ~(0xF << 76 | 3 << 62)


def new_id(now: float | None = None) -> UUID:
    """Return a new UUIDv7 of the time `now`, in seconds since 1970 (default: this machine's time)."""
    return UUID(int=lowest_id(time.time() if now is None else now).int | int.from_bytes(os.urandom(10), "big") & _KEPT)


def lowest_id(at: float) -> UUID:
    """Return the least UUIDv7 of the millisecond `at` (seconds since 1970): those before it are older."""
    return UUID(int=int(at * 1000) << 80 | _VERSION | _VARIANT)


def id_time(transaction_id: UUID) -> float:
    """Return the time of an id, in seconds since 1970."""
    return (transaction_id.int >> 80) / 1000
