"""What check-back announces: what it parks and what policy rolls back, in the database transaction that does it."""

import asyncio
import re
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from aiohttp import web

from app.announcements import PARKED, ROLLED_BACK
from app.checkback.check import Check, FinishedCheck
from app.checkback.loop import CheckBack
from app.checkback.sweep import Sweeps
from app.checkback.verdicts import record_verdicts
from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection, connect
from app.loops import announce_held_back
from app.policy.check_schedule import Settle
from app.runtime.state import Runtime
from app.store.checkback.claims import CheckCapacity, asked_groups, asked_messages, claim, take_turn
from app.store.checkback.results import SETTLE, SettledCheck
from app.store.relay.announcements import ANNOUNCE_EVERY_S
from app.verdicts import Source, Verdict
from tests.announcements.test_messages import announce_now, announcement, bodies
from tests.checkback.test_sweep import run_passes
from tests.conftest import register_group
from tests.coordinator.test_races import until_waiting
from tests.coordinator.test_statement_plans import assert_keyed, both_plans, full, stored_ids
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import UNKNOWN, in_doubt, many_in_doubt, row, turn, verdict
from tests.support.explain import big, scans
from tests.support.processes import Service

__all__ = ["full"]

BOTH_POLICIES = pytest.mark.parametrize(("on_exhausted", "topic"), [("park", PARKED), ("rollback", ROLLED_BACK)])
TERMINATE = """
select pg_terminate_backend(pid, 10000) from pg_stat_activity
where wait_event_type = 'Lock' and datname = current_database()
"""


@BOTH_POLICIES
async def test_what_policy_parks_or_rolls_back_is_announced(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, on_exhausted: str, topic: str
) -> None:
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=2, on_exhausted=on_exhausted)
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert await bodies(db) == []
        runtime.clock.offset_s += 31
        await turn(runtime, checks)
    transaction = (await client.get(f"/transactions/{transaction_id}")).json()
    [body] = await bodies(db)
    at = transaction["verdict"]["decided_at"] if topic == ROLLED_BACK else transaction["timeline"][-1]["at"]
    assert body == {
        "type": topic,
        "at": at,
        "transaction_id": str(transaction_id),
        "producer_group": "shop",
        "topic": "order",
        "key": "order-1030",
        "messages": 1,
        "born_at": transaction["born_at"],
        "checks": 2,
        "reason": "2 checks were answered `unknown`",
        "held_back": 0,
    }
    assert await db.fetchval("select key from outbox where topic = $1", topic) == "shop"
    # The relay was woken.
    assert runtime.wake_ups.relay.is_set()


@BOTH_POLICIES
async def test_a_burst_is_announced_by_one_message_at_once_and_one_later(
    runtime: Runtime, db: Connection, on_exhausted: str, topic: str
) -> None:
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as shop:
        for name, count in (("shop", 60), ("bank", 1)):
            await register_group(db, name, check_urls=[shop.url], max_checks=1, on_exhausted=on_exhausted)
            await many_in_doubt(db, runtime, name, count)
        while await turn(runtime, checks):
            pass
    at_once = [body["producer_group"] for body in await bodies(db)]
    assert sorted(at_once) == ["bank", "shop"]
    runtime.clock.offset_s += ANNOUNCE_EVERY_S
    await announce_held_back.step(runtime, runtime.clock.now())
    announced = [body for body in await bodies(db) if body["producer_group"] == "shop"]
    assert {body["type"] for body in announced} == {topic}
    assert sum(1 + body["held_back"] for body in announced) == 60
    assert len(announced) <= 2


@BOTH_POLICIES
async def test_it_is_announced_in_the_database_transaction_of_the_settle(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, on_exhausted: str, topic: str
) -> None:
    """The settle waits for its last lock, loses its connection, and is repeated: one announcement in all."""
    checks, holder = CheckBack(), await connect(dsn)
    async with Responder(content=UNKNOWN) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=1, on_exhausted=on_exhausted)
        transaction_id = await in_doubt(client, runtime)
        async with holder.transaction():
            await holder.execute(f"select pg_advisory_xact_lock({AdvisoryLock.OFFSET})")
            settling = asyncio.create_task(turn(runtime, checks))
            for _ in range(2):
                await until_waiting(db)
                assert (await row(db, transaction_id))["state"] == 1
                assert await verdict(db, transaction_id) is None
                assert await bodies(db) == []
                assert await db.fetchval(TERMINATE)
        await settling
    await holder.close()
    assert [body["transaction_id"] for body in await bodies(db)] == [str(transaction_id)]
    if on_exhausted == "park":
        assert (await row(db, transaction_id))["state"] == 2
        assert await db.fetchval("select count(*) from attempt where kind = 'parked'") == 1
    else:
        assert await verdict(db, transaction_id) == (2, 2)
        assert await row(db, transaction_id) is None


