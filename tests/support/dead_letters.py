"""Dead letters for tests: made, listed, redelivered and dropped."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.relay_stepping import order

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)


@pytest.fixture
async def relay(runtime: Runtime) -> AsyncIterator[Relay]:
    """The relay of a process, turned by the tests."""
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


@pytest.fixture
async def mailer(client: httpx.AsyncClient) -> str:
    """A subscription whose receiver gets no requests."""
    return await subscription(client, "mailer")


async def subscription(client: httpx.AsyncClient, name: str, **fields: Any) -> str:
    url = {"type": "webhook", "url": "http://127.0.0.1:9/in"}
    answer = await client.put(f"/subscriptions/{name}", json={"topics": ["order"], "destination": url, **fields})
    assert answer.status_code == 201, answer.text
    return name


async def committed(client: httpx.AsyncClient, message: dict[str, Any]) -> str:
    """Commit a message; return its id."""
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": [message]})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["messages"][0]["message_id"])


async def bury(db: Connection, message_id: str, name: str, **columns: Any) -> None:
    """Write a message's dead letter, as a settle does."""
    row = {"replay": 0, "reason": "retries_exhausted", "died_at": AT, "status": 500, "error": "answered 500", **columns}
    await db.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, attempts, first_at, '
        "error, response, replay, reason, died_at, status) "
        'select s.subscription_id, o.transaction_id, o.position, o."offset", o.topic, o.key, 17, $3, $8, '
        "'no', $4, $5, $6, $7 from outbox o, subscription s "
        "where o.transaction_id = $1 and o.position = 0 and s.name = $2",
        UUID(message_id[:36]),
        name,
        AT - timedelta(hours=8),
        *row.values(),
    )


async def dead(client: httpx.AsyncClient, db: Connection, name: str, number: int = 1030, **columns: Any) -> str:
    """Commit order `number` and write its dead letter; return the message's id."""
    message_id = await committed(client, order(number, tag="created"))
    await bury(db, message_id, name, **columns)
    return message_id


def by_ids(name: str, *message_ids: str, **fields: Any) -> dict[str, Any]:
    return {"ids": [{"subscription": name, "message_id": one} for one in message_ids], **fields}


def by_filter(at_most: int = 1000, **filters: Any) -> dict[str, Any]:
    return {"filter": filters, "dry_run": False, "at_most": at_most}


async def redeliver(client: httpx.AsyncClient, wanted: dict[str, Any]) -> Any:
    answer = await client.post("/dead-letters/redeliver", json=wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def drop(client: httpx.AsyncClient, wanted: dict[str, Any]) -> Any:
    answer = await client.request("DELETE", "/dead-letters", json=wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def listed(client: httpx.AsyncClient, **query: Any) -> list[str]:
    page = (await client.get("/dead-letters", params=query)).json()
    assert page["next_cursor"] is None
    return [one["message_id"] for one in page["items"]]


async def many(db: Connection, count: int, **columns: Any) -> None:
    """Write dead letters of every subscription, of days that are gone; the first of them is of the topic `rare`."""
    await db.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
        "died_at, producer_group, content_type, body, body_digest, committed_at) "
        "select s.subscription_id, gen_random_uuid(), 0, n, case when n = 1 then 'rare' else 'order' end, 1, 'x', "
        "$2::timestamptz + n * interval '1 ms', 'shop', 'application/json', '{}', '\\x00', $2 "
        "from subscription s, generate_series(1, $1::int) n",
        count,
        AT,
    )
