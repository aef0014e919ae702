"""The plans of check-back's statements."""

import re
from dataclasses import astuple
from datetime import datetime, timedelta

import pytest

from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.checkback import claimed_checks, claims, results, rounds
from app.store.checkback.results import SettledCheck
from app.store.checkback.rounds import begin_round
from tests.conftest import register_group
from tests.support.check_stepping import many_in_doubt
from tests.support.explain import scans


async def test_plans_of_claim_and_settle(db: Connection, runtime: Runtime, subtests: pytest.Subtests) -> None:
    for n in range(4):
        await register_group(db, f"group-{n}")
        await many_in_doubt(db, runtime, f"group-{n}", 2500)
    await db.execute("analyze check_back, half, op, producer_group")
    for generic in (False, True):
        with subtests.test(generic=generic):
            await assert_plans(db, runtime.clock.now(), generic=generic)


async def assert_plans(db: Connection, now: datetime, *, generic: bool) -> None:
    kinds = ["timestamptz", "text[]", "int[]", "int", "int", "int", "int", "int"]
    arguments = [now, ["group-1"], [3], 64, 4, 320, 100, 30]
    for statement in (claims.ANY_DUE, claims.CLAIM):
        for scan in await scans(db, statement, kinds, arguments, generic=generic):
            if scan.table.startswith(("check_back", "half_", "op_")) and scan.rows > 1:
                assert "Seq" not in scan.node
                assert scan.rows <= 200, scan
    kinds, arguments = ["text", "timestamptz", "int", "timestamptz"], ["group-1", now, 100, now]
    for statement in (rounds.ASK_IN_FLIGHT, rounds.ASK_WAITING):
        for scan in await scans(db, statement, kinds, arguments, generic=generic):
            if scan.table.startswith("check_back"):
                assert "Seq" not in scan.node
    for scan in await scans(db, rounds.DUE, ["text", "timestamptz", "int"], ["group-1", now, 100], generic=generic):
        assert "Seq" not in scan.node
        assert scan.rows <= 100
    ids = [row["transaction_id"] for row in await db.fetch("select transaction_id from check_back limit 32")]
    for scan in await scans(db, claims.MESSAGES, ["uuid[]", "bool"], [ids, True], generic=generic):
        assert scan.rows <= 1 or "Seq" not in scan.node
        assert scan.rows <= 64
    settled = [
        SettledCheck(one, 0, 1, now, over=n % 2 == 0, next_check_at=now, parked_reason="why" if n % 4 == 1 else None)
        for n, one in enumerate(ids)
    ]
    columns = [list(column) for column in zip(*map(astuple, settled), strict=True)]
    kinds = re.findall(r"\$\d+::(\w+\[\])", results.SETTLE)
    for scan in await scans(db, results.SETTLE, [*kinds, "timestamptz"], [*columns, now], generic=generic):
        if scan.table.startswith("check_back"):
            assert "Seq" not in scan.node
            assert scan.rows <= 32


async def test_plan_of_a_round(db: Connection, runtime: Runtime, subtests: pytest.Subtests) -> None:
    """A batch reads no check that was answered, and a bounded part of the others, in the order of rounds."""
    for n in range(2):
        await register_group(db, f"group-{n}")
        await many_in_doubt(db, runtime, f"group-{n}", 15_000)
    now = runtime.clock.now()
    await db.execute(
        "update check_back c set swept_at = $1, next_check_at = $2, "
        "unanswered = (producer_group = 'group-1' or o.n % 50 = 0)::int, "
        "urged_at = case when o.n % 2 = 0 then $1::timestamptz + o.n * interval '1 ms' end from "
        "(select transaction_id, row_number() over (order by transaction_id) as n from check_back) o "
        "where o.transaction_id = c.transaction_id",
        now - timedelta(hours=1),
        now + timedelta(seconds=600),
    )
    await db.execute("vacuum analyze check_back, producer_group")
    few = await db.fetchval("select count(*) from check_back where producer_group = 'group-0' and unanswered > 0")
    kinds = ["text", "timestamptz", "int", "timestamptz"]
    # As `probe` sets them.
    await db.execute("set enable_seqscan = off; set enable_sort = off")
    for group, most in (("group-0", few), ("group-1", rounds.READ_MOST)):
        for generic in (False, True):
            with subtests.test(group=group, generic=generic):
                found = await scans(db, rounds.ASK_WAITING, kinds, [group, now, 100, now], generic=generic)
                for scan in found:
                    if scan.table == "check_back":
                        assert "Seq" not in scan.node
                        assert scan.rows <= most


@pytest.mark.parametrize("known", [False, True])
async def test_a_round_looks_each_check_up_whatever_the_statistics_know(
    db: Connection, runtime: Runtime, subtests: pytest.Subtests, known: bool
) -> None:
    """A service of which every check is answered has statistics by which no check is unanswered."""
    await register_group(db, "group-0")
    await many_in_doubt(db, runtime, "group-0", 15_000)
    now = runtime.clock.now()
    if not known:
        await db.execute("vacuum analyze check_back, producer_group")
    await db.execute(
        "update check_back c set swept_at = $1, next_check_at = $2, unanswered = 1, "
        "leased_until = case when o.n <= 300 then $2::timestamptz end from "
        "(select transaction_id, row_number() over (order by transaction_id) as n from check_back) o "
        "where o.transaction_id = c.transaction_id",
        now - timedelta(hours=1),
        now + timedelta(seconds=600),
    )
    if known:
        await db.execute("vacuum analyze check_back, producer_group")
    kinds = ["text", "timestamptz", "int", "timestamptz"]
    # As `probe` sets them.
    await db.execute("set enable_seqscan = off; set enable_sort = off")
    for name, statement in (("waiting", rounds.ASK_WAITING), ("in flight", rounds.ASK_IN_FLIGHT)):
        for generic in (False, True):
            with subtests.test(statement=name, generic=generic):
                for scan in await scans(db, statement, kinds, ["group-0", now, 100, now], generic=generic):
                    if scan.table == "check_back":
                        assert "Seq" not in scan.node, scan
                        assert scan.rows <= (rounds.READ_MOST if scan.index == "check_back_urged" else 300), scan


