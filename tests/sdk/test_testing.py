"""The testing kit as its users have it, and the client against the real service over real sockets."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from halfnote import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    CheckEndpoint,
    Outgoing,
    SyncTransactionProducer,
    TransactionProducer,
    Verdict,
)
from halfnote.delivery import DeliveryEndpoint
from halfnote.ids import new_id
from halfnote.inbox import AsyncInbox, Reject
from halfnote.message import Message
from halfnote.testing import SECRET, Coordinator, signed_check, signed_delivery, signed_ping
from halfnote.testing.fixtures import halfnote_service

from tests.sdk.servers import asgi_server
from tests.sdk.sites import INSERT, SITES

__all__ = ["halfnote_service"]

ORDER = Outgoing("order", {"order": 1030}, key="order-1030", headers={"a": "é"})


@pytest.fixture(scope="session")
def halfnote_command() -> list[str]:
    """This checkout's service, which needs a newer Python than the client."""
    return [os.environ.get("HALFNOTE_TESTS_PYTHON", sys.executable), "-m", "app.cli"]


class Shop:
    """A listener with an answer for all."""

    def __init__(self, answer: Verdict) -> None:
        self.answer = answer
        self.contexts: list[Any] = []

    def check_local(self, transaction: Any) -> Verdict:
        self.contexts.append(transaction.context)
        return self.answer


async def test_a_producer_s_unit_test() -> None:
    coordinator = Coordinator("shop")
    async with TransactionProducer("http://halfnote", group="shop", transport=coordinator.transport()) as producer:
        async with producer.transaction(ORDER):
            assert coordinator.published == []
        await producer.send_plain(Outgoing("image", b"\x00", content_type="image/png"))
        with pytest.raises(LookupError):
            async with producer.transaction(ORDER):
                raise LookupError("no teapots left")
    order, image = coordinator.published
    assert (order.topic, order.json(), order.key, order.headers) == ("order", {"order": 1030}, "order-1030", {"a": "é"})
    assert (image.body, image.content_type, image.offset) == (b"\x00", "image/png", 2)
    assert [stored.state for stored in coordinator.transactions.values()] == ["committed", "committed", "rolled_back"]
    assert coordinator.undecided == []


def test_what_a_dead_producer_left_is_asked_about() -> None:
    coordinator = Coordinator("shop")

    class Dies(BaseException):
        """As a power cut."""

    shop = Shop(UNKNOWN)
    endpoint = CheckEndpoint(shop, group="shop", secrets=SECRET)
    with SyncTransactionProducer("http://halfnote", group="shop", transport=coordinator.transport()) as producer:
        with pytest.raises(Dies):
            with producer.transaction(ORDER, context={"order": 1030}):
                raise Dies
    [left] = coordinator.undecided
    assert coordinator.check_sync(endpoint) == {left.transaction_id: "unknown"}
    wrong = CheckEndpoint(shop, group="shop", secrets="whsec_" + "N" * 43 + "=")
    assert coordinator.check_sync(wrong) == {left.transaction_id: "unanswered"}
    shop.answer = COMMIT
    assert coordinator.check_sync(endpoint) == {left.transaction_id: "commit"}
    assert coordinator.undecided == []
    assert [message.topic for message in coordinator.published] == ["order"]
    assert shop.contexts == [{"order": 1030}] * 2
    assert (left.source, left.checks) == ("check", 3)


async def test_the_whole_way_in_memory(tmp_path: Path) -> None:
    """Barrier and inbox on real databases, the coordinator in memory."""
    coordinator = Coordinator("shop")
    async with SITES["asyncpg"](tmp_path) as site:
        await site.barrier.create_table()
        inbox = AsyncInbox(site.barrier.database, "points")
        await inbox.create_table()

        async def handler(message: Message, connection: Any) -> None:
            await connection.execute(INSERT.format(message.json()["order"] + 1))

        checks = CheckEndpoint(site.barrier, group="shop", secrets=SECRET)
        deliveries = DeliveryEndpoint(handler, secrets=SECRET, inbox=inbox)
        async with TransactionProducer("http://halfnote", group="shop", transport=coordinator.transport()) as producer:
            with pytest.raises(KeyboardInterrupt):
                async with producer.transaction(ORDER) as tx:
                    async with site.local() as local:
                        await local.enter(tx)
                        await local.order(1030)
                    raise KeyboardInterrupt
        assert await coordinator.check(checks) == {tx.transaction_id: "commit"}
        assert await coordinator.deliver(deliveries) == [200]
        assert await coordinator.deliver(deliveries) == []
        assert await coordinator.deliver(deliveries, again=True) == [200]
        assert site.orders() == [1030, 1031]


