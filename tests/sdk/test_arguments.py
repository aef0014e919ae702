"""Wrong arguments are named where they are given, and values that JSON does not have are serialized."""

import asyncio
import uuid
from datetime import date, datetime, time, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from halfnote import (
    CheckEndpoint,
    HalfFailed,
    Outgoing,
    PlainFailed,
    Refused,
    SyncTransactionProducer,
    TransactionProducer,
    Unconfirmed,
    Verifier,
)
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.databases.dbapi import DbApi
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy, SqlAlchemy
from halfnote.delivery import DeliveryEndpoint
from halfnote.inbox import AsyncInbox, Inbox
from halfnote.message import Message
from halfnote.testing import SECRET, Coordinator, signed_delivery
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from tests.sdk.coordinators import Scripted, problem
from tests.support.ports import free_port

ORDER = Outgoing("order", {"order": 1030})
PRODUCERS = [TransactionProducer, SyncTransactionProducer]


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("url", ["localhost:8080", "127.0.0.1", "", "ftp://halfnote", "http://", "postgresql://h/shop"])
def test_a_url_that_is_none(producer: Any, url: str) -> None:
    with pytest.raises(ValueError, match="must begin with http:// or https:// and name a host"):
        producer(url, group="shop")


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_url_that_is_missing_or_has_a_password(producer: Any) -> None:
    with pytest.raises(TypeError, match="URL of Halfnote must be text, not NoneType"):
        producer(None, group="shop")
    with pytest.raises(ValueError, match="the given one does not") as refused:
        producer("amqp://kim:secret@halfnote", group="shop")
    assert "secret" not in str(refused.value)


MESSAGES = [{"topic": "order", "body": 1}, [{"topic": "order"}], "order", None, [ORDER, None]]


@pytest.mark.parametrize("messages", MESSAGES)
def test_a_message_that_is_none(messages: Any) -> None:
    halfnote = Scripted()
    with SyncTransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        with pytest.raises(TypeError, match="Outgoing"):
            producer.send_plain(messages)
    assert halfnote.came == []


@pytest.mark.parametrize("fields", [{"topic": None}, {"topic": 1}, {"key": 1030}, {"tag": b"x"}, {"headers": ["a"]}])
def test_a_field_of_another_type(fields: dict[str, Any]) -> None:
    [name] = fields
    with pytest.raises(TypeError, match=f"`{name}` of a message must be"):
        Outgoing(**{"topic": "order", "body": 1, **fields})


@pytest.mark.parametrize("secrets", [None, [None], 1, lambda: None])
def test_secrets_that_are_none(secrets: Any) -> None:
    with pytest.raises(TypeError, match="`secrets` must be text"):
        Verifier(secrets)


