"""The inbox in every database and driver."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.dbapi import DbApi
from halfnote.databases.django import Django
from halfnote.delivery import DeliveryEndpoint
from halfnote.errors import StillRunning
from halfnote.hosting import answered_async, answered_sync
from halfnote.ids import new_id
from halfnote.inbox import AsyncInbox, Inbox, Received, Undone
from halfnote.message import Message
from halfnote.signatures import sign
from halfnote.testing import SECRET
from sqlalchemy import text

from tests.sdk.sites import INSERT, SITES, AsyncLocal, Site, execute_on_cursor


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * name.endswith("mariadb")) for name in SITES])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """A consumer's database with each driver."""
    async with SITES[request.param](tmp_path) as site:
        yield site


def arrived(number: int, **fields: Any) -> Message:
    """Return a message about an order."""
    return Message(f"{new_id()}-0", "order", b"%d" % number, subscription="points", **fields)


class Points:
    """A consumer that writes each order that it takes into its database, through an inbox."""

    def __init__(self, site: Site, **options: Any) -> None:
        self._site = site
        database = site.barrier.database
        asynchronous = asyncio.iscoroutinefunction(site.barrier.check_local)
        self.inbox: Any = (AsyncInbox if asynchronous else Inbox)(database, "points", **options)
        self.handler = self._async_handler if asynchronous else self._handler
        self.failing = False

    async def hide(self, message: Message, connection: Any) -> None:
        """Store an order and a duplicate of one, and suppress the database's error about the duplicate."""
        await self._async_handler(message, connection)
        with suppress(Exception):
            await self._async_handler(message, connection)

    def hide_plainly(self, message: Message, connection: Any) -> None:
        self._handler(message, connection)
        with suppress(Exception):
            self._handler(message, connection)

    async def receive(self, message: Message) -> Received:
        found: Received = await self._site.call(self.inbox.receive, message, self.handler)
        return found

    def _handler(self, message: Message, connection: Any) -> None:
        sql = INSERT.format(message.json())
        if isinstance(self.inbox.database, Django):
            from django.db import connections

            execute_on_cursor(connections[self.inbox.database._using], sql)
        elif self._site.name.startswith("sqlalchemy"):
            connection.execute(text(sql))
        else:
            execute_on_cursor(connection, sql)
        self._maybe_fail()

    async def _async_handler(self, message: Message, connection: Any) -> None:
        sql = INSERT.format(message.json())
        await connection.execute(text(sql) if self._site.name.startswith("sqlalchemy") else sql)
        self._maybe_fail()

    def _maybe_fail(self) -> None:
        if self.failing:
            raise LookupError("no such customer")


async def test_each_message_once(site: Site) -> None:
    points = Points(site)
    await site.call(points.inbox.create_table)
    one, two = arrived(1), arrived(2)
    assert await points.receive(one) is Received.DONE
    # Whatever brings it.
    for again in (one, Message(**{**vars(one), "subscription": "other", "attempt": 2, "replay": "7"})):
        assert await points.receive(again) is Received.DUPLICATE
    points.failing = True
    with pytest.raises(LookupError):
        await points.receive(two)
    assert site.orders() == [1]
    # A failed message leaves no row, so its redelivery is accepted.
    points.failing = False
    assert await points.receive(two) is Received.DONE
    assert site.orders() == [1, 2]
    # Another consumer's inbox in the same table knows nothing of it.
    other = type(points.inbox)(points.inbox.database, "billing")
    assert await site.call(other.purge, timedelta(0) - timedelta(hours=1)) == 0
    assert await site.call(points.inbox.purge) == 0
    assert await site.call(points.inbox.purge, timedelta(0) - timedelta(hours=1)) == 2


async def test_what_is_not_in_the_database_is_not_acknowledged(site: Site) -> None:
    """PostgreSQL answers a COMMIT after a failed statement by a rollback that is no error."""
    points = Points(site)
    await site.call(points.inbox.create_table)
    asynchronous = isinstance(points.inbox, AsyncInbox)
    one = arrived(1)
    answer = await asyncio.gather(
        site.call(points.inbox.receive, one, points.hide if asynchronous else points.hide_plainly),
        return_exceptions=True,
    )
    assert (answer == [Received.DONE]) == (site.orders() == [1])
    again = await points.receive(one) if answer != [Received.DONE] else None
    assert again in (Received.DONE, None)
    assert site.orders() == [1]


