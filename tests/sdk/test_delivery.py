"""The endpoint of deliveries in each framework, sent to by the service's own client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.urls import path
from fastapi import FastAPI
from flask import Flask
from halfnote.delivery import DeliveryEndpoint
from halfnote.inbox import AsyncInbox, Reject
from halfnote.message import Message

from app.delivery import Delivered, Failed, Refused
from app.egress.http_client import EgressClient
from app.secrets.signatures import Secret
from tests.sdk.servers import asgi_server, configure, django_server, threaded, wsgi_server
from tests.sdk.sites import INSERT, SITES
from tests.support.webhooks import SECRET, egress_client, message, webhook

PATH = "/deliveries"


class Taker:
    """A handler without an inbox that keeps its messages and fails when the test says so."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.failures: dict[str, Exception] = {}

    def __call__(self, message: Message) -> None:
        if message.message_id in self.failures:
            raise self.failures[message.message_id]
        self.taken.append(message)


class AsyncTaker(Taker):
    """The same for an event loop."""

    async def __call__(self, message: Message) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().__call__(message)


def in_fastapi(endpoint: DeliveryEndpoint) -> Any:
    app = FastAPI()
    app.add_route(PATH, endpoint.asgi())
    return asgi_server(app)


def in_flask(endpoint: DeliveryEndpoint) -> Any:
    app = Flask(__name__)
    app.wsgi_app = endpoint.wsgi(app.wsgi_app)  # type: ignore[method-assign]
    return threaded(wsgi_server(app))


def in_django(endpoint: DeliveryEndpoint) -> Any:
    configure()
    return threaded(django_server([path(PATH[1:], endpoint.django())]))


@pytest.fixture
async def client() -> AsyncIterator[EgressClient]:
    """A client as the service has it."""
    async with egress_client() as made:
        yield made


@pytest.mark.parametrize(
    ("host", "taking"),
    [(in_fastapi, AsyncTaker), (in_fastapi, Taker), (in_flask, Taker), (in_django, Taker), (in_django, AsyncTaker)],
)
async def test_the_service_delivers(
    host: Callable[[DeliveryEndpoint], Any],
    taking: type[Taker],
    client: EgressClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    taker = taking()
    one, bad, refused, last = (message(number, tag="new", headers={"a": "é"}) for number in (1, 2, 3, 4))
    taker.failures = {
        bad.message_id: LookupError("no such customer"),
        refused.message_id: Reject("order 3 is über the\nlimit \udcff"),
    }
    async with host(DeliveryEndpoint(taker, secrets=SECRET)) as url:
        binary = webhook(client, url + PATH)
        [answer] = await binary.deliver([one], now())
        assert isinstance(answer, Delivered)
        [answer] = await binary.deliver([bad], now())
        assert isinstance(answer, Failed)
        assert answer.status == 500
        assert "no such customer" in caplog.text
        assert "no such customer" not in (answer.response or "")
        [answer] = await binary.deliver([refused], now())
        assert isinstance(answer, Refused)
        assert (answer.status, answer.reason) == (422, "order 3 is %C3%BCber the limit ?")
        assert isinstance((await webhook(client, url + PATH, mode="structured").deliver([last], now()))[0], Delivered)
        batch = webhook(client, url + PATH, mode="batch", batch_max=10)
        outcomes = await batch.deliver([one, bad, refused, last], now())
        assert [type(outcome) for outcome in outcomes] == [Delivered, Failed, Refused, Delivered]
        auto = webhook(client, url + PATH, mode="auto", batch_max=10)
        for deliveries in ([one], [one, last]):
            assert {type(outcome) for outcome in await auto.deliver(deliveries, now())} == {Delivered}
        [answer] = await webhook(client, url + PATH, secrets=[Secret("whsec_" + "N" * 43 + "=")]).deliver([one], now())
        assert isinstance(answer, Failed)
        assert answer.status == 401
    assert "a delivery was refused: no signature fits" in caplog.text
    assert taker.taken[0].message_id == one.message_id
    assert (taker.taken[0].tag, taker.taken[0].headers, taker.taken[0].key) == ("new", {"a": "é"}, "order-1")
    assert {message.message_id for message in taker.taken} == {one.message_id, last.message_id}


def now() -> datetime:
    return datetime.now(UTC)


@pytest.mark.parametrize(
    ("host", "taking"), [(in_fastapi, AsyncTaker), (in_flask, Taker), (in_django, Taker), (in_django, AsyncTaker)]
)
async def test_what_halfnote_takes_is_delivered_whole(
    host: Callable[[DeliveryEndpoint], Any], taking: type[Taker], client: EgressClient
) -> None:
    """Django's own limit is one for forms, of 2.5 MB."""
    taker, body = taking(), json.dumps("x" * 4_000_000).encode()
    async with host(DeliveryEndpoint(taker, secrets=SECRET)) as url:
        [answer] = await webhook(client, url + PATH).deliver([message(body=body)], now())
    assert isinstance(answer, Delivered)
    assert [len(taken.body) for taken in taker.taken] == [len(body)]


async def test_delivered_twice_it_is_run_once(client: EgressClient, tmp_path: Path) -> None:
    async with SITES["asyncpg"](tmp_path) as site:
        inbox = AsyncInbox(site.barrier.database, "points")
        await inbox.create_table()

        async def handler(message: Message, connection: Any) -> None:
            await connection.execute(INSERT.format(message.json()["order"]))

        async with in_fastapi(DeliveryEndpoint(handler, secrets=[SECRET], inbox=inbox)) as url:
            for _ in range(2):
                [answer] = await webhook(client, url + PATH).deliver([message(1030)], now())
                assert isinstance(answer, Delivered)
                assert answer.status == 200
        assert site.orders() == [1030]
