"""What begins or ends while upkeep closes a day: nothing is lost without a trace, and no worker waits for long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest

from app.database.connection import Connection, connect
from app.retention import day_closing
from app.retention import loop as retention_loop
from app.runtime.state import Runtime
from app.store.coordinator.ops import RECORD_END
from app.store.relay import checkpoints
from app.store.relay.checkpoints import Shard
from app.store.relay.leases import Lease
from app.store.retention import day_blockers, day_dead_letters, days
from app.store.subscriptions import subscriptions
from app.verdicts import Source, Verdict
from tests.support.days import (
    all_delivered,
    go_to,
    long_ago,
    post_half,
    post_transaction,
    subscribe,
    write_transactions,
)

pytestmark = pytest.mark.usefixtures("group", "old_time")

PROMPTLY_S = 20
OLD_TIME = long_ago(10)
DAY = OLD_TIME.date()
# Past retention (7 days), not past the longest one (45 days).
NOW = OLD_TIME + timedelta(days=9)
AFTER_MAX_RETENTION = OLD_TIME + timedelta(days=46)
LOCK_DAY = f"select from day where day = '{DAY}' for update"
# Other tests have databases on the same server.
WAITING = (
    "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database() "
    "and query like $1 || '%'"
)
WEBHOOK = {"type": "webhook", "url": "https://receiver.example/hook"}


@pytest.fixture
async def old_time(runtime: Runtime, db: Connection) -> datetime:
    """Set the service's clock to a time in a day that is to be removed; return that time."""
    await go_to(runtime, db, OLD_TIME)
    await db.execute("update day set state = 'gone' where day = $1", DAY - timedelta(days=1))
    return OLD_TIME


@asynccontextmanager
async def holding(dsn: str, statement: str, *arguments: Any) -> AsyncIterator[Connection]:
    """Hold a database transaction of another session open after one statement; commit it at the end."""
    connection = await connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute(statement, *arguments)
            yield connection
    finally:
        await connection.close()


async def until_waiting(db: Connection, statement: str) -> None:
    """Wait until a session waits for a lock in a statement that begins so."""
    async with asyncio.timeout(PROMPTLY_S):
        while not await db.fetchval(WAITING, statement):
            await asyncio.sleep(0.01)


async def standing(db: Connection) -> tuple[str, list[str]]:
    """Return the day's state and what holds it."""
    row = await db.fetchrow("select state, held from day where day = $1", DAY)
    assert row is not None
    return row["state"], row["held"]


async def dead_letters(db: Connection) -> set[tuple[str, str]]:
    """Return the subscription and the transaction of each dead letter."""
    rows = await db.fetch(
        "select s.name, d.transaction_id from dead_letter d join subscription s using (subscription_id)"
    )
    return {(row["name"], str(row["transaction_id"])) for row in rows}


async def record_commit(connection: Connection, transaction_id: str) -> None:
    """Record a commit as the lane of Ends does."""
    ended = [Verdict.COMMIT, Source.PRODUCER, None, None]
    assert await connection.fetch(RECORD_END, UUID(transaction_id), "shop", *ended, OLD_TIME)


async def write_retry(db: Connection, transaction_id: str, subscription_id: int) -> None:
    """Write a retry of a message."""
    await db.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, due_at) '
        'select $1, transaction_id, position, "offset", topic, 3, now() from outbox where transaction_id = $2',
        subscription_id,
        transaction_id,
    )


