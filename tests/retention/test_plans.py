"""The plans of upkeep's statements over full days: short index ranges of the day's log, keyed reads elsewhere."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from app.database.connection import Connection
from app.store.retention.day_blockers import AT_ONCE, REPLAYING, RETRIES_WAIT, WAITING
from app.store.retention.day_dead_letters import (
    BODIES_AT_ONCE,
    BODY_BYTES_AT_ONCE,
    BURY_LATE,
    BURY_LOG,
    BURY_RETRIES,
    BURY_UNREPLAYED,
    KEEP_BODIES,
    LAST_BEFORE,
    REPLAYS,
    UNBURY,
    RowPlace,
    bury_log,
    bury_retries,
    bury_unreplayed,
    keep_bodies,
)
from app.store.retention.days import Day, days, partition_name
from app.store.retention.index_plans import probe
from app.store.retention.orphans import AT_ONCE as CLEARED_AT_ONCE
from app.store.retention.orphans import BEFORE_RETRIES, RETRIES_OF_GONE_DAY, RetryPlace, clear_gone_retries
from app.store.subscriptions import replays
from app.store.subscriptions.replays import Replay
from app.store.subscriptions.subscriptions import Subscription, one
from tests.coordinator.test_statement_plans import full
from tests.support.days import subscribe
from tests.support.explain import Scan, scans

__all__ = ["full"]

BOTH_PLANS = pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
OF_ROUTE = ["uuid", "uuid", "int", "text[]", "text[]", "jsonb"]


async def oldest(db: Connection) -> Day:
    """Return the oldest full day."""
    first: UUID = await db.fetchval("select transaction_id from outbox order by transaction_id limit 1")
    return next(day for day in await days(db) if day.low <= first < day.high)


async def last_offset(db: Connection) -> int:
    """Return the last offset of the log."""
    offset: int = await db.fetchval('select max("offset") from outbox')
    return offset


def of_route(day: Day, subscription_id: int, topic: str = "order") -> list[Any]:
    """Return the first parameters of a statement about a subscription in a day."""
    return [day.low, day.high, subscription_id, [topic], None, None]


async def probed(
    db: Connection, statement: str, types: list[str], arguments: list[Any], *, generic: bool
) -> list[Scan]:
    """Return the scans of a statement in a database transaction as upkeep's."""
    async with db.transaction():
        await probe(db)
        return await scans(db, statement, types, arguments, generic=generic)


def rows_of(found: list[Scan], table: str) -> float:
    """Return how many rows of a table or its partitions were read."""
    return sum(scan.rows for scan in found if scan.table == table or scan.table.startswith(f"{table}_2"))


def sequential_scans(found: list[Scan]) -> list[Scan]:
    """Return the scans of whole partitions."""
    return [scan for scan in found if scan.node == "Seq Scan" and scan.table.startswith(("outbox_", "half_"))]


def in_log(day: Day, statement: str) -> str:
    """Return a statement that names the day's partition of the log."""
    return statement.format(outbox=partition_name("outbox", day.day))


@BOTH_PLANS
async def test_a_forced_close_reads_nothing_for_a_subscription_that_has_settled_the_day(
    full: Connection, generic: bool
) -> None:
    """It reads while new subscriptions wait."""
    day = await oldest(full)
    settled = await subscribe(full, "settled", "order", after=await last_offset(full))
    arguments = [*of_route(day, settled), datetime.now(UTC), 0]
    found = await probed(full, in_log(day, BURY_LOG), [*OF_ROUTE, "timestamptz", "bigint"], arguments, generic=generic)
    assert rows_of(found, "outbox") == 0
    assert [scan.index for scan in found if scan.table.startswith("outbox")] == [f"outbox_{day.day:%Y%m%d}_offset_idx"]


@BOTH_PLANS
@pytest.mark.parametrize("late", [False, True])
async def test_a_step_through_the_log_of_a_day_is_a_short_index_range(
    full: Connection, generic: bool, late: bool
) -> None:
    day = await oldest(full)
    after = await full.fetchval('select min("offset") from outbox where transaction_id >= $1', day.low)
    behind = await subscribe(full, "behind", "order")
    arguments = [*of_route(day, behind), datetime.now(UTC), after + 500, *([after] if late else [])]
    types = [*OF_ROUTE, "timestamptz", "bigint", *(["bigint"] if late else [])]
    found = await probed(full, in_log(day, BURY_LATE if late else BURY_LOG), types, arguments, generic=generic)
    assert rows_of(found, "outbox") == AT_ONCE
    assert rows_of(found, "half") == AT_ONCE
    assert {scan.node for scan in found if scan.table.startswith(("outbox_", "half_"))} == {"Index Scan"}


