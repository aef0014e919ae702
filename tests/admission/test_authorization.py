"""Permissions of each role on each route, for its own resources and for those of others.

The routes are those of the app: a route without a rule, or without a row here, fails.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from app.admission.route_roles import RULES, RouteRules, routes_of
from app.database.connection import Connection
from app.errors import Forbidden
from app.main import ENDPOINTS, api
from app.permissions import AUTH_OFF, Role
from app.routers.topics import get_topics
from app.runtime.state import Runtime
from tests.conftest import assembled, client_of, register_group, settings_of, shares
from tests.support.api_keys import bearer, make
from tests.support.route_requests import OTHER, OWN, REQUESTS, ROUTES, Asked, World

ROLES = (Role.PRODUCER, Role.SUBSCRIBER, Role.OPERATOR, Role.ADMIN, Role.METRICS, Role.VIEWER)

# For each role in the order above: `y` allowed, `n` refused (403), `o` allowed for its own and refused (403)
# for others' resources, `h` the same, but others' are hidden (404). `open`: every caller, also without a key.
OPEN = "open"
MAY = {
    ("POST", "/half"): "o n n y n n",
    ("POST", "/end"): "h n n y n n",
    ("POST", "/messages"): "o n n y n n",
    ("POST", "/halves"): "o n n y n n",
    ("POST", "/ends"): "h n n y n n",
    ("GET", "/messages/{message_id}"): "h h y y n y",
    ("GET", "/transactions"): "o n y y n y",
    ("GET", "/transactions/{transaction_id:uuid}"): "h n y y n y",
    ("GET", "/transactions/{transaction_id:uuid}/attempts"): "h n y y n y",
    ("GET", "/transactions/{transaction_id:uuid}/deliveries"): "h n y y n y",
    ("GET", "/transactions/{transaction_id:uuid}/delivery"): "h n y y n y",
    ("POST", "/transactions/{transaction_id:uuid}/check"): "h n y y n n",
    ("POST", "/transactions/{transaction_id:uuid}/verdict"): "n n y y n n",
    ("POST", "/transactions/{transaction_id:uuid}/reissue"): "n n y y n n",
    ("POST", "/transactions/{transaction_id:uuid}/replay"): "n n y y n n",
    ("POST", "/transactions/check"): "n n y y n n",
    ("POST", "/transactions/verdict"): "n n y y n n",
    ("POST", "/transactions/reissue"): "n n y y n n",
    ("GET", "/topics"): "y y y y n y",
    ("PUT", "/topics/{name}"): "n n n y n n",
    ("DELETE", "/topics/{name}"): "n n n y n n",
    ("GET", "/workers"): "n n y y n y",
    ("GET", "/stats"): "n n y y n y",
    ("GET", "/stats/series"): "n n y y n y",
    ("GET", "/events"): "n n y y n y",
    ("GET", "/search"): "n n y y n y",
    ("GET", "/accept"): "n n y y n y",
    ("PUT", "/accept"): "n n y y n n",
    ("GET", "/producer-groups"): "y n y y n y",
    ("GET", "/producer-groups/{name}"): "o n y y n y",
    # A producer's key may repeat the PUT of its group: tests/routers/test_producer_keys.py.
    ("PUT", "/producer-groups/{name}"): "n n n y n n",
    ("PATCH", "/producer-groups/{name}"): "n n n y n n",
    ("DELETE", "/producer-groups/{name}"): "n n n y n n",
    ("POST", "/producer-groups/{name}/test"): "n n y y n n",
    ("POST", "/producer-groups/{name}/rotate-secret"): "n n n y n n",
    ("POST", "/producer-groups/{name}/checks/claim"): "o n n y n n",
    ("POST", "/producer-groups/{name}/checks/answers"): "o n n y n n",
    ("GET", "/subscriptions"): "n y y y n y",
    ("GET", "/subscriptions/{name}"): "n o y y n y",
    ("PUT", "/subscriptions/{name}"): "n o n y n n",
    ("PATCH", "/subscriptions/{name}"): "n o n y n n",
    ("DELETE", "/subscriptions/{name}"): "n o n y n n",
    ("POST", "/subscriptions/{name}/test"): "n o y y n n",
    ("POST", "/subscriptions/{name}/pause"): "n o y y n n",
    ("POST", "/subscriptions/{name}/resume"): "n o y y n n",
    ("POST", "/subscriptions/{name}/reset-breaker"): "n o y y n n",
    ("GET", "/subscriptions/{name}/recent"): "n o y y n y",
    ("POST", "/subscriptions/{name}/rotate-secret"): "n o n y n n",
    ("POST", "/subscriptions/{name}/claim"): "n o n y n n",
    ("POST", "/subscriptions/{name}/ack"): "n o n y n n",
    ("POST", "/subscriptions/{name}/nack"): "n o n y n n",
    ("POST", "/subscriptions/{name}/extend"): "n o n y n n",
    ("POST", "/subscriptions/{name}/reject"): "n o n y n n",
    ("POST", "/subscriptions/{name}/replay"): "n o y y n n",
    ("GET", "/subscriptions/{name}/replays"): "n o y y n y",
    ("GET", "/subscriptions/{name}/replays/{replay_id}"): "n o y y n y",
    ("DELETE", "/subscriptions/{name}/replays/{replay_id}"): "n o y y n n",
    ("GET", "/dead-letters"): "n o y y n y",
    ("GET", "/dead-letters/groups"): "n o y y n y",
    ("GET", "/dead-letters/{subscription}/{message_id}"): "n o y y n y",
    ("POST", "/dead-letters/redeliver"): "n n y y n n",
    ("DELETE", "/dead-letters"): "n n y y n n",
    ("GET", "/reconciliation"): "n n y y n y",
    ("GET", "/reconciliation/certificates"): "n n y y n y",
    ("GET", "/reconciliation/report"): "n n y y n y",
    ("GET", "/reconciliation/{day}"): "n n y y n y",
    ("GET", "/reconciliation/{day}/certificate"): "n n y y n y",
    ("GET", "/findings"): "n n y y n y",
    ("GET", "/findings/{finding_id}"): "n n y y n y",
    ("GET", "/findings/kinds/{kind}"): OPEN,
    ("POST", "/api-keys"): "n n n y n n",
    ("GET", "/api-keys"): "n n n y n y",
    ("GET", "/api-keys/{key_id}"): "n n n y n y",
    ("PUT", "/api-keys/{key_id}"): "n n n y n n",
    ("POST", "/api-keys/{key_id}/rotate"): "n n n y n n",
    ("DELETE", "/api-keys/{key_id}"): "n n n y n n",
    ("GET", "/audit"): "n n n y n y",
    ("GET", "/audit/chain"): "n n n y n y",
    ("GET", "/metrics"): "n n y y y y",
    ("GET", "/livez"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/version"): OPEN,
    ("GET", "/problems/{slug}"): OPEN,
    ("GET", "/openapi.json"): OPEN,
    ("GET", "/docs"): OPEN,
}


# For a subscriber's key: its own subscription, to which an admin added a foreign topic, and the messages of that
# topic. `y` allowed, `n` refused (403), `h` hidden (404), `-` left out of a list.
MIXED = {
    ("GET", "/messages/{message_id}"): "h",
    ("GET", "/subscriptions/{name}"): "y",
    ("PUT", "/subscriptions/{name}"): "n",
    ("PATCH", "/subscriptions/{name}"): "n",
    ("DELETE", "/subscriptions/{name}"): "y",
    ("POST", "/subscriptions/{name}/test"): "y",
    ("POST", "/subscriptions/{name}/pause"): "y",
    ("POST", "/subscriptions/{name}/resume"): "y",
    ("POST", "/subscriptions/{name}/reset-breaker"): "y",
    ("GET", "/subscriptions/{name}/recent"): "y",
    ("POST", "/subscriptions/{name}/rotate-secret"): "n",
    ("POST", "/subscriptions/{name}/claim"): "n",
    ("POST", "/subscriptions/{name}/ack"): "y",
    ("POST", "/subscriptions/{name}/nack"): "y",
    ("POST", "/subscriptions/{name}/extend"): "y",
    ("POST", "/subscriptions/{name}/reject"): "y",
    ("POST", "/subscriptions/{name}/replay"): "n",
    ("GET", "/subscriptions/{name}/replays"): "y",
    ("GET", "/subscriptions/{name}/replays/{replay_id}"): "y",
    ("DELETE", "/subscriptions/{name}/replays/{replay_id}"): "y",
    ("GET", "/dead-letters"): "-",
    ("GET", "/dead-letters/groups"): "-",
    ("GET", "/dead-letters/{subscription}/{message_id}"): "h",
}


def test_every_route_has_a_rule_and_a_row() -> None:
    assert set(ROUTES) == set(RULES)
    assert set(ROUTES) == set(MAY)
    assert set(MIXED) == {route for route, roles in MAY.items() if roles.split()[1:2] in (["o"], ["h"])}
    documented = {(method.upper(), path) for path, methods in api.openapi()["paths"].items() for method in methods}
    assert documented <= {(method, path.replace(":uuid", "")) for method, path in ROUTES}


def test_a_route_without_a_rule_is_refused() -> None:
    new = FastAPI()
    new.add_api_route("/topics", get_topics, methods=["GET"])
    new.add_api_route("/topics/{name}/new", get_topics, methods=["POST"])
    rules = RouteRules(routes_of(new.router.routes))
    assert rules.of("GET", "/topics") == RULES["GET", "/topics"]
    assert rules.of("POST", "/topics") is None
    unruled = rules.of("POST", "/topics/order/new")
    assert unruled == frozenset()
    for role in Role:
        with pytest.raises(Forbidden):
            type(AUTH_OFF)(role).must_be(unruled)


def test_a_route_that_no_rule_could_be_given_to_is_refused() -> None:
    new = FastAPI()
    new.mount("/files", FastAPI())
    with pytest.raises(TypeError):
        list(routes_of(new.router.routes))


# A producer's requests are recorded with its transactions, not in the audit.
SENT = {("POST", path) for path in ENDPOINTS}
SENT |= {("POST", f"/producer-groups/{{name}}/checks/{act}") for act in ("claim", "answers")}
SENT |= {("POST", "/transactions/{transaction_id:uuid}/check")}
# Of consumers: what they do is in the receipts and attempts.
CONSUMED = {("POST", f"/subscriptions/{{name}}/{action}") for action in ("claim", "ack", "nack", "extend", "reject")}
# The resource has this state already, so nothing changes and nothing is audited.
UNCHANGED = {("POST", f"/subscriptions/{{name}}/{act}") for act in ("resume", "reset-breaker")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(shared_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    """The parts of one process that asks for keys, over the module's database."""
    reports = tmp_path_factory.mktemp("reports")
    (reports / "report.html").write_text("<!doctype html><title>Proved</title>")
    async with assembled(settings_of(shared_dsn, auth="keys", report_dir=reports), shared_dsn) as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keys(guarded: Runtime) -> dict[Role, str]:
    """A key of each role; those with scopes reach one side."""
    return await keys_of(guarded)


