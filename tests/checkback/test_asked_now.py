"""Checks of many transactions that a person asks for: as many statements as for one, and no decided one among them."""

import asyncio
from datetime import UTC, datetime
from uuid import UUID

import httpx

from app.database.connection import Connection
from app.ids import uuid7
from app.runtime.state import Runtime
from app.store.checkback.requests import ask_all_now
from tests.coordinator.test_half_end import post_end
from tests.routers.test_transactions import half_of
from tests.support.statements import recorded


async def test_many_are_asked_or_decided_by_as_many_statements_as_one(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Row by row, the rows of the first ones would stay locked for the time of all statements."""
    chosen = {"producer_group": "shop", "dry_run": False}
    calls = ("check", {"state": "half"}), ("check", {"state": "in_doubt"}), ("verdict", {"state": "in_doubt"})
    counts: dict[int, list[int]] = {}
    for size in (1, 30):
        ones = {await half_of(client) for _ in range(size)}
        for what, fields in calls:
            said = {"verdict": "commit", "reason": "all"} if what == "verdict" else {}
            # Ends are flushed by a lane's own connection, which is not of the pool.
            with recorded(runtime.database) as statements:
                answer = await client.post(f"/transactions/{what}", json={**chosen, **fields, **said})
                await asyncio.sleep(0)
            assert answer.json()["changed"] == size
            assert set(answer.json()["transaction_ids"]) == ones
            audited = "select target, at from audit where what = $1 and target = any($2) order by audit_id"
            rows = await db.fetch(audited, f"transaction.{what}", list(ones))
            assert {row["target"] for row in rows} == ones
            counts.setdefault(size, []).append(len(statements))
        swept = await db.fetch("select transaction_id::text from attempt where kind = 'swept'")
        assert {row["transaction_id"] for row in swept} >= ones
    assert counts[30] == counts[1]


async def test_a_decided_one_among_many_is_not_asked(db: Connection, client: httpx.AsyncClient, group: str) -> None:
    ones = sorted([UUID(await half_of(client)) for _ in range(3)])
    await post_end(client, str(ones[1]), "commit")
    now = datetime.now(UTC)
    assert await ask_all_now(db, [*reversed(ones), uuid7(now), ones[0]], now) == [ones[0], ones[2]]
    assert await ask_all_now(db, [], now) == []
    rows = await db.fetch("select transaction_id, next_check_at from check_back order by transaction_id")
    assert [tuple(row) for row in rows] == [(ones[0], now), (ones[2], now)]
