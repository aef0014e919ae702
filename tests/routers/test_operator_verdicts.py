"""Operator actions: immediate checks, verdicts one by one and by a filter, and reissues."""

import asyncio
from uuid import UUID

import httpx
import pytest

from app.database.connection import Connection
from app.ids import uuid7
from app.runtime.state import Runtime
from tests.conftest import register_group, shares
from tests.coordinator.test_half_end import ORDER, post_end, post_half
from tests.routers.test_transactions import half_of, in_doubt


async def act(client: httpx.AsyncClient, transaction_id: object, what: str, **fields: object) -> httpx.Response:
    return await client.post(f"/transactions/{transaction_id}/{what}", json=fields)


async def test_a_check_is_asked_now(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    early, doubtful, parked = [await half_of(client) for _ in range(3)]
    await in_doubt(db, doubtful)
    await in_doubt(db, parked, 2)
    for one in (early, doubtful, parked):
        answer = await client.post(f"/transactions/{one}/check")
        assert answer.status_code == 202, answer.text
        assert answer.json()["transaction_id"] == one
    assert await db.fetchval("select count(*) from check_back where next_check_at <= now()") == 3
    assert (await client.get(f"/transactions/{parked}")).json()["state"] == "parked"


async def test_a_decided_transaction_is_not_checked(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    transaction_id = await half_of(client)
    await post_end(client, transaction_id, "rollback")
    answer = await client.post(f"/transactions/{transaction_id}/check")
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/already-decided")
    answer = await client.post(f"/transactions/{uuid7(runtime.clock.now())}/check")
    assert answer.status_code == 404


async def test_a_persons_verdict(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    transaction_id = await half_of(client)
    await in_doubt(db, transaction_id, 2)
    wanted = {"verdict": "commit", "reason": "the bank says so", "actor": "dana"}
    first = await act(client, transaction_id, "verdict", **wanted)
    again = await act(client, transaction_id, "verdict", **wanted)
    assert (first.status_code, first.json()["source"], first.json()["replayed"]) == (200, "operator", False)
    assert again.json() == {**first.json(), "replayed": True}
    verdict = (await client.get(f"/transactions/{transaction_id}")).json()["verdict"]
    assert (verdict["actor"], verdict["reason"], verdict["source"]) == ("dana", "the bank says so", "operator")
    opposite = await act(client, transaction_id, "verdict", verdict="rollback", reason="no")
    assert (opposite.status_code, opposite.json()["recorded"]["verdict"]) == (409, "commit")


@pytest.mark.parametrize("force", [False, True])
async def test_a_verdict_on_an_unknown_transaction_leaves_no_audit_row(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, force: bool
) -> None:
    unknown = uuid7(runtime.clock.now())
    answer = await act(client, unknown, "verdict", verdict="commit", reason="typing error", force=force)
    assert answer.status_code == 404
    assert await db.fetchval("select count(*) from audit where target = $1", str(unknown)) == 0


async def test_a_transaction_in_half_is_decided_by_force_alone(client: httpx.AsyncClient, group: str) -> None:
    made = (await post_half(client)).json()
    transaction_id = made["transaction_id"]
    early = await act(client, transaction_id, "verdict", verdict="rollback", reason="mistake")
    assert (early.status_code, early.json()["type"]) == (409, "/problems/too-early")
    assert early.json()["first_check_at"] == made["first_check_at"]
    forced = await act(client, transaction_id, "verdict", verdict="rollback", reason="mistake", force=True)
    assert forced.status_code == 200


@shares
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"verdict": "commit"}, "reason"),
        ({"verdict": "commit", "reason": ""}, "reason"),
        ({"verdict": "commit", "reason": "x" * 1001}, "reason"),
        ({"verdict": "commit", "reason": "a\x00b"}, "reason"),
        ({"verdict": "unknown", "reason": "x"}, "verdict"),
        ({"verdict": "commit", "reason": "x", "force": "yes"}, "force"),
        ({"verdict": "commit", "reason": "x", "actor": "\x7f"}, "actor"),
        ({"verdict": "commit", "reason": "x", "because": "x"}, "because"),
    ],
)
async def test_a_bad_verdict_names_the_field(
    shared_client: httpx.AsyncClient, fields: dict[str, object], field: str
) -> None:
    transaction_id = await half_of(shared_client)
    answer = await act(shared_client, transaction_id, "verdict", **fields)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