@BOTH_PLANS
async def test_only_late_entries_are_read_again_for_a_subscription_that_has_settled_the_day(
    full: Connection, generic: bool
) -> None:
    day, late = await oldest(full), 7
    settled = await subscribe(full, "settled", "order", after=await last_offset(full))
    last: int = await full.fetchval(f'select max("offset") from {partition_name("outbox", day.day)}')
    types = [*OF_ROUTE, "timestamptz", "bigint", "bigint"]
    arguments = [*of_route(day, settled), datetime.now(UTC), 0, last - late]
    found = await probed(full, in_log(day, BURY_LATE), types, arguments, generic=generic)
    assert rows_of(found, "outbox") == late
    assert [scan.index for scan in found if scan.table.startswith("outbox") and scan.rows] == [
        f"outbox_{day.day:%Y%m%d}_offset_idx"
    ]
    # A subscription that started later than that gets what came after its start.
    await full.execute("update subscription set started_after = $1 where subscription_id = $2", last - 2, settled)
    found = await probed(full, in_log(day, BURY_LATE), types, arguments, generic=generic)
    assert rows_of(found, "outbox") == 2


@BOTH_PLANS
async def test_the_look_for_late_entries_reads_those_and_one_before(full: Connection, generic: bool) -> None:
    day, late = await oldest(full), 7
    log = partition_name("outbox", day.day)
    last: int = await full.fetchval(f'select max("offset") from {log}')
    await full.execute(
        f"update {log} set committed_at = committed_at + interval '1 day' where \"offset\" > $1",
        last - late,
    )
    await full.execute(f"vacuum {log}")
    since = await full.fetchval(f"select max(committed_at) from {log}")
    statement = in_log(day, LAST_BEFORE)
    await full.execute("set enable_seqscan = off")
    assert await full.fetchval(statement, since) == last - late
    found = await scans(full, statement, ["timestamptz"], [since], generic=generic)
    assert [(scan.index, scan.rows) for scan in found] == [(f"outbox_{day.day:%Y%m%d}_offset_idx", late + 1)]


@BOTH_PLANS
async def test_a_plan_that_was_made_with_few_dead_letters_does_not_read_all_later(
    full: Connection, generic: bool
) -> None:
    """It is kept while a day is gone through, and each step writes more of them."""
    day = await oldest(full)
    await full.execute("vacuum analyze dead_letter, delivery_retry")
    behind = await subscribe(full, "behind", "order")
    arguments = [*of_route(day, behind), datetime.now(UTC), 0]
    found = await probed(full, in_log(day, BURY_LOG), [*OF_ROUTE, "timestamptz", "bigint"], arguments, generic=generic)
    looked_up = [
        scan for scan in found if scan.table in ("dead_letter", "delivery_retry", "redelivery", "subscription")
    ]
    assert {scan.table for scan in looked_up} >= {"dead_letter", "delivery_retry", "redelivery"}
    assert {scan.node for scan in looked_up} <= {"Index Scan", "Index Only Scan"}


@BOTH_PLANS
async def test_a_look_for_undelivered_messages_is_a_short_index_range(full: Connection, generic: bool) -> None:
    day = await oldest(full)
    last = await last_offset(full)
    types = [*OF_ROUTE, "bigint"]
    for name, checkpoint, topic, rows in (("settled", last, "order", 0), ("other", 0, "stock", AT_ONCE)):
        subscription_id = await subscribe(full, name, topic, after=checkpoint)
        arguments = [*of_route(day, subscription_id, topic), 0]
        found = await probed(full, in_log(day, WAITING), types, arguments, generic=generic)
        assert rows_of(found, "outbox") == rows
        assert {scan.node for scan in found if scan.table.startswith("outbox_")} == {"Index Scan"}


@BOTH_PLANS
async def test_a_look_for_messages_of_a_replay_is_one_probe(full: Connection, generic: bool) -> None:
    day = await oldest(full)
    last = await last_offset(full)
    for at in (0, last - 1):
        await full.execute(
            'insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at) '
            "values (1, 0, $1, $2, 'running', now(), now())",
            last,
            at,
        )
        found = await scans(full, in_log(day, REPLAYING), ["int"], [1], generic=generic)
        assert rows_of(found, "outbox") <= 1
        assert sequential_scans(found) == []
        await full.execute("delete from replay")