async def test_a_subscription_that_is_being_created_holds_the_close(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """The request has read where the log begins, and waits with its insert for another one of the same name."""
    await post_transaction(client)
    other = await connect(dsn)
    try:
        inserted = other.transaction()
        await inserted.start()
        await subscribe(other, "late", "order")
        created = asyncio.create_task(
            client.put("/subscriptions/late", json={"topics": ["order"], "start": "earliest", "destination": WEBHOOK})
        )
        await until_waiting(db, "\nwith made as")
        await retention_loop.step(runtime, NOW)
        assert await standing(db) == ("open", ["reader"])
        await inserted.rollback()
    finally:
        await other.close()
    assert (await created).status_code == 201
    await retention_loop.step(runtime, NOW)
    assert await standing(db) == ("open", ["undelivered:late"])


async def test_a_subscription_that_is_created_between_the_look_and_the_close_holds_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """Upkeep has looked at all subscriptions that there were. The relay would skip the closed day at once."""
    await post_transaction(client)
    await subscribe(db, "billing", "order")
    await all_delivered(db)
    async with holding(dsn, "lock table replay in access exclusive mode"):
        step = asyncio.create_task(retention_loop.step(runtime, NOW))
        # It looks for replays of the subscriptions that it knows.
        await until_waiting(db, "\nselect exists (\n  select from replay")
        await subscribe(db, "late", "order")
    await step
    assert await standing(db) == ("open", ["undelivered:late"])


async def test_a_subscription_that_is_created_while_a_day_is_closed_by_force_gets_its_dead_letters(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """Upkeep has the list of subscriptions already. The relay moves the new one's checkpoint past the closed day."""
    transaction_id = await post_transaction(client)
    await db.execute("update outbox set committed_at = committed_at - interval '1 day'")
    await subscribe(db, "billing", "order")
    async with holding(dsn, "select from day"):
        async with holding(dsn, "lock table dead_letter in share row exclusive mode"):
            step = asyncio.create_task(retention_loop.step(runtime, AFTER_MAX_RETENTION))
            await until_waiting(db, "\nwith span as")
            await subscribe(db, "late", "order")
        await step
        assert await standing(db) == ("archiving", ["reader"])
    await all_delivered(db)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])
    assert await dead_letters(db) == {("billing", transaction_id), ("late", transaction_id)}


START_REPLAY = (
    'insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at) '
    "values ($1, 0, 1000, 0, 'running', now(), now())"
)
# A dead letter of the first replay.
BURY_FIRST_REPLAY = (
    'insert into dead_letter (subscription_id, replay, transaction_id, position, "offset", topic, attempts, '
    "reason, died_at) select $1, 1, transaction_id, 0, \"offset\", topic, 0, 'day_left', now() from outbox "
    "where topic = 'order'"
)


async def test_a_replay_that_begins_while_a_day_is_closed_by_force_gets_its_dead_letters(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """Upkeep has looked for replays already, and goes through the log of another one."""
    transaction_id = await post_transaction(client)
    await db.execute("update outbox set committed_at = committed_at - interval '1 day'")
    billing = await subscribe(db, "billing", "order")
    await all_delivered(db)
    await db.execute(START_REPLAY, billing)
    async with holding(dsn, "select from day"):
        # It is not committed yet.
        async with holding(dsn, BURY_FIRST_REPLAY, billing):
            step = asyncio.create_task(retention_loop.step(runtime, AFTER_MAX_RETENTION))
            await until_waiting(db, "\nwith span as")
            await db.execute(START_REPLAY, billing)
        await step
        assert await standing(db) == ("archiving", ["reader"])
    await db.execute('update replay set "offset" = until')
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])
    found = await db.fetch("select replay, transaction_id from dead_letter order by replay")
    assert [tuple(row) for row in found] == [(1, UUID(transaction_id)), (2, UUID(transaction_id))]


async def test_a_replay_that_begins_during_the_last_try_of_a_forced_close_holds_the_day_as_a_replay(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(day_closing, "TRIES", 1)
    await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    await all_delivered(db)
    await db.execute(START_REPLAY, billing)
    async with holding(dsn, BURY_FIRST_REPLAY, billing):
        step = asyncio.create_task(retention_loop.step(runtime, AFTER_MAX_RETENTION))
        await until_waiting(db, "\nwith span as")
        await db.execute(START_REPLAY, billing)
    await step
    assert await standing(db) == ("open", ["replay:billing"])
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])


