"""The plans of check-back's statements."""

import re
from dataclasses import astuple
from datetime import datetime, timedelta

import pytest

from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.checkback import claims, requests, results
from app.store.checkback.results import SettledCheck
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
    arguments = ["group-1", now - timedelta(days=1), 100]
    for scan in await scans(db, requests.ASK_UNANSWERED, ["text", "timestamptz", "int"], arguments, generic=generic):
        if scan.table.startswith("check_back"):
            assert "Seq" not in scan.node
    ids = [row["transaction_id"] for row in await db.fetch("select transaction_id from check_back limit 32")]
    for scan in await scans(db, claims.MESSAGES, ["uuid[]"], [ids], generic=generic):
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
