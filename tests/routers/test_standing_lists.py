"""Lists with the state of their items: lag and last error of subscriptions, open transactions of groups, traffic."""

import csv
from datetime import timedelta
from io import StringIO
from typing import Any

import httpx

from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.checkback.group_standing import GROUP_LOOKS_AT
from app.store.relay.page_standing import DEAD_MOST, ENTRIES_MOST
from tests.support.check_stepping import many_in_doubt
from tests.support.console_forms import FORM
from tests.support.dead_letters import bury, committed, subscription
from tests.support.proof_runs import DAY, find, looked_at, reconciled

ORDER = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}


async def items(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return {one.get("name") or one["topic"]: one for one in answer.json()["items"]}


async def test_subscriptions_have_their_lag_and_their_last_error(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "mailer")
    await subscription(client, "refunds", filters={"tags": ["refunded"]})
    await subscription(client, "photos", topics=["photo"])
    assert (await items(client, "/subscriptions"))["mailer"]["standing"] is None
    dead = await committed(client, ORDER)
    await bury(db, dead, "mailer")
    for number in range(3):
        await committed(client, {**ORDER, "body": {"order": number}})
    found = await items(client, "/subscriptions?standing=true")
    mailer = found["mailer"]["standing"]
    assert {**mailer, "seconds": mailer["seconds"] > 0} == {
        "messages": 3,
        "seconds": True,
        "dead_letters": 1,
        "exact": True,
        "last_error": "answered 500",
    }
    for name in ("refunds", "photos"):
        assert found[name]["standing"] == {
            "messages": 0,
            "seconds": 0.0,
            "dead_letters": 0,
            "exact": True,
            "last_error": None,
        }
    # What is settled after the checkpoint does not wait.
    await db.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        'duration_ms, settled_at) select o.transaction_id, o.position, s.subscription_id, o."offset", '
        "'delivered', 1, now(), 1, now() from outbox o, subscription s where s.name = 'mailer'"
    )
    assert (await items(client, "/subscriptions?standing=true"))["mailer"]["standing"]["messages"] == 0