async def test_a_consumer_s_unit_test() -> None:
    taken: list[Message] = []

    async def handler(message: Message) -> None:
        if message.key == "bad":
            raise Reject("a negative total")
        taken.append(message)

    app = FastAPI()
    app.add_route("/deliveries", DeliveryEndpoint(handler, secrets=SECRET).asgi())  # type: ignore[arg-type]
    sent = Message(
        f"{new_id()}-0", "order", b"{}", key="é 1", tag="50%", headers={"a": "ü"}, group="the shop/1", offset=7
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://points") as client:
        headers, body = signed_delivery(sent)
        assert (await client.post("/deliveries", content=body, headers=headers)).status_code == 200
        assert taken == [sent]
        headers, body = signed_delivery(Message(f"{new_id()}-0", "order", b"{}", key="bad"))
        response = await client.post("/deliveries", content=body, headers=headers)
    assert (response.status_code, response.headers["webhook-delivery"]) == (422, "abort-message")
    assert response.headers["halfnote-reason"] == "a negative total"


def test_a_check_endpoint_s_unit_test_with_flask_s_client() -> None:
    app = Flask(__name__)
    app.wsgi_app = CheckEndpoint(Shop(ROLLBACK), group="shop", secrets=SECRET).wsgi(app.wsgi_app)  # type: ignore[method-assign]
    client = app.test_client()
    headers, body = signed_check(new_id(), "shop", context={"order": 1030})
    assert client.post("/halfnote/check", data=body, headers=headers).get_json() == {"verdict": "rollback"}
    headers, body = signed_ping("shop")
    assert client.post("/halfnote/check", data=body, headers=headers).status_code == 204
    headers, body = signed_check(new_id(), "shop", at=0)
    assert client.post("/halfnote/check", data=body, headers=headers).status_code == 401


async def test_against_the_real_service_over_real_sockets(halfnote_service: str, tmp_path: Path) -> None:
    """Registered, sent, asked about after a crash, delivered, and taken once."""
    async with SITES["asyncpg"](tmp_path) as site:
        await site.barrier.create_table()
        inbox = AsyncInbox(site.barrier.database, "points")
        await inbox.create_table()
        taken: list[tuple[int, str | None]] = []

        async def handler(message: Message, connection: Any) -> None:
            taken.append((message.json()["order"], message.traceparent))

        async def both() -> None:
            while len(taken) < 2:
                await asyncio.sleep(0.05)

        app = FastAPI()
        secrets: list[str] = []
        # Both have their secrets only once the service has made them.
        async with asgi_server(app) as url, TransactionProducer(halfnote_service, group="shop") as producer:
            made = await producer.register([url + "/check"], immunity_s=1)
            secrets.append(made.secret or "")
            app.add_route("/check", CheckEndpoint(site.barrier, group="shop", secrets=lambda: secrets).asgi())  # type: ignore[arg-type]
            async with httpx.AsyncClient(base_url=halfnote_service) as client:
                subscription = {"topics": ["order"], "destination": {"type": "webhook", "url": url + "/deliveries"}}
                answer = (await client.put("/subscriptions/points", json=subscription)).json()
                app.add_route(
                    "/deliveries",
                    DeliveryEndpoint(handler, secrets=answer["secret"], inbox=inbox).asgi(),  # type: ignore[arg-type]
                )
                async with producer.transaction(Outgoing("order", {"order": 1})) as tx, site.local() as local:
                    await local.enter(tx)
                    await local.order(1)
                with pytest.raises(asyncio.CancelledError):
                    async with producer.transaction(Outgoing("order", {"order": 2})) as crashed:
                        async with site.local() as local:
                            await local.enter(crashed)
                            await local.order(2)
                        raise asyncio.CancelledError
                await asyncio.wait_for(both(), 120)
                shown = (await client.get(f"/transactions/{crashed.transaction_id}")).json()
        assert shown["verdict"]["source"] == "check"
        assert sorted(number for number, _ in taken) == [1, 2]
        assert site.orders() == [1, 2]


def test_the_sync_producer_against_the_real_service(halfnote_service: str) -> None:
    with SyncTransactionProducer(halfnote_service, group="sync") as producer:
        producer.register(["http://127.0.0.1:9/check"])
        with producer.transaction(ORDER) as tx:
            pass
        assert tx.result is not None
        assert tx.result.end == "recorded"
        assert producer.send_plain(ORDER).offsets