@pytest.mark.parametrize("name", ["psycopg", "psycopg-async"])
async def test_a_rollback_of_psycopg_acknowledges_nothing(name: str, tmp_path: Path) -> None:
    """`psycopg.Rollback` ends the database transaction without an exception."""

    async def roll_back(message: Message, connection: Any) -> None:
        raise psycopg.Rollback

    def roll_back_plainly(message: Message, connection: Any) -> None:
        raise psycopg.Rollback

    async with SITES[name](tmp_path) as site:
        points, one = Points(site), arrived(1)
        await site.call(points.inbox.create_table)
        with pytest.raises(Undone):
            await site.call(points.inbox.receive, one, roll_back if name == "psycopg-async" else roll_back_plainly)
        assert await points.receive(one) is Received.DONE
        assert site.orders() == [1]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_psycopg_refuses_that_a_handler_ends_its_database_transaction(ends: str, tmp_path: Path) -> None:
    """A part of the work would be committed with the message's row, and the rest never be done."""
    async with SITES["psycopg"](tmp_path) as site:
        points, one = Points(site), arrived(1)
        await site.call(points.inbox.create_table)

        def end(message: Message, connection: Any) -> None:
            points.handler(message, connection)
            getattr(connection, ends)()
            raise LookupError("no such customer")

        with pytest.raises(psycopg.ProgrammingError, match="forbidden within a Transaction"):
            await site.call(points.inbox.receive, one, end)
        assert site.orders() == []
        assert await points.receive(one) is Received.DONE
        assert site.orders() == [1]


async def test_the_same_message_twice_at_once_is_taken_once(site: Site) -> None:
    points = Points(site)
    await site.call(points.inbox.create_table)
    one = arrived(1)
    answer = await asyncio.gather(*(points.receive(one) for _ in range(3)), return_exceptions=True)
    # SQLite's writers do not wait long here; a service answers 500 and is sent it again.
    assert answer.count(Received.DONE) == 1
    assert site.orders() == [1]
    assert await points.receive(one) is Received.DUPLICATE


async def test_a_message_that_is_still_worked_on_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfnote.inbox_sql.WAIT_S", 0.2)
    points, one = Points(site), arrived(1)
    await site.call(points.inbox.create_table)
    limits = list[Any]()
    if isinstance(site.barrier.database, Asyncpg):

        async def look(message: Message, connection: Any) -> None:
            limits.append(await connection.fetchval("show lock_timeout"))

        assert await points.inbox.receive(arrived(2), look) is Received.DONE
        assert limits == ["0"]
    sql = "insert into halfnote_inbox (consumer, message_id, replay) values ('points', '{}', '')"
    async with site.local() as local:
        if isinstance(local, AsyncLocal):
            await local.execute(sql.format(one.message_id))
        else:
            await local._run(local.execute, local.connection, sql.format(one.message_id))
        with pytest.raises(StillRunning):
            await points.receive(one)
    assert await points.receive(one) is Received.DUPLICATE


async def test_it_is_asked_for_again_without_a_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfnote.inbox_sql.WAIT_S", 0.2)
    async with SITES["psycopg"](tmp_path) as site:
        points = Points(site)
        points.inbox.create_table()
        endpoint = DeliveryEndpoint(points.handler, secrets=SECRET, inbox=points.inbox)
        headers = {"ce-id": "1-0", "ce-type": "order", **sign(SECRET, "1-0", b"1")}
        with site.barrier.database.begin() as connection:
            execute_on_cursor(connection, "insert into halfnote_inbox (consumer, message_id) values ('points', '1-0')")
            reply = await asyncio.to_thread(answered_sync, endpoint, headers, b"1")
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")


async def test_each_replay_runs_a_message_once_more(tmp_path: Path) -> None:
    async with SITES["asyncpg"](tmp_path) as site:
        database, taken = site.barrier.database, list[str | None]()
        inbox = AsyncInbox(database, "points", on_replay="run", table="public.inbox")
        await inbox.create_table()

        async def handler(message: Message, connection: Any) -> None:
            taken.append(message.replay)

        one = arrived(1)
        for replay in (None, None, "7", "7", "8", None):
            await inbox.receive(Message(**{**vars(one), "replay": replay}), handler)
    assert taken == [None, "7", "8"]


