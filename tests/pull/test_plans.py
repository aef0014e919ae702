"""The plans of the statements of claims over full days: a short range of the log, keyed reads elsewhere."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest

from app.database.connection import Connection
from app.store.pull.claims import (
    ACKNOWLEDGE,
    CLAIM_FURTHER,
    CLAIM_NEW,
    CLAIM_NEXT,
    SETTLED,
    ClaimStatement,
    HeldMessage,
)
from app.store.pull.held_retries import HELD, LOCK_HELD
from app.store.pull.ordered_claims import CLAIM_FURTHER_IN_ORDER, CLAIM_NEW_IN_ORDER, CLAIM_STORED_IN_ORDER, FULL
from app.store.pull.sweeps import CLAIMS_AT_ONCE, PUT_OFF, PUT_OFF_AT_ONCE, TAKE_OVER, put_off
from app.store.pull.waiting import CLAIMABLE, SPAN
from app.store.pull.waiting_limits import LOCK_WAITING, OLDEST, OLDEST_AHEAD, PASS_OVER, PASSER, WAITING_ROWS
from app.store.pull.waiting_limits import SPAN as SPAN_PASSED
from app.store.relay.log import NEWEST, Reader
from app.store.subscriptions.subscriptions import Route
from app.topic_patterns import TopicPatterns
from tests.coordinator.test_statement_plans import DAYS, full
from tests.relay.test_plans import BOTH_PLANS, ends, scans_of, sequential_scans
from tests.support.explain import big, scans

__all__ = ["full"]

ROOM, READ = 50, 100
NOW = datetime.now(UTC)
UNTIL = NOW + timedelta(seconds=30)
SUBSCRIPTION = """
insert into subscription (subscription_id, name, topics, destination, ordered, on_dead, shards, max_in_flight,
  timeout_s, retry, start, state, created_at, updated_at, started_after, matches_since, secrets)
overriding system value
values (1, 'worker', '{}', '{"type": "pull"}', 'none', 'release', 1, 1,
  1, '{}', 'null', 'active', now(), now(), 0, now(), '[]')
