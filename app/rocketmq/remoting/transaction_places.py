"""A transaction id as the two numbers that clients repeat when they end a transaction.

RocketMQ's client says where its half message is: a position in the commit log and one in a queue. An id has 128 bits,
of which two are the same in every UUIDv7, so the two numbers are not negative.
"""

from uuid import UUID

_VARIANT = 0b10 << 62
_LOW = (1 << 62) - 1


def places_of(transaction: UUID) -> tuple[int, int]:
    """Return the position in the commit log and the position in the queue."""
    return transaction.int >> 64, transaction.int & _LOW


def transaction_at(position: int, queue_position: int) -> UUID | None:
    """Return the transaction id of two numbers; None: they are of no id."""
    if not (0 <= position < 1 << 63 and 0 <= queue_position <= _LOW):
        return None
    return UUID(int=position << 64 | _VARIANT | queue_position)