def test_a_wrong_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`skip` or `run`"):
        Inbox(DbApi(lambda: None, "sqlite"), "points", on_replay="always")  # type: ignore[arg-type]

    async def handler(message: Message, connection: Any) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="async functions or neither"):
        DeliveryEndpoint(handler, secrets=SECRET, inbox=Inbox(DbApi(lambda: None, "sqlite"), "points"))


async def test_what_is_signed_but_no_message_is_refused() -> None:
    endpoint = DeliveryEndpoint(lambda message: None, secrets=SECRET)
    transport = httpx.ASGITransport(app=endpoint.asgi())  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://points") as client:
        answer = await client.post("/", content=b"{}", headers=sign(SECRET, "m-0", b"{}"))
    assert answer.status_code == 400
    assert "`id` is missing" in answer.json()["detail"]


async def test_a_handler_that_only_looks_plain_is_awaited_or_refused(tmp_path: Path) -> None:
    """Nothing is acknowledged that was never run."""
    taken: list[str] = []

    async def take(message: Message, *connection: Any) -> None:
        taken.append(message.message_id)

    secret = "whsec_" + base64.b64encode(bytes(32)).decode()
    body = b'{"order": 1}'
    headers = {"ce-id": "1-0", "ce-type": "order", **sign(secret, "1-0", body)}
    endpoint = DeliveryEndpoint(lambda message: take(message), secrets=secret)
    assert answered_sync(endpoint, headers, body).status == 500
    assert not taken
    assert (await answered_async(endpoint, headers, body)).status == 200
    assert taken == ["1-0"]
    async with SITES["sqlite"](tmp_path) as site:
        inbox = Inbox(site.barrier.database, "points")
        await site.call(inbox.create_table)
        with pytest.raises(TypeError, match="returned an awaitable"):
            await site.call(inbox.receive, arrived(1), lambda message, connection: take(message, connection))
    assert taken == ["1-0"]


def test_a_delivery_whose_unsigned_id_was_changed_is_refused() -> None:
    body, taken = b"{}", list[Message]()
    endpoint = DeliveryEndpoint(taken.append, secrets=SECRET)
    signed = {"ce-type": "order", **sign(SECRET, "1-0", body)}
    for headers, status in (
        ({"ce-id": "1-0", **signed}, 200),
        ({"ce-id": "2-0", **signed}, 401),
    ):
        assert answered_sync(endpoint, headers, body).status == status
    # The mode is not signed either: a batch as one message, one message as a batch or as an event of another id.
    event = {"specversion": "1.0", "id": "8-0", "type": "order", "data": 1}
    for kind, signed_id, content in (
        ("application/json", "bat_1", [event]),
        ("application/cloudevents+json", "1-0", event),
        ("application/cloudevents-batch+json", "1-0", [event]),
    ):
        text = json.dumps(content).encode()
        attributes = {"ce-id": signed_id, "ce-type": "order"} if kind == "application/json" else {}
        headers = {**attributes, "content-type": kind, **sign(SECRET, signed_id, text)}
        assert answered_sync(endpoint, headers, text).status == 401, kind
    # A message whose own body is an event.
    text = json.dumps(event).encode()
    own = {"ce-id": "9-0", "ce-type": "order", "content-type": "application/cloudevents+json"}
    assert answered_sync(endpoint, {**own, **sign(SECRET, "9-0", text)}, text).status == 200
    assert (taken.pop().message_id, len(taken)) == ("9-0", 1)
    # The id and the time, of which the time is moved into the id, so that the body begins with another time.
    body = b"9999999999." + body
    headers = {"ce-id": "1-0", "ce-type": "order", **sign(SECRET, "1-0", body, at=1.0)}
    moved = headers | {"webhook-id": "1-0.1", "ce-id": "1-0.1", "webhook-timestamp": "9999999999"}
    refused = answered_sync(endpoint, moved, body.partition(b".")[2])
    assert (refused.status, b"has a `.`" in refused.body) == (401, True)
    assert [message.message_id for message in taken] == ["1-0"]
