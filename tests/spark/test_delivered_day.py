"""One proof of a day of the real service: what consumers claimed has no finding but of a lost receipt, and what the
relay sent is compared with what the producer posted."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx
import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession

from app.database.connection import Connection, connect
from app.ids import message_id
from app.lifecycle.startup import assemble
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.conftest import client_of, migrated_template, register_group, settings_of
from tests.spark.days import prove, rows
from tests.support import postgres
from tests.support.check_responder import Responder
from tests.support.consumers import Consumer, lapse, put_pulled, sweep_after
from tests.support.relay_stepping import order, publish, subscribe, turn_until

NAMED = "returning transaction_id::text || '-' || position || ':' || subscription_id as id"


async def make_day(dsn: str) -> tuple[date, UUID]:
    """Make yesterday: acknowledged in parts, given back, rejected, redelivered, lapsed, held for long, and delayed.

    Another subscription claims three messages, and the others expire. The consumer of a third one holds two and settles
    what comes after them. A webhook gets two; the last one is damaged.
    Return the day and the transaction of the damaged one.
    """
    async with AsyncExitStack() as stack:
        runtime = await assemble(settings_of(dsn), dsn, stack)
        noon = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
        runtime.clock.fixed = noon
        client = await stack.enter_async_context(client_of(runtime))
        async with runtime.database.connection() as connection:
            await register_group(connection, "shop")
            await connection.execute("update producer_group set created_at = created_at - interval '2 days'")
        await put_pulled(client)
        await put_pulled(client, "late", expire_after_s=60)
        await put_pulled(client, "holding", topics=["held"])
        await publish(client, *(order(n) for n in range(30)), order(30, deliver_after_s=0.5))
        # The ids are of yesterday; the log has its times from the database.
        runtime.clock.fixed = None
        consumer = Consumer(client)
        await _parts(consumer)
        await _again(runtime, client, consumer)
        late = Consumer(client, "late")
        first = await late.claim(max=3)
        assert await late.ack(*first[:2]) == [200, 200]
        await late.settle("nack", first[2]["handle"], retry_after_s=3600)
        await sweep_after(runtime, 120)
        await _held(runtime, client, noon)
        async with runtime.database.connection() as connection:
            # The worker was ahead of the time that the proof reads.
            await connection.execute("update dead_letter set died_at = now() where reason = 'expired'")
        runtime.clock.fixed = noon
        db = await connect(dsn)
        stack.push_async_callback(db.close)
        damaged = await send_damaged(runtime, client, db)
        # Days are made ahead, so a day is open before it begins.
        async with runtime.database.connection() as connection:
            await connection.execute("update day set changed_at = changed_at - interval '3 days'")
    return noon.date(), damaged


async def _parts(consumer: Consumer) -> None:
    first = await consumer.claim(max=10)
    assert await consumer.ack(*first[:4]) == [200] * 4
    await consumer.settle("nack", *(one["handle"] for one in first[4:6]), retry_after_s=0)
    await consumer.settle("reject", first[6]["handle"], reason="no address")
    await consumer.settle("extend", first[7]["handle"], invisible_s=3600)
    again = await consumer.claim(max=2)
    assert [one["attempt"] for one in again] == [2, 2]
    assert await consumer.ack(*again, *first[7:]) == [200] * 5


async def _again(runtime: Runtime, client: httpx.AsyncClient, consumer: Consumer) -> None:
    dead = (await client.get("/dead-letters")).json()["items"]
    ids = [{"subscription": "worker", "message_id": dead[0]["message_id"]}]
    assert (await client.post("/dead-letters/redeliver", json={"ids": ids})).status_code == 200
    # Two that lapse, and what is held for long.
    held = [*await consumer.claim(max=1), *await consumer.claim(max=10)]
    async with runtime.database.connection() as connection:
        await lapse(connection, runtime)
    lapsed = await consumer.claim(max=100, invisible_s=3600)
    assert sum(one["attempt"] == 2 for one in lapsed) == len(held)
    rest = await consumer.claim(max=100, invisible_s=3600)
    await sweep_after(runtime, 31)
    async with asyncio.timeout(20), runtime.database.connection() as connection:
        # The delayed one may have come before.
        while rest:
            assert set(await consumer.ack(*lapsed, *rest)) == {200}
            lapsed = []
            while await connection.fetchval("select count(*) from receipt") < 31 and not (
                rest := await consumer.claim()
            ):
                await asyncio.sleep(0.1)
            if await connection.fetchval("select count(*) from receipt") == 31:
                break
    await sweep_after(runtime)


async def send_damaged(runtime: Runtime, client: httpx.AsyncClient, db: Connection) -> UUID:
    """Send a message as it was posted, and one whose body changes between commit and delivery; return the latter's
    transaction. The half's other columns do not show it."""
    relay = Relay(runtime)
    async with Responder() as receiver:
        await subscribe(client, receiver, topics=["sent"])
        await publish(client, order(1, topic="sent"), order(2, topic="sent"))
        # The ids are of yesterday; the log has its times from the database.
        runtime.clock.fixed = None
        damaged: UUID = await db.fetchval(
            "update half set body = 'damaged' where transaction_id = "
            "(select max(transaction_id::text)::uuid from half where topic = 'sent') returning transaction_id"
        )
        arrived = "select count(*) = 2 from receipt r join half using (transaction_id, position) where topic = 'sent'"
        await turn_until(relay, runtime, lambda: db.fetchval(arrived))
        await relay.drain(runtime)
    assert b"damaged" in [call.body for call in receiver.calls]
    return damaged


