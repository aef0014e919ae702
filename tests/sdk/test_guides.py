"""The Python blocks of the guides are run, with the names that a service would have."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from halfnote import Outgoing
from halfnote.barrier import AsyncBarrier
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy
from halfnote.hosting import answered_async
from halfnote.testing import SECRET, Coordinator, signed_delivery
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.sdk.doc_blocks import SCHEMA, Order, Points, blocks_of, runner
from tests.sdk.shop import fresh, with_driver


@pytest.fixture
async def names() -> AsyncIterator[dict[str, Any]]:
    """What a service has before it uses the client: an engine, its models, a barrier's table."""
    engine = create_async_engine(with_driver(fresh(SCHEMA), "asyncpg"))
    barrier = AsyncBarrier(AsyncSqlAlchemy(engine))
    await barrier.create_table()

    async def place(number: int, transaction: Any) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await barrier.enter(session, transaction)
            session.add(Order(number=number))

    yield {
        "memory": Coordinator("shop"),
        "engine": engine,
        "AsyncSession": AsyncSession,
        "AsyncSqlAlchemy": AsyncSqlAlchemy,
        "Order": Order,
        "Points": Points,
        "barrier": barrier,
        "place": place,
        "SECRET": SECRET,
        "app": FastAPI(),
    }
    await engine.dispose()


async def found(names: dict[str, Any], column: Any) -> list[int]:
    async with AsyncSession(names["engine"]) as session:
        return list((await session.scalars(select(column).order_by(column))).all())


async def left_undecided(names: dict[str, Any]) -> None:
    """Have a transaction without an end, as after a crash, whose order was never saved."""
    with pytest.raises(asyncio.CancelledError):
        async with names["producer"].transaction(Outgoing("order", {"order": 7})):
            raise asyncio.CancelledError


async def test_guarantees(names: dict[str, Any]) -> None:
    page = "docs/guarantees.md"
    run = runner(page)
    for block in blocks_of(page):
        await run(block, names)
    assert await found(names, Order.number) == [1030]
    assert await found(names, Points.order) == [1030]


async def test_from_rocketmq(names: dict[str, Any]) -> None:
    page = "docs/from-rocketmq.md"
    run = runner(page)
    kept = set()

    async def save(number: int, transaction_id: Any) -> None:
        async with AsyncSession(names["engine"]) as session, session.begin():
            session.add(Order(number=number))
        kept.add(transaction_id)

    async def saved(transaction_id: Any) -> bool:
        return transaction_id in kept

    names |= {"save": save, "saved": saved}
    register, listener, barrier, consumer = blocks_of(page)
    await run(register, names)
    assert names["memory"].groups["shop"]["on_exhausted"] == "park"
    await run(listener, names)
    await left_undecided(names)
    assert list((await names["memory"].check(names["endpoint"])).values()) == ["unknown"]
    await run(barrier, names)
    assert list((await names["memory"].check(names["endpoint"])).values()) == ["rollback"]
    await run(consumer, names)
    assert await names["memory"].deliver(names["deliveries"]) == [200, 200]
    assert await found(names, Points.order) == await found(names, Order.number) == [1030, 1031]


async def test_from_dtm(names: dict[str, Any]) -> None:
    page = "docs/from-dtm.md"
    run = runner(page)
    *steps, consumer = blocks_of(page)
    for block in steps:
        await run(block, names)
    assert [(message.topic, message.key) for message in names["memory"].published] == [
        ("points", "order-1030"),
        ("bill", "order-1030"),
    ]
    await left_undecided(names)
    assert list((await names["memory"].check(names["endpoint"])).values()) == ["rollback"]
    await run(consumer, names)
    for_points = signed_delivery(names["memory"].published[0], secret=SECRET)
    assert (await answered_async(names["deliveries"], *for_points)).status == 200
    assert await found(names, Points.order) == await found(names, Order.number) == [1030]
