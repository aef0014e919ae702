"""The Python blocks of the guides are run, with the names that a service would have."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from halfnote import Outgoing, PlainFailed, TransactionProducer
from halfnote.barrier import WAIT_S, AsyncBarrier
from halfnote.barrier_mark import marked
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy
from halfnote.exchange import FIRST_PAUSE_S, LONGEST_PAUSE_S
from halfnote.hosting import answered_async
from halfnote.ids import new_id
from halfnote.testing import SECRET, Coordinator, signed_delivery
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from app.config import Settings
from app.policy.check_schedule import FIRST_BACKOFF_S, LONGEST_BACKOFF_S
from app.policy.delivery_retry import DEFAULT_RETRY
from app.schemas.producer_groups import URLS_MAX, GroupPut
from app.schemas.subscription_put import SubscriptionPut
from tests.sdk.doc_blocks import ROOT, SCHEMA, Order, Points, blocks_of, runner
from tests.sdk.shop import fresh, with_driver


@pytest.fixture
async def names() -> AsyncIterator[dict[str, Any]]:
    """Return the objects that a service has before it uses the client: an engine, models, a barrier's table."""
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


async def left_undecided(names: dict[str, Any], context: Any = None) -> None:
    """Have a transaction without an end, as after a crash, whose order was never saved."""
    with pytest.raises(asyncio.CancelledError):
        async with names["producer"].transaction(Outgoing("order", {"order": 7}), context=context):
            raise asyncio.CancelledError


async def test_guarantees(names: dict[str, Any]) -> None:
    page = "docs/guarantees.md"
    run = runner(page)
    for block in blocks_of(page):
        await run(block, names)
    assert await found(names, Order.number) == [1030, 1031]
    assert await found(names, Points.order) == [1030, 1031]


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
    await left_undecided(names, marked(None))
    assert list((await names["memory"].check(names["endpoint"])).values()) == ["unknown", "rollback"]
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
    await left_undecided(names, marked(None))
    assert list((await names["memory"].check(names["endpoint"])).values()) == ["rollback"]
    await run(consumer, names)
    for_points = signed_delivery(names["memory"].published[0], secret=SECRET)
    assert (await answered_async(names["deliveries"], *for_points)).status == 200
    assert await found(names, Points.order) == await found(names, Order.number) == [1030]


async def test_from_an_outbox(names: dict[str, Any]) -> None:
    page = "docs/from-an-outbox.md"
    run = runner(page)
    table, relay, consumer, barrier, instead = blocks_of(page)
    names["Base"] = type("Own", (DeclarativeBase,), {})
    await run(table, names)
    async with names["engine"].begin() as connection:
        await connection.run_sync(names["Base"].metadata.create_all)
    await run(relay, names)
    memory = names["memory"]
    assert [message.json() for message in memory.published] == [{"order": 1030}]
    await sent_again_after_a_crash(names)
    await run(consumer, names)
    assert await memory.deliver(names["deliveries"]) == [200, 200]
    await run(barrier, names)
    await run(instead, names)
    await left_undecided(names, marked(None))
    assert list((await memory.check(names["endpoint"])).values()) == ["rollback"]
    assert await memory.deliver(names["deliveries"]) == [200]
    assert await found(names, Points.order) == await found(names, Order.number) == [7, 1030, 1031]


async def sent_again_after_a_crash(names: dict[str, Any]) -> None:
    """A row whose id is too old was never sent and gets another; one that was sent is not sent twice."""
    row = names["OutboxRow"]
    await names["place"](7)
    await names["write"](update(row).values(sent_as=new_id(time.time() - 3600)))
    with pytest.raises(PlainFailed, match="too old"):
        await names["relay"]()
    sent_as = new_id()
    await names["write"](update(row).values(sent_as=sent_as))
    again = Outgoing("order", {"order": 7}, key="order-7")
    assert not (await names["sender"].send_plain(again, transaction_id=sent_as)).replayed
    assert await names["relay"]() == 1
    assert [message.json() for message in names["memory"].published] == [{"order": 1030}, {"order": 7}]


def test_the_defaults_that_the_pages_name() -> None:
    """A default that changes in the code changes in the pages."""
    guarantees = (ROOT / "docs/guarantees.md").read_text()
    group = {name: field.default for name, field in GroupPut.model_fields.items()}
    settings = {name: field.default for name, field in Settings.model_fields.items()}
    producer = inspect.signature(TransactionProducer).parameters
    attempts, total_s = len(DEFAULT_RETRY) + 1, round(sum(DEFAULT_RETRY) / 60)
    last_check_s = group["immunity_s"] + (group["max_checks"] - 1) * group["interval_s"]
    for named in (
        f"`immunity_s` ({group['immunity_s']} s)",
        f"`interval_s` ({group['interval_s']} s)",
        f"`max_checks` times ({group['max_checks']})",
        f"`check_timeout_s` {group['check_timeout_s']} s each, up to {URLS_MAX} in turn",
        f"`unanswered_park_s` ({group['unanswered_park_s']:,} s",
        f"after {FIRST_BACKOFF_S}, {2 * FIRST_BACKOFF_S}, {4 * FIRST_BACKOFF_S} s and so on",
        f"at most {LONGEST_BACKOFF_S} s",
        f"= {last_check_s // 60} min {last_check_s % 60} s with the defaults",
        f"`end_within_s` ({producer['end_within_s'].default:.0f} s)",
        f"`half_within_s` ({producer['half_within_s'].default:.0f} s)",
        f"`refused_within_s` ({producer['refused_within_s'].default:.0f} s)",
        f"pauses of {FIRST_PAUSE_S / 2} to {FIRST_PAUSE_S} s",
        f"up to {LONGEST_PAUSE_S / 2} to {LONGEST_PAUSE_S:.0f} s",
        f"`wait_s` ({WAIT_S:.0f} s)",
        f"`timeout_s` {SubscriptionPut.model_fields['timeout_s'].default:.0f} s",
        f"{attempts} attempts in about {total_s // 60} h {total_s % 60} min",
        f"`HALFNOTE_MAX_RETENTION_S` ({settings['max_retention_s']:,} s",
    ):
        assert named in " ".join(guarantees.split()), named