async def _held(runtime: Runtime, client: httpx.AsyncClient, noon: datetime) -> None:
    runtime.clock.fixed = noon
    await publish(client, *(order(n, topic="held") for n in range(3)))
    runtime.clock.fixed = None
    holding = Consumer(client, "holding")
    assert await holding.ack((await holding.claim(max=3, invisible_s=3600))[-1]) == [200]


@dataclass(frozen=True)
class ProvedDay:
    """The day, its database, the transaction with the damaged body, the delivery without its receipt, and a run's exit
    status and output."""

    day: date
    dsn: str
    damaged: UUID
    lost: str
    status: int
    out: Path


@pytest.fixture(scope="module")
def proved(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProvedDay]:
    """Yesterday, proved once; tests change nothing of it.

    The finding of the removed receipt shows that the rules read the consumers' day, and that all else has none.
    """
    dsn, out = postgres.create_database(migrated_template()), tmp_path_factory.mktemp("proved")
    day, damaged = asyncio.run(make_day(dsn))
    [lost] = rows(dsn, f'delete from receipt where subscription_id = 1 and "offset" = 2 {NAMED}')
    yield ProvedDay(day, dsn, damaged, lost["id"], prove(dsn, "--day", day, "--sla-s", 0, "--out", out), out)
    postgres.drop_database(dsn)


def test_a_day_of_consumers_has_no_finding_but_of_a_lost_receipt_and_what_is_late(proved: ProvedDay) -> None:
    """What a consumer holds is late once the SLA is over, and not lost, although a later message was received."""
    receipts = "select s.name, count(*) as n from receipt join subscription s using (subscription_id) group by 1"
    assert {row["name"]: row["n"] for row in rows(proved.dsn, receipts)} == {
        "worker": 30,
        "late": 2,
        "holding": 1,
        "mailer": 2,
    }
    expired = "select count(*) as n, sum(attempts) as tries from dead_letter where reason = 'expired'"
    assert rows(proved.dsn, expired) == [{"n": 29, "tries": 1}]
    others = "select kind, subject, detail from finding where transaction_id is distinct from %s order by kind desc"
    lost, late = rows(proved.dsn, others, proved.damaged)
    assert (lost["kind"], lost["subject"]) == ("undelivered", proved.lost)
    assert (late["kind"], late["subject"], late["detail"]["messages"]) == ("delivery_late", "holding", 2)


def test_a_body_that_was_damaged_before_it_was_sent_is_a_finding(proved: ProvedDay) -> None:
    assert proved.status == 3
    # The half's digest of its body shows the damage, too.
    found, _, altered, _ = rows(proved.dsn, "select * from finding order by kind")
    assert (found["kind"], found["subject"]) == ("content_differs", message_id(proved.damaged, 0))
    assert (altered["kind"], altered["transaction_id"]) == ("half_altered", proved.damaged)
    assert {digest["source"].partition(":")[0] for digest in found["detail"]["digests"]} == {"half", "receipt"}
    # The run and its files say the same.
    [run] = rows(proved.dsn, "select * from reconciliation_run")
    said = (run["state"], run["days"], run["open"], run["new"], run["resolved"])
    assert said == ("findings", [proved.day], 4, 4, 0)
    files = pyarrow.dataset.dataset(proved.out / "findings", partitioning="hive").to_table().to_pylist()
    [written] = [one for one in files if one["kind"] == found["kind"]]
    assert len(files) == 4
    assert json.loads(written["detail"]) == found["detail"]
    assert (written["kind"], written["subject"]) == (found["kind"], found["subject"])
    assert str(proved.damaged) in (proved.out / "report.html").read_text()
