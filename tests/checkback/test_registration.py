"""A producer group that is registered again: the pause that it asked for ends, and what it did not answer is due."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.checkback import registrations
from app.checkback.loop import CheckBack
from app.checkback.registrations import Rounds
from app.database.connection import Connection, connect
from app.permissions import Role
from app.runtime.state import Runtime
from app.store.checkback import rounds
from app.store.checkback.results import SettledCheck, settle
from app.store.checkback.rounds import AT_ONCE, AskedBatch, begin_round, round_of
from tests.coordinator.test_races import until_waiting
from tests.support.api_keys import bearer, make
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import COMMIT, UNKNOWN, in_doubt, many_in_doubt, turn, verdict
from tests.support.keyed_services import start

__all__ = ["start"]

SHOP = "/producer-groups/shop"


async def held_until(client: httpx.AsyncClient) -> str | None:
    until: str | None = (await client.get(SHOP)).json()["held_until"]
    return until


@pytest.mark.parametrize("by", ["admin", "producer", "patch"])
async def test_a_registration_ends_the_pause_that_the_group_asked_for(
    start: Callable[..., Any], db: Connection, by: str
) -> None:
    runtime, client = await start()
    headers = (
        bearer(await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=["*"])) if by == "producer" else {}
    )
    checks = CheckBack()
    async with Responder(status=503) as shop:
        shop.headers["retry-after"] = "3600"
        put = {"check_urls": [shop.url]}
        assert (await client.put(SHOP, json=put)).json()["held_until"] is None
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, checks)
        until = await held_until(client)
        assert until is not None
        assert (await client.put(f"{SHOP}?dry_run=true", json=put)).status_code == 200
        asked = (await client.post(f"/transactions/{transaction_id}/check")).json()
        assert (asked["next_check_at"], asked["held_until"]) == (until, until)
        shop.status, shop.content = 200, COMMIT
        assert await turn(runtime, checks) == 0
        call = client.patch(SHOP, json={}) if by == "patch" else client.put(SHOP, json=put, headers=headers)
        answer = await call
        assert (answer.status_code, answer.json()["changed"], answer.json()["held_until"]) == (200, [], None)
        assert await held_until(client) is None
        asked = (await client.post(f"/transactions/{transaction_id}/check")).json()
        assert asked["next_check_at"] <= runtime.clock.now().isoformat()
        assert asked["held_until"] is None
        await turn(runtime, checks)
    assert await verdict(db, transaction_id) == (1, 1)


async def test_a_late_answer_from_before_a_registration_holds_no_group(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """The process that asks for the pause has ended, and its successor has registered."""

    async def after_the_put(_: Call) -> web.Response:
        assert (await client.put(SHOP, json=put)).json()["changed"] == []
        return web.Response(status=503, headers={"retry-after": "3600"})

    checks = CheckBack()
    async with Responder(after_the_put) as shop:
        put = {"check_urls": [shop.url]}
        await client.put(SHOP, json=put)
        await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert await held_until(client) is None
        # It halves the window: the calls were too many.
        assert await db.fetchval("select check_window from producer_group") == 16
        shop.answer, shop.content = None, COMMIT
        second = await in_doubt(client, runtime)
        await turn(runtime, checks)
    assert await verdict(db, second) == (1, 1)


async def test_a_pause_that_is_over_is_not_shown_and_a_group_without_a_url_stays_uncalled(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    put = {"check_urls": [], "checks": "claim"}
    for _ in range(2):
        assert (await client.put(SHOP, json=put)).json()["held_until"] is None
        assert await db.fetchval("select held_until = 'infinity' from producer_group")
    await client.put(SHOP, json={"check_urls": ["http://127.0.0.1:9/"]})
    await db.execute("update producer_group set held_until = $1", runtime.clock.now())
    await asyncio.sleep(0.001)
    assert await held_until(client) is None


@pytest.mark.parametrize("by", ["PUT", "claim"])
async def test_all_that_was_not_answered_is_due_after_a_registration(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 60)
    put = {"check_urls": ["http://127.0.0.1:9/"], "checks": "claim"}
    await client.put(SHOP, json=put)
    ids = await many_in_doubt(db, runtime, "shop", 2 * AT_ONCE + 500)
    at = runtime.clock.now() + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", at)
    # Those that are in flight are asked again once they are settled.
    leased = "update check_back set leased_until = $1 where transaction_id = any($2::uuid[])"
    await db.execute(leased, at, ids[:AT_ONCE])
    if by == "PUT":
        assert (await client.put(SHOP, json=put)).status_code == 200
    else:
        assert (await client.post(f"{SHOP}/checks/claim", json={"started": True, "max": 1})).status_code == 200
    waits = "select count(*) from check_back where next_check_at > $1 and asked_at is null and claimed_at is null"
    assert await db.fetchval(waits, runtime.clock.now()) == 0


async def test_a_registration_begins_no_batch_after_its_time(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 0)
    put = {"check_urls": ["http://127.0.0.1:9/"]}
    await client.put(SHOP, json=put)
    await many_in_doubt(db, runtime, "shop", AT_ONCE + 500)
    at = runtime.clock.now() + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", at)
    assert (await client.put(SHOP, json=put)).status_code == 200
    later = "select count(*) from check_back where next_check_at = $1"
    assert await db.fetchval(later, at) == 500
    # A worker goes on, also one that starts later.
    runtime.clock.offset_s += registrations.ASKED_WITHIN_S + 1
    loop = Rounds()
    assert (await loop.step(runtime, runtime.clock.now())).done == 1
    assert await db.fetchval(later, at) == 0
    assert (await loop.step(runtime, runtime.clock.now())).done == 0


async def test_a_registration_asks_no_check_again_that_it_made_due(
    runtime: Runtime, db: Connection, dsn: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers claim what its first batch made due before its second one."""
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 60)
    now = runtime.clock.now()
    out, *waiting = await many_in_doubt(db, runtime, group, 1 + 2 * AT_ONCE + 500)
    at = now + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", at)
    lease = "update check_back set leased_until = $1, asked_at = null"
    await db.execute(f"{lease} where transaction_id = $2", at, out)
    ask_waiting = rounds.ask_waiting

    async def claimed_after(*arguments: Any) -> AskedBatch:
        found = await ask_waiting(*arguments)
        await db.execute(f"{lease} where next_check_at <= $2 and leased_until is null", at, now)
        return found

    monkeypatch.setattr(rounds, "ask_waiting", claimed_after)
    asking = await connect(dsn)
    await begin_round(asking, group, now)
    await registrations.ask_unanswered(asking, group, now)
    await asking.close()
    assert await db.fetchval("select array_agg(transaction_id) from check_back where asked_at is not null") == [out]
    assert await db.fetchval("select count(*) from check_back where next_check_at = $1", now) == len(waiting)