def test_engines_databases_and_barriers_of_the_other_kind(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine, asynchronous = create_engine(url), create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:9/shop")
    wrong: Any = engine
    with pytest.raises(TypeError, match=r"an AsyncEngine \(create_async_engine\) is expected, not Engine"):
        AsyncSqlAlchemy(wrong)
    wrong = asynchronous
    with pytest.raises(TypeError, match=r"an Engine \(create_engine\) is expected, not AsyncEngine"):
        SqlAlchemy(wrong)
    plain: Any = SqlAlchemy(engine)
    awaited: Any = AsyncSqlAlchemy(asynchronous)
    for kind in (AsyncBarrier, lambda database: AsyncInbox(database, "points")):
        with pytest.raises(TypeError, match="needs an asynchronous database"):
            kind(plain)
    for other in (Barrier, lambda database: Inbox(database, "points")):
        with pytest.raises(TypeError, match="needs a plain database"):
            other(awaited)
    with pytest.raises(TypeError, match="needs a barrier of the kind AsyncBarrier, not Barrier"):
        TransactionProducer("http://halfnote", group="shop", barrier=Barrier(plain))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a barrier of the kind Barrier, not AsyncBarrier"):
        SyncTransactionProducer("http://halfnote", group="shop", barrier=AsyncBarrier(awaited))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a barrier or a listener with `check_local`"):
        CheckEndpoint(DbApi(lambda: None, "sqlite"), group="shop", secrets=SECRET)  # type: ignore[arg-type]


class Money:
    """A type of the service's own."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


def test_values_that_json_does_not_have() -> None:
    halfnote, one = Scripted(), uuid.uuid4()
    body = {
        "at": datetime(2026, 11, 21, 8, tzinfo=timezone.utc),
        "on": date(2026, 11, 21),
        "from": time(8, 30),
        "total": Decimal("10.30"),
        "customer": one,
    }
    with SyncTransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        with producer.transaction(Outgoing("order", body), context={"customer": one}):
            pass
        with pytest.raises(
            TypeError, match="Money cannot be written as JSON: give the producer a `serialize` function"
        ):
            producer.send_plain(Outgoing("order", Money(1030)))
    [half] = halfnote.asked("/half")
    assert half["messages"][0]["body"] == {
        "at": "2026-11-21T08:00:00+00:00",
        "on": "2026-11-21",
        "from": "08:30:00",
        "total": "10.30",
        "customer": str(one),
    }
    assert half["context"] == {"customer": str(one)}


async def test_a_serializer_of_the_service_s_own() -> None:
    halfnote = Scripted()
    options: dict[str, Any] = {"group": "shop", "transport": halfnote.transport(), "serialize": lambda one: one.cents}
    async with TransactionProducer("http://halfnote", **options) as producer:
        async with producer.transaction(Outgoing("order", {"total": Money(1030)})):
            pass
    assert halfnote.asked("/half")[0]["messages"][0]["body"] == {"total": 1030}


def test_the_field_of_a_refusal() -> None:
    refusal = problem(422, "invalid-request", "1 to 255 characters are expected", field="messages[0].topic")
    halfnote = Scripted({"/half": [refusal], "/messages": [refusal]})
    with SyncTransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        with pytest.raises(HalfFailed, match=r"messages\[0\]\.topic") as half, producer.transaction(ORDER):
            pass
        with pytest.raises(PlainFailed, match=r"messages\[0\]\.topic") as plain:
            producer.send_plain(ORDER)
    assert half.value.field == plain.value.field == "messages[0].topic"
    assert isinstance(half.value.__cause__, Refused)
    assert half.value.__cause__.field == "messages[0].topic"


@pytest.mark.parametrize("transport", ["aiohttp", "httpx", "sync"])
async def test_a_service_that_is_down_fails_the_half_soon(transport: str) -> None:
    """Its port refuses connections. A limit of 60 s for the half does not apply, nor does the time of one attempt."""
    import httpx

    url, options = f"http://127.0.0.1:{free_port()}", {"group": "shop", "half_within_s": 60.0, "refused_within_s": 0.2}

    def inside() -> None:
        with SyncTransactionProducer(url, **options) as producer, producer.transaction(ORDER):  # type: ignore[arg-type]
            raise AssertionError

    async def awaited() -> None:
        line: Any = httpx.AsyncHTTPTransport() if transport == "httpx" else None
        async with TransactionProducer(url, transport=line, **options) as producer:  # type: ignore[arg-type]
            async with producer.transaction(ORDER):
                raise AssertionError

    with pytest.raises(HalfFailed) as caught:
        await asyncio.wait_for(asyncio.to_thread(inside) if transport == "sync" else awaited(), 30)
    cause = caught.value.__cause__
    assert isinstance(cause, Unconfirmed)
    assert not cause.perhaps_done


async def test_a_test_delivery_is_answered_without_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[Message] = []
    endpoint = DeliveryEndpoint(taken.append, secrets=SECRET)
    test = Message("tst_1", "halfnote.test", b'{"type":"halfnote.test"}', group="halfnote", subscription="points")
    order = Message("m-0", "order", b"{}")
    from halfnote.hosting import answered_async

    for message in (test, order):
        assert (await answered_async(endpoint, *signed_delivery(message))).status == 200
    assert [message.message_id for message in taken] == ["m-0"]
    assert (test.is_test, order.is_test) == (True, False)
    assert Coordinator("shop").published == []
