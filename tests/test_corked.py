"""A response's head and body leave in one write; what is alone leaves when the turn ends."""

import asyncio
from typing import Any

from app.corked import CorkedTransport


class Wire:
    """What the corked transport writes to."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def corked() -> tuple[Any, Wire]:
    wire = Wire()
    return CorkedTransport(wire), wire  # type: ignore[arg-type]


async def test_head_and_body_are_one_write() -> None:
    transport, wire = corked()
    transport.write(b"head")
    assert wire.writes == []
    transport.write(b"body")
    assert wire.writes == [b"headbody"]
    await asyncio.sleep(0)
    assert wire.writes == [b"headbody"]


async def test_what_is_alone_leaves_when_the_turn_ends() -> None:
    transport, wire = corked()
    transport.write(b"head")
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]


async def test_two_responses_of_one_turn_stay_in_order() -> None:
    transport, wire = corked()
    for part in (b"head1", b"body1", b"head2", b"body2", b"head3"):
        transport.write(part)
    await asyncio.sleep(0)
    assert b"".join(wire.writes) == b"head1body1head2body2head3"


async def test_close_sends_what_is_held_first() -> None:
    transport, wire = corked()
    transport.write(b"head")
    transport.close()
    assert (wire.writes, transport.is_closing()) == ([b"head"], True)
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]