async def keys_of(runtime: Runtime) -> dict[Role, str]:
    """A key of each role; those with scopes reach one side."""
    scopes: dict[Role, dict[str, Any]] = {
        Role.PRODUCER: {"producer_groups": [f"{OWN}-*"], "topics": [f"{OWN}.*"]},
        Role.SUBSCRIBER: {"subscriptions": [f"{OWN}-*"], "topics": [f"{OWN}.*"]},
    }
    return {role: await make(runtime, role, **scopes.get(role, {})) for role in Role}


async def ask(client: httpx.AsyncClient, method: str, asked: Asked, key: str | None) -> httpx.Response:
    headers = {} if key is None else bearer(key)
    answer = await client.request(method, asked.path, json=asked.json, params=asked.query, headers=headers)
    if asked.path not in ("/halves", "/ends") or answer.status_code != 200:
        return answer
    [outcome] = answer.json()["outcomes"]
    return httpx.Response(outcome["status"], json=outcome)


def wanted(may: str, side: str) -> str:
    """Return the expected outcome: `may`, `403` or `404`."""
    if may == "y" or (may in "oh" and side == OWN):
        return "may"
    return "404" if may == "h" else "403"


@shares
@pytest.mark.parametrize("segment", sorted({path.split("/")[1] for _, path in ROUTES}))
async def test_each_role_may_do_what_its_row_says(
    guarded: Runtime, keys: dict[Role, str], shared_db: Connection, segment: str
) -> None:
    db = shared_db
    async with client_of(guarded) as client, client_of(guarded) as admin:
        admin.headers.update(bearer(keys[Role.ADMIN]))
        # A replay needs something to send again.
        await World(OTHER, admin, db).ended()
        for method, template in ROUTES:
            if template.split("/")[1] != segment:
                continue
            if MAY[method, template] == OPEN:
                asked = await REQUESTS[method, template](World(OWN, admin, db))
                assert (await ask(client, method, asked, None)).status_code == 200, (method, template)
                continue
            for side in (OWN, OTHER):
                # A read or a refusal changes nothing, so the next role asks for the same.
                asked = None
                for role, may in zip(ROLES, MAY[method, template].split(), strict=True):
                    cell = (method, template, role, side)
                    if asked is None:
                        asked = await REQUESTS[method, template](World(side, admin, db))
                        without_key = await ask(client, method, asked, None)
                        assert without_key.status_code == 401, cell
                        assert without_key.headers["www-authenticate"] == 'Bearer realm="halfnote"'
                    before = await db.fetchval("select count(*) from audit")
                    answer = await ask(client, method, asked, keys[role])
                    left = await db.fetchval("select count(*) from audit") - before
                    _judge(cell, wanted(may, side), answer, left)
                    if method != "GET" and wanted(may, side) == "may":
                        asked = None


