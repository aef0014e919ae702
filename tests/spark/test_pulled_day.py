"""A day whose messages consumers claimed has no finding; a message without a receipt is found."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from pyspark.sql import SparkSession

from app.lifecycle.startup import assemble
from app.runtime.state import Runtime
from spark.transforms.rules import findings
from tests.conftest import client_of, register_group, settings_of
from tests.spark.days import rows
from tests.spark.test_real_day import SLA_S, read
from tests.support.consumers import Consumer, lapse, put_pulled, sweep_after
from tests.support.relay_stepping import order, publish

NAMED = "returning transaction_id::text || '-' || position || ':' || subscription_id as id"


async def make_pulled_day(dsn: str) -> None:
    """Make yesterday: acknowledged in parts, given back, rejected, redelivered, lapsed, held for long, and delayed.

    Another subscription claims three messages, and the others expire.
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
        async with runtime.database.connection() as connection:
            # The worker was ahead of the time that the proof reads.
            await connection.execute("update dead_letter set died_at = now() where reason = 'expired'")
        # Days are made ahead, so a day is open before it begins.
        async with runtime.database.connection() as connection:
            await connection.execute("update day set changed_at = changed_at - interval '3 days'")


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


@pytest.fixture
def pulled(dsn: str) -> str:
    asyncio.run(make_pulled_day(dsn))
    return dsn


def found(spark: SparkSession, dsn: str, path: Path) -> list[tuple[str, str]]:
    return sorted((row.kind, row.subject) for row in findings(read(spark, dsn, path), sla_s=SLA_S).collect())


def test_a_day_of_consumers_has_no_finding_but_of_a_lost_receipt(
    spark: SparkSession, pulled: str, tmp_path: Path
) -> None:
    assert rows(pulled, "select count(*) as n from receipt") == [{"n": 33}]
    expired = "select count(*) as n, sum(attempts) as tries from dead_letter where reason = 'expired'"
    assert rows(pulled, expired) == [{"n": 29, "tries": 1}]
    # One receipt is removed: its finding shows that the rules read the day, and that all else has none.
    [lost] = rows(pulled, f'delete from receipt where subscription_id = 1 and "offset" = 2 {NAMED}')
    assert found(spark, pulled, tmp_path) == [("undelivered", lost["id"])]