@BOTH_PLANS
async def test_a_step_through_what_a_replay_has_not_read_is_a_short_index_range(
    full: Connection, generic: bool
) -> None:
    day = await oldest(full)
    first = await full.fetchval('select min("offset") from outbox where transaction_id >= $1', day.low)
    replay = await full.fetchval(
        'insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at) '
        "values (1, 0, $1, $2, 'running', now(), now()) returning replay_id",
        await last_offset(full),
        first + 500,
    )
    types = [*OF_ROUTE, "timestamptz", "bigint", "int", "text[]", "text[]", "text[]", "jsonb"]
    arguments = [*of_route(day, 1), datetime.now(UTC), 0, replay, None, None, None, None]
    found = await probed(full, in_log(day, BURY_UNREPLAYED), types, arguments, generic=generic)
    assert rows_of(found, "outbox") == AT_ONCE
    assert rows_of(found, "half") == AT_ONCE
    assert sequential_scans(found) == []


REPLAY = 7


async def write_of_many_days(db: Connection, table: str, subscription_id: int, *columns: str) -> None:
    """Write rows of a subscription from all days: of live delivery, and of a replay."""
    names, values = (
        ", ".join(column.split(" = ")[0] for column in columns),
        ", ".join(c.split(" = ")[1] for c in columns),
    )
    for replay in (0, REPLAY):
        await db.execute(
            f'insert into {table} (subscription_id, replay, transaction_id, position, "offset", topic, attempts, '
            f'{names}) select $1, $2, transaction_id, 0, "offset", topic, 1, {values} from outbox',
            subscription_id,
            replay,
        )
    await db.execute(f"analyze {table}")


async def in_day(db: Connection, day: Day) -> int:
    """Return the number of the day's messages."""
    count: int = await db.fetchval(
        "select count(*) from outbox where transaction_id between $1 and $2", day.low, day.high
    )
    return count


@BOTH_PLANS
@pytest.mark.parametrize("replay", [0, REPLAY])
async def test_confirmed_dead_letters_of_a_day_are_found_among_those_of_many(
    full: Connection, generic: bool, replay: int
) -> None:
    day = await oldest(full)
    await write_of_many_days(full, "dead_letter", 1, "reason = 'day_left'", "died_at = now()")
    types = ["uuid", "int", "int", "uuid", "smallint"]
    found = await probed(full, UNBURY, types, [day.high, 1, replay, day.low, -1], generic=generic)
    assert rows_of(found, "dead_letter") == AT_ONCE
    assert [scan.index for scan in found if scan.table == "dead_letter" and scan.rows] == ["dead_letter_pkey"]
    assert rows_of(found, "receipt") <= AT_ONCE
    # A day of which there are none.
    low, high = (
        bound.int - int(timedelta(days=30) / timedelta(milliseconds=1)) * 2**80 for bound in (day.low, day.high)
    )
    found = await probed(full, UNBURY, types, [UUID(int=high), 1, replay, UUID(int=low), -1], generic=generic)
    assert rows_of(found, "dead_letter") == 0


@BOTH_PLANS
@pytest.mark.parametrize("replay", [0, REPLAY])
async def test_retries_of_a_day_are_found_among_those_of_many(full: Connection, generic: bool, replay: int) -> None:
    day = await oldest(full)
    await write_of_many_days(full, "delivery_retry", 1, "due_at = now()")
    types = ["uuid", "int", "int", "timestamptz", "uuid", "smallint"]
    arguments = [day.high, 1, replay, datetime.now(UTC), day.low, -1]
    found = await probed(full, BURY_RETRIES, types, arguments, generic=generic)
    read = [(scan.index, scan.rows) for scan in found if scan.table == "delivery_retry"]
    # Once to find, once to lock, and once to delete.
    assert read == [("delivery_retry_pkey", AT_ONCE)] * 3


@BOTH_PLANS
async def test_a_look_for_retries_of_a_day_does_not_read_those_of_others(full: Connection, generic: bool) -> None:
    """Before Postgres 18, conditions on a day without the replay read the retries of all days."""
    day = await oldest(full)
    await write_of_many_days(full, "delivery_retry", 1, "due_at = now()")
    low = UUID(int=day.low.int - int(timedelta(days=30) / timedelta(milliseconds=1)) * 2**80)
    await full.execute("set enable_seqscan = off")
    for bounds, rows in (((low, day.low), 0), ((day.low, day.high), 1)):
        found = await scans(full, RETRIES_WAIT, ["int", "uuid", "uuid"], [1, *bounds], generic=generic)
        of_day = [scan for scan in found if "transaction_id" in scan.condition]
        assert [(scan.index, scan.rows) for scan in of_day] == [("delivery_retry_pkey", rows)]
        assert all("replay = " in scan.condition for scan in of_day)
        # One row for each replay besides.
        assert rows_of(found, "delivery_retry") <= rows + 2
        assert await full.fetchval(RETRIES_WAIT, 1, *bounds) is bool(rows)
    # A retry with its own copy needs no day.
    await full.execute("update delivery_retry set body = ''")
    assert await full.fetchval(RETRIES_WAIT, 1, day.low, day.high) is False
    # One of a replay does.
    await full.execute("update delivery_retry set body = null where replay = $1", REPLAY)
    assert await full.fetchval(RETRIES_WAIT, 1, day.low, day.high) is True
    assert await full.fetchval(RETRIES_WAIT, 2, day.low, day.high) is False


