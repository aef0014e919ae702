"""Flushes fail on the first repeat and take those that follow: what is answered, and which statements run."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from uuid import UUID

import pytest

from app.coordinator import commit_lanes
from app.coordinator.commit_lanes import LaneFlushes
from app.database.connection import Connection
from app.ids import uuid7
from app.runtime.state import Runtime
from app.store.coordinator.halves import (
    INSERT_HALF,
    INSERT_HALVES,
    INSERT_NEW_HALF,
    INSERT_NEW_HALVES,
    INSERT_NEW_SINGLE_HALVES,
    INSERT_SINGLE_HALVES,
    Half,
    StoredHalf,
)
from app.store.coordinator.ops import RECORD_ENDS, RECORD_FIRST_ENDS, End, Recorded
from app.verdicts import Verdict
from tests.coordinator.test_races import half_with

NEW, ANY = "new", "any"
KINDS = {
    INSERT_NEW_SINGLE_HALVES: NEW,
    INSERT_NEW_HALVES: NEW,
    INSERT_NEW_HALF: NEW,
    RECORD_FIRST_ENDS: NEW,
    INSERT_SINGLE_HALVES: ANY,
    INSERT_HALVES: ANY,
    INSERT_HALF: ANY,
    RECORD_ENDS: ANY,
}


@contextmanager
def statements(db: Connection) -> Iterator[list[str]]:
    """Yield the kinds of the lanes' statements that run meanwhile, failed ones too."""
    seen: list[str] = []
    with db.query_logger(lambda record: seen.append(KINDS[record.query]) if record.query in KINDS else None):
        yield seen


async def logged() -> None:
    """Wait until the driver has called the logger."""
    await asyncio.sleep(0)


def flushes_of(runtime: Runtime) -> LaneFlushes:
    return LaneFlushes(runtime.clock, runtime.metrics, lambda topics, messages, complete: None)


def new_halves(count: int, *bodies: bytes) -> list[Half]:
    ids = sorted(uuid7(datetime.now(UTC)) for _ in range(count))
    return [half_with(one, *bodies or (b"1",)) for one in ids]


async def freshness(flushes: LaneFlushes, db: Connection, halves: Sequence[Half]) -> list[bool]:
    ordered = sorted(halves, key=lambda half: half.transaction_id)
    outcomes = dict(zip((half.transaction_id for half in ordered), await flushes.halves(db, ordered), strict=True))
    await logged()
    found = []
    for half in halves:
        one = outcomes[half.transaction_id]
        assert isinstance(one, StoredHalf)
        assert one.digest == half.digest
        found.append(one.fresh)
    return found


@pytest.mark.parametrize("bodies", [(b"1",), (b"1", b"2")], ids=["one message", "two messages"])
async def test_a_repeat_fails_no_other_half(
    db: Connection, runtime: Runtime, group: str, bodies: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = flushes_of(runtime)
    first, second, third, fourth, fifth = new_halves(5, *bodies)
    with statements(db) as seen:
        assert await freshness(flushes, db, [first, second]) == [True, True]
        assert seen == [NEW]
        assert await freshness(flushes, db, [first, third]) == [False, True]
        assert seen == [NEW, NEW, ANY]
        # The next repeats fail no statement.
        assert await freshness(flushes, db, [third, fourth]) == [False, True]
        assert seen == [NEW, NEW, ANY, ANY]
        # After the rest the fast statement is used again.
        monkeypatch.setattr(commit_lanes, "REPEATS_REST_S", 0.0)
        assert await freshness(flushes, db, [fourth]) == [False]
        assert await freshness(flushes, db, [fifth, fourth]) == [True, False]
        assert seen[4:] == [ANY, NEW, ANY]
    assert await db.fetchval("select count(*) from half") == 5 * len(bodies)


async def test_a_repeat_fails_no_other_end(
    db: Connection, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = flushes_of(runtime)
    halves = new_halves(5, b"1", b"2")
    await flushes.halves(db, halves)
    first, second, third, fourth, fifth = (half.transaction_id for half in halves)

    async def ended(*verdicts: tuple[UUID, Verdict]) -> list[tuple[Verdict | None, bool, int]]:
        outcomes = await flushes.ends(db, [End(one, "shop", verdict) for one, verdict in sorted(verdicts)])
        await logged()
        assert all(isinstance(one, Recorded) for one in outcomes)
        return [(one.verdict, one.fresh, len(one.messages)) for one in outcomes if isinstance(one, Recorded)]

    commit, rollback = Verdict.COMMIT, Verdict.ROLLBACK
    with statements(db) as seen:
        assert await ended((first, commit), (second, rollback)) == [(commit, True, 2), (rollback, True, 0)]
        assert seen == [NEW]
        assert await ended((first, commit), (second, commit), (third, commit)) == [
            (commit, False, 2),
            (rollback, False, 0),
            (commit, True, 2),
        ]
        assert seen == [NEW, NEW, ANY]
        assert await ended((third, rollback), (fourth, commit)) == [(commit, False, 2), (commit, True, 2)]
        assert seen == [NEW, NEW, ANY, ANY]
        monkeypatch.setattr(commit_lanes, "REPEATS_REST_S", 0.0)
        assert await ended((first, commit), (second, commit)) == [(commit, False, 2), (rollback, False, 0)]
        assert await ended((first, commit), (fifth, commit)) == [(commit, False, 2), (commit, True, 2)]
        assert seen[4:] == [ANY, NEW, ANY]
    assert await db.fetchval("select count(*) from op") == 5
    offsets = [row[0] for row in await db.fetch('select "offset" from outbox order by 1')]
    assert len(offsets) == len(set(offsets)) == 8
    # Each refused verdict is evidence, once for each transaction, verdict and source.
    assert await db.fetchval("select count(*) from attempt where kind = 'refused'") == 2


async def test_plain_messages_take_repeats_at_once(db: Connection, runtime: Runtime, group: str) -> None:
    """A statement that fails would end the database transaction of half and commit."""
    flushes = flushes_of(runtime)
    first, second = new_halves(2)
    with statements(db) as seen:
        await flushes.plains(db, [first])
        outcomes = await flushes.plains(db, [first, second])
        await logged()
    assert not any(isinstance(one, Exception) for one in outcomes)
    assert NEW not in seen
    assert await db.fetchval("select count(*) from outbox") == 2