async def test_a_replay_that_begins_while_a_day_is_closed_finds_it_closed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    await post_transaction(client)
    await subscribe(db, "billing", "order")
    await all_delivered(db)
    await db.execute("update day set decided = true where day = $1", DAY)
    async with holding(dsn, "lock table replay in share mode"):
        async with holding(dsn, LOCK_DAY):
            step = asyncio.create_task(retention_loop.step(runtime, NOW))
            await until_waiting(db, "update day set state = 'archiving'")
            asked = asyncio.create_task(client.post("/subscriptions/billing/replay", json={"from": "earliest"}))
            # It waits for its turn, or with its insert.
            async with asyncio.timeout(PROMPTLY_S):
                while await db.fetchval(WAITING, "") < 2:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(PROMPTLY_S):
            while (await standing(db))[0] == "open":
                await asyncio.sleep(0.01)
    await step
    answer = await asked
    assert await standing(db) == ("gone", [])
    assert answer.status_code == 422
    assert "the log is empty" in answer.json()["detail"]
    assert await db.fetchval("select count(*) from replay") == 0


async def test_a_commit_that_takes_longer_than_a_minute_becomes_a_dead_letter(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """It is recorded before the close and visible long after it; the relay skips it, because its day is closed."""
    late = await post_half(client)
    await subscribe(db, "billing", "order")
    hanging = await connect(dsn)
    try:
        async with hanging.transaction():
            await record_commit(hanging, late)
            # The service's time at the close is days after the time of that commit.
            await retention_loop.step(runtime, AFTER_MAX_RETENTION)
            assert await standing(db) == ("archiving", ["reader"])
    finally:
        await hanging.close()
    await all_delivered(db)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])
    assert await dead_letters(db) == {("billing", late)}


async def test_the_time_of_late_messages_is_that_of_the_oldest_open_database_transaction(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """However long its commit takes."""
    late = await post_half(client)
    before = await db.fetchval("select clock_timestamp()")
    hanging = await connect(dsn)
    try:
        async with hanging.transaction():
            await record_commit(hanging, late)
            began = await hanging.fetchval("select now()")
            await asyncio.sleep(0.05)
            assert before < began == await day_blockers.oldest_writer(db)
            assert await hanging.fetchval('select min(committed_at) from outbox where "offset" > 0') >= began
            await retention_loop.step(runtime, AFTER_MAX_RETENTION)
            assert await db.fetchval("select changed_at from day where day = $1", DAY) == began
    finally:
        await hanging.close()
    assert await day_blockers.oldest_writer(db) > began


async def test_a_commit_with_a_newer_transaction_id_than_the_close_delays_the_removal(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """It read the day as open after the close had begun, and has no snapshot any more while it commits."""
    late = await post_half(client)
    await subscribe(db, "billing", "order")
    hanging = await connect(dsn)
    try:
        async with hanging.transaction():
            async with holding(dsn, LOCK_DAY):
                step = asyncio.create_task(retention_loop.step(runtime, AFTER_MAX_RETENTION))
                await until_waiting(db, "update day set state = 'archiving'")
                await record_commit(hanging, late)
            await step
            assert await standing(db) == ("archiving", ["reader"])
            assert await db.fetchval("select count(*) from pg_inherits where inhrelid = $1::regclass", part("outbox"))
    finally:
        await hanging.close()
    await all_delivered(db)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])
    assert await dead_letters(db) == {("billing", late)}


async def test_a_close_does_not_wait_for_database_transactions_that_began_after_it(
    runtime: Runtime, db: Connection, dsn: str
) -> None:
    """As a proof, an archive and a dump do, of which one is open at each look."""
    async with holding(dsn, "select from day"):
        for _ in range(2):
            await retention_loop.step(runtime, AFTER_MAX_RETENTION)
            assert await standing(db) == ("archiving", ["reader"])
        later = await connect(dsn)
        reading = later.transaction()
        await reading.start()
        await later.execute("select from day")
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
        assert await standing(db) == ("archiving", ["reader"])
    try:
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
        assert await standing(db) == ("gone", [])
    finally:
        await later.close()


async def test_a_second_close_waits_for_readers_that_began_after_the_first(
    runtime: Runtime, db: Connection, dsn: str
) -> None:
    async with holding(dsn, "select from day"):
        for _ in range(2):
            await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    # As if another worker had opened the day again. The time that the row keeps of a close may be the same again.
    await db.execute("update day set state = 'open' where day = $1", DAY)
    async with holding(dsn, "select from day"):
        await db.execute("update day set state = 'archiving' where day = $1", DAY)
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
        assert await standing(db) == ("archiving", ["reader"])
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])