def _judge(cell: tuple[str, str, Role, str], verdict: str, answer: httpx.Response, left: int) -> None:
    method, template, role, side = cell
    context = (cell, answer.status_code, answer.text)
    if verdict != "may":
        assert answer.status_code == int(verdict), context
        assert left == 0, context
        if verdict == "403":
            assert answer.json()["type"] == "/problems/forbidden", context
            assert answer.json()["missing"], context
        else:
            assert answer.json()["type"] in ("/problems/transaction-unknown", "/problems/message-unknown"), context
    elif template in ("/end", "/ends") and side == OTHER:
        # An admin reaches both groups, so the answer says that the transaction is another group's.
        assert answer.json()["type"] == "/problems/wrong-group", context
    else:
        assert answer.is_success, context
        unaudited = UNCHANGED | CONSUMED | (SENT if role is Role.PRODUCER else set())
        changes = method != "GET" and (method, template) not in unaudited
        assert (left > 0) == changes, context


@shares
@pytest.mark.parametrize("route", MIXED, ids=" ".join)
async def test_own_subscription_with_a_foreign_topic(
    guarded: Runtime, keys: dict[Role, str], shared_db: Connection, route: tuple[str, str]
) -> None:
    db = shared_db
    method, may = route[0], MIXED[route]
    async with client_of(guarded) as client, client_of(guarded) as admin:
        admin.headers.update(bearer(keys[Role.ADMIN]))
        for role in (Role.SUBSCRIBER, Role.ADMIN):
            world = World(OWN, admin, db, topic=f"{OTHER}.order")
            # A replay needs something to send again.
            await world.ended()
            asked = await REQUESTS[route](world)
            if route == ("PUT", "/subscriptions/{name}"):
                asked = replace(asked, path=f"/subscriptions/{await world.subscription()}")
            answer = await ask(client, method, asked, keys[role])
            context = (role, answer.status_code, answer.text)
            if role is Role.ADMIN or may == "y":
                assert answer.is_success, context
            elif may == "-":
                assert answer.json()["items"] == [], context
            else:
                assert answer.status_code == (403 if may == "n" else 404), context
                assert may == "h" or answer.json()["missing"] == {"topics": f"{OTHER}.order"}, context
            if role is Role.ADMIN and may == "-":
                assert len(answer.json()["items"]) == 1