@BOTH_PLANS
async def test_retries_of_a_removed_day_are_found_among_those_of_others(full: Connection, generic: bool) -> None:
    day = await oldest(full)
    for subscription_id in (1, 2):
        await write_of_many_days(full, "delivery_retry", subscription_id, "due_at = now()")
    # Of each subscription in live delivery and in a replay.
    streams, of_day = 4, 4 * await in_day(full, day)
    # One of them has a copy of its message.
    await full.execute(
        "update delivery_retry set body = '' where ctid = (select ctid from delivery_retry where transaction_id < $1 "
        "order by transaction_id limit 1)",
        day.high,
    )
    await full.execute("vacuum delivery_retry")
    types = ["uuid", "uuid", "int", "int", "uuid"]
    arguments = [
        day.low,
        day.high,
        BEFORE_RETRIES.subscription_id,
        BEFORE_RETRIES.replay,
        BEFORE_RETRIES.transaction_id,
    ]
    for left in (of_day, 1):
        rows = min(left, CLEARED_AT_ONCE)
        found = await probed(full, RETRIES_OF_GONE_DAY, types, arguments, generic=generic)
        by_day = [scan for scan in found if "transaction_id" in scan.condition]
        assert [scan.index for scan in by_day] == ["delivery_retry_pkey"]
        assert all("subscription_id = " in one.condition and "replay = " in one.condition for one in by_day)
        # Those that are deleted are read once more.
        assert rows_of(found, "delivery_retry") <= 2 * rows + streams
        place: RetryPlace | None = BEFORE_RETRIES
        while place is not None:
            place = await clear_gone_retries(full, day, place)
        await full.execute("vacuum delivery_retry")
    assert await full.fetchval("select count(*) from delivery_retry where transaction_id < $1", day.high) == 1


@BOTH_PLANS
@pytest.mark.parametrize("table", ["dead_letter", "delivery_retry"])
async def test_the_replays_of_many_rows_are_one_descent_each(full: Connection, generic: bool, table: str) -> None:
    died = ["reason = 'day_left'", "died_at = now()"]
    await write_of_many_days(full, table, 1, *(died if table == "dead_letter" else ["due_at = now()"]))
    found = await probed(full, REPLAYS[table], ["int"], [1], generic=generic)
    assert rows_of(found, table) == 2
    assert [row[0] for row in await full.fetch(REPLAYS[table], 1)] == [0, REPLAY]


async def pages_of_step(db: Connection, since: UUID, day: Day) -> int:
    """Copy messages into the next dead letters; return how many pages it took to find these."""
    statement = KEEP_BODIES.replace("$1", f"'{since}'").replace("$2", f"'{day.high}'")
    plan = json.loads(await db.fetchval(f"explain (analyze, buffers, format json) {statement}"))
    [found] = [node for node in nodes(plan[0]["Plan"]) if node.get("Index Name") == "dead_letter_uncopied"]
    pages: int = found["Shared Hit Blocks"] + found["Shared Read Blocks"]
    return pages


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a plan's node and all below it."""
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


async def test_a_step_that_copies_messages_into_dead_letters_does_not_pass_those_of_earlier_steps(
    full: Connection,
) -> None:
    """Their entries stay in the index: here because the database transaction that copied them has not ended."""
    day = await oldest(full)
    for subscription_id in (1, 2, 3):
        await write_of_many_days(full, "dead_letter", subscription_id, "reason = 'expired'", "died_at = now()")
    async with full.transaction():
        first = await pages_of_step(full, day.low, day)
        since: UUID | None = day.low
        for _ in range(10):
            assert since is not None
            since = await keep_bodies(full, day, since)
        assert since is not None
        assert await pages_of_step(full, since, day) <= first * 1.2
        # From the beginning of the day it passes them all.
        assert await pages_of_step(full, day.low, day) > first * 2
        while since is not None:
            since = await keep_bodies(full, day, since)
    left = "select count(*) from dead_letter where body is null and transaction_id between $1 and $2"
    assert await full.fetchval(left, day.low, day.high) == 0