async def test_a_detached_day_waits_for_no_reader(runtime: Runtime, db: Connection, dsn: str) -> None:
    async with holding(dsn, f"select from {part('attempt')}"):
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
        assert await standing(db) == ("archiving", ["reader"])
        assert not await db.fetchval("select count(*) from pg_inherits where inhrelid = $1::regclass", part("outbox"))
    async with holding(dsn, "select from day"):
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
        assert await standing(db) == ("gone", [])


def part(table: str) -> str:
    """Return the name of the day's partition of a table."""
    return days.partition_name(table, DAY)


async def test_a_locked_retry_of_one_subscription_keeps_only_its_own_messages(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    transaction_id = await post_transaction(client)
    for name in ("billing", "stock"):
        await write_retry(db, transaction_id, await subscribe(db, name, "order"))
    await all_delivered(db)
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    locked = "select from delivery_retry join subscription using (subscription_id) where name = 'stock' for update"
    async with holding(dsn, locked):
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
        assert await standing(db) == ("archiving", ["failed"])
        assert await dead_letters(db) == {("billing", transaction_id)}
    await retention_loop.step(runtime, AFTER_MAX_RETENTION + timedelta(minutes=2))
    assert await standing(db) == ("gone", [])
    assert await dead_letters(db) == {("billing", transaction_id), ("stock", transaction_id)}


MANY = 2 * day_dead_letters.AT_ONCE + 500


async def test_a_large_day_is_gone_through_in_steps(runtime: Runtime, db: Connection) -> None:
    await write_transactions(db, OLD_TIME, MANY)
    await subscribe(db, "billing", "order")
    day = {row.day: row for row in await days.days(db)}[DAY]
    billing = await subscriptions.one(db, "billing")
    assert billing is not None
    first = await day_dead_letters.bury_log(db, day, billing, 0, None, NOW)
    assert first.buried is not None
    assert (first.reached, first.more, first.buried.messages) == (day_dead_letters.AT_ONCE, True, 1000)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])
    found = await db.fetchrow("select count(*) as rows, count(body) as bodies from dead_letter")
    assert tuple(found or ()) == (MANY, MANY)


async def test_many_retries_and_confirmed_deliveries_are_gone_through_in_steps(
    runtime: Runtime, db: Connection
) -> None:
    await write_transactions(db, OLD_TIME, MANY)
    billing = await subscribe(db, "billing", "order")
    await db.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, due_at) '
        'select $1, transaction_id, position, "offset", topic, 3, now() from outbox',
        billing,
    )
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    await db.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, settled_at) select transaction_id, position, $1, \"offset\", 'delivered', 1, now(), 1, now() "
        'from outbox where "offset" % 2 = 0',
        billing,
    )
    await all_delivered(db)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    found = await db.fetchrow('select count(*) as rows, bool_and("offset" % 2 = 1) as odd from dead_letter')
    assert tuple(found or ()) == (MANY // 2, True)


@pytest.mark.parametrize("undecided", [False, True])
async def test_a_removal_that_has_begun_goes_on_after_the_retention_was_raised(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, undecided: bool
) -> None:
    if undecided:
        await post_half(client)
    await post_transaction(client)
    await db.execute("update day set state = 'archiving', decided = not $2 where day = $1", DAY, undecided)
    runtime.settings = runtime.settings.model_copy(update={"retention_s": 30 * 86_400})
    await retention_loop.step(runtime, NOW)
    assert await standing(db) == (("open", ["in_doubt"]) if undecided else ("gone", []))


@pytest.mark.parametrize("undecided", [False, True])
async def test_a_confirmed_delivery_is_no_dead_letter_after_the_longest_retention_was_raised(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, undecided: bool
) -> None:
    """A forced close made the dead letter while the relay delivered; the day is removed, or opened again."""
    if undecided:
        await post_half(client)
    confirmed = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    day = {row.day: row for row in await days.days(db)}[DAY]
    subscription = await subscriptions.one(db, "billing")
    assert subscription is not None
    await day_dead_letters.bury_log(db, day, subscription, 0, None, NOW)
    assert await dead_letters(db) == {("billing", confirmed)}
    await db.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, settled_at) select transaction_id, position, $1, \"offset\", 'delivered', 1, now(), 1, now() "
        "from outbox where transaction_id = $2",
        billing,
        UUID(confirmed),
    )
    await all_delivered(db)
    await db.execute("update day set state = 'archiving', decided = not $2 where day = $1", DAY, undecided)
    await retention_loop.step(runtime, NOW)
    assert await standing(db) == (("open", ["in_doubt"]) if undecided else ("gone", []))
    assert await dead_letters(db) == set()