async def test_large_lags_are_minimums(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    for _ in range(2):
        batch = [{"producer_group": "shop", "messages": [ORDER]} for _ in range(ENTRIES_MOST)]
        assert (await client.post("/messages", json={"transactions": batch})).status_code == 200
    found = (await items(client, "/subscriptions?standing=true"))["mailer"]["standing"]
    assert (found["messages"], found["exact"]) == (ENTRIES_MOST, False)
    assert DEAD_MOST > ENTRIES_MOST


async def test_groups_have_their_open_transactions_and_answers(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    ids = await many_in_doubt(db, runtime, group, 5)
    await db.execute("update check_back set state = 2, parked_at = now() where transaction_id = any($1)", ids[:2])
    # A verdict that arrived after the row was written.
    end = {"transaction_id": str(ids[4]), "producer_group": group, "verdict": "commit"}
    assert (await client.post("/end", json=end)).status_code == 200
    for one, outcome in ((ids[2], "unknown"), (ids[2], "unknown"), (ids[3], "unanswered")):
        await db.execute(
            "insert into attempt (transaction_id, kind, at, number, outcome) values ($1, 'check', $2, 1, $3)",
            one,
            runtime.clock.now() - timedelta(minutes=1),
            outcome,
        )
    rows = {row["transaction_id"]: row for row in (await client.get("/transactions?state=in_doubt")).json()["items"]}
    assert rows[str(ids[2])]["last_check"]["outcome"] == "unknown"
    assert rows[str(ids[3])]["last_check"]["outcome"] == "unanswered"
    listed = (await client.get("/console/transactions?state=in_doubt", headers=FORM)).text
    assert "<td>unanswered <time" in listed
    assert (await items(client, "/producer-groups"))[group]["standing"] is None
    listed = (await items(client, "/producer-groups?standing=true"))[group]["standing"]
    assert listed == {"in_doubt": 2, "parked": 2, "exact": True}
    shown = (await client.get(f"/producer-groups/{group}")).json()
    assert shown["standing"] == listed
    assert [(one["outcome"], one["checks"]) for one in shown["answers"]] == [("unknown", 2), ("unanswered", 1)]
    page = (await client.get(f"/console/producer-groups/{group}", headers=FORM)).text
    assert "<td>unknown</td>" in page
    assert f'href="/console/transactions?producer_group={group}&amp;state=parked"' in page
    await many_in_doubt(db, runtime, group, GROUP_LOOKS_AT)
    listed = (await items(client, "/producer-groups?standing=true"))[group]["standing"]
    assert (listed["exact"], listed["in_doubt"] > 900) == (False, True)


async def test_topics_have_rates_last_messages_and_unrouted_ones(client: httpx.AsyncClient, group: str) -> None:
    await subscription(client, "mailer")
    for topic in ("order", "order", "lost"):
        await committed(client, {**ORDER, "topic": topic})
    assert (await client.put("/topics/quiet")).status_code == 204
    assert (await items(client, "/topics"))["order"]["traffic"] is None
    found = {name: one["traffic"] for name, one in (await items(client, "/topics?traffic=true")).items()}
    assert (found["order"]["messages"], found["order"]["unrouted"]) == (2, 0)
    assert found["order"]["per_s"] > found["lost"]["per_s"] > 0
    assert (found["lost"]["messages"], found["lost"]["unrouted"]) == (1, 1)
    assert found["lost"]["last_at"] > found["order"]["last_at"]
    assert found["quiet"] == {"messages": 0, "per_s": 0.0, "last_at": None, "unrouted": 0}
    page = (await client.get("/console/topics", headers=FORM)).text
    assert '<b class="warn">1</b>' in page


async def test_lists_of_the_console_are_sorted_and_exported(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    for name in ("a", "b", "c"):
        await subscription(client, name, topics=[f"topic-{name}"])
    await committed(client, {**ORDER, "topic": "topic-b"})
    dead = await committed(client, {**ORDER, "topic": "topic-c"})
    await bury(db, dead, "c")

    async def order_of(query: str) -> list[str]:
        answer = await client.get(f"/console/subscriptions?format=csv{query}")
        assert answer.status_code == 200, answer.text
        return [row["name"] for row in csv.DictReader(StringIO(answer.text))]

    assert await order_of("") == ["a", "b", "c"]
    assert await order_of("&sort=lag") == ["b", "a", "c"]
    assert await order_of("&sort=dead") == ["c", "a", "b"]
    assert (await client.post("/subscriptions/b/pause")).status_code == 200
    assert await order_of("&sort=state") == ["b", "a", "c"]
    refused = await client.get("/console/subscriptions?sort=nonsense", headers=FORM)
    assert (refused.status_code, "Input should be" in refused.text) == (422, True)
    page = await client.get("/console/subscriptions?sort=lag", headers=FORM)
    assert 'aria-sort="descending"' in page.text
    assert "halfnote subscriptions list --sort lag" in page.text


async def test_the_proof_has_a_trend_and_a_page_for_each_day(client: httpx.AsyncClient, db: Connection) -> None:
    run_id = await reconciled(db, "findings", DAY - timedelta(days=1))
    one_day = await client.get("/console/proof", headers=FORM)
    assert "Findings by day" not in one_day.text
    await looked_at(db, DAY, run_id, parked=2)
    await find(db, "parked", "x")
    page = await client.get("/console/proof", headers=FORM)
    assert 'aria-label="Findings by day: last 2, at most 2"' in page.text
    assert f'href="/console/proof/{DAY}"' in page.text
    day = await client.get(f"/console/proof/{DAY}", headers=FORM)
    assert (day.status_code, "99.98" in day.text, "/findings/kinds/parked" in day.text) == (200, True, True)
    rows = list(csv.DictReader(StringIO((await client.get("/console/proof?format=csv")).text)))
    assert (rows[0]["day"], rows[0]["found"], rows[0]["complete"]) == (str(DAY), "2", "99.98")
    for path, status in ((DAY + timedelta(days=1), 404), ("nonsense", 404)):
        assert (await client.get(f"/console/proof/{path}", headers=FORM)).status_code == status


async def test_every_page_with_rows_is_exported(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    message_id = await committed(client, ORDER)
    for path, column in (
        ("/console", "halves"),
        (f"/console/transactions/{message_id[:36]}", "what"),
        ("/console/subscriptions/mailer", "shard"),
        (f"/console/producer-groups/{group}", "url"),
        ("/console/topics", "per_s"),
        ("/console/producer-groups", "in_doubt"),
    ):
        page = await client.get(path, headers=FORM)
        assert 'format=csv"' in page.text, path
        answer = await client.get(f"{path}?format=csv")
        assert answer.headers["content-type"].startswith("text/csv"), path
        rows = list(csv.DictReader(StringIO(answer.text)))
        assert rows, path
        assert column in rows[0], path
