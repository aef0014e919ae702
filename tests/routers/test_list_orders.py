"""Orders and counts of lists: over all pages, within the scope of a key, and with a bounded cost."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

import app.store.coordinator.transactions as lists
from app.database.connection import Connection
from app.permissions import Role
from app.routers import transactions as router
from app.schemas.totals import COUNTED_MOST
from app.store.checkback import group_rankings
from app.store.coordinator import topic_rankings
from app.store.coordinator.transactions import COUNTS, OLDEST_PAGES, TransactionFilter, count_transactions
from app.store.subscriptions import rankings
from app.store.subscriptions.dead_letters import WINDOW_ROWS, DeadLetterSearch, count_matching
from app.topic_patterns import TopicPatterns
from tests.conftest import client_of, register_group, shares
from tests.coordinator.test_half_end import ORDER, post_end, post_half
from tests.coordinator.test_statement_plans import full
from tests.routers.test_dead_letters import many
from tests.routers.test_stats_plans import SUBSCRIPTIONS, busy
from tests.routers.test_transactions import half_of, in_doubt
from tests.support.api_keys import bearer, make
from tests.support.dead_letters import bury, committed, mailer, subscription
from tests.support.explain import big, scans
from tests.support.keyed_services import start

__all__ = ["busy", "full", "mailer", "start"]

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)


async def pages(client: httpx.AsyncClient, path: str, limit: int = 2, **query: Any) -> list[dict[str, Any]]:
    """Return the items of all pages of a list."""
    found: list[dict[str, Any]] = []
    asked = {**query, "limit": limit}
    while True:
        answer = await client.get(path, params=asked)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert len(page["items"]) <= limit
        found += page["items"]
        if page["next_cursor"] is None:
            return found
        asked["cursor"] = page["next_cursor"]


async def names(client: httpx.AsyncClient, path: str, **query: Any) -> list[str]:
    return [one.get("name") or one["topic"] for one in await pages(client, path, **query)]


async def test_subscriptions_are_sorted_over_all_pages(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    for name in ("a", "b", "c", "d", "e"):
        await subscription(client, name)
    ids = [await committed(client, {"topic": "order", "body": number}) for number in range(4)]
    for name, dead in (("b", 1), ("d", 3), ("e", 1)):
        for one in ids[:dead]:
            await bury(db, one, name)
    offsets = [row[0] for row in await db.fetch('select "offset" from outbox order by "offset"')]
    move = (
        'update checkpoint c set "offset" = $2 from subscription s '
        "where s.name = $1 and s.subscription_id = c.subscription_id"
    )
    for name, offset in zip("abcde", (offsets[3], offsets[0] - 1, offsets[3], offsets[1], offsets[3]), strict=True):
        await db.execute(move, name, offset)
    assert (await client.post("/subscriptions/c/pause")).status_code == 200
    await db.execute("update subscription set state = 'disabled' where name = 'e'")
    await db.execute(
        "update checkpoint c set opened_at = now(), opened_because = 'x' from subscription s "
        "where s.name = 'd' and s.subscription_id = c.subscription_id"
    )
    await db.execute("update subscription set updated_at = now() + interval '1 h' where name = 'b'")
    await db.execute("update subscription set updated_at = now() - interval '1 h' where name <> 'b'")
    assert await names(client, "/subscriptions") == ["a", "b", "c", "d", "e"]
    for standing in ("false", "true"):
        for order, wanted in (
            ("name", ["a", "b", "c", "d", "e"]),
            ("lag", ["b", "d", "a", "c", "e"]),
            ("dead", ["d", "b", "e", "a", "c"]),
            ("state", ["e", "c", "d", "a", "b"]),
            ("changed", ["b", "a", "c", "d", "e"]),
        ):
            assert await names(client, "/subscriptions", sort=order, standing=standing) == wanted, order
    await client.delete("/subscriptions/d")
    assert await names(client, "/subscriptions", sort="dead") == ["b", "e", "a", "c"]


async def test_groups_and_topics_are_sorted_over_all_pages(client: httpx.AsyncClient, db: Connection) -> None:
    for name, undecided in (("a", 0), ("b", 1), ("c", 3), ("d", 1), ("e", 0)):
        await register_group(db, name)
        for number in range(undecided):
            message = {**ORDER, "topic": f"topic-{name}"}
            one = (await post_half(client, message, producer_group=name)).json()["transaction_id"]
            await in_doubt(db, one, 1 + number % 2)
            await db.execute(
                "update check_back set swept_at = $2, producer_group = $3 where transaction_id = $1::text::uuid",
                one,
                AT - timedelta(hours=1 if name == "d" else number / 10),
                name,
            )
    assert await names(client, "/producer-groups", sort="undecided") == ["c", "b", "d", "a", "e"]
    assert await names(client, "/producer-groups", sort="oldest") == ["d", "c", "b", "a", "e"]
    assert await names(client, "/producer-groups", sort="name") == ["a", "b", "c", "d", "e"]
    for topic, count in (("topic-d", 3), ("topic-b", 1)):
        for _ in range(count):
            sent = {"producer_group": "a", "messages": [{"topic": topic, "body": 1}]}
            assert (await client.post("/messages", json=sent)).status_code == 201
    assert await names(client, "/topics", sort="messages") == ["topic-d", "topic-b", "topic-c"]
    await db.execute("update topic set first_seen_at = now() + interval '1 h' where name = 'topic-c'")
    await db.execute("update topic set first_seen_at = now() - interval '1 h' where name = 'topic-b'")
    for traffic in ("false", "true"):
        found = await pages(client, "/topics", sort="first_seen", traffic=traffic)
        assert [one["topic"] for one in found] == ["topic-c", "topic-d", "topic-b"]
        assert [one["subscriptions"] for one in found] == [[], [], []]


async def test_a_key_gets_its_own_in_each_order(start: Any, db: Connection) -> None:
    runtime, admin = await start()
    await register_group(db, "mine-1")
    await register_group(db, "other")
    for name in ("mine-1", "mine-2", "other"):
        await subscription(admin, name, topics=[f"{name}.x"])
        sent = {"producer_group": "other", "messages": [{"topic": f"{name}.x", "body": 1}]}
        assert (await admin.post("/messages", json=sent)).status_code == 201
    subscriber = await make(runtime, Role.SUBSCRIBER, subscriptions=["mine-*"], topics=["mine-1.*"])
    producer = await make(runtime, Role.PRODUCER, producer_groups=["mine-*"], topics=["mine-2.*"])
    async with client_of(runtime) as client:
        for key, path, orders, wanted in (
            (subscriber, "/subscriptions", ("name", "lag", "dead", "state", "changed"), ["mine-1", "mine-2"]),
            (producer, "/producer-groups", ("name", "undecided", "oldest"), ["mine-1"]),
            (producer, "/topics", ("name", "messages", "first_seen"), ["mine-2.x"]),
        ):
            client.headers.update(bearer(key))
            for order in orders:
                assert sorted(await names(client, path, sort=order)) == wanted, (path, order)
                page = (await client.get(path, params={"sort": order, "count": "true", "limit": 1})).json()
                assert page["total"] == {"count": len(wanted), "exact": True}


async def test_keys_are_sorted_over_all_pages(start: Any, db: Connection) -> None:
    runtime, admin = await start()
    for name in ("c", "a", "d", "b"):
        await make(runtime, Role.METRICS, name=name)
    for name, minutes in (("a", 3), ("b", 1), ("c", 2)):
        await db.execute("update api_key set last_used_at = $2 where name = $1", name, AT - timedelta(minutes=minutes))
    for order, wanted in (("newest", "bdac"), ("name", "abcd"), ("used", "bcad")):
        assert "".join(await names(admin, "/api-keys", sort=order)) == wanted
        page = (await admin.get("/api-keys", params={"sort": order, "count": "true", "limit": 1})).json()
        assert page["total"] == {"count": 4, "exact": True}
    assert (await admin.get("/api-keys")).json().get("total") is None


@shares
@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/subscriptions", "sort=nothing"),
        ("/producer-groups", "sort=lag"),
        ("/topics", "sort=x"),
        ("/transactions", "sort=age"),
        ("/dead-letters/groups", "sort=x"),
        ("/subscriptions", "cursor=x&sort=lag"),
        ("/producer-groups", "cursor=-1&sort=oldest"),
        ("/topics", "cursor=%D9%A1&sort=messages"),
        ("/topics", "cursor=1234567890&sort=messages"),
        ("/transactions", "count=x"),
        ("/api-keys", "sort=role"),
        ("/audit", "sort=actor"),
    ],
)
async def test_what_is_no_order_is_named(shared_client: httpx.AsyncClient, path: str, query: str) -> None:
    answer = await shared_client.get(f"{path}?{query}")
    assert (answer.status_code, answer.json()["field"]) == (422, query.partition("=")[0])


async def test_a_list_is_counted_only_if_asked(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    first = await committed(client, {"topic": "order", "key": "k", "body": 1})
    await bury(db, first, "mailer")
    await bury(db, await committed(client, {"topic": "order", "body": 2}), "mailer", error="other")
    await client.put("/topics/refund")
    of_all = {"/subscriptions": 1, "/producer-groups": 1, "/topics": 2, "/transactions": 2, "/dead-letters": 2}
    for path, count in of_all.items():
        assert (await client.get(path)).json().get("total") is None
        page = (await client.get(path, params={"count": "true", "limit": 1})).json()
        assert page["total"] == {"count": count, "exact": True}, path
        if page["next_cursor"]:
            # The total is that of the whole list.
            query = {"count": "true", "limit": 1, "cursor": page["next_cursor"]}
            assert (await client.get(path, params=query)).json()["total"]["count"] == count
    for path, query, count in (
        ("/transactions", {"key": "k"}, 1),
        ("/transactions", {"state": "rolled_back"}, 0),
        ("/transactions", {"state": "committed", "producer_group": "shop"}, 2),
        ("/dead-letters", {"error": "other"}, 1),
        ("/dead-letters", {"subscription": "mailer", "key": "k"}, 1),
        ("/dead-letters", {"topic": "refund"}, 0),
    ):
        assert (await client.get(path, params={**query, "count": "true"})).json()["total"]["count"] == count, query


async def test_groups_of_dead_letters_are_sorted(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    for name in ("a", "b"):
        await subscription(client, name)
    for error, name, count, hours in (("often", "a", 3, 5), ("late", "b", 1, 0), ("early", "b", 2, 9)):
        for number in range(count):
            one = await committed(client, {"topic": "order", "body": number})
            await bury(db, one, name, error=error, died_at=AT - timedelta(hours=hours, minutes=number))
    for order, wanted in (
        (None, ["often", "early", "late"]),
        ("count", ["often", "early", "late"]),
        ("last", ["late", "often", "early"]),
        ("first", ["early", "often", "late"]),
        ("subscription", ["often", "early", "late"]),
    ):
        query = {} if order is None else {"sort": order}
        found = (await client.get("/dead-letters/groups", params=query)).json()
        assert [one["error"] for one in found["items"]] == wanted, order
        [first] = (await client.get("/dead-letters/groups", params={**query, "limit": "1"})).json()["items"]
        assert first["error"] == wanted[0]


async def test_transactions_oldest_first(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    made = [await half_of(client, {**ORDER, "topic": f"t{number % 3}"}) for number in range(11)]
    for one in made[:6]:
        await in_doubt(db, one)
    await post_end(client, made[2], "commit")
    for query, wanted in (
        ({}, made),
        ({"topic": "t1"}, made[1::3]),
        ({"key": "order-1030"}, made),
        ({"state": "in_doubt"}, [*made[:2], *made[3:6]]),
        ({"state": "committed", "producer_group": "shop"}, [made[2]]),
    ):
        for limit in (1, 3, 11):
            found = await pages(client, "/transactions", limit, sort="oldest", **query)
            # Ids of the same millisecond are in any order.
            assert [one["transaction_id"] for one in found] == sorted(wanted), (query, limit)


async def test_a_page_of_the_oldest_that_ran_out_of_time_has_a_next_page(full: Connection) -> None:
    wanted, read = TransactionFilter(topic="nobody"), 0
    while True:
        rows, low = await lists.list_transactions(full, wanted, 10, oldest_first=True, scan_s=0)
        assert rows == []
        read += 1
        if low is None:
            break
        # A list of one group's transactions does not show another group's ids.
        assert await full.fetchval("select count(*) from half where transaction_id = $1", low) == 0
        wanted = TransactionFilter(topic="nobody", low=low)
    stored = await full.fetchval("select count(*) from half where position = 0")
    assert read == -(-stored // lists.WINDOW_ROWS)
    # Both orders have the same transactions.
    newest, _ = await lists.list_transactions(full, TransactionFilter(), stored, scan_s=60)
    oldest, _ = await lists.list_transactions(full, TransactionFilter(), stored, oldest_first=True, scan_s=60)
    assert len(oldest) == stored
    assert [one.transaction_id for one in oldest] == [one.transaction_id for one in reversed(newest)]


async def test_a_page_that_ran_out_of_time_is_not_counted_again(
    client: httpx.AsyncClient, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        await half_of(client, ORDER)
    counted = []

    async def out_of_time(connection: Connection, wanted: TransactionFilter, limit: int, **order: bool) -> Any:
        return await lists.list_transactions(connection, wanted, min(limit, 2), **order)

    async def count(*arguments: Any) -> tuple[int, bool]:
        counted.append(arguments)
        return await count_transactions(*arguments)

    monkeypatch.setattr(router, "list_transactions", out_of_time)
    monkeypatch.setattr(router, "count_transactions", count)
    page = (await client.get("/transactions", params={"count": "true"})).json()
    assert (len(page["items"]), page["total"], counted) == (2, {"count": 2, "exact": False}, [])
    # The other pages are short too, but do not have the rows of those before.
    for number, items in enumerate((2, 1), 1):
        query = {"count": "true", "cursor": page["next_cursor"]}
        page = (await client.get("/transactions", params=query)).json()
        assert (len(page["items"]), page["total"], len(counted)) == (items, {"count": 5, "exact": True}, number)


async def test_counting_ends_with_its_time_or_its_limit(full: Connection) -> None:
    stored = await full.fetchval("select count(*) from half where position = 0")
    assert stored > 2 * lists.WINDOW_ROWS
    assert await count_transactions(full, TransactionFilter(), stored, scan_s=60) == (stored, True)
    assert await count_transactions(full, TransactionFilter(), stored - 1, scan_s=60) == (stored - 1, False)
    assert await count_transactions(full, TransactionFilter(), stored, scan_s=0) == (lists.WINDOW_ROWS, False)
    assert await count_transactions(full, TransactionFilter(topic="nobody"), 10, scan_s=60) == (0, True)
    assert await count_transactions(full, TransactionFilter(topic="nobody"), 10, scan_s=0) == (0, False)


async def test_counting_dead_letters_ends_with_its_time_or_its_limit(
    client: httpx.AsyncClient, db: Connection, mailer: str
) -> None:
    await many(db, 3 * WINDOW_ROWS)
    stored = await db.fetchval("select count(*) from dead_letter")
    of = await db.fetchval("select subscription_id from subscription where name = 'mailer'")
    for search in (DeadLetterSearch(), DeadLetterSearch(subscription_id=of)):
        assert await count_matching(db, search, stored, scan_s=60) == (stored, True)
        assert await count_matching(db, search, 10, scan_s=60) == (10, False)
        assert await count_matching(db, search, stored, scan_s=0) == (WINDOW_ROWS, False)
    own = DeadLetterSearch(subscription_id=of, topics=TopicPatterns(["nothing"]))
    assert await count_matching(db, own, stored, scan_s=60) == (0, True)


async def test_counts_and_the_oldest_never_read_a_whole_day(full: Connection) -> None:
    types = ["uuid", "uuid", "text", "text", "text", "timestamptz", "timestamptz", "bigint", "smallint", "boolean"]
    for source, more, keys in (("id", [], []), ("key", ["text"], ["order-7"]), ("doubt", [], [])):
        place = (lists.LOWEST, lists.HIGHEST, *keys)
        ceiling = await full.fetchval(lists.CEILINGS[source], *place)
        floors = [lists.CEILINGS[source], lists.NEXT_OLDEST[source]]
        found = []
        for statement in floors:
            found += big(await scans(full, statement, [*types[:2], *more], place, generic=False))
        values = (lists.LOWEST, ceiling or lists.HIGHEST, *[None] * 5, COUNTED_MOST, *[None] * 3, *keys)
        for statements in (OLDEST_PAGES, COUNTS):
            found += big(await scans(full, statements[source], [*types, "boolean", *more], values, generic=False))
            # Four tables, each probed once for a row of the window.
            assert sum(scan.rows for scan in found) <= 8 * lists.WINDOW_ROWS, source
        assert not [scan for scan in found if scan.node == "Seq Scan" and scan.rows], source


@pytest.mark.parametrize("generic", [False, True])
async def test_orders_read_small_tables_and_short_ranges(busy: Connection, generic: bool) -> None:
    scope = ("bigint", "bigint", "text[]", "text[]")
    for statement in rankings.RANKED.values():
        found = big(await scans(busy, statement, scope, (0, 51, None, []), generic=generic))
        assert not [scan for scan in found if scan.node == "Seq Scan" and scan.rows], statement
        assert sum(scan.rows for scan in found) <= SUBSCRIPTIONS * (rankings.DEAD_MOST + 1)
    for statement in group_rankings.RANKED.values():
        found = big(await scans(busy, statement, scope, (0, 51, None, []), generic=generic))
        # check_back is small: it is read up to a limit.
        assert sum(scan.rows for scan in found if scan.table == "check_back") <= group_rankings.UNDECIDED_MOST
        assert not [scan for scan in found if scan.table != "check_back"], statement
    for order in topic_rankings.RANKED.values():
        found = big(await scans(busy, order, ("bigint", "bigint", "text[]"), (0, 51, None), generic=generic))
        assert not [scan for scan in found if scan.node == "Seq Scan" and scan.rows], order
        assert sum(scan.rows for scan in found) <= topic_rankings.LOG_LOOKS_AT + 100
