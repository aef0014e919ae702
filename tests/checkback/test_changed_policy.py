"""A group whose policy changes while one of its checks is out: policy decides by the new configuration."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.checkback.claim_loops import Lapses
from app.checkback.loop import CheckBack
from app.database.connection import Connection, connect
from app.runtime.state import Runtime
from app.store.checkback import claimed_checks
from app.verdicts import Source, Verdict
from tests.coordinator.test_races import until_waiting
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import COMMIT, UNKNOWN, attempts, in_doubt, row, turn, verdict

SHOP = "/producer-groups/shop"
IN_DOUBT, PARKED = 1, 2
PARKS, ROLLS_BACK = ({"max_checks": 1, "on_exhausted": word} for word in ("park", "rollback"))
CHANGE = """
update producer_group set on_exhausted = $1, unanswered_park_s = $2, updated_at = clock_timestamp()
"""


async def change(client: httpx.AsyncClient, **fields: Any) -> None:
    answer = await client.put(SHOP, json=fields)
    assert answer.status_code in (200, 201), answer.text


async def answer_all(call: Call, *verdicts: dict[str, Any]) -> web.StreamResponse:
    """Answer a check, or a batch of checks in its order; UNKNOWN where no verdict is given."""
    asked = call.json()
    given = [*verdicts, *[UNKNOWN] * len(asked.get("checks", []))]
    answers = [
        {"transaction_id": one["transaction_id"], **answer}
        for one, answer in zip(asked.get("checks", []), given, strict=False)
    ]
    return web.json_response({"answers": answers} if answers else UNKNOWN)


@pytest.mark.parametrize(
    ("former", "changed", "state"),
    [
        (ROLLS_BACK, PARKS, PARKED),
        (ROLLS_BACK, ROLLS_BACK | {"max_checks": 3}, IN_DOUBT),
        (PARKS, PARKS | {"max_checks": 3}, IN_DOUBT),
        (PARKS, ROLLS_BACK, None),
    ],
)
@pytest.mark.parametrize("batch_checks", [False, True])
async def test_policy_decides_by_what_a_put_has_answered_while_the_check_is_out(
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    former: dict[str, Any],
    changed: dict[str, Any],
    state: int | None,
    batch_checks: bool,
) -> None:
    async def change_first(call: Call) -> web.StreamResponse:
        await change(client, check_urls=[shop.url], batch_checks=batch_checks, **changed)
        return await answer_all(call)

    async with Responder(change_first) as shop:
        await change(client, check_urls=[shop.url], batch_checks=batch_checks, **former)
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    [attempt] = await attempts(db, transaction_id)
    assert (attempt["outcome"], attempt["number"]) == ("unknown", 1)
    found = await row(db, transaction_id)
    if state is None:
        assert found is None
        assert await verdict(db, transaction_id) == (Verdict.ROLLBACK, Source.POLICY)
    else:
        assert await verdict(db, transaction_id) is None
        assert (found["state"], found["answered"], found["leased_until"]) == (state, 1, None)
        assert (found["next_check_at"] is None) == (state == PARKED)
    assert await announced(db) == {PARKED: ["parked"], None: ["rolled_back_by_policy"]}.get(state, [])


async def announced(db: Connection) -> list[str]:
    rows = await db.fetch("select topic from half where topic like 'halfnote.transaction.%'")
    return [row["topic"].rpartition(".")[2] for row in rows]


async def test_each_transaction_of_a_batch_is_decided_by_the_changed_policy(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    async def change_first(call: Call) -> web.StreamResponse:
        await change(client, check_urls=[shop.url], batch_checks=True, **ROLLS_BACK)
        assert [one["transaction_id"] for one in call.json()["checks"]] == [str(one) for one in ids]
        return await answer_all(call, UNKNOWN, COMMIT, UNKNOWN, UNKNOWN)

    async with Responder(change_first) as shop:
        await change(client, check_urls=[shop.url], batch_checks=True, **PARKS)
        own: list[dict[str, Any]] = [{}, {}, {"on_exhausted": "park"}, {"max_checks": 5}]
        ids = [await in_doubt(client, runtime, context={"n": n}, check=one) for n, one in enumerate(own)]
        await turn(runtime, CheckBack())
    decided = [(Verdict.ROLLBACK, Source.POLICY), (Verdict.COMMIT, Source.CHECK), None, None]
    assert [await verdict(db, one) for one in ids] == decided
    left = [await row(db, one) for one in ids]
    assert [one and (one["state"], one["answered"]) for one in left] == [None, None, (PARKED, 1), (IN_DOUBT, 1)]
    assert [len(await attempts(db, one)) for one in ids] == [1] * 4
    assert sorted(await announced(db)) == ["parked", "rolled_back_by_policy"]


async def test_what_no_producer_answered_is_parked_by_what_a_put_has_answered(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    async def change_first(call: Call) -> web.StreamResponse:
        await change(client, check_urls=[shop.url], unanswered_park_s=600_000)
        return web.Response(status=500)

    async with Responder(change_first) as shop:
        await change(client, check_urls=[shop.url], unanswered_park_s=60)
        transaction_id = await in_doubt(client, runtime)
        since = runtime.clock.now() - timedelta(seconds=100)
        await db.execute("update check_back set unanswered = 9, unanswered_since = $1", since)
        await turn(runtime, CheckBack())
    found = await row(db, transaction_id)
    assert (found["state"], found["unanswered"], found["unanswered_since"]) == (IN_DOUBT, 10, since)
    assert await announced(db) == []


async def test_a_check_that_policy_replaced_is_sent_once_the_policy_allows_more(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as shop:
        await change(client, check_urls=[shop.url], max_checks=1, on_exhausted="rollback")
        transaction_id = await in_doubt(client, runtime)
        await db.execute("update check_back set answered = 1")
        prepared = CheckBack._prepared

        async def changed_after(self: CheckBack, *arguments: Any) -> Any:
            found = await prepared(self, *arguments)
            await change(client, check_urls=[shop.url], max_checks=5)
            return found

        monkeypatch.setattr(CheckBack, "_prepared", changed_after)
        await turn(runtime, checks)
        assert shop.calls == []
        assert await verdict(db, transaction_id) is None
        assert (await row(db, transaction_id))["answered"] == 1
        monkeypatch.setattr(CheckBack, "_prepared", prepared)
        await turn(runtime, checks)
        assert len(shop.calls) == 1
    assert (await row(db, transaction_id))["answered"] == 2


@pytest.mark.parametrize(("former", "changed"), [(ROLLS_BACK, PARKS), (PARKS, ROLLS_BACK)])
async def test_policy_waits_for_a_change_that_is_not_committed_yet(
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    dsn: str,
    former: dict[str, Any],
    changed: dict[str, Any],
) -> None:
    holder = await connect(dsn)
    async with Responder(content=UNKNOWN) as shop:
        await change(client, check_urls=[shop.url], **former)
        transaction_id = await in_doubt(client, runtime)
        async with holder.transaction():
            await holder.execute(CHANGE, changed["on_exhausted"], 600)
            policy = asyncio.create_task(turn(runtime, CheckBack()))
            await until_waiting(db)
        await policy
    await holder.close()
    if changed is PARKS:
        assert await verdict(db, transaction_id) is None
        assert (await row(db, transaction_id))["state"] == PARKED
    else:
        assert await verdict(db, transaction_id) == (Verdict.ROLLBACK, Source.POLICY)
        assert await row(db, transaction_id) is None


@pytest.mark.parametrize(
    ("former", "changed", "state"), [(ROLLS_BACK, PARKS, "parked"), (PARKS, ROLLS_BACK, "rolled_back")]
)
async def test_the_answer_to_a_claimed_check_says_what_the_changed_policy_made_of_it(
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    dsn: str,
    former: dict[str, Any],
    changed: dict[str, Any],
    state: str,
) -> None:
    await change(client, check_urls=[], checks="claim", **former)
    transaction_id = await in_doubt(client, runtime)
    [check] = (await client.post(f"{SHOP}/checks/claim", json={})).json()["checks"]
    answer = {"transaction_id": check["transaction_id"], "handle": check["handle"], **UNKNOWN}
    holder = await connect(dsn)
    async with holder.transaction():
        await holder.execute(CHANGE, changed["on_exhausted"], 600)
        answering = asyncio.create_task(client.post(f"{SHOP}/checks/answers", json={"answers": [answer]}))
        await until_waiting(db)
    answered = await answering
    await holder.close()
    [outcome] = answered.json()["outcomes"]
    assert (outcome["status"], outcome["state"]) == (202, state)
    assert (await verdict(db, transaction_id) is None) == (state == "parked")


async def test_a_check_that_no_producer_claims_is_parked_by_what_a_put_has_answered(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    await change(client, check_urls=[], checks="claim", unanswered_park_s=60)
    transaction_id = await in_doubt(client, runtime)
    due_at = (await row(db, transaction_id))["next_check_at"]
    now = runtime.clock.now() + timedelta(seconds=100)
    holder = await connect(dsn)
    async with holder.transaction():
        await holder.execute(CHANGE, "rollback", 600_000)
        parking = asyncio.create_task(Lapses().step(runtime, now))
        await until_waiting(db)
    await parking
    await holder.close()
    found = await row(db, transaction_id)
    assert (found["state"], found["leased_until"], found["next_check_at"]) == (IN_DOUBT, None, due_at)
    assert (await Lapses().step(runtime, now)).done == 0
    assert await announced(db) == []


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("park_s", [60, 600_000])
async def test_a_check_that_was_taken_to_be_parked_waits_on_if_its_group_changed(
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    monkeypatch: pytest.MonkeyPatch,
    claimed: bool,
    park_s: int,
) -> None:
    await change(client, check_urls=[], checks="claim", unanswered_park_s=60)
    transaction_id = await in_doubt(client, runtime)
    now = runtime.clock.now() + timedelta(seconds=100)
    if claimed:
        await db.execute("update check_back set unanswered = 9, unanswered_since = $1", now - timedelta(seconds=90))
    before = await row(db, transaction_id)

    async def changed_after(*arguments: Any) -> Any:
        taken = await take_left(*arguments)
        await db.execute(CHANGE, "rollback", park_s)
        return taken

    take_left = claimed_checks.take_left
    monkeypatch.setattr(claimed_checks, "take_left", changed_after)
    assert (await Lapses().step(runtime, now)).done == 1
    monkeypatch.setattr(claimed_checks, "take_left", take_left)
    found = await row(db, transaction_id)
    assert (found["state"], found["leased_until"]) == (IN_DOUBT, None)
    kept = ("next_check_at", "unanswered", "unanswered_since")
    assert [found[column] for column in kept] == [before[column] for column in kept]
    # The next look.
    parked = park_s == 60
    assert (await Lapses().step(runtime, now + timedelta(seconds=30))).done == parked
    assert (await row(db, transaction_id))["state"] == (PARKED if parked else IN_DOUBT)
