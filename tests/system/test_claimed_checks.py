"""A service that is killed, and one that stops, while checks are out to a producer that claimed them."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from app.database.connection import Connection
from tests.support.processes import Service

MESSAGES = [{"topic": "order", "body": {"order": 1030}}]
GROUP = {"check_urls": [], "checks": "claim", "immunity_s": 1, "interval_s": 1}


async def claimed(client: httpx.AsyncClient, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Claim until so many checks are out."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(90):
        while len(found) < count:
            wanted = {"max": count - len(found), "wait_s": 5, **fields}
            answer = await client.post("/producer-groups/batch/checks/claim", json=wanted)
            assert answer.status_code == 200, answer.text
            found += answer.json()["checks"]
    return found


async def answered(client: httpx.AsyncClient, checks: list[dict[str, Any]], word: str) -> list[int]:
    """Answer checks; return the statuses of the outcomes."""
    answers = [{"transaction_id": one["transaction_id"], "handle": one["handle"], "verdict": word} for one in checks]
    outcomes = await client.post("/producer-groups/batch/checks/answers", json={"answers": answers})
    return [one["status"] for one in outcomes.json()["outcomes"]]


async def test_claims_outlive_a_kill_of_the_service_and_lapse_after_it(
    tmp_path: Path, dsn: str, db: Connection
) -> None:
    service = Service(tmp_path / "data", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    try:
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            assert (await client.put("/producer-groups/batch", json=GROUP)).status_code == 201
            halves = {"halves": [{"producer_group": "batch", "messages": MESSAGES}] * 8}
            made = await client.post("/halves", json=halves)
            ids = {one["transaction_id"] for one in made.json()["outcomes"]}
            kept = await claimed(client, 4, invisible_s=600)
            lapsing = await claimed(client, 4, invisible_s=1)
            assert {one["transaction_id"] for one in (*kept, *lapsing)} == ids
            waiting = asyncio.create_task(
                client.post("/producer-groups/batch/checks/claim", json={"max": 1, "wait_s": 30})
            )
            await asyncio.sleep(0)
            service.kill()
            await asyncio.wait([waiting])
        await service.start()
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            again = await claimed(client, 4, invisible_s=600)
            # Those whose time was over while no process ran; the others are still out to the first claim.
            assert {one["transaction_id"] for one in again} == {one["transaction_id"] for one in lapsing}
            assert {one["check"] for one in again} <= {2, 3}
            assert await answered(client, lapsing, "unknown") == [409] * 4
            assert await answered(client, again, "rollback") == [200] * 4
            assert await answered(client, kept, "commit") == [200] * 4
            waiting = asyncio.create_task(
                client.post("/producer-groups/batch/checks/claim", json={"max": 1, "wait_s": 30})
            )
            await client.get("/producer-groups/batch")
            service.stop()
            # The stop answers the claim that waits, instead of cutting it off.
            last = await waiting
            assert (last.status_code, last.json()["checks"]) == (200, [])
    finally:
        service.kill()
    assert await db.fetch("select verdict, source, count(*) from op group by 1, 2 order by 1") == [(1, 1, 4), (2, 1, 4)]
    unproven = """
      select count(*) from op o where not exists (
        select from attempt a where a.transaction_id = o.transaction_id and a.kind = 'check' and a.verdict = o.verdict)
    """
    assert await db.fetchval(unproven) == 0
    lapses = "select count(distinct transaction_id) from attempt where outcome = 'unanswered'"
    assert await db.fetchval(lapses) == 4
