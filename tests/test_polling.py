"""The loop stays awake through waits that the last ones say are short, and through no others."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.polling import Polling

MOST_S = 1.0


class HandClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def polling(clock: HandClock) -> AsyncIterator[Polling]:
    """One that has seen an answer and a next request come at once."""
    made = Polling(MOST_S, clock)
    for _ in range(2):
        made.asked()
        made.answered()
    yield made
    clock.now_s += MOST_S
    await turn()


async def turn() -> None:
    """Let the loop turn a few times."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_polls_through_a_wait_whose_like_was_short_until_its_time_is_over(
    polling: Polling, clock: HandClock
) -> None:
    polling.asked()
    await turn()
    assert polling.awake
    clock.now_s += MOST_S * 0.9
    polling.answered()
    clock.now_s += MOST_S * 0.9
    await turn()
    # Each wait has its own time.
    assert polling.awake
    clock.now_s += MOST_S * 0.2
    await turn()
    assert not polling.awake


async def test_sleeps_where_the_database_was_slow(polling: Polling, clock: HandClock) -> None:
    polling.asked()
    clock.now_s += MOST_S * 2
    polling.answered()
    await turn()
    # The caller was quick.
    assert polling.awake
    polling.asked()
    await turn()
    assert not polling.awake


async def test_sleeps_where_the_caller_was_slow(polling: Polling, clock: HandClock) -> None:
    clock.now_s += MOST_S * 2
    polling.asked()
    await turn()
    # The database was quick.
    assert polling.awake
    polling.answered()
    await turn()
    assert not polling.awake


async def test_does_not_poll_before_anything_is_known(clock: HandClock) -> None:
    polling = Polling(MOST_S, clock)
    polling.asked()
    await turn()
    assert not polling.awake


async def test_zero_never_polls(clock: HandClock) -> None:
    polling = Polling(0, clock)
    for _ in range(3):
        polling.asked()
        await turn()
        polling.answered()
        await turn()
        assert not polling.awake


async def test_timers_and_sockets_are_not_kept_waiting(polling: Polling) -> None:
    polling.asked()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b""
        writer.close()
    await asyncio.sleep(0.01)
    # All of that, and time has stood still.
    assert polling.awake