@pytest.mark.parametrize("leased", [False, True])
async def test_of_two_registrations_at_once_the_second_writes_no_row_again(
    runtime: Runtime, db: Connection, dsn: str, group: str, leased: bool
) -> None:
    now = runtime.clock.now()
    await many_in_doubt(db, runtime, group, 3)
    at = now + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", at)
    if leased:
        await db.execute("update check_back set leased_until = $1", at)
    first, second = [await connect(dsn) for _ in range(2)]
    await begin_round(db, group, now)
    async with first.transaction():
        await registrations.ask_unanswered(first, group, now)
        written = await first.fetch("select transaction_id, xmin::text from check_back order by 1")
        asked = asyncio.create_task(registrations.ask_unanswered(second, group, now + timedelta(seconds=1)))
        await until_waiting(db)
    await asked
    assert await db.fetch("select transaction_id, xmin::text from check_back order by 1") == written
    for connection in (first, second):
        await connection.close()


async def test_a_row_that_is_settled_now_is_asked_once_it_has_its_back_off(
    runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    now = runtime.clock.now()
    first, second = await many_in_doubt(db, runtime, group, 2)
    at = now + timedelta(seconds=600)
    await begin_round(db, group, now)
    await db.execute("update check_back set unanswered = 1, leased_until = $1", at)
    holder, settling, asking = [await connect(dsn) for _ in range(3)]
    rows = [SettledCheck(one, 0, 1, now, unanswered=True, next_check_at=at) for one in (second, first)]
    async with holder.transaction():
        await holder.execute("select from check_back where transaction_id = $1 for update", second)
        settled = asyncio.create_task(settle(settling, rows, now))
        await until_waiting(db)
        one = await round_of(db, group)
        assert one is not None
        asked = asyncio.create_task(rounds.ask_in_flight(asking, one, now))
        await until_waiting(db, 2)
    await settled
    assert (await asked).found == 2
    found = await db.fetch("select next_check_at, unanswered, leased_until from check_back")
    assert [tuple(row) for row in found] == [(now, 2, None)] * 2
    for connection in (holder, settling, asking):
        await connection.close()


@pytest.mark.parametrize("by", ["PUT", "claim"])
async def test_a_worker_asks_a_batch_of_each_group_a_step_until_none_is_left(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Each check is asked once, also one that was tried again meanwhile."""
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 0)
    put = {"check_urls": ["http://127.0.0.1:9/"], "checks": "claim"}
    await client.put(SHOP, json=put)
    ids = await many_in_doubt(db, runtime, "shop", 4 * AT_ONCE + 500)
    runtime.clock.fixed = now = runtime.clock.now()
    out = ids[: AT_ONCE + 1]
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", now + timedelta(seconds=600))
    leased = "update check_back set leased_until = $1 where transaction_id = any($2::uuid[])"
    await db.execute(leased, now + timedelta(seconds=30), out)
    if by == "PUT":
        assert (await client.put(SHOP, json=put)).status_code == 200
    else:
        assert (await client.post(f"{SHOP}/checks/claim", json={"started": True, "max": 1})).status_code == 200
    loop, steps, urged = Rounds(), 0, "select count(*) from check_back where urged_at is not null"
    counts = [await db.fetchval(urged)]
    while True:
        runtime.clock.fixed += timedelta(milliseconds=10)
        result = await loop.step(runtime, runtime.clock.now())
        counts.append(await db.fetchval(urged))
        # They were tried again, and not answered.
        again = "update check_back set next_check_at = $1, unanswered = 10 where next_check_at <= $2"
        await db.execute(again, now + timedelta(seconds=700), runtime.clock.now())
        steps += 1
        if not result.more:
            break
    assert [after - before for before, after in pairwise(counts)] == [AT_ONCE, AT_ONCE, AT_ONCE + 499, 1][:steps]
    assert counts[-1] == len(ids)
    waits = "select count(*) from check_back where next_check_at = $1 and leased_until is null"
    assert await db.fetchval(waits, now + timedelta(seconds=600)) == 0
    assert await db.fetchval("select round_reached from producer_group") is None


async def test_a_fleet_that_starts_one_after_the_other_asks_a_check_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """Each producer registers while a check is in flight, and none of these is answered."""

    async def while_it_is_out(_: Call) -> web.Response:
        assert (await client.put(SHOP, json=put)).status_code == 200
        return web.Response(status=500)

    checks = CheckBack()
    async with Responder(while_it_is_out) as shop:
        put = {"check_urls": [shop.url]}
        await client.put(SHOP, json=put)
        transaction_id = await in_doubt(client, runtime)
        await db.execute("update check_back set unanswered = 9, unanswered_since = now()")
        runtime.clock.fixed = began = runtime.clock.now()
        made = []
        for _ in range(20):
            made.append(await turn(runtime, checks))
            runtime.clock.fixed += timedelta(milliseconds=100)
        assert made == [1, 1] + [0] * 18
        # It is not forgotten: the registration of the second check asks for the third.
        found = await db.fetchrow("select next_check_at, urged_at from check_back")
        due = began + timedelta(seconds=rounds.URGED_APART_S)
        assert tuple(found) == (due, due)
        for _ in range(20):
            assert (await client.put(SHOP, json=put)).status_code == 200
        assert await db.fetchval("select next_check_at from check_back") == due
        shop.answer, shop.status, shop.content = None, 200, COMMIT
        runtime.clock.fixed = due
        assert await turn(runtime, checks) == 1
    assert await verdict(db, transaction_id) == (1, 1)


async def test_a_check_in_flight_that_is_answered_unknown_is_not_asked_again_by_a_registration(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    async def while_it_is_out(_: Call) -> web.Response:
        assert (await client.put(SHOP, json=put)).status_code == 200
        return web.json_response(UNKNOWN)

    checks = CheckBack()
    async with Responder(while_it_is_out) as shop:
        put = {"check_urls": [shop.url]}
        await client.put(SHOP, json=put)
        await in_doubt(client, runtime)
        await db.execute("update check_back set unanswered = 9, unanswered_since = now()")
        runtime.clock.fixed = runtime.clock.now()
        assert await turn(runtime, checks) == 1
        found = await db.fetchrow("select next_check_at, answered, asked_at from check_back")
        assert tuple(found) == (runtime.clock.now() + timedelta(seconds=30), 1, None)


@pytest.mark.parametrize("leased", [False, True])
async def test_a_check_that_was_put_off_has_its_time_again_if_another_one_came_first(
    runtime: Runtime, db: Connection, group: str, leased: bool
) -> None:
    """A person asked for one meanwhile, and it was not answered."""
    now = runtime.clock.now()
    await many_in_doubt(db, runtime, group, 1)
    put_off, at = now + timedelta(seconds=5), now + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9, urged_at = $2", at, put_off)
    if leased:
        await db.execute("update check_back set leased_until = $1", at)
    for _ in range(2):
        await begin_round(db, group, now)
        await registrations.ask_unanswered(db, group, now)
        found = await db.fetchrow("select next_check_at, asked_at, urged_at from check_back")
        assert tuple(found) == ((at, put_off, put_off) if leased else (put_off, None, put_off))