async def test_a_step_copies_few_large_messages_into_dead_letters(full: Connection) -> None:
    day = await oldest(full)
    await write_of_many_days(full, "dead_letter", 1, "reason = 'expired'", "died_at = now()")
    await make_large(full, day)
    steps = Copied(full)
    place: UUID | None = day.low
    while place is not None:
        place = await keep_bodies(full, day, place)
        await steps.look()
    assert steps.rows == 2 * await in_day(full, day)
    steps.assert_bounded()


async def test_a_step_that_copies_messages_locks_no_other_dead_letter(full: Connection) -> None:
    day = await oldest(full)
    await write_of_many_days(full, "dead_letter", 1, "reason = 'expired'", "died_at = now()")
    await make_large(full, day)
    async with full.transaction():
        await keep_bodies(full, day, day.low)
        copied = await full.fetchval("select count(body) from dead_letter")
        locked = await full.fetchval("select count(*) from dead_letter where xmax <> '0'")
    assert 0 < copied < BODIES_AT_ONCE
    assert locked == copied


@pytest.mark.parametrize("by", ["log", "late", "replay", "retries"])
async def test_a_step_of_a_forced_close_writes_few_large_messages(full: Connection, by: str) -> None:
    day, now = await oldest(full), datetime.now(UTC)
    await full.execute("truncate receipt")
    await make_large(full, day)
    await subscribe(full, "behind", "*")
    subscription = await one(full, "behind")
    assert subscription is not None
    steps = Copied(full)
    if by == "retries":
        await full.execute(
            'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, due_at) '
            'select $1, transaction_id, position, "offset", topic, 1, now() from outbox where transaction_id < $2',
            subscription.subscription_id,
            day.high,
        )
        place: RowPlace | None = RowPlace.before(day, 0)
        while place is not None:
            place = (await bury_retries(full, day, subscription, place, now)).place
            await steps.look()
        assert await full.fetchval("select count(*) from delivery_retry") == 0
    else:
        reached, more = 0, True
        while more:
            if by == "replay":
                step = await bury_unreplayed(full, day, subscription, await replay_of(full, subscription), reached, now)
            else:
                step = await bury_log(full, day, subscription, reached, 0 if by == "late" else None, now)
            reached, more = step.reached, step.more
            await steps.look()
    assert steps.rows == await in_day(full, day)
    steps.assert_bounded()


async def replay_of(db: Connection, subscription: Subscription) -> Replay:
    """Return the running replay of a subscription that has read nothing; made if there is none."""
    found = [one for one in await replays.running(db) if one.subscription_id == subscription.subscription_id]
    if not found:
        await db.execute(
            'insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at) '
            "values ($1, 0, $2, 0, 'running', now(), now())",
            subscription.subscription_id,
            await last_offset(db),
        )
        return await replay_of(db, subscription)
    return found[0]


LARGE = 2**20


async def make_large(db: Connection, day: Day) -> None:
    """Give 100 messages of a day, between small ones, bodies of 1 MiB, and one a body that is larger than a step."""
    first = 'select min("offset") from outbox where transaction_id >= $1 and transaction_id < $2'
    await db.execute(
        "update half h set body = convert_to(repeat('x', case o.\"offset\" when $1 + 50 then $2::int else $3 end), "
        "'utf8') "
        'from outbox o where o.transaction_id = h.transaction_id and o."offset" >= $1 and o."offset" < $1 + 100',
        await db.fetchval(first, day.low, day.high),
        BODY_BYTES_AT_ONCE + LARGE,
        LARGE,
    )


class Copied:
    """What each step has written of bodies."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._bytes, self.rows = 0, 0
        self._steps: list[tuple[int, int]] = []

    async def look(self) -> None:
        """Note what the last step has written."""
        size, rows = await self._db.fetchrow(
            "select coalesce(sum(octet_length(body)), 0), count(body) from dead_letter"
        ) or (0, 0)
        self._steps.append((size - self._bytes, rows - self.rows))
        self._bytes, self.rows = size, rows

    def assert_bounded(self) -> None:
        """Assert that no step has written more than it may, nor little without need."""
        assert all(size <= BODY_BYTES_AT_ONCE or rows == 1 for size, rows in self._steps), self._steps
        assert len(self._steps) < 25
