"""A model of consumers: many claim, die, give back, extend and acknowledge, while services and Postgres are killed.

Each committed message is acknowledged, none is out to two consumers at a time, and none comes after its
acknowledgement was confirmed. With `ordered: key` also: a message comes only if all earlier ones of its key are
settled, or in the same claim, and while no other claim has any of its key.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.database.connection import connect
from app.embedded_postgres import EmbeddedPostgres
from app.migrate import migrate
from tests.conftest import register_group
from tests.relay.test_kills import FILL
from tests.support.processes import Service

MESSAGES, CONSUMERS, KILLS = 1500, 6, 4
INVISIBLE_S = 2.0
# The services measure the clock of one database, each for itself.
CLOCKS_APART = timedelta(milliseconds=300)
FOUND = """
select count(*) as receipts, count(distinct transaction_id) as messages,
  (select count(*) from delivery_retry) as retries, (select count(*) from dead_letter) as dead from receipt
"""


class Model:
    """What consumers know: who holds which message until when, and what was confirmed.

    `keys`: the offsets of each key, in order, if the subscription is ordered.
    """

    def __init__(self, keys: dict[str, list[int]]) -> None:
        self._keys = keys
        self._held_until: dict[int, datetime] = {}
        self._acknowledged: set[int] = set()
        # Acknowledgements whose answers are not known.
        self._asked: Counter[int] = Counter()
        self.faults: list[str] = []

    def claimed(self, messages: list[dict[str, Any]], held_until: str) -> None:
        until = datetime.fromisoformat(held_until)
        claimed_at = until - timedelta(seconds=INVISIBLE_S)
        offsets = [message["offset"] for message in messages]
        for one in offsets:
            if self._is_out(one, claimed_at):
                self.faults.append(f"{one} is out to two consumers: until {self._held_until[one]}, again {claimed_at}")
            if one in self._acknowledged:
                self.faults.append(f"{one} comes after its acknowledgement")
        if self._keys:
            self._check_order(messages, claimed_at)
        for one in offsets:
            self._held_until[one] = until

    def _check_order(self, messages: list[dict[str, Any]], claimed_at: datetime) -> None:
        claim: dict[str, list[int]] = defaultdict(list)
        for message in messages:
            claim[message["key"]].append(message["offset"])
        for key, offsets in claim.items():
            if offsets != sorted(offsets):
                self.faults.append(f"{key} is not in order: {offsets}")
            for other in set(self._keys[key]) - set(offsets):
                over = other in self._acknowledged or self._asked[other] > 0
                if other < max(offsets) and not over:
                    self.faults.append(f"{offsets} of {key} come before {other} is settled")
                if not over and self._is_out(other, claimed_at):
                    self.faults.append(f"{offsets} of {key} come while {other} is out")

    def _is_out(self, offset: int, at: datetime) -> bool:
        until = self._held_until.get(offset)
        return until is not None and at < until - CLOCKS_APART

    def asks(self, action: str, message: dict[str, Any]) -> None:
        """Note a request before it is sent, because its answer may be lost."""
        if action == "nack":
            self._held_until.pop(message["offset"], None)
        if action == "ack":
            self._asked[message["offset"]] += 1

    def answered(self, action: str, message: dict[str, Any], outcome: dict[str, Any]) -> None:
        one = message["offset"]
        if action == "ack":
            self._asked[one] -= 1
            if outcome["status"] == 200:
                self._acknowledged.add(one)
        if action == "extend" and outcome["status"] == 200:
            self._held_until[one] = datetime.fromisoformat(outcome["held_until"])


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
    began = asyncio.get_running_loop().time()
    answer = await client.post("/claim", json=wanted)
    if answer.status_code != 200:
        await asyncio.sleep(0.05)
        return
    if asyncio.get_running_loop().time() - began > wanted["wait_s"] + INVISIBLE_S / 2:
        # Others may have its messages already.
        return
    messages = answer.json()["messages"]
    model.claimed(messages, answer.json()["held_until"])
    if chance.random() < 0.5:
        chance.shuffle(messages)
    for action in chance.choice((("ack",), ("ack", "ack", "nack", "extend", "ack", "lost"))):
        count = chance.randint(0, len(messages)) if action != "ack" or chance.random() < 0.5 else len(messages)
        part = messages[:count]
        if action != "extend":
            messages = messages[count:]
        if not part or action == "lost":
            continue
        await asyncio.sleep(chance.choice((0, 0, 0, 0.1)))
        fields = {
            "nack": {"retry_after_s": chance.choice((0.0, 0.3))},
            "extend": {"invisible_s": INVISIBLE_S},
        }
        await settle(client, model, action, part, fields.get(action, {}))


async def settle(
    client: httpx.AsyncClient, model: Model, action: str, part: list[dict[str, Any]], fields: dict[str, float]
) -> None:
    for message in part:
        model.asks(action, message)
    answer = await client.post(f"/{action}", json={"handles": [one["handle"] for one in part], **fields})
    if answer.status_code == 200:
        for message, outcome in zip(part, answer.json()["outcomes"], strict=True):
            model.answered(action, message, outcome)


async def kill_some(services: list[Service], servers: list[EmbeddedPostgres], chance: random.Random) -> None:
    """Kill services, and Postgres in between; the last of `servers` runs."""
    for n in range(KILLS):
        await asyncio.sleep(chance.uniform(0.5, 2))
        if n % 2:
            await asyncio.to_thread(servers[-1].kill)
            # It starts on its former port.
            servers.append(await asyncio.to_thread(EmbeddedPostgres.start, servers[-1].data_dir))
        else:
            service = chance.choice(services)
            service.kill()
            await service.start()


async def found(url: str) -> dict[str, int]:
    db = await connect(url)
    try:
        row = await db.fetchrow(FOUND)
    finally:
        await db.close()
    assert row is not None
    return dict(row)


async def until_acknowledged(url: str) -> None:
    while True:
        # Postgres may be down, or be killed while the connection is closed.
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            if (await found(url))["receipts"] >= MESSAGES:
                return
        await asyncio.sleep(0.2)


@asynccontextmanager
async def two_services(data_dir: Path, server: EmbeddedPostgres) -> AsyncIterator[list[Service]]:
    services = [Service(data_dir.parent / f"{n}" / "data", HALFNOTE_DATABASE_URL=server.url) for n in range(2)]
    try:
        for n, service in enumerate(services):
            (data_dir.parent / f"{n}").mkdir()
            await service.start()
        yield services
    finally:
        for service in services:
            if service.process is not None:
                service.kill()


async def fill(server: EmbeddedPostgres, service: Service, ordered: str) -> dict[str, list[int]]:
    """Make the subscription and its messages; return the offsets by key, if it is ordered."""
    db = await connect(server.url)
    try:
        await register_group(db, "shop")
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            put = {"topics": ["order"], "destination": {"type": "pull"}, "retry": [0.0] * 90, "ordered": ordered}
            assert (await client.put("/subscriptions/worker", json=put)).status_code == 201
        await db.execute(FILL, MESSAGES, 50)
        rows = await db.fetch('select key, array_agg("offset" order by "offset") as offsets from outbox group by key')
    finally:
        await db.close()
    return {row["key"]: row["offsets"] for row in rows} if ordered == "key" else {}


@pytest.mark.parametrize(("ordered", "seed"), [("none", 1), ("key", 2), ("key", 3)])
async def test_no_message_is_lost_or_out_twice_over_kills(data_dir: Path, ordered: str, seed: int) -> None:
    chance, over = random.Random(seed), asyncio.Event()
    async with AsyncExitStack() as stack:
        servers = [server := await asyncio.to_thread(EmbeddedPostgres.start, data_dir)]
        stack.push_async_callback(asyncio.to_thread, lambda: servers[-1].stop())
        await migrate(server.url, days_ahead=7)
        services = await stack.enter_async_context(two_services(data_dir, server))
        model = Model(await fill(server, services[0], ordered))
        consumers = [
            asyncio.create_task(consume(services, model, over, random.Random(f"{seed}-{n}"))) for n in range(CONSUMERS)
        ]
        stack.callback(lambda: [task.cancel() for task in consumers])
        work: list[Awaitable[None]] = [kill_some(services, servers, chance), until_acknowledged(server.url)]
        async with asyncio.timeout(300):
            await asyncio.gather(*work)
        over.set()
        await asyncio.gather(*consumers)
        last = await found(server.url)
    assert model.faults == []
    assert last == {"receipts": MESSAGES, "messages": MESSAGES, "retries": 0, "dead": 0}