@shares
async def test_a_list_of_dead_letters_has_those_of_ones_topics(guarded: Runtime, shared_db: Connection) -> None:
    db = shared_db
    topics = ["order", "order.paid", "payment", "halfnote.finding", "halfnote.other"]
    async with client_of(guarded) as client:
        client.headers.update(bearer(await make(guarded, Role.ADMIN)))
        name = await World(OWN, client, db, topic="*").subscription()
        await db.execute(
            'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
            "died_at) select s.subscription_id, gen_random_uuid(), 0, t.n, t.topic, 3, 'retries_exhausted', now() "
            "from subscription s, unnest($2::text[]) with ordinality as t(topic, n) where s.name = $1",
            name,
            topics * 3,
        )
        for scope, shown in (
            (["order"], {"order"}),
            (["order*"], {"order", "order.paid"}),
            (["*"], {"order", "order.paid", "payment"}),
            (["order.*", "halfnote.finding"], {"order.paid", "halfnote.finding"}),
            (["halfnote.*"], {"halfnote.finding", "halfnote.other"}),
            (["bank"], set()),
        ):
            key = bearer(await make(guarded, Role.SUBSCRIBER, subscriptions=[name], topics=scope))
            found: list[str] = []
            query: dict[str, Any] = {"subscription": name, "limit": 2}
            while True:
                page = (await client.get("/dead-letters", params=query, headers=key)).json()
                found += [one["topic"] for one in page["items"]]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
            groups = (await client.get("/dead-letters/groups", params={"subscription": name}, headers=key)).json()
            assert sum(one["count"] for one in groups["items"]) == len(found)
            assert sorted(found) == sorted([*shown] * 3), scope
        refused = await client.get("/dead-letters", params={"subscription": name, "topic": "payment"}, headers=key)
        assert (refused.status_code, refused.json()["missing"]) == (403, {"topics": "payment"})
        everything = (await client.get("/dead-letters", params={"subscription": name})).json()["items"]
        assert len(everything) == 3 * len(topics)