@BOTH_POLICIES
async def test_a_transaction_decided_meanwhile_is_not_announced(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, on_exhausted: str, topic: str
) -> None:
    transaction_id: UUID | None = None

    async def end_first(call: Call) -> web.StreamResponse:
        end = {"transaction_id": str(transaction_id), "producer_group": "shop", "verdict": "commit"}
        assert (await client.post("/end", json=end)).status_code == 200
        return web.json_response(UNKNOWN)

    async with Responder(end_first) as shop:
        await db.execute(
            "update producer_group set check_urls = $1, max_checks = 1, on_exhausted = $2", [shop.url], on_exhausted
        )
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    assert await verdict(db, transaction_id) == (1, 0)
    assert await bodies(db) == []
    assert await db.fetchval("select count(*) from announced") == 0
    assert await db.fetchval("select count(*) from attempt where kind = 'parked'") == 0
    lost = runtime.metrics.registry.get_sample_value("halfnote_verdicts_refused_total", {"source": "policy"})
    assert (lost or 0) == (1 if on_exhausted == "rollback" else 0)


async def test_of_a_batch_only_transactions_that_policy_decided_are_announced(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    ids = await many_in_doubt(db, runtime, group, 3)
    now = runtime.clock.now()
    async with db.transaction():
        await take_turn(db)
        claims, _ = await claim(db, CheckCapacity({}, 64, 4, 320), now)
    messages, groups = await asked_messages(db, ids), await asked_groups(db, [group])
    end = {"transaction_id": str(ids[1]), "producer_group": group, "verdict": "commit"}
    assert (await client.post("/end", json=end)).status_code == 200
    batch = [
        FinishedCheck(
            Check(one, groups[group], messages[one.transaction_id], ()),
            now,
            Settle(Verdict.ROLLBACK, Source.POLICY, "why"),
        )
        for one in claims
    ]
    for _ in range(2):
        recorded = (await record_verdicts(runtime, batch, runtime.database)).recorded
        assert {one: recorded[one].verdict for one in ids} == {
            ids[0]: Verdict.ROLLBACK, ids[1]: Verdict.COMMIT, ids[2]: Verdict.ROLLBACK,
        }  # fmt: skip
    [body] = await bodies(db)
    assert UUID(body["transaction_id"]) in (ids[0], ids[2])
    assert (body["reason"], body["checks"], body["held_back"]) == ("why", 0, 1)
    assert await db.fetchval("select count(*) from attempt where kind = 'refused'") == 1


@both_plans
async def test_parking_probes_the_verdicts_by_key(full: Connection, generic: bool) -> None:
    now, ids = datetime.now(UTC), await stored_ids(full, 32, odd=True)
    await full.executemany(
        "insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at) "
        "values ($1, 'shop', 1, $2, $2)",
        [(one, now) for one in ids],
    )
    settled = [SettledCheck(one, 0, 1, now, parked_reason="why") for one in ids]
    columns = [list(column) for column in zip(*map(astuple, settled), strict=True)]
    kinds = re.findall(r"\$\d+::(\w+\[\])", SETTLE)
    found = await scans(full, SETTLE, [*kinds, "timestamptz"], [*columns, now], generic=generic)
    assert_keyed(found, ids)
    assert {scan.table.partition("_2")[0] for scan in big(found)} == {"op"}


async def test_operational_messages_are_never_in_doubt(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    await announce_now(db, [announcement(1, now)], now)
    await run_passes(Sweeps(lambda: None), runtime, now + timedelta(seconds=70))
    assert await db.fetchval("select count(*) from check_back") == 0


async def test_a_webhook_gets_the_message_of_a_parked_transaction_within_two_seconds(
    db: Connection, dsn: str, data_dir: Path
) -> None:
    """The real service, all roles, over real sockets: from the parking to the request that announces it."""
    received: asyncio.Future[tuple[float, Call]] = asyncio.get_running_loop().create_future()

    async def receive(call: Call) -> web.StreamResponse:
        age_s = await db.fetchval("select extract(epoch from clock_timestamp() - parked_at)::float8 from check_back")
        received.set_result((age_s, call))
        return web.Response(status=204)

    data_dir.mkdir()
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn)
    async with Responder(content=UNKNOWN) as shop, Responder(receive) as operator:
        await service.start()
        try:
            async with httpx.AsyncClient(base_url=service.url) as client:
                transaction_id = await park_one(client, shop, operator)
            async with asyncio.timeout(30):
                age_s, call = await received
        finally:
            assert service.stop() == 0
    assert age_s < 2
    announced = call.json()
    assert (announced["type"], announced["transaction_id"], announced["held_back"]) == (PARKED, transaction_id, 0)
    assert call.headers["ce-type"] == PARKED
    assert call.headers["ce-source"] == "/producer-groups/halfnote"


async def park_one(client: httpx.AsyncClient, shop: Responder, operator: Responder) -> str:
    """Subscribe an operator's webhook, and have a transaction parked by one check; return its id."""
    group = {"check_urls": [shop.url], "max_checks": 1, "on_exhausted": "park"}
    assert (await client.put("/producer-groups/shop", json=group)).status_code == 201
    subscription = {"topics": ["halfnote.*"], "destination": {"type": "webhook", "url": operator.url}}
    assert (await client.put("/subscriptions/people", json=subscription)).status_code == 201
    half = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}
    transaction_id = (await client.post("/half", json=half)).json()["transaction_id"]
    assert (await client.post(f"/transactions/{transaction_id}/check")).status_code == 202
    return str(transaction_id)
