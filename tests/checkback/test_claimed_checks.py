"""Checks that producers claim: handed out to one claim at a time, answered, lapsed, and waited for."""

import asyncio
import json
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from app.checkback.claim_loops import Lapses, wake_claims
from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.checkback.results import CLOSED_DAY_RETRY_S
from tests.support.check_responder import Responder
from tests.support.check_stepping import COMMIT, attempts, in_doubt, row, turn, verdict
from tests.support.leaving_client import leave_while_locked

SHOP = "/producer-groups/shop"


@pytest.fixture
async def shop(client: httpx.AsyncClient) -> str:
    """The group `shop`, whose checks are only claimed."""
    made = await client.put(SHOP, json={"check_urls": [], "checks": "claim"})
    assert made.status_code == 201, made.text
    return "shop"


async def claim(client: httpx.AsyncClient, group: str = "shop", **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(f"/producer-groups/{group}/checks/claim", json=fields)
    assert answer.status_code == 200, answer.text
    checks: list[dict[str, Any]] = answer.json()["checks"]
    return checks


async def reply(client: httpx.AsyncClient, *answers: dict[str, Any], group: str = "shop") -> list[dict[str, Any]]:
    answer = await client.post(f"/producer-groups/{group}/checks/answers", json={"answers": answers})
    assert answer.status_code == 200, answer.text
    outcomes: list[dict[str, Any]] = answer.json()["outcomes"]
    assert len(outcomes) == len(answers)
    return outcomes


def to(check: dict[str, Any], word: str, **fields: Any) -> dict[str, Any]:
    """The answer to a claimed check."""
    return {"transaction_id": check["transaction_id"], "handle": check["handle"], "verdict": word, **fields}


async def test_a_claim_tells_what_a_check_tells_and_its_answers_decide(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    fields: dict[str, Any] = {"context": {"order": 1030}, "check": {"include_body": True, "max_checks": 3}}
    ids = [await in_doubt(client, runtime, **fields) for _ in range(3)]
    checks = await claim(client)
    assert [UUID(one["transaction_id"]) for one in checks] == ids
    first = checks[0]
    assert {name: first[name] for name in ("type", "producer_group", "check", "max_checks", "context")} == {
        "type": "halfnote.check",
        "producer_group": "shop",
        "check": 1,
        "max_checks": 3,
        "context": {"order": 1030},
    }
    assert first["messages"] == [
        {
            "message_id": f"{ids[0]}-0",
            "topic": "order",
            "key": "order-1030",
            "tag": "created",
            "headers": {},
            "body": {"order": 1030},
        }
    ]
    outcomes = await reply(
        client, to(checks[0], "commit"), to(checks[1], "rollback", reason="no row"), to(checks[2], "unknown")
    )
    assert [one["status"] for one in outcomes] == [200, 200, 202]
    assert (outcomes[0]["source"], outcomes[0]["replayed"]) == ("check", False)
    assert outcomes[0]["messages"][0]["topic"] == "order"
    assert outcomes[2] == {
        "status": 202,
        "transaction_id": str(ids[2]),
        "verdict": "unknown",
        "state": "in_doubt",
    }
    assert [await verdict(db, one) for one in ids] == [(1, 1), (2, 1), None]
    assert await db.fetchval("select reason from op where transaction_id = $1", ids[1]) == "no row"
    for one, word in zip(ids, ("commit", "rollback", "unknown"), strict=True):
        [attempt] = await attempts(db, one)
        assert (attempt["outcome"], attempt["number"], attempt["source"], attempt["destination"]) == (word, 1, 1, None)
    left = await row(db, ids[2])
    assert (left["answered"], left["unanswered"], left["leased_until"]) == (1, 0, None)
    assert left["next_check_at"] > runtime.clock.now() + timedelta(seconds=25)
    assert await db.fetchval("select count(*) from check_back") == 1


async def test_a_transaction_is_out_to_one_claim_at_a_time(
    client: httpx.AsyncClient, runtime: Runtime, shop: str
) -> None:
    ids = {str(await in_doubt(client, runtime)) for _ in range(20)}
    claims = await asyncio.gather(*(claim(client, max=7) for _ in range(6)))
    taken = [one["transaction_id"] for checks in claims for one in checks]
    assert len(taken) == 20
    assert set(taken) == ids
    assert await claim(client) == []


async def test_a_claim_that_lapses_is_an_unanswered_check_and_is_asked_again_soon(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    transaction_id = await in_doubt(client, runtime)
    runtime.clock.fixed = runtime.clock.now()
    lapses, handles = Lapses(), []
    for wait_s in (2, 4, 8, 16, 30, 60):
        [check] = await claim(client, invisible_s=20)
        handles.append(check["handle"])
        runtime.clock.fixed += timedelta(seconds=19)
        await lapses.step(runtime, runtime.clock.now())
        assert (await row(db, transaction_id))["lease_epoch"] == (await row(db, transaction_id))["claimed_epoch"]
        runtime.clock.fixed += timedelta(seconds=1)
        assert await claim(client) == []
        await lapses.step(runtime, runtime.clock.now())
        found = await row(db, transaction_id)
        assert (found["next_check_at"] - runtime.clock.fixed).total_seconds() == wait_s
        assert found["answered"] == 0
        runtime.clock.fixed = found["next_check_at"]
    found = await attempts(db, transaction_id)
    assert [(one["number"], one["outcome"], one["duration_ms"]) for one in found] == [
        (number, "unanswered", 20_000) for number in range(1, 7)
    ]
    assert found[0]["error"] == "a producer claimed it, and did not answer within 20 s"
    # An `unknown` to a claim that lapsed changes nothing; a verdict is final.
    before = await row(db, transaction_id)
    [refused] = await reply(client, {"transaction_id": str(transaction_id), "handle": handles[0], "verdict": "unknown"})
    assert (refused["status"], refused["type"]) == (409, "/problems/check-lapsed")
    assert await row(db, transaction_id) == before
    [late] = await reply(client, {"transaction_id": str(transaction_id), "handle": handles[0], "verdict": "commit"})
    assert (late["status"], late["source"]) == (200, "check")
    assert (await attempts(db, transaction_id))[-1]["verdict"] == 1


async def test_an_answer_counts_once(client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str) -> None:
    transaction_id = await in_doubt(client, runtime)
    [check] = await claim(client)
    outcomes = await reply(client, to(check, "unknown"), to(check, "unknown"))
    assert [one["status"] for one in outcomes] == [202, 409]
    # Without a handle it is an `unknown` by `/end`, which counts no check twice.
    without = {"transaction_id": str(transaction_id), "verdict": "unknown"}
    assert [one["status"] for one in await reply(client, without)] == [202]
    both = await asyncio.gather(*(reply(client, to(check, "unknown")) for _ in range(4)))
    assert {one["status"] for [one] in both} == {409}
    assert (await row(db, transaction_id))["answered"] == 1
    assert len(await attempts(db, transaction_id)) == 1


async def test_an_answer_to_a_claim_that_is_over_keeps_no_other_from_its_claim(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    ids = [await in_doubt(client, runtime) for _ in range(5)]
    old = await claim(client, invisible_s=20)
    runtime.clock.fixed = runtime.clock.now() + timedelta(seconds=21)
    await Lapses().step(runtime, runtime.clock.now())
    runtime.clock.fixed += timedelta(seconds=10)
    new = await claim(client)
    assert [UUID(one["transaction_id"]) for one in new] == [UUID(one["transaction_id"]) for one in old] == ids
    without = {"transaction_id": str(ids[2]), "verdict": "unknown"}
    outcomes = await reply(
        client,
        *(to(old[0], "unknown"), to(new[0], "unknown")),
        *(to(new[1], "unknown"), to(old[1], "unknown")),
        *(to(old[2], "unknown"), without, to(new[2], "unknown")),
        *(to(old[3], "commit"), to(new[3], "unknown")),
        *({"transaction_id": "none"}, to(old[4], "unknown"), to(new[4], "rollback", reason="no row")),
    )
    statuses = [one["status"] for one in outcomes]
    assert statuses == [409, 202, 202, 409, 409, 202, 409, 200, 202, 422, 409, 200]
    assert {one["type"] for one in outcomes if one["status"] == 409} == {"/problems/check-lapsed"}
    assert [await verdict(db, one) for one in ids] == [None, None, None, (1, 1), (2, 1)]
    assert [(await row(db, one))["answered"] for one in ids[:3]] == [1, 1, 1]
    expected = [["unanswered", "unknown"]] * 3 + [["unanswered", "unknown", "commit"], ["unanswered", "rollback"]]
    assert [[one["outcome"] for one in await attempts(db, each)] for each in ids] == expected


async def test_answered_checks_run_out_as_policy_says(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    rolled_back = await in_doubt(client, runtime, check={"max_checks": 2})
    parked = await in_doubt(client, runtime, check={"max_checks": 2, "on_exhausted": "park"})
    for state in ("in_doubt", None):
        checks = await claim(client)
        assert len(checks) == 2
        outcomes = await reply(client, *(to(one, "unknown") for one in checks))
        assert [one["state"] for one in outcomes] == ([state] * 2 if state else ["rolled_back", "parked"])
        runtime.clock.offset_s += 31
    assert await verdict(db, rolled_back) == (2, 2)
    assert (await row(db, parked))["state"] == 2
    assert [one["outcome"] for one in await attempts(db, rolled_back)] == ["unknown", "unknown"]
    # A person may ask for a check of the parked one; only a verdict decides it.
    assert (await client.post(f"/transactions/{parked}/check")).status_code == 202
    [check] = await claim(client)
    assert (await reply(client, to(check, "unknown")))[0]["state"] == "parked"
    assert (await client.post(f"/transactions/{parked}/check")).status_code == 202
    [check] = await claim(client)
    assert (await reply(client, to(check, "commit")))[0]["source"] == "check"


async def test_end_with_from_check_answers_a_claimed_check(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    committed, unknown = await in_doubt(client, runtime), await in_doubt(client, runtime)
    assert len(await claim(client)) == 2
    end = {"producer_group": "shop", "from_check": True}
    said = await client.post("/end", json={**end, "transaction_id": str(committed), "verdict": "commit"})
    assert said.json()["source"] == "check"
    said = await client.post("/end", json={**end, "transaction_id": str(unknown), "verdict": "unknown"})
    assert (said.status_code, said.json()["state"]) == (202, "in_doubt")
    found = await row(db, unknown)
    assert (found["answered"], found["leased_until"]) == (1, None)
    assert [one["outcome"] for one in await attempts(db, unknown)] == ["unknown"]
    # The claim of the decided one lapses without a trace.
    runtime.clock.offset_s += 31
    await Lapses().step(runtime, runtime.clock.now())
    assert await row(db, committed) is None
    assert [one["outcome"] for one in await attempts(db, committed)] == ["commit"]


async def test_a_verdict_that_came_first_stands(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    ids = [await in_doubt(client, runtime) for _ in range(2)]
    checks = await claim(client)
    for one in ids:
        end = {"transaction_id": str(one), "producer_group": "shop", "verdict": "rollback"}
        assert (await client.post("/end", json=end)).status_code == 200
    conflict, same = await reply(client, to(checks[0], "commit"), to(checks[1], "rollback"))
    assert (conflict["status"], conflict["recorded"]["source"]) == (409, "producer")
    assert (same["status"], same["replayed"], same["source"]) == (200, True, "producer")
    assert [await verdict(db, one) for one in ids] == [(2, 0), (2, 0)]
    assert [one["outcome"] for one in await attempts(db, ids[0])] == ["lost"]
    assert await db.fetchval("select count(*) from check_back") == 0


async def test_a_waiting_claim_gets_the_first_check_that_is_due(
    client: httpx.AsyncClient, runtime: Runtime, shop: str
) -> None:
    first, second = (asyncio.create_task(claim(client, wait_s=30)) for _ in range(2))
    await both_wait(runtime, 2)
    transaction_id = await in_doubt(client, runtime)
    result = await wake_claims(runtime, runtime.clock.now())
    assert result.within_s is None
    done, waiting = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
    # One check wakes one claim; the other one stays out of the database.
    assert [one["transaction_id"] for one in done.pop().result()] == [str(transaction_id)]
    assert runtime.waiting_claims.limits == {"shop": 32}
    runtime.waiting_claims.close()
    assert await waiting.pop() == []
    assert await claim(client, wait_s=30) == []


async def test_no_more_claims_are_woken_than_there_are_checks(
    client: httpx.AsyncClient, runtime: Runtime, shop: str
) -> None:
    tasks = [asyncio.create_task(claim(client, wait_s=30, max=1)) for _ in range(4)]
    async with asyncio.timeout(60):
        while runtime.waiting_claims.limits != {"shop": 4}:
            await asyncio.sleep(0.01)
    due = {str(await in_doubt(client, runtime)) for _ in range(2)}
    await wake_claims(runtime, runtime.clock.now())
    # Those that are woken have not run yet.
    assert runtime.waiting_claims.limits == {"shop": 2}
    async with asyncio.timeout(60):
        while sum(task.done() for task in tasks) < 2:
            await asyncio.sleep(0.01)
    runtime.waiting_claims.close()
    answers = sorted(await asyncio.gather(*tasks), key=len)
    assert [len(checks) for checks in answers] == [0, 0, 1, 1]
    assert {checks[0]["transaction_id"] for checks in answers[2:]} == due


async def test_waiting_claims_wake_when_the_next_check_is_due(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    transaction_id = await in_doubt(client, runtime)
    at = runtime.clock.now() + timedelta(seconds=30)
    await db.execute("update check_back set next_check_at = $1", at)
    waiting = asyncio.create_task(claim(client, wait_s=30))
    await both_wait(runtime, 1)
    now = at - timedelta(seconds=0.25)
    assert (await wake_claims(runtime, now)).within_s == pytest.approx(0.25)
    runtime.clock.offset_s += 30
    await wake_claims(runtime, runtime.clock.now())
    assert [one["transaction_id"] for one in await waiting] == [str(transaction_id)]


async def test_a_wait_without_a_check_ends_empty(client: httpx.AsyncClient, runtime: Runtime, shop: str) -> None:
    assert await claim(client, wait_s=1) == []
    assert runtime.waiting_claims.limits == {}
    assert await wake_claims(runtime, runtime.clock.now()) is not None


async def both_wait(runtime: Runtime, count: int) -> None:
    async with asyncio.timeout(60):
        while sum(runtime.waiting_claims.limits.values()) < 32 * count:
            await asyncio.sleep(0.01)


async def test_the_first_claim_says_that_the_producer_started(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    async def tried_before() -> UUID:
        made = await in_doubt(client, runtime)
        at = runtime.clock.now() + timedelta(seconds=600)
        await db.execute("update check_back set unanswered = 9, next_check_at = $2 where transaction_id = $1", made, at)
        return made

    first = await tried_before()
    assert [one["transaction_id"] for one in await claim(client)] == [str(first)]
    assert (await client.get(SHOP)).json()["claimed_at"] is not None
    second = await tried_before()
    assert await claim(client) == []
    assert [one["transaction_id"] for one in await claim(client, started=True)] == [str(second)]
    third = await tried_before()
    assert await claim(client) == []
    # A minute later a claim is that of a producer that was away.
    runtime.clock.offset_s += 61
    assert str(third) in [one["transaction_id"] for one in await claim(client)]


async def test_without_a_claim_policy_parks_by_age_and_nothing_is_called(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    await client.patch(SHOP, json={"unanswered_park_s": 86_400})
    transaction_id, lapses, checks = await in_doubt(client, runtime), Lapses(), CheckBack()
    runtime.clock.fixed = born = runtime.clock.now()
    due = (await row(db, transaction_id))["next_check_at"]
    for hours in range(0, 24, 3):
        runtime.clock.fixed = born + timedelta(hours=hours, minutes=30)
        assert await turn(runtime, checks) == 0
        await lapses.step(runtime, runtime.clock.now())
        found = await row(db, transaction_id)
        assert (found["state"], found["asked"]) == (1, 0)
        # The proof finds a check that was due for hours, so a check that waits for a claim is due again each hour.
        assert runtime.clock.fixed - found["next_check_at"] <= timedelta(hours=1)
        if hours:
            assert found["unanswered_since"] == due
    runtime.clock.fixed = due + timedelta(seconds=86_401)
    await lapses.step(runtime, runtime.clock.now())
    found = await row(db, transaction_id)
    assert (found["state"], found["next_check_at"]) == (2, None)
    assert found["parked_reason"] == f"no producer claimed and answered a check since {due:%Y-%m-%dT%H:%M:%SZ}"
    assert await attempts(db, transaction_id) == []
    noted = "select outcome from attempt where transaction_id = $1 and kind = 'parked'"
    assert await db.fetchval(noted, transaction_id) == "parked"
    assert [one["checks"] for one in await parked_bodies(db)] == [0]


async def parked_bodies(db: Connection) -> list[Any]:
    rows = await db.fetch("select body from half where topic = 'halfnote.transaction.parked'")
    return [json.loads(row["body"]) for row in rows]


async def test_a_parked_message_counts_the_checks_that_producers_claimed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    await client.patch(SHOP, json={"unanswered_park_s": 600})
    transaction_id, lapses = await in_doubt(client, runtime), Lapses()
    runtime.clock.fixed = runtime.clock.now()
    for _ in range(2):
        assert len(await claim(client, invisible_s=20)) == 1
        runtime.clock.fixed += timedelta(seconds=20)
        await lapses.step(runtime, runtime.clock.now())
        runtime.clock.fixed = (await row(db, transaction_id))["next_check_at"]
    # From now on no producer claims.
    runtime.clock.fixed += timedelta(seconds=600)
    await lapses.step(runtime, runtime.clock.now())
    [body] = await parked_bodies(db)
    assert (body["transaction_id"], body["checks"]) == (str(transaction_id), 2)
    assert len(await attempts(db, transaction_id)) == 2


async def test_a_check_that_a_worker_asks_is_not_claimed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    transaction_id = await in_doubt(client, runtime)
    runtime.clock.fixed = runtime.clock.now()
    until = runtime.clock.fixed + timedelta(seconds=5)
    await db.execute("update check_back set lease_epoch = lease_epoch + 1, leased_until = $1", until)
    assert await claim(client) == []
    runtime.clock.fixed = until
    [check] = await claim(client)
    assert check["transaction_id"] == str(transaction_id)


async def test_the_lease_of_a_worker_does_not_lapse_as_a_claim(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    transaction_id = await in_doubt(client, runtime)
    [check] = await claim(client)
    assert [one["status"] for one in await reply(client, to(check, "unknown"))] == [202]
    before = await attempts(db, transaction_id)
    runtime.clock.fixed = runtime.clock.now()
    await db.execute("update check_back set lease_epoch = lease_epoch + 1, leased_until = $1", runtime.clock.fixed)
    runtime.clock.fixed += timedelta(seconds=1)
    assert (await Lapses().step(runtime, runtime.clock.fixed)).done == 0
    assert await attempts(db, transaction_id) == before


async def test_claims_come_before_calls_where_a_group_has_both(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    checks = CheckBack()
    async with Responder(content=COMMIT) as producer:
        await client.put(SHOP, json={"check_urls": [producer.url], "checks": "claim"})
        claimed = await in_doubt(client, runtime)
        assert await turn(runtime, checks) == 0
        [check] = await claim(client, invisible_s=30)
        called = await in_doubt(client, runtime)
        runtime.clock.offset_s += 3
        assert await turn(runtime, checks) == 1
        assert [UUID(call.json()["transaction_id"]) for call in producer.calls] == [called]
        # A claim that lapsed is settled before the URL is called.
        runtime.clock.offset_s += 30
        assert await turn(runtime, checks) == 0
        await Lapses().step(runtime, runtime.clock.now())
        runtime.clock.offset_s += 5
        assert await turn(runtime, checks) == 1
    assert await verdict(db, claimed) == (1, 1)
    assert [one["outcome"] for one in await attempts(db, claimed)] == ["unanswered", "commit"]
    assert check["check"] == 1


async def test_bad_requests_are_refused(client: httpx.AsyncClient, runtime: Runtime, subtests: pytest.Subtests) -> None:
    await client.put(SHOP, json={"check_urls": [], "checks": "claim"})
    await client.put("/producer-groups/bank", json={"check_urls": ["http://127.0.0.1:9/"]})
    for fields in ({"invisible_s": 0}, {"invisible_s": 46_800}, {"max": 0}, {"max": 101}, {"wait_s": 31}, {"more": 1}):
        with subtests.test(**fields):
            answer = await client.post(f"{SHOP}/checks/claim", json=fields)
            assert (answer.status_code, answer.json()["field"]) == (422, next(iter(fields)))
    answer = await client.post("/producer-groups/bank/checks/claim", json={})
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/checks-not-claimed")
    assert (await client.post("/producer-groups/none/checks/claim", json={})).status_code == 404
    for shape in ({"check_urls": []}, {"check_urls": [], "checks": "call"}, {"check_urls": [], "checks": "x"}):
        assert (await client.put("/producer-groups/new", json=shape)).status_code == 422
    transaction_id = await in_doubt(client, runtime)
    [check] = await claim(client)
    foreign = await in_doubt(client, runtime, "bank")
    outcomes = await reply(
        client,
        {"transaction_id": str(transaction_id), "verdict": "maybe"},
        {"transaction_id": str(transaction_id), "verdict": "commit", "handle": "x"},
        {"transaction_id": str(uuid4()), "verdict": "unknown", "handle": "1-1"},
        {"transaction_id": str(foreign), "verdict": "commit"},
        {"transaction_id": str(transaction_id), "verdict": "unknown", "handle": "1-999"},
        "commit",
        to(check, "commit"),
    )
    assert [one["status"] for one in outcomes] == [422, 422, 404, 403, 409, 422, 200]
    for body in ({"answers": []}, {"answers": [{}] * 501}, {}):
        assert (await client.post(f"{SHOP}/checks/answers", json=body)).status_code == 422


async def test_requests_at_a_bound_are_taken(client: httpx.AsyncClient, runtime: Runtime, shop: str) -> None:
    for fields in ({"max": 1}, {"max": 100}, {"invisible_s": 1}, {"invisible_s": 3600}, {"wait_s": 0}, {"wait_s": 30}):
        await in_doubt(client, runtime)
        assert len(await claim(client, **fields)) == 1, fields
    for fields in ({"invisible_s": 3601}, {"wait_s": -1}):
        answer = await client.post(f"{SHOP}/checks/claim", json=fields)
        assert (answer.status_code, answer.json()["field"]) == (422, next(iter(fields)))
    transaction_id = await in_doubt(client, runtime)
    [check] = await claim(client)
    for reason, status in (("x" * 1001, 422), ("x" * 1000, 202)):
        [outcome] = await reply(client, to(check, "unknown", reason=reason))
        assert (outcome["status"], outcome.get("transaction_id", str(transaction_id))) == (status, str(transaction_id))
    assert len(await reply(client, *[{}] * 500)) == 500


async def test_large_bodies_are_handed_out_in_parts(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    body = {"large": "x" * 900_000}
    messages = [{"topic": "order", "body": body}]
    half = {"producer_group": "shop", "messages": messages, "check": {"include_body": True}}
    ids = []
    for _ in range(7):
        ids.append((await client.post("/half", json=half)).json()["transaction_id"])
        assert (await client.post(f"/transactions/{ids[-1]}/check")).status_code == 202
    first = await claim(client, max=100)
    assert 1 <= len(first) < 7
    # What did not fit was not asked, and is due at once.
    second = await claim(client, max=100)
    assert [one["transaction_id"] for one in [*first, *second]] == ids
    assert {one["check"] for one in second} == {1}


@pytest.mark.parametrize("wait_s", [0, 25])
async def test_checks_of_a_client_that_left_during_its_claim_are_due_at_once_and_were_not_asked(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, shop: str, wait_s: int
) -> None:
    ids = [await in_doubt(client, runtime) for _ in range(3)]
    fields = {"invisible_s": 600, "wait_s": wait_s}
    await leave_while_locked(
        client, db, dsn, "lock table check_back in exclusive mode", f"{SHOP}/checks/claim", **fields
    )
    claimed = await db.fetch("select asked, claimed_at is not null as was_out from check_back")
    assert [tuple(one) for one in claimed] == [(0, True)] * 3
    again = await claim(client)
    assert [(UUID(one["transaction_id"]), one["check"]) for one in again] == [(one, 1) for one in ids]
    assert [one["state"] for one in await reply(client, *(to(one, "unknown") for one in again))] == ["in_doubt"] * 3


async def test_a_group_may_change_between_claims_and_calls(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    transaction_id, checks = await in_doubt(client, runtime), CheckBack()
    assert await db.fetchval("select held_until = 'infinity' from producer_group")
    async with Responder(content=COMMIT) as producer:
        changed = await client.patch(SHOP, json={"check_urls": [producer.url], "checks": "call"})
        assert sorted(changed.json()["changed"]) == ["check_urls", "checks"]
        assert await turn(runtime, checks) == 1
    assert await verdict(db, transaction_id) == (1, 1)
    assert (await client.patch(SHOP, json={"checks": "claim", "check_urls": []})).status_code == 200
    assert (await client.delete(SHOP)).status_code == 204
    assert await db.fetchval("select held_until from producer_group") is None


async def test_a_group_is_deleted_only_after_its_claimed_checks_are_answered(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    transaction_id = await in_doubt(client, runtime)
    [check] = await claim(client)
    refused = await client.delete(SHOP)
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/group-in-use")
    [outcome] = await reply(client, to(check, "commit"))
    assert outcome["status"] == 200
    assert (await client.delete(SHOP)).status_code == 204
    assert (await client.post(f"{SHOP}/checks/claim", json={})).status_code == 404
    # Its answer comes again, after the group.
    answers = {"answers": [to(check, "commit")]}
    assert (await client.post(f"{SHOP}/checks/answers", json=answers)).status_code < 500
    assert await verdict(db, transaction_id) == (1, 1)


async def test_two_producers_and_a_lapse_race(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    """Every answer of every claim at once, beside its lapse and the producer's End: one verdict, counted once."""
    ids = [await in_doubt(client, runtime) for _ in range(12)]
    checks = {one["transaction_id"]: one for one in await claim(client, invisible_s=1)}
    runtime.clock.offset_s += 2

    async def lapse() -> None:
        await Lapses().step(runtime, runtime.clock.now())

    async def answer(word: str) -> None:
        for one in checks.values():
            await reply(client, to(one, word))

    async def end(some: list[UUID]) -> None:
        for one in some:
            said = {"transaction_id": str(one), "producer_group": "shop", "verdict": "commit"}
            assert (await client.post("/end", json=said)).status_code in (200, 409)

    await asyncio.gather(lapse(), answer("unknown"), answer("unknown"), end(ids[:6]), lapse(), answer("commit"))
    for one in ids:
        assert (await verdict(db, one) or (0, 0))[0] == 1
        found = await attempts(db, one)
        # The claim lapsed, or its `unknown` counted, or neither came before the verdict: never both.
        assert len([a for a in found if a["outcome"] in ("unanswered", "unknown")]) <= 1
        sources = {a["source"] for a in found if a["verdict"] == 1}
        _, source = await verdict(db, one) or (0, 0)
        assert source in (0, 1)
        if source == 1:
            assert 1 in sources
    assert await db.fetchval("select count(*) from op") == 12


async def test_the_handle_of_a_claim_that_the_database_lost_answers_no_later_one(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    transaction_id = await in_doubt(client, runtime)
    before = dict(await row(db, transaction_id))
    [lost] = await claim(client)
    # As after a failover to a standby that was behind.
    names = ("asked", "lease_epoch", "claimed_epoch", "claimed_at", "leased_until", "next_check_at")
    columns = ", ".join(f"{name} = ${n}" for n, name in enumerate(names, 2))
    await db.execute(
        f"update check_back set {columns} where transaction_id = $1",
        transaction_id,
        *(before[name] for name in names),
    )
    [check] = await claim(client)
    [outcome] = await reply(client, to(lost, "unknown"))
    assert outcome["status"] == 409
    assert (await row(db, transaction_id))["answered"] == 0
    [outcome] = await reply(client, to(check, "unknown"))
    assert outcome["status"] == 202
    assert (await row(db, transaction_id))["answered"] == 1


async def test_a_day_that_is_closed_does_not_begin_the_time_without_an_answer_again(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    """It counts from when the first check was due, which no producer claimed."""
    await client.patch(SHOP, json={"unanswered_park_s": 600})
    transaction_id, lapses = await in_doubt(client, runtime), Lapses()
    due = (await row(db, transaction_id))["next_check_at"]
    state = "update day set state = $2 where low <= $1 and high > $1"
    await db.execute(state, transaction_id, "archiving")
    runtime.clock.fixed = due + timedelta(seconds=601)
    assert (await lapses.step(runtime, runtime.clock.now())).done == 1
    found = await row(db, transaction_id)
    assert (found["state"], found["unanswered_since"]) == (1, due)
    await db.execute(state, transaction_id, "open")
    # The next look after the day is open again.
    runtime.clock.fixed += timedelta(seconds=CLOSED_DAY_RETRY_S)
    assert (await lapses.step(runtime, runtime.clock.now())).done == 1
    found = await row(db, transaction_id)
    assert found["state"] == 2
    assert found["parked_reason"] == f"no producer claimed and answered a check since {due:%Y-%m-%dT%H:%M:%SZ}"
