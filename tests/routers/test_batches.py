"""Many transactions in one request: each has the outcome of a request of its own, and all share a flush."""

import json
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import httpx
import pytest

from app.coordinator.wire import TRANSACTIONS_MAX
from app.database.connection import Connection
from app.ids import uuid7
from app.permissions import Role
from app.runtime.state import Runtime
from tests.conftest import client_of, shares
from tests.support.api_keys import bearer, make
from tests.support.keyed_services import start

__all__ = ["start"]

ORDER = {"topic": "order", "key": "order-1030", "body": {"order": 1030}}
ROUTES = {"/halves": ("halves", "/half"), "/ends": ("ends", "/end"), "/messages": ("transactions", "/messages")}


def half(runtime: Runtime, **fields: Any) -> dict[str, Any]:
    chosen = str(uuid7(runtime.clock.now()))
    return {"producer_group": "shop", "messages": [ORDER], "transaction_id": chosen, **fields}


def end(of: dict[str, Any], verdict: str, **fields: Any) -> dict[str, Any]:
    return {"transaction_id": of["transaction_id"], "producer_group": "shop", "verdict": verdict, **fields}


async def many(client: httpx.AsyncClient, path: str, requests: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
    answer = await client.post(path, json={ROUTES[path][0]: list(requests)}, **options)
    assert answer.status_code == 200, answer.text
    outcomes: list[dict[str, Any]] = answer.json()["outcomes"]
    assert len(outcomes) == len(requests)
    return outcomes


def comparable(outcome: dict[str, Any], request: Any) -> Any:
    """Return an outcome without times, offsets and the request's own id."""
    own = str(request.get("transaction_id")) if isinstance(request, dict) else "none"
    shown = json.loads(json.dumps(outcome).replace(own, "id"))
    for part in (shown, shown.get("recorded", {}), *(shown.get("messages") or ())):
        for name in [name for name in part if name.endswith("_at") or name == "offset"]:
            del part[name]
    return shown


@shares
async def test_each_outcome_is_the_answer_of_a_request_of_its_own(
    shared_client: httpx.AsyncClient, shared_runtime: Runtime
) -> None:
    """The same requests, once together and once one by one."""
    runtime, client = shared_runtime, shared_client

    def new() -> dict[str, list[Any]]:
        first, second, third, never = (half(runtime) for _ in range(4))
        halves = [first, second, third, first, first | {"messages": [{**ORDER, "key": "1031"}]}]
        halves += [half(runtime, messages=[]), half(runtime, producer_group="unregistered"), 1, {}]
        halves += [half(runtime, messages=[{"topic": "halfnote.x", "body": 1}]), half(runtime, transaction_id="x")]
        ends = [end(first, "commit"), end(second, "rollback", reason="out of stock"), end(third, "unknown")]
        ends += [end(first, "commit"), end(first, "rollback"), end(never, "commit"), end(second, "maybe"), None]
        ends += [end(third, "commit", producer_group="other")]
        plains = [half(runtime), half(runtime, context=1), half(runtime, messages=[ORDER, ORDER])]
        return {"/halves": halves, "/ends": ends, "/messages": plains}

    together, alone = new(), new()
    for path, (_, single) in ROUTES.items():
        outcomes = await many(client, path, together[path])
        for number, (outcome, request) in enumerate(zip(outcomes, alone[path], strict=True)):
            content, headers = json.dumps(request), {"content-type": "application/json"}
            answer = await client.post(single, content=content, headers=headers)
            expected = {"status": answer.status_code, **answer.json()}
            if "retry-after" in answer.headers:
                expected["retry_after_s"] = int(answer.headers["retry-after"])
            assert comparable(outcome, together[path][number]) == comparable(expected, request), (path, number)


async def test_all_are_committed_in_one_flush(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    for lane in (runtime.lanes.half, runtime.lanes.end, runtime.lanes.plain):
        flush = lane._flush

        async def counted(connection: Any, requests: Sequence[Any], flush: Any = flush) -> Any:
            sizes.append(len(requests))
            return await flush(connection, requests)

        monkeypatch.setattr(lane, "_flush", counted)
    halves = [half(runtime) for _ in range(TRANSACTIONS_MAX)]
    assert {one["status"] for one in await many(client, "/halves", halves)} == {201}
    assert await db.fetchval("select count(*) from outbox") == 0
    assert {one["status"] for one in await many(client, "/ends", [end(one, "commit") for one in halves])} == {200}
    plains = [half(runtime) for _ in range(TRANSACTIONS_MAX)]
    assert {one["status"] for one in await many(client, "/messages", plains)} == {201}
    assert sizes == [TRANSACTIONS_MAX] * 3
    assert await db.fetchval("select count(*) from outbox") == 2 * TRANSACTIONS_MAX
    # A repeat of the request, as after a lost answer, changes nothing.
    assert {one["status"] for one in await many(client, "/halves", halves)} == {200}
    assert await db.fetchval("select count(*) from half") == 2 * TRANSACTIONS_MAX


@shares
@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_is_no_list_of_transactions_is_refused_whole(
    shared_client: httpx.AsyncClient, shared_runtime: Runtime, shared_db: Connection, path: str
) -> None:
    field = ROUTES[path][0]
    before = await shared_db.fetchval("select count(*) from half")
    one = json.dumps(half(shared_runtime))
    begin = '{"' + field + '": ['
    for content, status, word in (
        (begin + "]}", 422, field),
        (begin + ",".join([one] * (TRANSACTIONS_MAX + 1)) + "]}", 422, str(TRANSACTIONS_MAX)),
        (begin + one + '], "more": 1}', 422, "more"),
        ('{"more": 1, ' + begin[1:] + one + "]}", 422, "more"),
        ('{"' + field + '": {}}', 422, field),
        (begin + one + "]", 400, "JSON"),
        (begin + one + ", }]", 400, "JSON"),
    ):
        answer = await shared_client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == status, content[:80]
        assert word in answer.text
    assert await shared_db.fetchval("select count(*) from half") == before


async def test_scope_audit_and_rate_are_those_of_single_requests(
    start: Callable[..., Any], db: Connection, group: str
) -> None:
    runtime, client = await start(auth="keys")
    own = await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=["order"], rate_per_s=3.0)
    halves = [half(runtime), half(runtime, producer_group="other"), half(runtime), half(runtime)]
    halves[2]["messages"] = [{**ORDER, "topic": "points"}]
    outcomes = await many(client, "/halves", halves, headers=bearer(own))
    assert [one["status"] for one in outcomes] == [201, 403, 403, 201]
    # A burst of 3 and one transaction more: the next request waits for more than a second.
    refused = await client.post("/half", json=half(runtime), headers=bearer(own))
    assert (refused.status_code, refused.json()["type"]) == (429, "/problems/too-many-requests")
    reader = await make(runtime, Role.SUBSCRIBER, subscriptions=["delivery"], topics=["*"])
    assert (await client.post("/halves", json={"halves": halves}, headers=bearer(reader))).status_code == 403
    admin = await make(runtime, Role.ADMIN)
    mine = [half(runtime) for _ in range(9)]
    assert {one["status"] for one in await many(client, "/halves", mine, headers=bearer(admin))} == {201}
    assert {one["status"] for one in await many(client, "/ends", [end(mine[0], "commit")], headers=bearer(admin))} == {
        200
    }
    rows = await db.fetch("select what, target from audit where what like 'transaction.%' order by audit_id")
    assert sorted(row["target"] for row in rows if row["what"] == "transaction.half") == sorted(
        one["transaction_id"] for one in mine
    )
    assert [row["target"] for row in rows if row["what"] == "transaction.end"] == [mine[0]["transaction_id"]]


async def test_a_lost_flush_leaves_each_outcome_unknown(
    runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(connection: Any, requests: Sequence[Any]) -> Any:
        raise OSError("connection lost")

    halves = [half(runtime) for _ in range(3)]
    async with client_of(runtime) as client:
        with monkeypatch.context() as patch:
            patch.setattr(runtime.lanes.half, "_flush", lost)
            outcomes = await many(client, "/halves", [*halves, half(runtime, messages=[])])
        assert [one["status"] for one in outcomes] == [503, 503, 503, 422]
        assert {one["type"] for one in outcomes[:3]} == {"/problems/outcome-unknown"}
        assert [UUID(one["transaction_id"]) for one in outcomes[:3]] == [UUID(one["transaction_id"]) for one in halves]
        assert all(one["retry_after_s"] >= 1 for one in outcomes[:3])
        assert {one["status"] for one in await many(client, "/halves", halves)} == {201}


async def test_outcomes_are_counted_by_route_and_status(runtime: Runtime, group: str) -> None:
    halves = [half(runtime) for _ in range(3)]
    unknown = end(half(runtime), "commit")
    async with client_of(runtime) as client:
        await many(client, "/halves", [*halves, half(runtime, messages=[]), 1])
        await many(client, "/halves", halves[:1])
        await many(client, "/ends", [end(halves[0], "commit"), end(halves[1], "rollback"), unknown])
        await many(client, "/messages", [half(runtime), half(runtime)])
        answers = [{"transaction_id": unknown["transaction_id"], "verdict": "commit"}]
        assert (await client.post("/producer-groups/shop/checks/answers", json={"answers": answers})).status_code == 200
        # A list that is refused as a whole, and a request of one transaction, have no outcomes.
        await client.post("/halves", json={"halves": []})
        await client.post("/half", json=half(runtime))
    runtime.metrics.tallies.publish()
    families = {family.name: family.samples for family in runtime.metrics.registry.collect()}
    outcomes = families["halfnote_transaction_outcomes"]
    assert {(one.labels["route"], one.labels["status"]): one.value for one in outcomes} == {
        ("/halves", "201"): 3,
        ("/halves", "422"): 2,
        ("/halves", "200"): 1,
        ("/ends", "200"): 2,
        ("/ends", "404"): 1,
        ("/messages", "201"): 2,
        ("/producer-groups/{name}/checks/answers", "404"): 1,
    }
    requests = {one.labels["route"] for one in families["halfnote_requests"]}
    assert {one.labels["route"] for one in outcomes} <= requests


@shares
@pytest.mark.parametrize("path", ["/halves", "/messages"])
@pytest.mark.parametrize("contexts_first", [False, True])
async def test_each_transaction_may_have_a_trace_context_of_its_own(
    shared_client: httpx.AsyncClient, shared_runtime: Runtime, shared_db: Connection, path: str, contexts_first: bool
) -> None:
    of_request, own = (f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")
    # One that does not fit: then each half is decoded by itself.
    for more in ([], [{"producer_group": "shop", "messages": []}]):
        halves = [half(shared_runtime) for _ in range(3)]
        fields = [(ROUTES[path][0], halves + more), ("traceparents", [own, None, "not one", *[own for _ in more]])]
        answer = await shared_client.post(
            path,
            json=dict(reversed(fields) if contexts_first else fields),
            headers={"traceparent": of_request},
        )
        assert [one["status"] for one in answer.json()["outcomes"]] == [201] * 3 + [422 for _ in more]
        ids = [UUID(one["transaction_id"]) for one in halves]
        stored = dict(
            await shared_db.fetch("select transaction_id, traceparent from half where transaction_id = any($1)", ids)
        )
        assert [stored[one] for one in ids] == [own, of_request, None]


@shares
@pytest.mark.parametrize("given", [[], [None, None], "00-1-2-01", [1], None])
async def test_trace_contexts_are_as_many_as_the_transactions(
    shared_client: httpx.AsyncClient, shared_runtime: Runtime, given: Any
) -> None:
    for more in ([], [{"producer_group": "shop", "messages": []}]):
        halves = [half(shared_runtime), *more]
        contexts = given if not more or not isinstance(given, list) or given == [] else [*given, None]
        answer = await shared_client.post("/halves", json={"halves": halves, "traceparents": contexts})
        assert answer.status_code == 422
        assert "traceparents" in answer.text


@shares
async def test_the_fields_of_a_request_have_no_order(
    shared_client: httpx.AsyncClient, shared_runtime: Runtime, subtests: pytest.Subtests
) -> None:
    def of(path: str) -> dict[str, Any]:
        single = half(shared_runtime)
        return end(single, "unknown") if path == "/ends" else single

    for path, (field, _) in ROUTES.items():
        with subtests.test(path=path):
            one = of(path)
            contexts = '"traceparents": [null]'
            answers = []
            for name in (f'"{field}"', f'"\\u{ord(field[0]):04x}{field[1:]}"'):
                listed = f"{name}: [{json.dumps(one)}]"
                for content in (f"{{{listed}, {contexts}}}", f"{{{contexts}, {listed}}}"):
                    headers = {"content-type": "application/json"}
                    answer = await shared_client.post(path, content=content, headers=headers)
                    assert answer.status_code == 200, (content, answer.text)
                    [outcome] = answer.json()["outcomes"]
                    outcome.pop("replayed", None)
                    answers.append(outcome | {"status": outcome["status"] // 100})
            assert answers == [answers[0]] * 4
    # A transaction of its own whose field does not exist is refused as before.
    for content, word in (("[]", "object"), ('{"more": 1}', "more"), ('{"producer_group": "shop", "x": 1}', "x")):
        answer = await shared_client.post("/messages", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 422
        assert word in answer.text