@pytest.mark.parametrize("route", ["/messages", "/api-keys"])
async def test_a_key_that_is_revoked_while_the_body_arrives_does_nothing(dsn: str, db: Connection, route: str) -> None:
    async with assembled(settings_of(dsn, auth="keys"), dsn) as runtime, client_of(runtime) as client:
        await register_group(db, "shop")
        revoked, admin = await make(runtime, Role.ADMIN, name="revoked"), await make(runtime, Role.ADMIN, name="admin")
        [key_id] = [
            one["key_id"]
            for one in (await client.get("/api-keys", headers=bearer(admin))).json()["items"]
            if one["name"] == "revoked"
        ]
        wanted = {"name": "of a thief", "role": "admin"}
        if route == "/messages":
            wanted = {"producer_group": "shop", "messages": [{"topic": "order", "body": 1}]}
        whole = json.dumps(wanted).encode()

        async def body() -> AsyncIterator[bytes]:
            yield whole[:5]
            assert (await client.delete(f"/api-keys/{key_id}", headers=bearer(admin))).is_success
            yield whole[5:]

        sent = {**bearer(revoked), "content-type": "application/json", "content-length": str(len(whole))}
        answer = await client.post(route, content=body(), headers=sent)
        assert answer.status_code == 401, answer.text
        assert await db.fetchval("select count(*) from half") == 0
        assert await db.fetchval("select count(*) from api_key where name = 'of a thief'") == 0