returning xmin::text
"""
CURSOR = """
insert into pull_cursor (subscription_id, "offset") values (1, $1)
on conflict (subscription_id) do update set "offset" = $1
"""


@BOTH_PLANS
@pytest.mark.parametrize("statement", [CLAIM_NEW, CLAIM_NEXT, CLAIM_FURTHER])
async def test_a_claim_reads_a_short_range_of_the_log(
    full: Connection, generic: bool, statement: ClaimStatement
) -> None:
    low, high = await ends(full)
    version = await full.fetchval(SUBSCRIPTION)
    await full.execute(CURSOR, (low + high) // 2)
    reader = Reader(1, 0, Route(TopicPatterns(["ord*"]), None, None), 1, 0, 0, NEWEST)
    parameters, sql = statement.of(reader)
    asked = {"version": version, "room": ROOM, "span": READ, "held_until": UNTIL, "sweep_at": UNTIL, "now": NOW}
    found = big(await scans(full, sql, parameters.types, parameters.arguments(reader, **asked), generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= READ + DAYS
    assert all("offset" in (scan.index or "offset") for scan in scans_of(found, "outbox"))
    assert sum(scan.rows for scan in scans_of(found, "half")) == ROOM
    assert all("pkey" in (scan.index or "") for scan in scans_of(found, "half"))


@BOTH_PLANS
@pytest.mark.parametrize("statement", [CLAIM_NEW_IN_ORDER, CLAIM_FURTHER_IN_ORDER])
async def test_a_claim_in_the_order_of_keys_reads_a_short_range_of_the_log(
    full: Connection, generic: bool, statement: ClaimStatement
) -> None:
    low, high = await ends(full)
    version = await full.fetchval(SUBSCRIPTION)
    await full.execute(CURSOR, (low + high) // 2)
    # As on the connections of these statements; a scan of one page costs less than an index.
    await full.execute("set enable_seqscan = off")
    reader = Reader(1, 0, Route(TopicPatterns(["ord*"]), None, None), 1, 0, 0, NEWEST)
    parameters, sql = statement.of(reader)
    asked = {"version": version, "room": ROOM, "span": READ, "held_until": UNTIL, "sweep_at": UNTIL, "now": NOW}
    asked["hold"] = True
    found = big(await scans(full, sql, parameters.types, parameters.arguments(reader, **asked), generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= READ + DAYS
    assert sum(scan.rows for scan in scans_of(found, "half")) == ROOM
    assert all("pkey" in (scan.index or "") for scan in scans_of(found, "half"))


@BOTH_PLANS
async def test_a_claim_of_stored_messages_in_order_reads_each_row_twice(full: Connection, generic: bool) -> None:
    rows = await full.fetch('select transaction_id, position, "offset" from outbox order by "offset" limit 500')
    await full.executemany(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts, '
        "due_at) values (1, $1, $2, $3, 'order', 'k' || $3::bigint % 7, 0, $4)",
        [(*row, NOW - timedelta(minutes=1)) for row in rows],
    )
    await full.execute("analyze delivery_retry; set enable_seqscan = off")
    types = ["int", "int", "timestamptz", "timestamptz", "bool", "text"]
    found = await scans(full, CLAIM_STORED_IN_ORDER, types, [1, ROOM, UNTIL, NOW, True, None], generic=generic)
    assert sequential_scans(big(found)) == []
    # Once to find the keys, once to find the order, and once for each row that is taken.
    assert sum(scan.rows for scan in found if scan.table == "delivery_retry") <= 2 * 500 + ROOM


@BOTH_PLANS
async def test_delayed_messages_cost_a_claim_in_the_order_of_keys_little(full: Connection, generic: bool) -> None:
    rows = await full.fetch('select transaction_id, position, "offset" from outbox order by "offset" limit 500')
    await full.executemany(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts, '
        "due_at, waiting_since) values (1, $1, $2, $3, 'order', 'k' || $3::bigint, 0, $4, $4)",
        [(*row, NOW + timedelta(minutes=1 if n < 480 else -1)) for n, row in enumerate(rows)],
    )
    await full.execute("analyze delivery_retry; set enable_seqscan = off")
    types = ["int", "timestamptz"]
    found = await scans(full, f"select {FULL.format('$1', '$2')}", types, [1, NOW], generic=generic)
    assert sequential_scans(found) == []
    # Those that are due, and in an index all of them, up to ROWS_MOST.
    assert sorted(scan.rows for scan in found) == [20, 500]
    # The log is asked for the messages that are taken, not for those of other keys that may be delayed.
    types = ["int", "int", "timestamptz", "timestamptz", "bool", "text"]
    found = await scans(full, CLAIM_STORED_IN_ORDER, types, [1, ROOM, UNTIL, NOW, True, None], generic=generic)
    assert sequential_scans(big(found)) == []
    assert 0 < sum(scan.rows for scan in scans_of(found, "outbox")) <= 20


@BOTH_PLANS
async def test_a_look_for_waiting_claims_reads_a_short_range(full: Connection, generic: bool) -> None:
    low, high = await ends(full)
    await full.execute(CURSOR, (low + high) // 2)
    types = ["int[]", "int[]", "timestamptz"]
    found = big(await scans(full, CLAIMABLE, types, [[1], [10], NOW], generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= SPAN + DAYS


@BOTH_PLANS
async def test_what_is_passed_over_is_a_short_range_of_the_log(full: Connection, generic: bool) -> None:
    low, high = await ends(full)
    await full.execute(CURSOR, (low + high) // 2)
    await full.execute("set enable_seqscan = off")
    reader = Reader(1, 0, Route(TopicPatterns(["ord*"]), None, None), 1, 0, 0, NEWEST)
    await full.execute(SUBSCRIPTION)
    since = await full.fetchval("select matches_since from subscription")
    for statement, parameters, given in (
        (PASS_OVER, PASSER, {"room": ROOM, "before": NOW, "now": NOW, "matches_since": since}),
        (OLDEST_AHEAD, OLDEST, {"after": (low + high) // 2}),
    ):
        arguments = parameters.arguments(reader, **given)
        found = big(await scans(full, statement, parameters.types, arguments, generic=generic))
        assert sequential_scans(found) == []
        assert sum(scan.rows for scan in scans_of(found, "outbox")) <= SPAN_PASSED + DAYS
        assert scans_of(found, "half") == []


@BOTH_PLANS
async def test_what_waits_is_found_by_its_time(full: Connection, generic: bool) -> None:
    rows = await full.fetch('select transaction_id, position, "offset" from outbox order by "offset" limit 500')
    await full.executemany(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, due_at, '
        "waiting_since) values (1, $1, $2, $3, 'order', 0, $4, $4)",
        [(*row, NOW - timedelta(seconds=n)) for n, row in enumerate(rows)],
    )
    await full.execute("analyze delivery_retry; set enable_seqscan = off")
    for statement, types, arguments in (
        (LOCK_WAITING, ["int", "timestamptz", "int", "bool"], [1, NOW, ROOM, True]),
        (WAITING_ROWS, ["int", "timestamptz", "int"], [1, NOW, ROOM]),
    ):
        found = await scans(full, statement, types, arguments, generic=generic)
        of_rows = [scan for scan in found if scan.table == "delivery_retry" and scan.rows]
        assert {scan.index for scan in of_rows} == {"delivery_retry_waiting"}
        assert sum(scan.rows for scan in of_rows) <= ROOM


@BOTH_PLANS
async def test_an_acknowledgement_reads_no_message(full: Connection, generic: bool) -> None:
    rows = await full.fetch('select transaction_id, position, "offset" from outbox order by "offset" limit 20')
    claim_id = await full.fetchval(
        "insert into pull_claim (subscription_id, lowest, size, claimed_at, held_until, sweep_at, transaction_ids, "
        "positions) values (1, 1, 20, $1, $2, $2, $3, $4) returning claim_id",
        NOW,
        UNTIL,
        [row["transaction_id"] for row in rows],
        [row["position"] for row in rows],
    )
    # As on the connections of these statements; a scan of one page costs less than an index.
    await full.execute("set enable_seqscan = off")
    digest = sha256(b"x").digest()
    messages = [HeldMessage(1, 0, claim_id, n, 1, *row, NOW, digest) for n, row in enumerate(rows, 1)]
    types = ["int", "timestamptz", "text", *SETTLED.types]
    arguments = [1, NOW, None, *SETTLED.arrays(messages)]
    found = await scans(full, ACKNOWLEDGE, types, arguments, generic=generic)
    assert big(found) == []
    # The row is found by its key, in each part that locks, deletes or keeps it.
    assert all("pkey" in (scan.index or "") for scan in found if scan.table == "pull_claim" and scan.rows)


@BOTH_PLANS
async def test_held_rows_are_found_by_their_key_whatever_the_plan_was_made_for(full: Connection, generic: bool) -> None:
    rows = await full.fetch('select transaction_id, position from outbox order by "offset" limit 500')
    await full.executemany(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, '
        "due_at, leased_until, lease_epoch) values (1, $1, $2, 1, 'order', 0, $3, $4, $4, 7)",
        [(*row, NOW, UNTIL) for row in rows],
    )
    messages = [HeldMessage(1, 0, 7, 0, 1, *row, 1, NOW, b"") for row in rows[:50]]
    types = ["int", "timestamptz", *HELD.types]
    found = await scans(full, LOCK_HELD, types, [1, NOW, *HELD.arrays(messages)], generic=generic)
    of_rows = [scan for scan in found if scan.table == "delivery_retry"]
    # One row for each handle by the key, and one by its place.
    assert {scan.index for scan in of_rows} == {"delivery_retry_pkey", None}
    assert sum(scan.rows for scan in of_rows) <= 2 * 50


@BOTH_PLANS
async def test_claims_that_wait_for_a_day_are_read_once_and_then_passed_by_the_index(
    full: Connection, generic: bool
) -> None:
    rows = await full.fetch("select transaction_id, position from outbox order by transaction_id limit 100")
    await full.executemany(
        "insert into pull_claim (subscription_id, lowest, size, claimed_at, held_until, sweep_at, transaction_ids, "
        "positions) values (1, $1, 100, $2, $2, $2, $3, $4)",
        [
            (n, NOW - timedelta(hours=1, seconds=n), [row[0] for row in rows], [row[1] for row in rows])
            for n in range(3 * PUT_OFF_AT_ONCE)
        ],
    )
    # As on the connections of these statements; a scan of one page costs less than an index.
    await full.execute("analyze pull_claim; set enable_seqscan = off")

    async def read(statement: str) -> float:
        found = await scans(full, statement, ["timestamptz"], [NOW], generic=generic)
        assert sequential_scans(found) == []
        return sum(scan.rows for scan in found if scan.table == "pull_claim")

    # Nothing to put off, and few to take over.
    assert await read(PUT_OFF) == 0
    assert await read(TAKE_OVER) <= 3 * CLAIMS_AT_ONCE
    await full.execute("update day set state = 'archiving' where low <= $1 and high > $1", rows[0]["transaction_id"])
    # Each once to look at it, and once to put it off.
    assert PUT_OFF_AT_ONCE <= await read(PUT_OFF) <= 2 * PUT_OFF_AT_ONCE
    for _ in range(3):
        assert await put_off(full, NOW) == PUT_OFF_AT_ONCE
    assert await put_off(full, NOW) == 0
    assert await read(PUT_OFF) == await read(TAKE_OVER) == 0
