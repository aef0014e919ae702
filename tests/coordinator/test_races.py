"""Races for one id in one flush, over connections and over replicas: one wins, the others get its recorded verdict."""

import asyncio
import random
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import pytest

from app.config import Settings
from app.database.connection import Connection, connect
from app.ids import uuid7
from app.lifecycle.startup import assemble
from app.runtime.state import Runtime
from app.store.coordinator.halves import Half, HalfMessage, insert_halves
from app.store.coordinator.ops import End, read_recorded, record_ends
from app.verdicts import Verdict
from tests.conftest import client_of

ORDER: dict[str, Any] = {"topic": "order", "key": "order-1030", "body": {"order": 1030}}
WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"


def now() -> datetime:
    return datetime.now(UTC)


def half_with(transaction_id: UUID, *bodies: bytes) -> Half:
    messages = [
        HalfMessage("order", None, None, None, "application/json", body, sha256(body).digest(), None) for body in bodies
    ]
    return Half(transaction_id, "shop", messages, sha256(b"|".join(bodies)).digest())


async def store_halves(db: Connection, count: int) -> list[UUID]:
    halves = sorted((half_with(uuid7(now()), b"1", b"2") for _ in range(count)), key=lambda half: half.transaction_id)
    await insert_halves(db, halves, ["order"], now())
    return [half.transaction_id for half in halves]


async def until_waiting(db: Connection, count: int = 1) -> None:
    async with asyncio.timeout(10):
        while await db.fetchval(WAITING) < count:
            await asyncio.sleep(0.005)


def end_of(transaction_id: UUID | str, verdict: str) -> dict[str, Any]:
    return {"transaction_id": str(transaction_id), "producer_group": "shop", "verdict": verdict}


