"""`GET /transactions`: filters, pages, and what the statements read."""

from datetime import timedelta
from uuid import UUID

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import app.store.coordinator.transactions as lists
from app.database.connection import Connection
from app.ids import lowest_id
from app.runtime.state import Runtime
from app.store.coordinator.transactions import FLOORS, HIGHEST, LOWEST, NEXT, PAGES
from app.verdicts import Source
from tests.conftest import register_group, shares
from tests.coordinator.test_half_end import ORDER, post_end, post_half
from tests.coordinator.test_statement_plans import full
from tests.routers.test_transactions import half_of, in_doubt
from tests.support.explain import big, scans

__all__ = ["full"]


async def test_lists_filter(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await register_group(db, "bank")
    plain = await half_of(client)
    second = await half_of(client, {"topic": "points", "key": "p-1", "body": 1}, ORDER)
    other = (await post_half(client, ORDER, producer_group="bank")).json()["transaction_id"]
    committed, rolled_back, parked = [await half_of(client) for _ in range(3)]
    await post_end(client, committed, "commit")
    await post_end(client, rolled_back, "rollback")
    await in_doubt(db, parked, 2)

    async def ids(**params: str) -> list[str]:
        page = (await client.get("/transactions", params=params)).json()
        assert page["next_cursor"] is None
        return [row["transaction_id"] for row in page["items"]]

    everything = sorted([plain, second, other, committed, rolled_back, parked], reverse=True)
    assert await ids() == everything
    assert await ids(producer_group="bank") == [other]
    assert await ids(topic="points") == [second]
    assert await ids(key="p-1") == [second]
    assert await ids(key="order-1030") == everything
    assert await ids(key="order-1030", state="committed") == [committed]
    assert await ids(key="nobody") == []
    assert await ids(state="committed") == [committed]
    assert await ids(state="rolled_back") == [rolled_back]
    assert await ids(state="parked", producer_group="shop") == [parked]
    assert await ids(state="parked", producer_group="bank") == []
    assert await ids(state="half", producer_group="shop") == sorted([plain, second], reverse=True)
    born = (await client.get(f"/transactions/{other}")).json()["born_at"]
    assert await ids(born_after=born, born_before=born) == []
    assert set(await ids(born_after=born)) | set(await ids(born_before=born)) == set(everything)
    assert other in await ids(born_after=born)


async def test_lists_filter_by_who_decided_and_by_refused_ends(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    by_producer, by_person, late, undecided = [await half_of(client) for _ in range(4)]
    await post_end(client, by_producer, "commit")
    verdict = {"verdict": "rollback", "reason": "asked the bank", "force": True}
    for one in (by_person, late):
        assert (await client.post(f"/transactions/{one}/verdict", json=verdict)).status_code == 200
    await post_end(client, late, "commit")

    async def ids(**params: str) -> set[str]:
        page = (await client.get("/transactions", params=params)).json()
        return {row["transaction_id"] for row in page["items"]}

    assert await ids(source="producer") == {by_producer}
    assert await ids(source="operator") == {by_person, late}
    assert await ids(source="policy") == set()
    assert await ids(refused_end="true") == {late}
    assert await ids(refused_end="false") == {by_producer, by_person, undecided}
    assert await ids(refused_end="true", source="producer") == set()
    assert await ids(key="order-1030", source="operator", refused_end="false") == {by_person}
    assert await ids(source="operator", state="committed") == set()
    for query in ({"source": "nobody"}, {"refused_end": "maybe"}):
        refused = await client.get("/transactions", params=query)
        assert (refused.status_code, refused.json()["field"]) == (422, next(iter(query)))


async def test_a_row_of_a_list(client: httpx.AsyncClient, group: str) -> None:
    transaction_id = await half_of(client, ORDER, ORDER)
    (row,) = (await client.get("/transactions")).json()["items"]
    shown = (await client.get(f"/transactions/{transaction_id}")).json()
    same = {name: shown[name] for name in ("transaction_id", "producer_group", "state", "born_at", "next_check_at")}
    assert row == {**same, "topic": "order", "key": "order-1030", "message_count": 2}
    await post_end(client, transaction_id, "commit")
    (row,) = (await client.get("/transactions")).json()["items"]
    assert (row["verdict"], row["source"], "next_check_at" in row) == ("commit", "producer", False)


async def test_pages_hold_everything_once(client: httpx.AsyncClient, group: str) -> None:
    made = {await half_of(client, {**ORDER, "topic": f"t{number % 3}"}) for number in range(11)}
    for params in ({}, {"topic": "t1"}, {"key": "order-1030"}):
        for limit in ("1", "3", "11"):
            seen: list[str] = []
            query = {**params, "limit": limit}
            while True:
                page = (await client.get("/transactions", params=query)).json()
                assert len(page["items"]) <= int(limit)
                seen += [row["transaction_id"] for row in page["items"]]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
            assert seen == sorted(set(seen), reverse=True)
            assert len(seen) == (4 if "topic" in params else len(made))


async def test_a_page_that_ran_out_of_time_has_a_next_page(full: Connection) -> None:
    """With no time at all a request reads one window, and the cursor leads through all of them."""
    wanted, pages = lists.TransactionFilter(topic="nobody"), 0
    while True:
        rows, high = await lists.list_transactions(full, wanted, 10, scan_s=0)
        assert rows == []
        pages += 1
        if high is None:
            break
        # A list of one group's transactions does not show another group's ids.
        assert await full.fetchval("select count(*) from half where transaction_id = $1", high) == 0
        wanted = lists.TransactionFilter(topic="nobody", high=high)
    stored = await full.fetchval("select count(*) from half where position = 0")
    assert pages == -(-stored // lists.WINDOW_ROWS)


@given(st.tuples(st.integers(0, (1 << 128) - 1), st.integers(0, (1 << 128) - 1)).filter(lambda two: two[0] != two[1]))
def test_a_boundary_is_over_the_one_and_not_over_the_other(two: tuple[int, int]) -> None:
    below, above = sorted(UUID(int=one) for one in two)
    assert below < lists.between(below, above) <= above


@shares
@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=1001", "limit=x", "cursor=x", "state=done", "stat=half", "key=%00", "topic=", "topic=%0a"),
        *("born_after=yesterday", "born_after=5", "born_after=2026-11-21T08:00:00"),
        "born_before=9999-12-31T23:59:59-23:59",
    ],
)
async def test_bad_filters_are_named(shared_client: httpx.AsyncClient, query: str) -> None:
    answer = await shared_client.get(f"/transactions?{query}")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["field"] == query.partition("=")[0]


TYPES = (
    *("uuid", "uuid", "text", "text", "text", "timestamptz", "timestamptz", "bigint", "smallint", "boolean", "boolean"),
    "text",
)


@pytest.mark.parametrize(
    ("source", "group", "state", "key"),
    [
        ("id", None, None, None),
        ("id", "shop", None, None),
        ("id", "nobody", None, None),
        ("key", None, None, "order-7"),
        ("doubt", None, "in_doubt", None),
        ("doubt", "shop", "parked", None),
    ],
)
async def test_lists_never_read_a_whole_day(
    full: Connection, source: str, group: str | None, state: str | None, key: str | None
) -> None:
    keys = [key] if key else []
    floor_types, floor_values = (*TYPES[:2], *(["text"] if key else [])), (LOWEST, HIGHEST, *keys)
    found = big(await scans(full, FLOORS[source], floor_types, floor_values, generic=False))
    found += big(await scans(full, NEXT[source], floor_types, floor_values, generic=False))
    page_types = TYPES if key else TYPES[:-1]
    floor = await full.fetchval(FLOORS[source], *floor_values)
    for more in ((None, None, None), (Source.POLICY, None, None), (None, True, None), (None, None, False)):
        values = (floor or LOWEST, HIGHEST, group, None, state, None, None, 101, *more, *keys)
        page = big(await scans(full, PAGES[source], page_types, values, generic=False))
        assert not [scan for scan in page if scan.node == "Seq Scan" and scan.rows]
        assert sum(scan.rows for scan in page) <= 4 * lists.WINDOW_ROWS
    # An empty day is rightly read without its index.
    assert not [scan for scan in found if scan.node == "Seq Scan" and scan.rows]
    assert sum(scan.rows for scan in found) <= 4 * lists.WINDOW_ROWS


async def test_a_range_of_birth_times_prunes_days(full: Connection, runtime: Runtime) -> None:
    low = lowest_id(runtime.clock.now() - timedelta(days=1, hours=1), -360)
    high = lowest_id(runtime.clock.now() - timedelta(days=1), 360)
    values = (low, high, None, None, None, None, None, 101, None, None, None)
    found = big(await scans(full, PAGES["id"], TYPES[:-1], values, generic=True))
    assert len({scan.table for scan in found if scan.table.startswith("half")}) <= 2