async def test_many_are_asked_or_decided_by_a_filter(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    ones = sorted([await half_of(client) for _ in range(4)], reverse=True)
    in_half = await half_of(client)
    for one in ones:
        await in_doubt(db, one)
    chosen = {"producer_group": "shop", "state": "in_doubt"}
    dry = (await client.post("/transactions/verdict", json={**chosen, "verdict": "commit", "reason": "all"})).json()
    assert dry == {"dry_run": True, "matched": 4, "changed": 0, "transaction_ids": ones, "more": False}
    asked = (await client.post("/transactions/check", json={**chosen, "dry_run": False, "limit": 3})).json()
    assert asked == {"dry_run": False, "matched": 3, "changed": 3, "transaction_ids": ones[:3], "more": True}
    assert await db.fetchval("select count(*) from check_back where next_check_at <= now()") == 3
    assert await db.fetchval("select count(*) from op") == 0
    decided = await client.post(
        "/transactions/verdict",
        json={**chosen, "verdict": "commit", "reason": "all", "actor": "dana", "dry_run": False},
    )
    assert (decided.json()["matched"], decided.json()["changed"]) == (4, 4)
    rows = await db.fetch("select distinct verdict, source, actor, reason from op")
    assert [tuple(row) for row in rows] == [(1, 3, "dana", "all")]
    assert (await client.get(f"/transactions/{in_half}")).json()["state"] == "half"


async def test_a_filter_with_ids_acts_on_no_others(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    shown = sorted([await half_of(client) for _ in range(3)], reverse=True)
    for one in shown:
        await in_doubt(db, one)
    foreign, in_half = await half_of(client), await half_of(client)
    await in_doubt(db, foreign)
    chosen = {"producer_group": "shop", "state": "in_doubt", "verdict": "rollback", "reason": "all"}
    await act(client, shown[1], "verdict", verdict="commit", reason="it was paid")
    named = [*shown, shown[0], in_half, str(uuid7(runtime.clock.now()))]
    for dry_run in (True, False):
        answer = await client.post(
            "/transactions/verdict", json={**chosen, "transaction_ids": named, "dry_run": dry_run, "limit": 1}
        )
        assert answer.json() == {
            "dry_run": dry_run,
            "matched": 2,
            "changed": 0 if dry_run else 2,
            "transaction_ids": [shown[0], shown[2]],
            "more": False,
        }
    states = [(await client.get(f"/transactions/{one}")).json()["state"] for one in (*shown, foreign, in_half)]
    assert states == ["rolled_back", "committed", "rolled_back", "in_doubt", "half"]
    again = {"producer_group": "shop", "reason": "mistake", "dry_run": False, "transaction_ids": [shown[0], shown[1]]}
    answer = await client.post("/transactions/reissue", json=again)
    assert answer.json()["transaction_ids"] == [shown[0]]
    asked = {"producer_group": "shop", "state": "half", "dry_run": False, "transaction_ids": [in_half, foreign]}
    assert (await client.post("/transactions/check", json=asked)).json()["transaction_ids"] == [in_half]
    for refused in ([], ["order-1030"], [in_half] * 1001, in_half):
        answer = await client.post("/transactions/check", json={**asked, "transaction_ids": refused})
        assert answer.status_code == 422
        assert answer.json()["field"].startswith("transaction_ids")


async def test_a_filter_keeps_to_its_group_and_range(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    first = await half_of(client)
    await in_doubt(db, first)
    born = (await client.get(f"/transactions/{first}")).json()["born_at"]
    wanted = {"producer_group": "shop", "state": "in_doubt", "verdict": "rollback", "reason": "x", "dry_run": False}
    for narrower in ({"producer_group": "bank"}, {"born_before": born}, {"state": "parked"}):
        answer = await client.post("/transactions/verdict", json={**wanted, **narrower})
        assert answer.json()["matched"] == 0
    for refused in ({"state": "half"}, {"limit": 1001}, {"dry_run": "no"}, {"reason": None}):
        answer = await client.post("/transactions/verdict", json={**wanted, **refused})
        assert (answer.status_code, answer.json()["field"]) == (422, next(iter(refused)))
    answer = await client.post("/transactions/verdict", json={**wanted, "born_after": born})
    assert answer.json()["changed"] == 1


async def test_reissue_sends_a_rolled_back_transaction_after_all(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    messages = [
        {**ORDER, "headers": {"Region": "eu"}, "deliver_after_s": 90},
        {"topic": "file", "body_base64": "AP8=", "content_type": "image/png"},
    ]
    transaction_id = await half_of(client, *messages, context={"order": 1030})
    await post_end(client, transaction_id, "rollback")
    answer = await act(client, transaction_id, "reissue", reason="the card went through", actor="dana")
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["reissued_from"], made["replayed"]) == (transaction_id, False)
    new = made["transaction_id"]
    assert [message["message_id"] for message in made["messages"]] == [f"{new}-0", f"{new}-1"]
    assert made["messages"][1]["offset"] == made["messages"][0]["offset"] + 1
    old, new_one = [(await client.get(f"/transactions/{each}")).json() for each in (transaction_id, new)]
    assert (old["state"], old["reissued_as"]) == ("rolled_back", new)
    assert old["timeline"][-1] | {"at": ""} == {
        "at": "",
        "what": "reissued",
        "reissued_as": new,
        "actor": "dana",
        "reason": "the card went through",
    }
    assert (new_one["state"], new_one["reissued_from"], new_one["context"]) == (
        "committed",
        transaction_id,
        {"order": 1030},
    )
    assert new_one["verdict"]["source"] == "operator"
    same = await db.fetch(
        "select count(distinct (topic, key, tag, headers, content_type, body, body_digest)) from half group by position"
    )
    assert [row[0] for row in same] == [1, 1]
    row = await db.fetchrow("select due_at - committed_at as delay from outbox where position = 0")
    assert row is not None
    assert row["delay"].total_seconds() == 90


async def test_reissue_happens_once(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    transaction_id = await half_of(client)
    await post_end(client, transaction_id, "rollback")
    answers = await asyncio.gather(*(act(client, transaction_id, "reissue", reason="again") for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]
    (made,) = [answer.json() for answer in answers if answer.status_code == 201]
    refused = [answer.json() for answer in answers if answer.status_code == 409]
    assert {problem["reissued_as"] for problem in refused} == {made["transaction_id"]}
    assert await db.fetchval("select count(*) from half") == 2
    assert await db.fetchval("select count(*) from outbox") == 1


async def test_only_rolled_back_ones_are_reissued(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    transaction_id = await half_of(client)
    for state in ("half", "committed"):
        answer = await act(client, transaction_id, "reissue", reason="x")
        assert (answer.status_code, answer.json()["state"]) == (409, state)
        await post_end(client, transaction_id, "commit")
    assert (await act(client, uuid7(runtime.clock.now()), "reissue", reason="x")).status_code == 404


async def test_reissue_that_cannot_be_stored_leaves_nothing(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    transaction_id = await half_of(client)
    await post_end(client, transaction_id, "rollback")
    runtime.refusing_halves = True
    assert (await act(client, transaction_id, "reissue", reason="x")).json()["type"] == "/problems/draining"
    runtime.refusing_halves = False
    await db.execute("update producer_group set deleted_at = now()")
    assert (await act(client, transaction_id, "reissue", reason="x")).json()["type"] == "/problems/group-unregistered"
    assert await db.fetchval("select count(*) from reissue") == 0
    await db.execute("update producer_group set deleted_at = null")
    assert (await act(client, transaction_id, "reissue", reason="x")).status_code == 201


async def test_many_are_reissued_by_a_filter(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await register_group(db, "bank")
    other = (await post_half(client, ORDER, producer_group="bank")).json()["transaction_id"]
    await post_end(client, other, "rollback", producer_group="bank")
    ones = sorted([await half_of(client) for _ in range(4)], reverse=True)
    committed, in_half = await half_of(client), await half_of(client)
    for one in ones:
        await post_end(client, one, "rollback")
    await post_end(client, committed, "commit")
    before = (await act(client, ones[0], "reissue", reason="one by one")).json()["transaction_id"]
    chosen = {"producer_group": "shop", "reason": "the bank was wrong", "actor": "dana"}
    dry = (await client.post("/transactions/reissue", json=chosen)).json()
    assert dry == {"dry_run": True, "matched": 3, "changed": 0, "transaction_ids": ones[1:], "more": False}
    assert await db.fetchval("select count(*) from reissue") == 1
    for reissued, wanted in (("false", ones[1:]), ("true", ones[:1])):
        query = {"producer_group": "shop", "state": "rolled_back", "reissued": reissued}
        page = await client.get("/transactions", params=query)
        assert [row["transaction_id"] for row in page.json()["items"]] == wanted
    some = (await client.post("/transactions/reissue", json={**chosen, "dry_run": False, "limit": 2})).json()
    assert some == {"dry_run": False, "matched": 2, "changed": 2, "transaction_ids": ones[1:3], "more": True}
    rest = (await client.post("/transactions/reissue", json={**chosen, "dry_run": False})).json()
    assert (rest["transaction_ids"], rest["changed"], rest["more"]) == (ones[3:], 1, False)
    assert (await client.post("/transactions/reissue", json=chosen)).json()["matched"] == 0
    # Each is what a reissue of one is: rows, links, audit, and offsets in the order of birth.
    rows = await db.fetch("select transaction_id::text, reissued_as::text, reason, actor from reissue")
    made = {row["transaction_id"]: row["reissued_as"] for row in rows}
    assert (made.keys(), made[ones[0]]) == (set(ones), before)
    assert {(row["reason"], row["actor"]) for row in rows} == {
        ("one by one", None),
        ("the bank was wrong", "dana"),
    }
    sent = await db.fetch('select transaction_id::text from outbox order by "offset"')
    assert [row["transaction_id"] for row in sent][1:] == [before, made[ones[2]], made[ones[1]], made[ones[3]]]
    for old, new in made.items():
        shown = (await client.get(f"/transactions/{new}")).json()
        assert (shown["state"], shown["reissued_from"]) == ("committed", old)
    rows = await db.fetch("select target, detail ->> 'reason' as reason from audit where what = 'transaction.reissue'")
    assert {row["target"]: row["reason"] for row in rows} == {
        ones[0]: "one by one",
        **dict.fromkeys(ones[1:], "the bank was wrong"),
    }
    assert (await client.get(f"/transactions/{in_half}")).json()["state"] == "half"
    assert (await client.get(f"/transactions/{other}")).json().get("reissued_as") is None


async def test_two_persons_reissue_the_same_ones_once(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    for _ in range(10):
        await post_end(client, await half_of(client), "rollback")
    wanted = {"producer_group": "shop", "reason": "x", "dry_run": False}
    answers = await asyncio.gather(*(client.post("/transactions/reissue", json=wanted) for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert sum(answer.json()["changed"] for answer in answers) == 10
    assert await db.fetchval("select count(*) from outbox") == 10
    assert await db.fetchval("select count(*) from audit where what = 'transaction.reissue'") == 10


async def test_a_reissue_of_many_that_is_refused_can_be_repeated(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    await post_end(client, await half_of(client), "rollback")
    wanted = {"producer_group": "shop", "reason": "x", "dry_run": False}
    for field, value in (("limit", 1001), ("dry_run", "no"), ("reason", None), ("state", "committed")):
        answer = await client.post("/transactions/reissue", json={**wanted, field: value})
        assert (answer.status_code, answer.json()["field"]) == (422, field)
    runtime.refusing_halves = True
    refused = await client.post("/transactions/reissue", json=wanted)
    assert (refused.status_code, refused.json()["type"]) == (503, "/problems/draining")
    runtime.refusing_halves = False
    assert (await client.post("/transactions/reissue", json=wanted)).json()["changed"] == 1


async def test_gone_days_take_nothing(client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str) -> None:
    gone: UUID = uuid7(runtime.clock.now())
    await db.execute("update day set state = 'gone', archive = 's3://archive/day' where day = current_date")
    for what, fields in (
        ("check", {}),
        ("verdict", {"verdict": "commit", "reason": "x"}),
        ("reissue", {"reason": "x"}),
    ):
        answer = await act(client, gone, what, **fields)
        assert (answer.status_code, answer.json()["archive"]) == (410, "s3://archive/day")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("check", "'half', 'in_doubt' or 'parked'"), ("verdict", "'in_doubt' or 'parked'")],
)
async def test_a_state_that_cannot_be_selected_is_refused_with_those_that_can(
    client: httpx.AsyncClient, group: str, path: str, allowed: str
) -> None:
    wanted = {"producer_group": "shop", "state": "committed", "verdict": "commit", "reason": "x"}
    if path == "check":
        del wanted["verdict"], wanted["reason"]
    refused = (await client.post(f"/transactions/{path}", json=wanted)).json()
    assert (refused["status"], refused["field"]) == (422, "state")
    assert refused["detail"].endswith(f"Input should be {allowed}.")
