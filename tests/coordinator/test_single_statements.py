"""The statements of one purpose answer and leave the same, for generated requests.

There are those for a single request and for batches, and of each those that take repeats and those that fail on one.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID

import asyncpg
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.database.connection import Connection
from app.ids import uuid7
from app.store.coordinator.halves import Half, HalfMessage, insert_batch, insert_halves, stored_halves
from app.store.coordinator.ops import End, Recorded, read_recorded, record_batch, record_ends
from app.verdicts import Source, Verdict
from tests.conftest import register_group

NOW = datetime.now(UTC).replace(microsecond=123_456)
OPEN, CLOSED, GONE = NOW, NOW + timedelta(days=2), NOW - timedelta(days=20)
# The last two ids are of a day that takes no more verdicts, and of one that has no partitions.
IDS = [uuid7(at) for at in (OPEN, OPEN, OPEN, CLOSED, GONE)]
STORED = st.none() | st.tuples(st.sampled_from(["shop", "bank"]), st.integers(1, 3), st.booleans())
TABLES = {
    "half": "to_jsonb(t)",
    "op": "to_jsonb(t)",
    "topic": "to_jsonb(t)",
    "check_back": "to_jsonb(t)",
    "attempt": "to_jsonb(t) - 'attempt_id'",
    "outbox": "to_jsonb(t) - 'committed_at' || jsonb_build_object('due_at', due_at - committed_at)",
}
texts = st.none() | st.sampled_from(["x", 'ä "1" \'', ""])


@dataclass(frozen=True)
class World:
    """What is there before: for each id but the last, its half's group and number of messages and whether a check is
    open, or nothing."""

    stored: tuple[tuple[str, int, bool] | None, ...]


def content(number: int, **fields: Any) -> HalfMessage:
    body = b'{"n": %d}' % number
    message = HalfMessage("order", f"key-{number}", None, None, "application/json", body, sha256(body).digest(), None)
    return replace(message, **fields)


def half(slot: int, *messages: HalfMessage, group: str = "shop", **fields: Any) -> Half:
    return Half(IDS[slot], group, messages or (content(1),), sha256(repr(messages).encode()).digest(), **fields)


def end(slot: int, verdict: Verdict, group: str | None = "shop", **fields: Any) -> End:
    return End(IDS[slot], group, verdict, **fields)


slots = st.integers(0, len(IDS) - 1)
contents = st.builds(
    content,
    st.integers(1, 3),
    topic=st.sampled_from(["order", "never.named"]),
    key=texts,
    tag=texts,
    headers=st.sampled_from([None, '{"Trace": "x"}']),
    deliver_after_s=st.sampled_from([None, 0.0, 1.5, 86_400.25]),
)
halves = st.builds(
    lambda slot, messages, **fields: half(slot, *messages, **fields),
    slots,
    st.lists(contents, min_size=1, max_size=2),
    group=st.sampled_from(["shop", "bank", "deleted", "unknown"]),
    context=st.sampled_from([None, '{"order": 1030}', "null"]),
    policy=st.sampled_from([None, '{"max_checks": 3}']),
    immunity_s=st.sampled_from([None, 1, 86_400]),
    traceparent=texts,
    reissued_from=st.sampled_from([None, IDS[0]]),
)
ends = st.builds(
    end,
    slots,
    st.sampled_from(Verdict),
    st.sampled_from(["shop", "shop", "bank", "unknown", None]),
    source=st.sampled_from(Source),
    actor=texts,
    reason=texts,
    from_check=st.booleans(),
)
worlds = st.builds(World, st.tuples(STORED, STORED, STORED, STORED))


async def prepare(db: Connection, world: World) -> None:
    for name, columns in (("shop", {"immunity_s": 6}), ("bank", {"immunity_s": 60}), ("deleted", {"deleted_at": NOW})):
        await register_group(db, name, **columns)
    for slot, stored in enumerate(world.stored):
        if stored is None:
            continue
        group, messages, asked = stored
        one = half(slot, *(content(n, deliver_after_s=None if n % 2 else 5.0) for n in range(messages)), group=group)
        await insert_batch(db, [one], ["order"], NOW - timedelta(seconds=10))
        if asked:
            await db.execute(
                "insert into check_back (transaction_id, producer_group, state, swept_at, asked) "
                "values ($1, $2, 1, $3, 1)",
                one.transaction_id,
                group,
                NOW,
            )
    await db.execute("update day set state = 'archiving' where low <= $1 and high > $1", IDS[3])


async def answer_of(db: Connection, request: Half | End, *, single: bool, fast: bool) -> Any:
    """Return what a request gets by one of the forms, and by the second statement if that did not decide."""
    if isinstance(request, Half):
        insert = insert_halves if single else insert_batch
        try:
            async with db.transaction():
                new = await insert(db, [request], [], NOW, are_new=fast)
        except asyncpg.UniqueViolationError:
            assert fast
            new = await insert(db, [request], [], NOW)
            assert new == [None]
        stored = await stored_halves(db, [request.transaction_id], [request.producer_group])
        return new, stored
    record = record_ends if single else record_batch
    try:
        async with db.transaction():
            [found] = await record(db, [request], NOW, are_first=fast)
    except asyncpg.UniqueViolationError:
        assert fast
        [found] = await record(db, [request], NOW)
        assert found.verdict is None
    if found.verdict is None:
        return [found], await read_recorded(db, [request], NOW)
    return [found], {}


async def outcome(
    db: Connection, world: World, requests: list[Half | End], *, single: bool, fast: bool = False
) -> tuple[list[Any], Any]:
    """Play requests one after another; return their answers and the rows that they leave, and undo it all."""
    transaction = db.transaction()
    await transaction.start()
    try:
        await prepare(db, world)
        answers: list[Any] = []
        for request in requests:
            try:
                async with db.transaction():
                    answers.append(await answer_of(db, request, single=single, fast=fast))
            except asyncpg.PostgresError as error:
                answers.append((error.sqlstate, str(error)))
        rows = {
            name: [json.loads(row[0]) for row in await db.fetch(f"select ({shown})::text from {name} t")]
            for name, shown in TABLES.items()
        }
    finally:
        await transaction.rollback()
    # Offsets are compared by their order: the sequence is never set back.
    order = {row["offset"]: n for n, row in enumerate(sorted(rows["outbox"], key=lambda row: int(row["offset"])))}
    for row in rows["outbox"]:
        row["offset"] = order[row["offset"]]
    answers = [_ordered(answer, order) for answer in answers]
    return answers, {name: sorted(found, key=repr) for name, found in rows.items()}


def _ordered(answer: Any, order: dict[int, int]) -> Any:
    def one(value: Any) -> Any:
        if not isinstance(value, Recorded):
            return value
        messages = tuple((message.position, message.topic, order[message.offset]) for message in value.messages)
        return replace(value, messages=messages)

    return tuple(
        {key: one(value) for key, value in part.items()} if isinstance(part, dict) else [one(value) for value in part]
        for part in answer
    )


COMMIT, ROLLBACK = Verdict
DELAYED = content(1, deliver_after_s=60.0)
DIRECTED: list[list[Half | End]] = [
    [end(slot, verdict) for slot in range(5) for verdict in (COMMIT, COMMIT, ROLLBACK)],
    [end(0, ROLLBACK, from_check=True), end(0, COMMIT), end(1, COMMIT, None), end(1, COMMIT, "bank")],
    [half(2, DELAYED), half(2, DELAYED), half(2, content(2)), end(2, COMMIT, reason="x"), half(4), half(3)],
    [half(2, group="unknown"), half(2, group="deleted"), half(2, DELAYED, content(2)), half(2, DELAYED)],
]
EVERY_DAY = World((("shop", 3, True), ("bank", 1, False), None, ("shop", 2, False)))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(worlds, st.lists(halves | ends, min_size=1, max_size=6))
@example(EVERY_DAY, DIRECTED[0])
@example(EVERY_DAY, DIRECTED[1])
@example(EVERY_DAY, DIRECTED[2])
@example(EVERY_DAY, DIRECTED[3])
async def test_a_single_request_has_the_result_of_a_batch(
    db: Connection, world: World, requests: list[Half | End]
) -> None:
    batch = await outcome(db, world, requests, single=False)
    for single, fast in ((True, False), (False, True), (True, True)):
        other = await outcome(db, world, requests, single=single, fast=fast)
        assert other[0] == batch[0]
        assert other[1] == batch[1]


async def test_the_comparison_covers_both_forms(db: Connection) -> None:
    requests: list[Half | End] = [half(2, DELAYED), end(2, COMMIT), end(2, ROLLBACK), end(4, COMMIT), end(3, COMMIT)]
    answers, rows = await outcome(db, EVERY_DAY, requests, single=True)
    stored, committed, refused, unknown, closed = answers
    found: UUID = IDS[2]
    assert stored[0] == [NOW + timedelta(seconds=6)]
    assert (committed[0][0].verdict, committed[0][0].fresh) == (Verdict.COMMIT, True)
    assert (refused[0][0].verdict, refused[1][found].verdict) == (None, Verdict.COMMIT)
    assert unknown[0][0].owner is None
    assert not closed[0][0].open
    assert [row["kind"] for row in rows["attempt"]] == ["refused"]
    assert [row["due_at"] for row in rows["outbox"]] == ["00:01:00"]
    assert len(rows["half"]) == 7
    assert await db.fetchval("select count(*) from half") == 0
