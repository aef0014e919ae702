"""The plans of the relay's statements over full days: a short index range of the log, keyed reads elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from app.database.connection import Connection
from app.ids import day_bounds, id_day
from app.store.checkback.group_standing import ANSWERS, STANDING
from app.store.coordinator.topic_traffic import LOG_LOOKS_AT, TRAFFIC, TRAFFIC_SPAN
from app.store.relay.checkpoints import START_POSITIONS
from app.store.relay.expiry import CLAIM_WAITING, COUNTER, MATCHING_AHEAD, WAITING
from app.store.relay.lag import EARLIEST, LAG, LATEST, SINCE
from app.store.relay.leases import Lease
from app.store.relay.log import LOG_HEAD, NEWEST, READER, SPAN, WINDOW, Reader
from app.store.relay.page_standing import ENTRIES_MOST, PAGE_STANDING
from app.store.relay.results import (
    FIRST_TRIES,
    OUTCOMES,
    SETTLE,
    SETTLE_FIRST_TRIES,
    SETTLE_NEW_FIRST_TRIES,
    STREAMS,
    Batch,
)
from app.store.relay.retries import CLAIM_RETRIES, CLAIMANTS, Claimant
from app.store.relay.unrouted import INACTIVE, TOPICS_AFTER
from app.store.retention.day_dead_letters import BODIES_AT_ONCE, KEEP_BODIES
from app.store.retention.days import partition_name
from app.store.subscriptions.subscriptions import Route
from app.topic_patterns import TopicPatterns
from tests.coordinator.test_statement_plans import DAYS, full
from tests.support.explain import Scan, big, scans

__all__ = ["full"]

BOTH_PLANS = pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
TAKEN = 64


def sequential_scans(found: list[Scan]) -> list[Scan]:
    """Return scans of whole tables; for an empty partition and for the small table `day`, that is the best plan."""
    return [scan for scan in found if scan.node == "Seq Scan" and scan.rows and scan.table != "day"]


def scans_of(found: list[Scan], table: str) -> list[Scan]:
    return [scan for scan in found if scan.table.startswith(f"{table}_2")]


async def ends(db: Connection) -> tuple[int, int]:
    row = await db.fetchrow('select min("offset"), max("offset") from outbox')
    assert row is not None
    return row[0] - 1, row[1]


def window_of(after: int, patterns: list[str], headers: str | None = None, settled_to: int = 0) -> list[Any]:
    route = Route(TopicPatterns(patterns), None, headers)
    reader = Reader(subscription_id=1, replay=0, route=route, shards=1, shard=0, settled_to=settled_to)
    return READER.arguments(reader, after=after, at_most=TAKEN)


@BOTH_PLANS
@pytest.mark.parametrize("where", ["first", "middle", "head"])
@pytest.mark.parametrize(
    ("patterns", "taken"),
    [(["order"], TAKEN), (["ord*"], TAKEN), (["none", "no.*"], 0)],
    ids=["topic", "prefix", "nothing"],
)
async def test_the_window_is_a_short_index_range(
    full: Connection, generic: bool, where: str, patterns: list[str], taken: int
) -> None:
    low, high = await ends(full)
    after = {"first": low, "middle": (low + high) // 2, "head": high}[where]
    found = big(await scans(full, WINDOW, READER.types, window_of(after, patterns), generic=generic))
    assert sequential_scans(found) == []
    # One row more in each day: a merge reads the next row of every partition before it stops.
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= SPAN + DAYS
    assert all("offset" in (scan.index or "offset") for scan in scans_of(found, "outbox"))
    expected = 0 if where == "head" else taken
    assert sum(scan.rows for scan in scans_of(found, "half")) == expected
    assert all("pkey" in (scan.index or "") for scan in scans_of(found, "half"))


@BOTH_PLANS
async def test_a_header_filter_reads_half_by_key_and_only_in_the_messages_own_day(
    full: Connection, generic: bool
) -> None:
    low, _ = await ends(full)
    arguments = window_of(low, ["order"], '{"region": "eu"}')
    found = big(await scans(full, WINDOW, READER.types, arguments, generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "half")) == SPAN
    days = await full.fetch(
        'select transaction_id from outbox where "offset" > $1 order by "offset" limit $2', low, SPAN
    )
    assert {s.table for s in scans_of(found, "half")} == {partition_name("half", id_day(row[0])) for row in days}


@BOTH_PLANS
async def test_after_a_takeover_receipts_are_looked_up_by_key(full: Connection, generic: bool) -> None:
    low, _ = await ends(full)
    await full.execute(
        """insert into receipt select transaction_id, 0, 1, "offset", 'delivered', 1, now(), 1, 200, null, now(), 0
           from outbox"""
    )
    await full.execute("analyze receipt")
    arguments = window_of(low, ["order"], settled_to=NEWEST)
    found = big(await scans(full, WINDOW, READER.types, arguments, generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "receipt")) <= SPAN
    assert sum(scan.rows for scan in scans_of(found, "half")) == 0


@BOTH_PLANS
async def test_a_settle_touches_its_own_rows(full: Connection, generic: bool) -> None:
    ids = [row[0] for row in await full.fetch('select transaction_id from outbox order by "offset" limit 64')]
    await full.execute("insert into lease values ('relay:1:1:0', 'one', 1, now())")
    await full.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) values (1, 1, 0, 0, now())'
    )
    await full.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, '
        "due_at) select n % 50, gen_random_uuid(), 0, n, 'order', 1, now(), now() from generate_series(1, 20000) n"
    )
    await full.execute(
        "insert into postponement select gen_random_uuid(), 0, n % 50, 0, 1, 'probe', 'x', now(), now(), 1 "
        "from generate_series(1, 20000) n"
    )
    await full.execute("analyze delivery_retry, postponement")
    now, count = datetime.now(UTC), len(ids)
    streams = STREAMS.arrays([Batch(Lease("relay:1:1:0", "one", 1), 1, 0, 1, 0, 7, now, "http://x", [])])
    outcome = outcomes(
        ids,
        claim=[None] * count,
        result=["delivered", "retry", "dead", "note"] * (count // 4),
        what=["failed", "postponed", "failed", "probe"] * (count // 4),
    )
    types = ["text", "timestamptz", *STREAMS.types, *FIRST_TRIES.types]
    arguments = ["one", now, *streams, *(outcome[name] for name in FIRST_TRIES.names)]
    for statement in (SETTLE_FIRST_TRIES, SETTLE_NEW_FIRST_TRIES):
        assert big(await scans(full, statement, types, arguments, generic=generic)) == []
    arguments += [outcome[name] for name in OUTCOMES.names]
    found = await scans(full, SETTLE, [*types, *OUTCOMES.types], arguments, generic=generic, parts=True)
    assert big(found) == []
    retries = [scan for scan in found if scan.table == "delivery_retry"]
    assert sum(scan.rows for scan in retries) <= 2 * count
    assert searched(found, count) == []


@BOTH_PLANS
@pytest.mark.parametrize("result", ["delivered", "retry", "dead"])
async def test_a_large_settle_of_retries_reads_each_message_once_in_each_part(
    full: Connection, generic: bool, result: str
) -> None:
    ids = [row[0] for row in await full.fetch('select transaction_id from outbox order by "offset" limit 200')]
    now, claim = datetime.now(UTC), 3
    await full.execute("insert into lease values ('relay:1:1:0', 'one', 1, now())")
    await full.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, '
        "due_at, leased_until, lease_epoch) select 1, id, 0, 5, 'order', 1, $2, $2, $2, $3 from unnest($1::uuid[]) id",
        ids,
        now,
        claim,
    )
    await full.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) values (1, 1, 0, 0, now())'
    )
    await full.execute("analyze delivery_retry")
    streams = STREAMS.arrays([Batch(Lease("relay:1:1:0", "one", 1), 1, 0, 1, 0, 7, now, "http://x", [])])
    count = len(ids)
    outcome = outcomes(ids, claim=[claim] * count, result=[result] * count, what=["failed"] * count)
    types = ["text", "timestamptz", *STREAMS.types, *FIRST_TRIES.types, *OUTCOMES.types]
    arguments = ["one", now, *streams, *([] for _ in FIRST_TRIES.names), *(outcome[name] for name in OUTCOMES.names)]
    found = await scans(full, SETTLE, types, arguments, generic=generic, parts=True)
    assert searched(found, count) == []
    assert sum(scan.rows for scan in found if scan.table == "delivery_retry") == count


def outcomes(ids: list[UUID], *, claim: list[int | None], result: list[str], what: list[str]) -> dict[str, list[Any]]:
    """Return the columns of OUTCOMES for messages of one stream."""
    now, count = datetime.now(UTC), len(ids)
    return {
        "n": [1] * count,
        "transaction_id": ids,
        "position": [0] * count,
        "offset": list(range(count)),
        "topic": ["order"] * count,
        "key": [None] * count,
        "claim": claim,
        "waits_from": [now] * count,
        "result": result,
        "attempts": [1] * count,
        "first_at": [now] * count,
        "due_at": [now] * count,
        "digest": [b"x"] * count,
        "what": what,
        "status": [1] * count,
        "duration_ms": [1] * count,
        "error": ["x"] * count,
        "response": ["x"] * count,
        "reason": ["x"] * count,
        "at": [now] * count,
    }


def searched(found: Sequence[Scan], count: int) -> list[Scan]:
    """Return the parts of a settle of `count` messages that were read more than once.

    A part that is searched for each message makes a large settle take minutes.
    """
    return [scan for scan in found if scan.node == "CTE Scan" and scan.rows > count]


@BOTH_PLANS
@pytest.mark.parametrize("ordered", [False, True])
async def test_due_retries_are_a_short_range_and_their_messages_keyed_reads(
    full: Connection, generic: bool, ordered: bool
) -> None:
    await full.execute(
        """insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts,
             first_at, due_at)
           select 1 + n % 20, transaction_id, 0, "offset", topic, 'k' || n, 1, now(), now() + n * interval '1 s'
           from (select *, row_number() over (order by "offset") as n from outbox) o"""
    )
    await full.execute("analyze delivery_retry")
    at = await full.fetchval("select max(first_at) + interval '20 s' from delivery_retry")
    ids = list(range(1, 21))
    await full.execute(
        "insert into lease select 'relay:' || n || ':1:0', 'one', 1, now() from generate_series(1, 20) n"
    )
    streams = [Claimant(Lease(f"relay:{n}:1:0", "one", 1), n, 0, 1, 0, 32, ordered=ordered, hold=False) for n in ids]
    arguments = [*CLAIMANTS.arrays(streams), "one", at, at]
    types = [*CLAIMANTS.types, "text", "timestamptz", "timestamptz"]
    found = await scans(full, CLAIM_RETRIES, types, arguments, generic=generic)
    assert [scan for scan in sequential_scans(found) if scan.table != "lease"] == []
    # For the length of the body, and for the message.
    assert sum(scan.rows for scan in scans_of(found, "half")) == 2 * 20
    assert sum(scan.rows for scan in scans_of(found, "outbox")) == 20
    # Many are due, and there is room for few.
    later = await full.fetchval("select max(first_at) + interval '2 days' from delivery_retry")
    arguments = [*arguments[:-2], later, later]
    found = await scans(full, CLAIM_RETRIES, types, arguments, generic=generic)
    assert [scan for scan in sequential_scans(found) if scan.table != "lease"] == []
    assert sum(scan.rows for scan in scans_of(found, "half")) == 2 * 20 * 32
    # The log is read up to the tenth of them.
    tenth = await full.fetchval('select "offset" from delivery_retry order by "offset" offset 199 limit 1')
    arguments = [*CLAIMANTS.arrays([replace(stream, reached=tenth) for stream in streams]), "one", later, later]
    found = await scans(full, CLAIM_RETRIES, types, arguments, generic=generic)
    assert [scan for scan in sequential_scans(found) if scan.table != "lease"] == []
    assert sum(scan.rows for scan in scans_of(found, "half")) == 2 * 20 * (10 if ordered else 32)
    assert not [scan for scan in found if scan.index == "delivery_retry_offset"]
    # Nothing is claimed in the order of keys, though all are due.
    arguments = [*CLAIMANTS.arrays([replace(stream, reached=0) for stream in streams]), "one", later, later]
    found = await scans(full, CLAIM_RETRIES, types, arguments, generic=generic)
    assert [scan for scan in sequential_scans(found) if scan.table != "lease"] == []
    assert sum(scan.rows for scan in scans_of(found, "half")) == 2 * 20 * (0 if ordered else 32)


@BOTH_PLANS
@pytest.mark.parametrize("statement", [LOG_HEAD, LATEST, EARLIEST])
async def test_the_ends_of_the_log_are_one_probe_a_day(full: Connection, generic: bool, statement: str) -> None:
    found = big(await scans(full, statement, ["int"], [0], generic=generic))
    assert {scan.node for scan in found} == {"Index Only Scan"}
    assert sum(scan.rows for scan in found) <= DAYS + 1


@BOTH_PLANS
async def test_a_time_is_found_by_binary_search(full: Connection, generic: bool) -> None:
    at = await full.fetchval("select min(committed_at) + (max(committed_at) - min(committed_at)) / 2 from outbox")
    found = big(await scans(full, SINCE, ["timestamptz"], [at], generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in found) <= 20 * (DAYS + 1)


@BOTH_PLANS
async def test_lag_and_start_positions_read_their_own_ranges(full: Connection, generic: bool) -> None:
    low, _ = await ends(full)
    at = await full.fetchval("select now()")
    await full.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) '
        "select n, 1, 0, $1, now() from generate_series(1, 9) n",
        low,
    )
    await full.execute(
        """insert into receipt select transaction_id, 0, 1 + "offset" % 9, "offset", 'delivered', 1, now(), 1, 200,
           null, now(), 0 from outbox"""
    )
    await full.execute("analyze receipt")
    places: list[Any] = [[1, 2], [1, 1], [0, 0], [0, 0]]
    found = big(await scans(full, START_POSITIONS, ["int[]"] * 4, places, generic=generic))
    assert sequential_scans(found) == []
    arguments: list[Any] = [1, ["order"], None, 100, True, at]
    kinds = ["int", "text[]", "text[]", "int", "bool", "timestamptz"]
    found = big(await scans(full, LAG, kinds, arguments, generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= 100 + DAYS


@BOTH_PLANS
async def test_a_lag_reads_what_was_settled_of_the_same_offsets(full: Connection, generic: bool) -> None:
    """A subscription may have received millions of messages, and have many dead letters."""
    low, high = await ends(full)
    middle, at = (low + high) // 2, datetime.now(UTC)
    await full.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) values (1, 1, 0, $1, now())',
        middle,
    )
    await full.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, settled_at) select transaction_id, position, 1, \"offset\", 'delivered', 1, now(), 1, now() "
        'from outbox where "offset" % 2 = 0 on conflict do nothing'
    )
    await full.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
        "died_at) select 1, transaction_id, position, \"offset\", topic, 17, 'x', now() from outbox "
        'where "offset" % 4 = 1'
    )
    await full.execute("analyze receipt, dead_letter, checkpoint")
    arguments: list[Any] = [1, ["order"], None, 100, False, at]
    kinds = ["int", "text[]", "text[]", "int", "bool", "timestamptz"]
    found = await scans(full, LAG, kinds, arguments, generic=generic)
    assert sequential_scans(big(found)) == []
    assert sum(scan.rows for scan in scans_of(found, "receipt")) <= 50 + DAYS
    settled = [scan for scan in scans_of(found, "dead_letter") if "offset" in (scan.index or "")]
    assert sum(scan.rows for scan in settled) <= 27
    row = await full.fetchrow(LAG, *arguments)
    assert row is not None
    matching = await full.fetchval(
        'select count(*) from (select * from outbox where "offset" > $1 order by "offset" limit 100) o '
        'where topic = \'order\' and "offset" % 2 = 1 and "offset" % 4 <> 1',
        middle,
    )
    assert row["waiting"] == matching


@BOTH_PLANS
async def test_topics_and_inactive_subscriptions_are_short_ranges(full: Connection, generic: bool) -> None:
    low, high = await ends(full)
    found = big(await scans(full, TOPICS_AFTER, ["bigint", "int"], [(low + high) // 2, 500], generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= 500 + DAYS
    await full.execute(
        """insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state,
             created_at, updated_at, started_after, matches_since)
           values ('mailer', '{order}', '{}', '[]', '{}', 1, 1, '{}', 'paused', now(), now(), 0, now())"""
    )
    await full.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) '
        "select subscription_id, 1, 0, $1, now() from subscription",
        (low + high) // 2,
    )
    found = big(await scans(full, INACTIVE, ["int"], [0], generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= 2 * (DAYS + 1)


@BOTH_PLANS
async def test_the_states_of_lists_are_short_ranges(full: Connection, generic: bool) -> None:
    low, high = await ends(full)
    await full.execute(
        """insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state,
             created_at, updated_at, started_after, matches_since)
           select 's' || n, '{order}', '{}', '[]', '{}', 1, 1, '{}', 'active', now(), now(), 0, now()
           from generate_series(1, 5) n"""
    )
    await full.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) '
        "select subscription_id, 1, 0, $1, now() from subscription",
        (low + high) // 2,
    )
    ids = [row[0] for row in await full.fetch("select subscription_id from subscription")]
    found = big(await scans(full, PAGE_STANDING, ["int[]"], [ids], generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= 5 * (ENTRIES_MOST + DAYS)
    # Half of the waiting transactions are in check_back; none of the rest is read.
    now = datetime.now(UTC)
    await full.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at) "
        "select transaction_id, 'shop', 1, $1 from half where position = 0 limit 5000",
        now,
    )
    await full.execute("analyze check_back")
    found = big(await scans(full, STANDING, ["text[]", "int", "int", "int"], [["shop"], 100, 1, 2], generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "op")) <= 100 + DAYS
    found = big(await scans(full, ANSWERS, ["text"], ["shop"], generic=generic))
    assert sequential_scans(found) == []
    for statement, kinds, arguments in ((TRAFFIC, ["text[]"], [["order"]]), (TRAFFIC_SPAN, [], [])):
        found = big(await scans(full, statement, kinds, arguments, generic=generic))
        assert sequential_scans(found) == []
        assert sum(scan.rows for scan in scans_of(found, "outbox")) <= LOG_LOOKS_AT + DAYS


@BOTH_PLANS
async def test_what_waits_is_counted_and_claimed_in_order_of_time(full: Connection, generic: bool) -> None:
    await full.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, '
        'due_at, waiting_since) select "offset" % 5, transaction_id, 0, "offset", \'order\', 1, now(), '
        "now() + interval '1 day', case when \"offset\" % 3 > 0 then now() - \"offset\" * interval '1 second' end "
        "from outbox"
    )
    await full.execute("analyze delivery_retry")
    now = datetime.now(UTC)
    of = ["int", "int", "int", "int", "timestamptz", "int"]
    found = await scans(full, WAITING, of, [1, 0, 1, 0, now, TAKEN], generic=generic)
    assert sequential_scans(found) == []
    assert [(scan.index, scan.rows) for scan in found if scan.table == "delivery_retry"] == [
        ("delivery_retry_waiting", TAKEN)
    ]
    await full.execute("insert into lease values ('relay:1:1:0', 'one', 1, now())")
    arguments = [1, 0, 1, 0, now, TAKEN, now, now, "relay:1:1:0", "one", 1]
    of += ["timestamptz", "timestamptz", "text", "text", "bigint"]
    found = await scans(full, CLAIM_WAITING, of, arguments, generic=generic)
    assert [scan for scan in sequential_scans(found) if scan.table != "lease"] == []
    assert max(scan.rows for scan in found if scan.table == "delivery_retry") <= TAKEN


@BOTH_PLANS
async def test_the_backlog_is_counted_in_a_short_index_range(full: Connection, generic: bool) -> None:
    _, high = await ends(full)
    reader = Reader(1, 0, Route(TopicPatterns(["order"]), None, None), shards=1, shard=0, settled_to=0)
    arguments = COUNTER.arguments(reader, after=high - 100, now=datetime.now(UTC))
    found = big(await scans(full, MATCHING_AHEAD, COUNTER.types, arguments, generic=generic))
    assert sequential_scans(found) == []
    assert sum(scan.rows for scan in scans_of(found, "outbox")) <= 100 + DAYS


@BOTH_PLANS
async def test_the_messages_of_many_dead_letters_are_copied_in_parts(full: Connection, generic: bool) -> None:
    await full.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
        "died_at) select 1, transaction_id, 0, \"offset\", topic, 0, 'expired', now() from outbox"
    )
    await full.execute("analyze dead_letter")
    first = await full.fetchval("select transaction_id from outbox order by transaction_id limit 1")
    found = await scans(full, KEEP_BODIES, ["uuid", "uuid"], list(day_bounds(id_day(first))), generic=generic)
    assert sequential_scans(found) == []
    assert all(scan.rows <= BODIES_AT_ONCE for scan in found)
