"""Days that are closed and removed while consumers hold their messages: nothing is lost, and late answers change
nothing.
"""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection, connect
from app.delivery import Refused
from app.pull import settling, sweep
from app.pull.handles import opened
from app.pull.settlements import Held, acknowledged, failed, refused
from app.retention import loop as retention_loop
from app.runtime.state import Runtime
from app.store.pull import sweeps
from app.store.pull.claims import HeldMessage, PulledSubscription, pulled
from app.store.pull.settles import SETTLE, settle_held
from app.store.pull.sweeps import LOOK_AGAIN_S, PUT_OFF_AT_ONCE
from app.store.retention import day_dead_letters, days
from app.store.subscriptions import subscriptions
from tests.support.consumers import Consumer, put_pulled, sweep_after
from tests.support.days import go_to, long_ago, post_end, post_half
from tests.support.relay_stepping import order, publish

OLD_TIME = long_ago(10)
DAY = OLD_TIME.date()
# Past retention (7 days), and past the longest one (45 days).
NOW, MUCH_LATER = OLD_TIME + timedelta(days=9), OLD_TIME + timedelta(days=46)
DAY_STATE = "select state from day where day = $1"


@pytest.fixture(params=["none", "key"])
async def consumer(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, request: pytest.FixtureRequest
) -> Consumer:
    """A consumer of `worker`; the service's clock is in a day that is to be removed."""
    await go_to(runtime, db, OLD_TIME)
    await db.execute("update day set state = 'gone' where day = $1", DAY - timedelta(days=1))
    await put_pulled(client, ordered=request.param)
    return Consumer(client)


async def dead(db: Connection) -> list[int]:
    return [row["offset"] for row in await db.fetch('select "offset" from dead_letter order by "offset"')]


async def held_again(consumer: Consumer, claimed: list[dict[str, Any]]) -> list[int]:
    outcomes = await consumer.settle("extend", *(one["handle"] for one in claimed), invisible_s=3600)
    return [one["status"] for one in outcomes]


async def test_what_consumers_hold_keeps_its_day_until_it_is_acknowledged(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, *(order(n) for n in range(3)))
    claimed = await consumer.claim(max=2)
    # A claim, a row of delivery_retry, and a message that was not claimed.
    await consumer.settle("extend", claimed[0]["handle"], invisible_s=3600)
    await retention_loop.step(runtime, NOW)
    assert await db.fetchval(DAY_STATE, DAY) == "open"
    assert await consumer.ack(*claimed) == [200, 200]
    await retention_loop.step(runtime, NOW)
    assert await db.fetchval(DAY_STATE, DAY) == "open"
    assert await consumer.ack(*await consumer.claim()) == [200]
    await sweep_after(runtime)
    await retention_loop.step(runtime, NOW)
    assert await db.fetchval(DAY_STATE, DAY) == "gone"
    assert await dead(db) == []


