"""The README's blocks are run, one after the other, with the names that a service would have."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import httpx
import psycopg
import pytest
from django.urls import path
from fastapi import FastAPI
from flask import Flask
from halfnote import Outgoing, SyncTransactionProducer, TransactionProducer
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.dbapi import DbApi
from halfnote.databases.django import Django
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy
from halfnote.inbox import Inbox
from halfnote.testing import Coordinator
from halfnote.units import in_django
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from app.checkback.claim_loops import wake_claims
from app.database.connection import Connection
from app.destinations.rabbitmq import message_of
from app.runtime.state import Runtime
from tests.sdk.doc_blocks import ROOT, SCHEMA, Order, Points, blocks_of, runner, shell_blocks_of
from tests.sdk.in_process import service
from tests.sdk.servers import configure
from tests.sdk.shop import fresh, with_driver
from tests.sdk.sites import django_alias
from tests.support.check_stepping import attempts, in_doubt
from tests.support.webhooks import message

BLOCKS = blocks_of("sdk/README.md")
run = runner("sdk/README.md")
PRODUCER, MANY, CHECK, CLAIMED, BARRIER, BOUND, ASYNCPG, DJANGO, CONSUMER, CLAIMING, LOOP, BROKER, TESTING = BLOCKS


@pytest.fixture
async def names() -> AsyncIterator[dict[str, Any]]:
    """Return the objects that a service has before it uses the client."""
    engine = create_async_engine(with_driver(fresh(SCHEMA), "asyncpg"))
    await AsyncBarrier(AsyncSqlAlchemy(engine)).create_table()
    yield {
        "memory": Coordinator("shop"),
        "engine": engine,
        "AsyncSession": AsyncSession,
        "Order": Order,
        "Points": Points,
        "app": FastAPI(),
    }
    await engine.dispose()


async def orders(names: dict[str, Any]) -> list[int]:
    async with AsyncSession(names["engine"]) as session:
        return list((await session.scalars(select(Order.number).order_by(Order.number))).all())


async def truncated(names: dict[str, Any]) -> None:
    async with AsyncSession(names["engine"]) as session, session.begin():
        await session.execute(text("truncate orders"))


async def test_the_ten_lines(names: dict[str, Any]) -> None:
    await run(PRODUCER, names)
    await names["place"](1030)
    assert await orders(names) == [1030]
    assert [message.key for message in names["memory"].published] == ["order-1030"]
    assert len([line for line in PRODUCER.splitlines() if line]) <= 10


async def test_many_at_once(names: dict[str, Any]) -> None:
    await run(PRODUCER, names)
    await run(MANY, names)
    assert await orders(names) == [1, 2, 3]
    assert [message.json()["order"] for message in names["memory"].published] == [1, 2, 3]


async def test_checks_barrier_consumer_and_tests(names: dict[str, Any]) -> None:
    await run(PRODUCER, names)
    names["listener"] = SimpleNamespace(check_local=lambda transaction: None)
    head, fastapi, flask, django = CHECK.strip().rsplit("\n", 3)
    await run(head, names)
    await run(fastapi, names)
    await run(flask, {**names, "app": Flask("shop")})
    configure()
    await run(django, {**names, "path": path})
    await run(BARRIER, names)
    await names["place_plainly"](7)
    assert await orders(names) == [7]
    await truncated(names)
    async with AsyncSession(names["engine"]) as session:
        await run(BOUND, {**names, "session": session})
    assert [found.json() for found in names["memory"].published] == [{"order": 7}, {"order": 1030}]
    await run(CONSUMER, names)
    await names["inbox"].create_table()
    acknowledged = []

    async def ack() -> None:
        acknowledged.append(1)

    sent = message_of(message(body=b'{"order": 7}'))
    incoming = SimpleNamespace(headers=sent.headers, body=sent.body, content_type=sent.content_type, ack=ack)
    await run(BROKER, {**names, "incoming": incoming})
    assert acknowledged == [1]
    await truncated(names)
    await run(TESTING, names)
    async with AsyncSession(names["engine"]) as session:
        assert set((await session.scalars(select(Points.order))).all()) == {7, 1030}


async def test_consumers_that_claim(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    memory = names["memory"]
    async with httpx.AsyncClient(transport=memory.transport(), base_url="http://halfnote") as client:
        put = {"topics": ["order"], "destination": {"type": "pull"}}
        assert (await client.put("/subscriptions/points", json=put)).status_code == 201
    await run(PRODUCER, names)
    await run(CONSUMER, names)
    await names["inbox"].create_table()
    for number, block in enumerate((CLAIMING, LOOP), 1):
        await names["place"](1030 + number)
        consuming = asyncio.create_task(run(block, names))
        async with asyncio.timeout(60):
            while len(memory.subscriptions["points"].acknowledged) < number:
                assert not consuming.done()
                await asyncio.sleep(0.01)
        consuming.cancel()
        await asyncio.wait((consuming,))
    async with AsyncSession(names["engine"]) as session:
        assert (await session.scalars(select(Points.order))).all() == [1031]
    assert capsys.readouterr().out == "order {'order': 1032}\n"


async def test_blocks_with_asyncpg(names: dict[str, Any]) -> None:
    await run(PRODUCER, names)
    url = names["engine"].url.set(drivername="postgresql").render_as_string(hide_password=False)
    async with asyncpg.create_pool(url, min_size=0) as pool, pool.acquire() as connection:
        memory = names["memory"].transport()
        barrier = AsyncBarrier(Asyncpg(pool))
        async with TransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=memory) as producer:
            await run(ASYNCPG, {**names, "connection": connection, "producer": producer})
    assert await orders(names) == [1030]
    assert len(names["memory"].published) == 1


def test_blocks_with_django() -> None:
    from django.db import connections

    coordinator = Coordinator("shop")
    alias = django_alias(fresh(SCHEMA))

    class Orders:
        """Replaces a model's manager, on the test's database."""

        @staticmethod
        def create(number: int) -> None:
            with connections[alias].cursor() as cursor:
                cursor.execute("insert into orders values (%s)", [number])

    def in_own(producer: Any, messages: Any) -> Any:
        return in_django(producer, messages, using=alias)

    barrier = Barrier(Django(alias))
    barrier.create_table()
    transport = coordinator.transport()
    with SyncTransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer:
        order = SimpleNamespace(objects=Orders)
        names = {"producer": producer, "in_django": in_own, "Outgoing": Outgoing, "Order": order}
        exec(compile(DJANGO, "sdk/README.md", "exec"), names)
    connections.close_all()
    assert len(coordinator.published) == 1


def test_ledgers(tmp_path: Path) -> None:
    url = fresh("")
    database = DbApi(lambda: psycopg.connect(url), "postgresql")
    Barrier(database).create_table()
    Inbox(database, "points").create_table()
    [block] = shell_blocks_of("sdk/README.md")
    program = f'halfnote-ledger() {{ "{sys.executable}" -m halfnote.ledger "$@"; }}\n'
    script = program + block.replace("postgresql://…", url)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "sdk")}
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, check=True)
    assert {file.name for file in tmp_path.iterdir()} == {"orders.parquet", "points.csv"}


async def test_checks_are_answered_without_an_endpoint(
    names: dict[str, Any], client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """Against the real service: the coordinator in memory has no claims."""
    barrier = AsyncBarrier(AsyncSqlAlchemy(names["engine"]))
    async with TransactionProducer("http://localhost", group="shop", transport=service(runtime)) as producer:
        await run(CLAIMED, names | {"producer": producer, "barrier": barrier})
        transaction_id = await in_doubt(client, runtime)
        async with asyncio.timeout(60):
            while not await attempts(db, transaction_id):
                await wake_claims(runtime, runtime.clock.now())
                await asyncio.sleep(0.01)
    # Its half does not say that it enters the barrier.
    assert [one["outcome"] for one in await attempts(db, transaction_id)] == ["unknown"]
