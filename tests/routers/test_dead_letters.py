"""`GET /dead-letters`: what is listed, shown and counted."""

import base64
from datetime import timedelta

import httpx
import pytest

from app.database.connection import Connection
from app.loops import gauges
from app.runtime.state import Runtime
from app.store.subscriptions import dead_letters as dead_letter_store
from app.store.subscriptions.dead_letters import (
    GROUPED_ROWS,
    WINDOW_ROWS,
    DeadLetterSearch,
    group_dead_letters,
    list_dead_letters,
)
from tests.conftest import shares
from tests.support.dead_letters import AT, bury, by_filter, committed, dead, drop, listed, mailer, many, subscription

__all__ = ["mailer"]

pytestmark = pytest.mark.usefixtures("group")


async def test_a_row_of_a_list(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    message_id = await dead(client, db, mailer)
    (row,) = (await client.get("/dead-letters")).json()["items"]
    assert row == {
        "subscription": "mailer",
        "message_id": message_id,
        "topic": "order",
        "key": "order-1030",
        "offset": await db.fetchval('select "offset" from outbox'),
        "attempts": 17,
        "reason": "retries_exhausted",
        "status": 500,
        "error": "answered 500",
        "died_at": "2026-11-21T08:00:00Z",
    }
    await bury(db, message_id, mailer, replay=7, status=None)
    second = next(one for one in (await client.get("/dead-letters")).json()["items"] if "replay" in one)
    assert (second["message_id"], second["replay"], "status" in second) == (message_id, 7, False)


async def test_lists_filter_newest_first(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    audit = await subscription(client, "audit", topics=["*"])
    first = await dead(client, db, mailer, 1, died_at=AT)
    second = await dead(client, db, mailer, 2, died_at=AT + timedelta(seconds=1), reason="unknown customer")
    other = await committed(client, {"topic": "points", "body": 1})
    await bury(db, other, audit, died_at=AT + timedelta(seconds=2))
    assert await listed(client) == [other, second, first]
    assert await listed(client, subscription="mailer") == [second, first]
    assert await listed(client, subscription="audit") == [other]
    assert await listed(client, topic="points") == [other]
    assert await listed(client, key="order-1") == [first]
    assert await listed(client, reason="unknown customer") == [second]
    assert await listed(client, subscription="mailer", topic="points") == []
    assert await listed(client, died_after="2026-11-21T08:00:01Z") == [other, second]
    assert await listed(client, died_before="2026-11-21T08:00:01Z") == [first]
    between = {"died_after": "2026-11-21T08:00:01Z", "died_before": "2026-11-21T08:00:02Z"}
    assert await listed(client, **between) == [second]
    answer = await client.get("/dead-letters", params={"subscription": "nobody"})
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/subscription-unknown")
    await client.delete("/subscriptions/audit")
    assert await listed(client) == [second, first]


async def test_groups_of_one_error_have_their_count_and_times(
    client: httpx.AsyncClient, db: Connection, mailer: str
) -> None:
    await subscription(client, "crm")
    refused = "connection to 10.0.0.{}:5432 refused"
    for number, columns in enumerate(
        [
            {"error": refused.format(7), "status": None},
            {"error": "answered 503", "status": 503},
            {"error": refused.format(8), "status": None},
            {"error": "answered 500", "status": 500},
            {"error": refused.format(9), "status": None},
            {"error": None, "status": None, "reason": "day_left"},
        ]
    ):
        await dead(client, db, mailer, number, died_at=AT + timedelta(seconds=number), **columns)
    await dead(client, db, "crm", 6, died_at=AT + timedelta(seconds=6))
    found = (await client.get("/dead-letters/groups")).json()
    assert (found["groups"], found["looked_at"], found["complete"]) == (5, 7, True)
    assert found["items"][0] == {
        "subscription": "mailer",
        "reason": "retries_exhausted",
        "error": "connection to # refused",
        "newest": refused.format(9),
        "status": None,
        "count": 3,
        "first_at": "2026-11-21T08:00:00Z",
        "last_at": "2026-11-21T08:00:04Z",
    }
    rest = [(one["subscription"], one["reason"], one["error"], one["status"]) for one in found["items"][1:]]
    assert rest == [
        ("crm", "retries_exhausted", "answered 500", 500),
        ("mailer", "day_left", "none", None),
        ("mailer", "retries_exhausted", "answered 500", 500),
        ("mailer", "retries_exhausted", "answered 503", 503),
    ]


async def test_a_group_is_a_filter_of_lists_and_of_acts(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    errors = ["no order 1030", "no order 1031", "answered 503", None]
    ids = [await dead(client, db, mailer, number, error=error) for number, error in enumerate(errors)]
    for kind, of_kind in (("no order #", ids[:2]), ("answered 503", ids[2:3]), ("none", ids[3:]), ("no order", [])):
        assert sorted(await listed(client, error=kind)) == sorted(of_kind)
        groups = (await client.get("/dead-letters/groups", params={"error": kind})).json()
        assert [one["count"] for one in groups["items"]] == ([len(of_kind)] if of_kind else [])
        assert groups["looked_at"] == len(ids)
    dropped = await drop(client, by_filter(subscription="mailer", reason="retries_exhausted", error="no order #"))
    assert (dropped["dropped"], dropped["left"]) == (2, 0)
    assert sorted(await listed(client)) == sorted(ids[2:])
    audited = await db.fetchval("select detail from audit where what = 'dead_letter.drop'")
    assert "no order #" in str(audited)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("answered 503", "answered 503"),
        ("no answer within 2.5 s", "no answer within 2.5 s"),
        ("message 0193a7d6-a5c8-7b1e-8f00-1030a1030a10-0 is too large", "message #-0 is too large"),
        ("[Errno 111] Connect call failed ('10.1.2.3', 9031)", "[Errno 111] Connect call failed ('#', #)"),
        ("request 4f9a2c77", "request #"),
        ("the facade of cafe", "the facade of cafe"),
        ("one\ntwo", "one two"),
        ("é" * 300, "é" * 200),
    ],
)
async def test_the_kind_of_an_error(
    client: httpx.AsyncClient, db: Connection, mailer: str, error: str, kind: str
) -> None:
    message_id = await dead(client, db, mailer, error=error)
    [group] = (await client.get("/dead-letters/groups")).json()["items"]
    assert (group["error"], group["newest"]) == (kind, error)
    assert await listed(client, error=kind) == [message_id]


async def test_groups_past_the_limit_and_filters_of_time(
    client: httpx.AsyncClient, db: Connection, mailer: str
) -> None:
    for number in range(3):
        for times in range(number + 1):
            columns = {"reason": f"because {number}", "died_at": AT + timedelta(minutes=times)}
            await dead(client, db, mailer, 10 * number + times, **columns)
    found = (await client.get("/dead-letters/groups", params={"limit": 1})).json()
    assert [(one["reason"], one["count"]) for one in found["items"]] == [("because 2", 3)]
    assert (found["groups"], found["looked_at"]) == (3, 6)
    late = (await client.get("/dead-letters/groups", params={"died_after": "2026-11-21T08:01:00Z"})).json()
    assert sorted((one["reason"], one["count"]) for one in late["items"]) == [("because 1", 1), ("because 2", 2)]
    assert late["looked_at"] == 3
    await client.delete("/subscriptions/mailer")
    assert (await client.get("/dead-letters/groups")).json()["items"] == []


async def test_no_more_than_the_newest_are_looked_at(
    db: Connection, client: httpx.AsyncClient, mailer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are counted in windows, until the time is over or enough are counted."""
    await many(db, 2 * GROUPED_ROWS + 7)
    every = await group_dead_letters(db, DeadLetterSearch(), 100, scan_s=60)
    assert (every.looked_at, every.complete) == (2 * GROUPED_ROWS + 7, True)
    assert sum(one.count for one in every.rows) == every.looked_at
    ends = await db.fetchrow("select min(died_at) as first_at, max(died_at) as last_at from dead_letter")
    assert ends is not None
    assert (min(one.first_at for one in every.rows), max(one.last_at for one in every.rows)) == tuple(ends)
    assert len({(one.subscription, one.reason, one.kind) for one in every.rows}) == every.count == len(every.rows)
    for of in (None, await db.fetchval("select subscription_id from subscription where name = 'mailer'")):
        newest = await group_dead_letters(db, DeadLetterSearch(subscription_id=of), 100, scan_s=0)
        assert (newest.looked_at, newest.complete) == (GROUPED_ROWS, False)
        assert max(one.last_at for one in newest.rows) == ends["last_at"]
    monkeypatch.setattr(dead_letter_store, "GROUPED_MOST", GROUPED_ROWS + 1)
    assert (await group_dead_letters(db, DeadLetterSearch(), 100, scan_s=60)).looked_at == 2 * GROUPED_ROWS
    found = (await client.get("/dead-letters/groups")).json()
    assert found["complete"] is False


async def test_pages_hold_everything_once(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    """Also where many died at the same time, as one settle writes them."""
    audit = await subscription(client, "audit")
    made = []
    for number in range(7):
        made.append(await dead(client, db, mailer, number, died_at=AT + timedelta(seconds=number // 3)))
        await bury(db, made[-1], audit, died_at=AT)
        await bury(db, made[-1], mailer, died_at=AT, replay=1)
    for query, count in (({}, 21), ({"subscription": "mailer"}, 14), ({"key": "order-3"}, 3)):
        for limit in (1, 4, 21):
            seen = []
            asked = {**query, "limit": str(limit)}
            while True:
                page = (await client.get("/dead-letters", params=asked)).json()
                assert len(page["items"]) <= limit
                seen += [
                    (one["died_at"], one["message_id"], one["subscription"], one.get("replay")) for one in page["items"]
                ]
                if page["next_cursor"] is None:
                    break
                asked["cursor"] = page["next_cursor"]
            assert len(set(seen)) == len(seen) == count
            assert [one[:2] for one in seen] == sorted((one[:2] for one in seen), reverse=True)


async def test_a_page_that_ran_out_of_time_has_a_next_page(
    db: Connection, client: httpx.AsyncClient, mailer: str
) -> None:
    await many(db, 3 * WINDOW_ROWS)
    wanted, pages, found = DeadLetterSearch(topic="rare"), 0, 0
    while True:
        rows, below = await list_dead_letters(db, wanted, 10, scan_s=0)
        pages, found = pages + 1, found + len(rows)
        if below is None:
            break
        wanted = DeadLetterSearch(topic="rare", below=below)
    assert (pages, found) == (4, 1)


@shares
@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=1001", "cursor=x", "cursor=", "topic=", "key=%00", "reason=%0a", "topi=order"),
        *("died_after=yesterday", "died_before=2026-11-21T08:00:00", "subscription="),
    ],
)
async def test_bad_filters_are_named(shared_client: httpx.AsyncClient, query: str) -> None:
    answer = await shared_client.get(f"/dead-letters?{query}")
    assert (answer.status_code, answer.json()["field"]) == (422, query.partition("=")[0])


async def test_a_dead_letter_is_shown_with_its_message(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    body = b'{"producer_group": "shop", "messages": [{"topic": "order", "key": "order-1030", "tag": "created", '
    body += b'"headers": {"Trace": "x"}, "body": { "z":1.0,  "a":[ ] }}]}'
    made = await client.post("/messages", content=body, headers={"content-type": "application/json"})
    [sent] = made.json()["messages"]
    await bury(db, sent["message_id"], mailer)
    answer = await client.get(f"/dead-letters/mailer/{sent['message_id']}")
    assert b'"body":{ "z":1.0,  "a":[ ] }' in answer.content
    assert answer.json() == {
        "subscription": "mailer",
        "message_id": sent["message_id"],
        "transaction_id": made.json()["transaction_id"],
        "producer_group": "shop",
        "topic": "order",
        "key": "order-1030",
        "tag": "created",
        "headers": {"Trace": "x"},
        "content_type": "application/json",
        "offset": sent["offset"],
        "attempts": 17,
        "first_at": "2026-11-21T00:00:00Z",
        "committed_at": (await client.get(f"/messages/{sent['message_id']}")).json()["committed_at"],
        "reason": "retries_exhausted",
        "status": 500,
        "error": "answered 500",
        "response": "no",
        "died_at": "2026-11-21T08:00:00Z",
        "redelivered": [],
        "body": {"z": 1.0, "a": []},
    }


async def test_other_bodies_and_replays_are_shown(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    raw = base64.b64encode(b"\x00\xff").decode()
    message_id = await committed(client, {"topic": "order", "body_base64": raw})
    await bury(db, message_id, mailer, replay=3, reason="too large")
    live = await client.get(f"/dead-letters/mailer/{message_id}")
    assert (live.status_code, live.json()["type"]) == (404, "/problems/dead-letter-unknown")
    shown = (await client.get(f"/dead-letters/mailer/{message_id}", params={"replay": 3})).json()
    assert (shown["replay"], shown["body_base64"], "body" in shown) == (3, raw, False)


async def test_unknown_dead_letters_are_named(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    message_id = await dead(client, db, mailer)
    for path in (f"mailer/{message_id[:-1]}1", "mailer/order-1030", f"mailer/{message_id}0000"):
        answer = await client.get(f"/dead-letters/{path}")
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/dead-letter-unknown")
    answer = await client.get(f"/dead-letters/nobody/{message_id}")
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/subscription-unknown")
    answer = await client.get(f"/dead-letters/mailer/{message_id}?replay=-1")
    assert (answer.status_code, answer.json()["field"]) == (422, "replay")


async def test_a_gauge_counts_them_for_each_subscription(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, mailer: str
) -> None:
    await subscription(client, "audit")
    for number in range(3):
        await dead(client, db, mailer, number)
    await gauges.step(runtime, runtime.clock.now())
    assert shown(runtime) == {"audit": 0, "mailer": 3}
    await drop(client, by_filter(at_most=1, subscription="mailer"))
    await client.delete("/subscriptions/audit")
    await gauges.step(runtime, runtime.clock.now())
    assert shown(runtime) == {"audit": 0, "mailer": 2}


def shown(runtime: Runtime) -> dict[str, float]:
    """The values of the gauge that `/metrics` shows, by subscription."""
    lines = runtime.metrics.exposition().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith("halfnote_dead_letters{"))
    return {series.split('"')[1]: float(value) for series, _, value in found}