async def test_equal_and_opposite_ends_in_one_flush(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    (one,) = await store_halves(db, 1)
    verdicts = ["commit", "commit", "rollback", "commit", "rollback"]
    answers = await asyncio.gather(*(client.post("/end", json=end_of(one, verdict)) for verdict in verdicts))
    assert [answer.status_code for answer in answers] == [200, 200, 409, 200, 409]
    assert [answer.json().get("replayed") for answer in answers] == [False, True, None, True, None]
    assert answers[2].json()["recorded"]["verdict"] == "commit"
    assert await db.fetchval("select count(*) from outbox") == 2
    assert await db.fetchval("select count(*) from attempt where kind = 'refused'") == 1


async def test_equal_and_different_halves_in_one_flush(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    one = str(uuid7(now()))
    contents = [[ORDER], [ORDER], [ORDER, ORDER, ORDER], [{**ORDER, "key": "order-1031"}]]
    answers = await asyncio.gather(
        *(
            client.post("/half", json={"producer_group": "shop", "transaction_id": one, "messages": messages})
            for messages in contents
        )
    )
    assert [answer.status_code for answer in answers] == [201, 200, 409, 409]
    assert [answer.json().get("field") for answer in answers[2:]] == ["messages", "messages[0].key"]
    assert await db.fetchval("select count(*) from half") == 1


async def test_a_repeat_with_more_messages_adds_none(db: Connection, group: str) -> None:
    one = uuid7(now())
    assert None not in await insert_halves(db, [half_with(one, b"1")], ["order"], now())
    assert await insert_halves(db, [half_with(one, b"1", b"2", b"3")], [], now()) == [None]
    assert await db.fetchval("select count(*) from half") == 1


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
async def test_end_waits_for_a_winner_that_is_held_open(
    client: httpx.AsyncClient, db: Connection, dsn: str, group: str, outcome: str
) -> None:
    (one,) = await store_halves(db, 1)
    winner = await connect(dsn)
    transaction = winner.transaction()
    await transaction.start()
    await record_ends(winner, [End(one, "shop", Verdict.COMMIT)], now())
    asked = asyncio.create_task(client.post("/end", json=end_of(one, "rollback")))
    await until_waiting(db)
    await getattr(transaction, outcome)()
    await winner.close()
    answer = await asked
    stands = "commit" if outcome == "commit" else "rollback"
    assert answer.status_code == (409 if outcome == "commit" else 200)
    assert answer.json().get("recorded", answer.json())["verdict"] == stands
    assert await db.fetchval("select count(*) from outbox") == (2 if outcome == "commit" else 0)


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
async def test_half_waits_for_a_winner_that_is_held_open(
    client: httpx.AsyncClient, db: Connection, dsn: str, group: str, outcome: str
) -> None:
    one = uuid7(now())
    winner = await connect(dsn)
    transaction = winner.transaction()
    await transaction.start()
    await insert_halves(winner, [half_with(one, b"1", b"2")], [], now())
    asked = asyncio.create_task(
        client.post("/half", json={"producer_group": "shop", "transaction_id": str(one), "messages": [ORDER]})
    )
    await until_waiting(db)
    await getattr(transaction, outcome)()
    await winner.close()
    answer = await asked
    assert answer.status_code == (409 if outcome == "commit" else 201)
    assert await db.fetchval("select count(*) from half") == (2 if outcome == "commit" else 1)


async def test_twelve_connections_and_both_verdicts(db: Connection, dsn: str, group: str) -> None:
    """No deadlock; one winner; the losers get the recorded verdict; a follower sees all offsets in order."""
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    before = await db.fetchval(deadlocks)
    ids = await store_halves(db, 400)
    finished = asyncio.Event()
    follower = asyncio.create_task(_follow(dsn, finished))
    verdicts_seen: dict[UUID, set[int]] = {one: set() for one in ids}
    won: list[UUID] = []
    await asyncio.gather(*(_end_at_random(dsn, ids, seed, verdicts_seen, won) for seed in range(12)))
    finished.set()
    seen = await follower
    assert len(won) == len(set(won)) == len(ids)
    assert all(len(verdicts) == 1 for verdicts in verdicts_seen.values())
    recorded = dict(await db.fetch("select transaction_id, verdict from op"))
    assert {one: {verdict} for one, verdict in recorded.items()} == verdicts_seen
    assert seen == sorted(seen)
    assert len(seen) == 2 * sum(verdict == Verdict.COMMIT for verdict in recorded.values())
    assert await db.fetchval(deadlocks) == before
    backwards = (
        'select count(*) from (select committed_at < lag(committed_at) over (order by "offset") b from outbox) w'
    )
    assert await db.fetchval(backwards + " where b") == 0
    apart = 'select count(*) from (select max("offset") - min("offset") d from outbox group by transaction_id) w'
    assert await db.fetchval(apart + " where d <> 1") == 0


async def _end_at_random(
    dsn: str, ids: list[UUID], seed: int, verdicts_seen: dict[UUID, set[int]], won: list[UUID]
) -> None:
    rng = random.Random(seed)
    connection = await connect(dsn)
    for _ in range(25):
        batch = sorted(rng.sample(ids, 60))
        ends = [End(one, "shop", rng.choice(list(Verdict))) for one in batch]
        try:
            recorded = await record_ends(connection, ends, now(), are_first=rng.random() < 0.5)
        except asyncpg.UniqueViolationError:
            recorded = await record_ends(connection, ends, now())
        found = dict(zip(batch, recorded, strict=True))
        losers = [end for end in ends if found[end.transaction_id].verdict is None]
        won.extend(one for one, recorded in found.items() if recorded.verdict is not None)
        found |= await read_recorded(connection, losers, now())
        for one in batch:
            verdict = found[one].verdict
            assert verdict is not None, "a losing End got no verdict"
            verdicts_seen[one].add(verdict)
    await connection.close()


async def _follow(dsn: str, finished: asyncio.Event) -> list[int]:
    connection = await connect(dsn)
    seen: list[int] = []
    while True:
        last_round = finished.is_set()
        rows = await connection.fetch(
            'select "offset" from outbox where "offset" > $1 order by 1 limit 50', seen[-1] if seen else 0
        )
        seen.extend(row[0] for row in rows)
        if last_round and not rows:
            break
    await connection.close()
    return seen


async def test_two_replicas_share_one_truth(
    settings: Settings, dsn: str, runtime: Runtime, db: Connection, group: str
) -> None:
    async with AsyncExitStack() as stack:
        other = await assemble(settings, dsn, stack)
        first = await stack.enter_async_context(client_of(runtime))
        second = await stack.enter_async_context(client_of(other))
        ids = await store_halves(db, 150)
        answers = await asyncio.gather(
            *(first.post("/end", json=end_of(one, "commit")) for one in ids),
            *(second.post("/end", json=end_of(one, "rollback")) for one in reversed(ids)),
        )
    recorded = {str(key): verdict for key, verdict in await db.fetch("select transaction_id, verdict from op")}
    for one, commit, rollback in zip(ids, answers[:150], reversed(answers[150:]), strict=True):
        assert {commit.status_code, rollback.status_code} == {200, 409}
        assert recorded[str(one)] == (1 if commit.status_code == 200 else 2)
    assert await db.fetchval("select count(distinct transaction_id) from outbox") == sum(
        verdict == 1 for verdict in recorded.values()
    )


async def test_the_same_half_on_two_replicas(
    settings: Settings, dsn: str, runtime: Runtime, db: Connection, group: str
) -> None:
    async with AsyncExitStack() as stack:
        other = await assemble(settings, dsn, stack)
        clients = [await stack.enter_async_context(client_of(one)) for one in (runtime, other)]
        chosen = [str(uuid7(now())) for _ in range(60)]
        answers = await asyncio.gather(
            *(
                client.post("/half", json={"producer_group": "shop", "transaction_id": one, "messages": [ORDER]})
                for one in chosen
                for client in clients
            )
        )
    pairs = [{answers[2 * n].status_code, answers[2 * n + 1].status_code} for n in range(60)]
    assert all(pair == {200, 201} for pair in pairs)
    assert await db.fetchval("select count(*) from half") == 60