async def test_what_consumers_hold_at_the_longest_retention_is_dead_and_can_be_redelivered(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    sent = await publish(client, *(order(n) for n in range(4)))
    claimed = await consumer.claim(max=3, invisible_s=3600)
    await consumer.settle("extend", claimed[0]["handle"], invisible_s=3600)
    assert await consumer.ack(claimed[1]) == [200]
    await retention_loop.step(runtime, MUCH_LATER)
    assert await db.fetchval(DAY_STATE, DAY) == "gone"
    assert await dead(db) == [sent[0], sent[2], sent[3]]
    # What they hold is settled no more, and nothing of it comes again by itself.
    assert await consumer.ack(claimed[0], claimed[2]) == [409, 409]
    assert await held_again(consumer, claimed) == [409, 409, 409]
    for action in ("nack", "reject"):
        assert {one["status"] for one in await consumer.settle(action, *(one["handle"] for one in claimed))} == {409}
    await sweep_after(runtime, 3700)
    assert await db.fetchval("select count(*) from pull_claim") == 0
    assert await consumer.claim() == []
    assert await dead(db) == [sent[0], sent[2], sent[3]]
    ids = [{"subscription": "worker", "message_id": claimed[2]["message_id"]}]
    assert (await client.post("/dead-letters/redeliver", json={"ids": ids})).status_code == 200
    [again] = await consumer.claim()
    assert (again["offset"], again["body"]) == (sent[2], {"order": 2})
    assert await consumer.ack(again) == [200]
    assert await db.fetchval("select count(*) from delivery_retry") == 0


async def test_with_on_dead_hold_a_dead_letter_of_a_removed_day_holds_none_before_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    midnight = OLD_TIME.replace(hour=0) + timedelta(days=1)
    await go_to(runtime, db, midnight - timedelta(minutes=1))
    await db.execute("update day set state = 'gone' where day = $1", DAY - timedelta(days=1))
    await put_pulled(client, ordered="key", on_dead="hold")
    late = await post_half(client, order(0, key="a"))
    await go_to(runtime, db, midnight + timedelta(minutes=1))
    [first] = await publish(client, order(1, key="a"))
    assert (await post_end(client, late)).status_code == 200
    await retention_loop.step(runtime, MUCH_LATER)
    assert await db.fetchval(DAY_STATE, DAY) == "gone"
    assert await dead(db) == [first + 1]
    consumer = Consumer(client)
    [message] = await consumer.claim()
    assert message["offset"] == first
    assert await consumer.ack(message) == [200]
    await publish(client, order(2, key="a"))
    assert await consumer.claim() == []


async def test_a_day_that_is_being_removed_is_neither_claimed_nor_settled_and_opens_again(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    sent = await publish(client, *(order(n) for n in range(2)))
    [held] = await consumer.claim(max=1, invisible_s=1)
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    assert await consumer.claim() == []
    assert await consumer.ack(held) == [409]
    await sweep_after(runtime, 10)
    # Upkeep owns its messages meanwhile, so no attempt is counted.
    assert await db.fetchval("select count(*) from pull_claim") == 1
    await db.execute("update day set state = 'open' where day = $1", DAY)
    runtime.clock.fixed = OLD_TIME + timedelta(seconds=10 + LOOK_AGAIN_S)
    await sweep_after(runtime)
    [again] = await consumer.claim()
    assert (again["offset"], again["attempt"]) == (sent[0], 2)
    assert await consumer.ack(again) == [200]


async def test_claims_that_wait_for_a_day_are_put_off_and_what_comes_after_them_is_not(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    [old] = await publish(client, order(1))
    await consumer.claim(invisible_s=1)
    many = PUT_OFF_AT_ONCE + 1
    await db.execute(
        "insert into pull_claim (subscription_id, lowest, size, claimed_at, held_until, sweep_at, transaction_ids, "
        "positions) select subscription_id, lowest, size, claimed_at, held_until, sweep_at, transaction_ids, positions "
        "from pull_claim cross join generate_series(2, $1)",
        many,
    )
    await go_to(runtime, db, OLD_TIME + timedelta(days=1))
    [new] = await publish(client, order(2))
    await consumer.claim(invisible_s=1)
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    # One step, for what is put off and for what is over.
    now = runtime.clock.now() + timedelta(seconds=10)
    assert (await sweep.step(runtime, now)).done == 1
    assert await db.fetch('select "offset", attempts from delivery_retry') == [(new, 1)]
    later = now + timedelta(seconds=LOOK_AGAIN_S)
    assert await db.fetch("select sweep_at, count(*) from pull_claim group by 1") == [(later, many)]
    # They are late then, and still wait.
    assert (await sweep.step(runtime, later)).done == 0
    assert await db.fetchval("select count(*) from pull_claim where sweep_at > $1", later) == many
    assert await db.fetchval('select min("offset") from checkpoint') == old - 1


@pytest.mark.parametrize("settled", [True, False])
async def test_a_day_that_is_being_removed_keeps_no_message_of_another_day_from_coming_again(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, settled: bool
) -> None:
    [old] = await publish(client, order(1))
    await go_to(runtime, db, OLD_TIME + timedelta(days=1))
    [new] = await publish(client, order(2))
    claimed = await consumer.claim(max=2)
    assert [one["offset"] for one in claimed] == [old, new]
    if settled:
        assert await consumer.ack(claimed[0]) == [200]
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    for _ in range(2):
        await sweep_after(runtime, 40)
        assert await db.fetch('select "offset", attempts from delivery_retry') == [(new, 1)]
    # What is not settled waits in the claim, before the checkpoint.
    left = await db.fetch("select lowest, settled from pull_claim")
    assert left == ([] if settled else [(old, [2])])
    assert (await db.fetchval('select min("offset") from checkpoint') >= new) is settled
    runtime.clock.fixed += timedelta(seconds=50)
    [again] = await consumer.claim()
    assert (again["offset"], again["attempt"]) == (new, 2)
    assert await consumer.ack(claimed[1], again) == [409, 200]
    await db.execute("update day set state = 'open' where day = $1", DAY)
    runtime.clock.fixed += timedelta(seconds=LOOK_AGAIN_S)
    await sweep_after(runtime)
    assert [(one["offset"], one["attempt"]) for one in await consumer.claim()] == ([] if settled else [(old, 2)])
    assert await db.fetchval("select count(*) from pull_claim") == 0


@pytest.mark.parametrize("lasts_s", [10, 600])
async def test_what_is_left_in_a_claim_goes_with_its_day(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, lasts_s: int
) -> None:
    [old] = await publish(client, order(1))
    await go_to(runtime, db, OLD_TIME + timedelta(days=1))
    await publish(client, order(2))
    claimed = await consumer.claim(max=2, invisible_s=lasts_s)
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    await sweep_after(runtime, 40)
    assert await db.fetchval("select count(*) from pull_claim") == 1
    await retention_loop.step(runtime, MUCH_LATER)
    await sweep_after(runtime, 40 + LOOK_AGAIN_S)
    assert await db.fetchval("select count(*) from pull_claim") == 0
    assert await dead(db) == [old]
    runtime.clock.fixed += timedelta(seconds=50)
    assert await consumer.ack(*claimed) == [409, 409 if lasts_s == 10 else 200]


async def test_stored_messages_of_a_day_that_is_being_removed_are_neither_claimed_nor_settled(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    sent = await publish(client, *(order(n) for n in range(2)))
    held, failed_once = await consumer.claim(max=2)
    await consumer.settle("extend", held["handle"], invisible_s=600)
    await consumer.settle("nack", failed_once["handle"], retry_after_s=0)
    rows = await db.fetch('select * from delivery_retry order by "offset"')
    assert [row["offset"] for row in rows] == sent
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    assert await consumer.claim() == []
    for action, fields in (("ack", {}), ("nack", {}), ("reject", {}), ("extend", {"invisible_s": 3600})):
        [outcome] = await consumer.settle(action, held["handle"], **fields)
        assert outcome["status"] == 409
    assert await db.fetch('select * from delivery_retry order by "offset"') == rows
    await db.execute("update day set state = 'open' where day = $1", DAY)
    [again] = await consumer.claim()
    assert (again["offset"], again["attempt"]) == (sent[1], 2)
    assert await consumer.ack(held, again) == [200, 200]


@pytest.mark.parametrize("how", ["delivered", "retry", "dead"])
async def test_what_is_settled_while_its_day_closes_leaves_nothing(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection, how: str
) -> None:
    """Upkeep closed the day after the message was taken out of its claim, in the same database transaction."""
    await publish(client, order(1))
    row = await db.fetchrow('select transaction_id, position, "offset", topic, key from outbox')
    subscription_id = await db.fetchval("select subscription_id from subscription")
    assert row is not None
    held = Held(
        at=None, subscription_id=subscription_id, replay=0, **row, waits_from=OLD_TIME, used=0, first_at=OLD_TIME
    )
    handle = HeldMessage(subscription_id, 0, 1, 1, 1, row["transaction_id"], 0, row["offset"], OLD_TIME, b"")
    settlement = {
        "delivered": acknowledged(held, handle, OLD_TIME),
        "retry": refused(held, failed("no paper"), [60.0], OLD_TIME),
        "dead": refused(held, failed("no paper"), [], OLD_TIME),
    }[how]
    tables = {"delivered": {"receipt"}, "retry": {"delivery_retry", "attempt"}, "dead": {"dead_letter", "attempt"}}
    for day, written in (("archiving", set()), ("open", tables[how])):
        await db.execute("update day set state = $2 where day = $1", DAY, day)
        await settle_held(db, [settlement], OLD_TIME)
        counts = {
            name: await db.fetchval(f"select count(*) from {name}")
            for name in ("receipt", "delivery_retry", "dead_letter", "attempt")
        }
        assert {name for name, count in counts.items() if count} == written


class _ClosesDay:
    """A connection that closes the day before a statement settles what was locked, as a forced close would."""

    def __init__(self, connection: Connection, other: Connection) -> None:
        self._connection, self._other = connection, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def execute(self, statement: str, *arguments: Any) -> str:
        await self._close(statement)
        return str(await self._connection.execute(statement, *arguments))

    async def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        await self._close(statement)
        return list(await self._connection.fetch(statement, *arguments))

    async def _close(self, statement: str) -> None:
        if statement == SETTLE:
            await self._other.execute("update day set state = 'archiving' where day = $1", DAY)


@pytest.mark.parametrize("held_in", ["a claim", "a row"])
@pytest.mark.parametrize("how", ["retry", "dead", "delivered"])
async def test_what_a_closing_day_keeps_from_being_recorded_is_not_held(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, dsn: str, how: str, held_in: str
) -> None:
    """A settlement whose day is closed after the message was locked is refused, unless it is recorded."""
    await publish(client, order(1))
    [message] = await consumer.claim()
    if held_in == "a row":
        await consumer.settle("extend", message["handle"], invisible_s=600)
    known = await pulled(db, "worker")
    assert isinstance(known, PulledSubscription)
    subscription, clock = known.subscription, runtime.clock
    handle = opened(message["handle"], lambda _: known.handle_key)
    assert handle is not None
    other = await connect(dsn)
    try:
        closing: Any = _ClosesDay(db, other)
        if how == "delivered":
            found: Any = await settling.acknowledge(closing, subscription, [handle], clock.now())
        else:
            outcome = failed("no paper") if how == "retry" else Refused("no paper", "no paper", None, None, 0)
            found, _ = await settling.give_back(closing, subscription, [handle], outcome, clock)
    finally:
        await other.close()
    closed = await db.fetchval(DAY_STATE, DAY) == "archiving"
    # An acknowledgement of a claim is one statement. A row that is given back is changed; upkeep finds it afterwards.
    assert closed is not (how == "delivered" and held_in == "a claim")
    recorded = not closed or (how != "delivered" and held_in == "a row")
    assert [one is not None for one in found] == [recorded]
    receipts = await db.fetchval("select count(*) from receipt")
    assert (receipts, await dead(db) != []) == (int(not closed), how == "dead" and recorded)
    assert await db.fetchval("select count(*) from delivery_retry") == (held_in == "a row" and how != "dead")


async def test_what_a_closing_day_keeps_a_sweep_from_recording_is_not_counted(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, dsn: str
) -> None:
    await publish(client, order(1))
    await consumer.claim(invisible_s=1)
    subscription_id = await db.fetchval("select subscription_id from subscription")
    other = await connect(dsn)
    try:
        closing: Any = _ClosesDay(db, other)
        async with db.transaction():
            [lapsed] = await sweeps.take_over(db, OLD_TIME + timedelta(seconds=5))
            settled = sweep._settled(await sweeps.pulled(db), [lapsed], [], OLD_TIME + timedelta(seconds=5))
            names = {subscription_id: "worker"}
            assert await settling.record(closing, settled, names, OLD_TIME) == ([], False)
    finally:
        await other.close()


async def test_a_row_whose_time_is_over_while_its_day_is_removed_is_buried_once(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, dsn: str
) -> None:
    [sent] = await publish(client, order(1))
    [held] = await consumer.claim()
    await consumer.settle("extend", held["handle"], invisible_s=60)
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    day = await days.day_of(db, await db.fetchval("select transaction_id from outbox"))
    [subscription] = await subscriptions.page(db, "", 10)
    assert day is not None
    place, now = day_dead_letters.RowPlace.before(day, 0), OLD_TIME + timedelta(seconds=120)
    waits = "select pg_blocking_pids($1) <> '{}'"
    other = await connect(dsn)
    try:
        async with db.transaction():
            pulled_now = await sweeps.pulled(db)
            settled = sweep._settled(pulled_now, [], await sweeps.lapsed(db, list(pulled_now), now), now)
            names = {one.subscription_id: one.name for one in pulled_now.values()}
            await settling.record(db, settled, names, now)
            burying = asyncio.create_task(day_dead_letters.bury_retries(other, day, subscription, place, now))
            async with asyncio.timeout(30):
                while not (burying.done() or await db.fetchval(waits, other.get_server_pid())):
                    await asyncio.sleep(0.01)
        await burying
    finally:
        await other.close()
    assert await dead(db) == [sent]
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    # Until upkeep has it, no attempt of it is counted.
    assert await db.fetchval("select attempts from dead_letter") == 0