async def test_plan_of_a_round_while_many_checks_are_in_flight(
    db: Connection, runtime: Runtime, subtests: pytest.Subtests
) -> None:
    """A batch reads none of the checks in flight that earlier batches asked."""
    await register_group(db, "group-0")
    await many_in_doubt(db, runtime, "group-0", 15_000)
    now = runtime.clock.now()
    await db.execute(
        "update check_back c set swept_at = $1, next_check_at = $2, leased_until = $2, unanswered = 1, "
        "urged_at = case when o.n > 300 then $3::timestamptz end, asked_at = case when o.n > 300 then $3 end from "
        "(select transaction_id, row_number() over (order by transaction_id) as n from check_back) o "
        "where o.transaction_id = c.transaction_id",
        now - timedelta(hours=1),
        now + timedelta(seconds=600),
        now,
    )
    await db.execute("vacuum analyze check_back, producer_group")
    kinds = ["text", "timestamptz", "int", "timestamptz"]
    # As `probe` sets them.
    await db.execute("set enable_seqscan = off; set enable_sort = off")
    for generic in (False, True):
        with subtests.test(generic=generic):
            found = await scans(db, rounds.ASK_IN_FLIGHT, kinds, ["group-0", now, 1000, now], generic=generic)
            assert [scan for scan in found if scan.table == "check_back" and scan.rows > 300] == []


async def test_plans_of_claimed_checks(db: Connection, runtime: Runtime, subtests: pytest.Subtests) -> None:
    """Each reads the rows that it takes, of its group, also while thousands are out to producers."""
    for n in range(3):
        await register_group(db, f"group-{n}", check_urls=[] if n else ["http://127.0.0.1:9/"], checks="claim")
        await many_in_doubt(db, runtime, f"group-{n}", 2500)
    now = runtime.clock.now()
    out = (
        "update check_back set lease_epoch = 1, claimed_epoch = 1, claimed_at = $1, leased_until = $2, "
        "next_check_at = $2 where transaction_id in (select transaction_id from check_back "
        "where producer_group = $3 order by transaction_id limit $4)"
    )
    await db.execute(out, now, now + timedelta(seconds=30), "group-1", 2400)
    await db.execute(out, now - timedelta(seconds=60), now - timedelta(seconds=30), "group-2", 20)
    await db.execute("analyze check_back, half, op, producer_group")
    ids = [row[0] for row in await db.fetch("select transaction_id from check_back where claimed_epoch = 1 limit 30")]
    at = "timestamptz"
    cases: list[tuple[str, list[str], list[object], int]] = [
        (claimed_checks.CLAIM, ["text", at, "int", "float8"], ["group-1", now, 32, 30.0], 64),
        (claimed_checks.GIVE_BACK, ["uuid[]", "bigint[]", at], [ids, [1] * 30, now], 60),
        (claimed_checks.ANSWERED, ["uuid[]", "bigint[]", "text", at], [ids, [1] * 30, "group-1", now], 60),
        (claimed_checks.ANY_LAPSED, [at], [now], 50),
        (claimed_checks.LAPSED, [at, "int"], [now, 500], 50),
        (claimed_checks.DUE, ["text[]", "int[]", at], [["group-1", "group-2"], [32, 32], now], 220),
    ]
    for statement, kinds, arguments, most in cases:
        for generic in (False, True):
            with subtests.test(statement=statement.strip()[:40], generic=generic):
                for scan in await scans(db, statement, kinds, arguments, generic=generic):
                    if scan.table.startswith(("check_back", "half_", "op_")) and scan.rows > 1:
                        assert "Seq" not in scan.node, scan
                        assert scan.rows <= most, scan
    for statement, kinds, arguments in (
        (claimed_checks.LEFT, [at, "int"], [now, 500]),
        (claimed_checks.STILL_DUE, [at, "int", "float8"], [now, 500, 3600.0]),
    ):
        for generic in (False, True):
            with subtests.test(statement=statement.strip()[:40], generic=generic):
                for scan in await scans(db, statement, kinds, arguments, generic=generic):
                    # The due rows of the groups without a URL, and no others.
                    assert not scan.table.startswith("check_back") or scan.rows <= 2700, scan


async def test_plan_of_the_rounds_that_are_left(runtime: Runtime, db: Connection) -> None:
    """Every worker looks once a second."""
    await register_group(db, "group-0")
    await db.execute(
        "insert into producer_group select (jsonb_populate_record(g, jsonb_build_object('name', 'group-' || n))).* "
        "from producer_group g, generate_series(1, 2000) n"
    )
    now = runtime.clock.now()
    await begin_round(db, "group-7", now - timedelta(seconds=9))
    await db.execute("analyze producer_group")
    async with runtime.database.keyed() as keyed:
        found = await scans(keyed, rounds.LEFT, ["timestamptz", "text", "int"], [now, "", 20], generic=True)
    assert sum(scan.rows for scan in found if scan.table == "producer_group") <= 2
    assert all("Seq" not in scan.node for scan in found if scan.table == "producer_group")
