"""A model of consumers: many claim, die, give back and acknowledge, while the services are killed.

Each committed message is acknowledged, none is out to two consumers at a time, and none comes after its
acknowledgement was confirmed.
"""

import asyncio
import random
from collections.abc import Awaitable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from tests.relay.test_kills import FILL
from tests.support.processes import Service

MESSAGES, CONSUMERS, KILLS = 1500, 6, 4
INVISIBLE_S = 2.0
# The services measure the clock of one database, each for itself.
CLOCKS_APART = timedelta(milliseconds=300)
LEFT = """
select $1 - (select count(*) from receipt where outcome = 'delivered') as left
"""


class Model:
    """What consumers know: who holds which message until when, and what was confirmed."""

    def __init__(self) -> None:
        self.held_until: dict[str, datetime] = {}
        self.acknowledged: set[str] = set()
        self.faults: list[str] = []

    def claimed(self, messages: list[dict[str, Any]], held_until: str) -> None:
        until = datetime.fromisoformat(held_until)
        claimed_at = until - timedelta(seconds=INVISIBLE_S)
        for message in messages:
            one = message["message_id"]
            before = self.held_until.get(one)
            if before is not None and claimed_at < before - CLOCKS_APART:
                self.faults.append(f"{one} is out to two consumers: until {before}, claimed at {claimed_at}")
            if one in self.acknowledged:
                self.faults.append(f"{one} comes after its acknowledgement")
            self.held_until[one] = until

    def settled(self, action: str, message: dict[str, Any], status: int) -> None:
        if status == 200 and action == "ack":
            self.acknowledged.add(message["message_id"])

    def released(self, message: dict[str, Any]) -> None:
        """From the request on that may give it back."""
        self.held_until.pop(message["message_id"], None)


async def consume(services: list[Service], model: Model, over: asyncio.Event, chance: random.Random) -> None:
    """Claim and settle until all is over; sometimes die with what was claimed."""
    while not over.is_set():
        service = chance.choice(services)
        async with httpx.AsyncClient(base_url=f"{service.url}/subscriptions/worker", timeout=20) as client:
            for _ in range(chance.randint(1, 8)):
                with suppress(httpx.TransportError):
                    await turn(client, model, chance)


async def turn(client: httpx.AsyncClient, model: Model, chance: random.Random) -> None:
    wanted = {"max": chance.choice((1, 5, 40)), "invisible_s": INVISIBLE_S, "wait_s": chance.choice((0.0, 0.5))}
    answer = await client.post("/claim", json=wanted)
    if answer.status_code != 200:
        await asyncio.sleep(0.05)
        return
    messages = answer.json()["messages"]
    model.claimed(messages, answer.json()["held_until"])
    chance.shuffle(messages)
    for action in ("ack", "ack", "nack", "ack", "lost"):
        count = chance.randint(0, len(messages))
        part, messages = messages[:count], messages[count:]
        if not part or action == "lost":
            continue
        await asyncio.sleep(chance.choice((0, 0, 0, 0.1)))
        await settle(client, model, action, part)


async def settle(client: httpx.AsyncClient, model: Model, action: str, part: list[dict[str, Any]]) -> None:
    fields = {"retry_after_s": 0.0} if action == "nack" else {}
    if action == "nack":
        for message in part:
            model.released(message)
    answer = await client.post(f"/{action}", json={"handles": [one["handle"] for one in part], **fields})
    if answer.status_code == 200:
        for message, outcome in zip(part, answer.json()["outcomes"], strict=True):
            model.settled(action, message, outcome["status"])


async def kill_some(services: list[Service], chance: random.Random) -> None:
    for _ in range(KILLS):
        await asyncio.sleep(chance.uniform(0.5, 2))
        service = chance.choice(services)
        service.kill()
        await service.start()


async def until_acknowledged(db: Connection) -> None:
    while await db.fetchval(LEFT, MESSAGES) > 0:
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_message_is_lost_or_out_twice_over_kills(
    tmp_path: Path, dsn: str, db: Connection, group: str, seed: int
) -> None:
    chance, model, over = random.Random(seed), Model(), asyncio.Event()
    services = [Service(tmp_path / f"{n}" / "data", HALFNOTE_DATABASE_URL=dsn) for n in range(2)]
    for n, service in enumerate(services):
        (tmp_path / f"{n}").mkdir()
        await service.start()
    consumers: list[asyncio.Task[None]] = []
    try:
        async with httpx.AsyncClient(base_url=services[0].url) as client:
            put = {"topics": ["order"], "destination": {"type": "pull"}, "retry": [0.0] * 90}
            assert (await client.put("/subscriptions/worker", json=put)).status_code == 201
        await db.execute(FILL, MESSAGES, 50)
        consumers += [
            asyncio.create_task(consume(services, model, over, random.Random(f"{seed}-{n}"))) for n in range(CONSUMERS)
        ]
        work: list[Awaitable[None]] = [kill_some(services, chance), until_acknowledged(db)]
        async with asyncio.timeout(200):
            await asyncio.gather(*work)
        over.set()
        await asyncio.gather(*consumers)
    finally:
        for task in consumers:
            task.cancel()
        for service in services:
            service.kill()
    assert model.faults == []
    [row] = await db.fetch(
        "select count(*) as receipts, count(distinct transaction_id) as messages, "
        "(select count(*) from delivery_retry) as retries, (select count(*) from dead_letter) as dead from receipt"
    )
    assert dict(row) == {"receipts": MESSAGES, "messages": MESSAGES, "retries": 0, "dead": 0}