async def test_a_detached_day_is_dropped_after_the_longest_retention_was_raised(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """It was closed by force with an undecided transaction, and can no more be opened."""
    await post_half(client)
    async with holding(dsn, f"select from {part('attempt')}"):
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
        assert await standing(db) == ("archiving", ["reader"])
    runtime.settings = runtime.settings.model_copy(update={"max_retention_s": 90 * 86_400})
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await standing(db) == ("gone", [])


async def test_what_a_long_step_writes_is_no_older_than_its_messages(client: httpx.AsyncClient, db: Connection) -> None:
    """The step of upkeep began before one message was committed, and before the first try of another one."""
    at = OLD_TIME + timedelta(minutes=5)
    committed, tried = [await post_transaction(client) for _ in range(2)]
    billing = await subscribe(db, "billing", "order")
    await db.execute("update outbox set committed_at = $1", at)
    await write_retry(db, tried, billing)
    await db.execute("update delivery_retry set first_at = $1", at + timedelta(minutes=1))
    day = await days.day_of(db, UUID(committed))
    [subscription] = await subscriptions.page(db, "", 10)
    assert day is not None
    await day_dead_letters.bury_log(db, day, subscription, -1, None, OLD_TIME)
    await day_dead_letters.bury_retries(db, day, subscription, day_dead_letters.RowPlace.before(day, 0), OLD_TIME)
    died = dict(await db.fetch("select transaction_id::text, died_at from dead_letter"))
    assert died == {committed: at, tried: at + timedelta(minutes=1)}


async def test_a_day_is_open_again_from_its_commit_on(db: Connection) -> None:
    """The proof expects a receipt of each redelivery that ended since. Statements that began before find it closed."""
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    began = await db.fetchval("select clock_timestamp()")
    await days.reopen_day(db, DAY, OLD_TIME)
    reopened = await db.fetchval("select changed_at from day where day = $1 and state = 'open'", DAY)
    assert timedelta(seconds=5) <= reopened - began < timedelta(seconds=30)
    # Another replica's upkeep may find at once that all of it is decided.
    await days.set_decided(db, DAY, began)
    assert await db.fetchval("select changed_at from day where day = $1 and decided", DAY) == reopened


async def test_a_retry_that_a_new_holder_frees_meanwhile_is_buried_once(
    client: httpx.AsyncClient, db: Connection, dsn: str
) -> None:
    tried = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    await write_retry(db, tried, billing)
    await db.execute("update delivery_retry set leased_until = now() + interval '1 minute'")
    shard = Shard(billing)
    await db.execute("insert into lease values ($1, 'one', 1, now() + interval '1 hour')", shard.lease_name)
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    day = await days.day_of(db, UUID(tried))
    [subscription] = await subscriptions.page(db, "", 10)
    assert day is not None
    place = day_dead_letters.RowPlace.before(day, 0)
    other = await connect(dsn)
    try:
        async with db.transaction():
            assert await checkpoints.free_claims(db, Lease(shard.lease_name, "one", 1), shard)
            burying = asyncio.create_task(day_dead_letters.bury_retries(other, day, subscription, place, OLD_TIME))
            async with asyncio.timeout(30):
                while not await db.fetchval("select pg_blocking_pids($1) <> '{}'", other.get_server_pid()):
                    assert not burying.done()
                    await asyncio.sleep(0.01)
        await burying
    finally:
        await other.close()
    assert await db.fetchval("select count(*) from dead_letter") == 1
    assert await db.fetchval("select count(*) from delivery_retry") == 0
