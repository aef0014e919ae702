"""The halves that a process keeps until their end."""

from uuid import UUID

from app.coordinator.recent_halves import HALF_BYTES, MESSAGE_BYTES, RecentHalves
from app.store.coordinator.halves import Half, HalfMessage


def half(number: int, body_bytes: int = 100, messages: int = 1) -> Half:
    message = HalfMessage("order", None, None, None, "text/plain", b"x" * body_bytes, b"", None)
    return Half(UUID(int=number), "shop", [message] * messages, b"")


def test_a_half_is_kept_until_it_is_taken() -> None:
    recent = RecentHalves(10_000)
    one = half(1)
    recent.keep(one)
    assert recent.take(UUID(int=2)) is None
    assert recent.take(UUID(int=1)) is one
    assert recent.take(UUID(int=1)) is None
    assert len(recent) == 0


def test_the_oldest_are_forgotten_first() -> None:
    size = HALF_BYTES + 2 * (MESSAGE_BYTES + 100)
    recent = RecentHalves(3 * size)
    for number in range(10):
        recent.keep(half(number, messages=2))
        # Repeated content of an id does not count twice.
        recent.keep(half(number, messages=2))
    assert [recent.take(UUID(int=number)) is not None for number in range(10)] == [False] * 7 + [True] * 3
    # What was taken leaves room.
    for number in range(3):
        recent.keep(half(number, messages=2))
    assert len(recent) == 3


def test_a_half_that_is_too_large_displaces_no_other() -> None:
    recent = RecentHalves(10_000)
    recent.keep(half(1))
    recent.keep(half(2, body_bytes=10_000))
    assert recent.take(UUID(int=2)) is None
    assert recent.take(UUID(int=1)) is not None
