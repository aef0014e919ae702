"""Each verdict of a check, and each of policy after its last check, is written together with its evidence."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from aiohttp import web

import app.checkback.settle as checkback_settle
from app.checkback.loop import CheckBack
from app.coordinator.commit_lanes import LaneFlushes
from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.checkback.results import SettledCheck, settle
from app.store.coordinator.ops import AnsweredCheck, End
from app.verdicts import CheckOutcome, Source, Verdict
from tests.conftest import register_group
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import COMMIT, UNKNOWN, attempts, in_doubt, row, turn, verdict

# `together`: whether the attempt was written in the database transaction of the verdict.
EVIDENCE = """
select a.number, a.outcome, a.verdict, a.source, a.destination, a.xmin = o.xmin as together
from attempt a join op o using (transaction_id)
where transaction_id = $1 and kind = 'check' order by attempt_id
"""


async def evidence(db: Connection, transaction_id: UUID) -> list[tuple[Any, ...]]:
    """Return the attempts of a decided transaction's checks."""
    return [tuple(row) for row in await db.fetch(EVIDENCE, transaction_id)]


async def end(client: httpx.AsyncClient, transaction_id: UUID | None, said: str, *, from_check: bool = True) -> None:
    """Post an end."""
    body = {"transaction_id": str(transaction_id), "producer_group": "shop", "verdict": said, "from_check": from_check}
    assert (await client.post("/end", json=body)).status_code in (200, 202)


async def test_the_attempt_of_an_answer_is_written_with_its_verdict(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    async with Responder(content=COMMIT) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    assert await verdict(db, transaction_id) == (1, 1)
    assert await evidence(db, transaction_id) == [(1, "commit", 1, 1, shop.url, True)]


async def test_policy_writes_its_last_answer_with_its_verdict(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=2)
        transaction_id = await in_doubt(client, runtime)
        for _ in range(2):
            await turn(runtime, checks)
            runtime.clock.offset_s += 31
    assert await verdict(db, transaction_id) == (2, 2)
    found = await evidence(db, transaction_id)
    assert found == [(1, "unknown", None, 1, shop.url, False), (2, "unknown", None, 1, shop.url, True)]


async def test_answers_by_end_are_on_record(client: httpx.AsyncClient, db: Connection, runtime: Runtime) -> None:
    checks = CheckBack()
    async with Responder(status=500) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=2)
        by_end = await in_doubt(client, runtime)
        await turn(runtime, checks)
        await end(client, by_end, "commit")
        exhausted = await in_doubt(client, runtime)
        for _ in range(3):
            await turn(runtime, checks)
            # The second one is no answer: the check has one.
            await end(client, exhausted, "unknown")
            await end(client, exhausted, "unknown")
            runtime.clock.offset_s += 31
    assert await verdict(db, by_end) == (1, 1)
    unanswered = "unanswered", None, 1, shop.url, False
    assert await evidence(db, by_end) == [(1, *unanswered), (1, "commit", 1, 1, None, True)]
    assert await verdict(db, exhausted) == (2, 2)
    unknown = "unknown", None, 1, None, False
    assert await evidence(db, exhausted) == [(1, *unanswered), (1, *unknown), (2, *unanswered), (2, *unknown)]


async def test_a_closed_day_takes_no_answer_by_end(client: httpx.AsyncClient, db: Connection, runtime: Runtime) -> None:
    async with Responder(status=500) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
        await close_day(db, transaction_id)
        await end(client, transaction_id, "unknown")
    assert await db.fetchval("select answered from check_back") == 0
    assert await db.fetchval("select count(*) from attempt where kind = 'check' and outcome = 'unknown'") == 0


def hold_first_settle(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Let the first settle wait, as for a database that is away. Return when it waits, and the event that ends it."""
    waits, back = asyncio.Event(), asyncio.Event()

    async def away(connection: Connection, checks: Sequence[SettledCheck], now: datetime) -> set[UUID]:
        if not waits.is_set():
            waits.set()
            await back.wait()
        return await settle(connection, checks, now)

    monkeypatch.setattr(checkback_settle, "settle", away)
    return waits, back


async def test_an_answer_that_is_recorded_after_its_lease_counts(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database was away for longer than the lease, and another check was claimed first."""
    late = CheckBack()
    waits, held = hold_first_settle(monkeypatch)
    async with Responder(content=UNKNOWN) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=3, on_exhausted="rollback")
        transaction_id = await in_doubt(client, runtime)
        await late.step(runtime, runtime.clock.now())
        async with asyncio.timeout(30):
            await waits.wait()
        runtime.clock.offset_s += 100
        others = CheckBack()
        answered = asyncio.Event()

        async def slow(call: Call) -> web.StreamResponse:
            held.set()
            await answered.wait()
            return web.json_response(UNKNOWN)

        shop.answer = slow
        await others.step(runtime, runtime.clock.now())
        await late.settle_all()
        found = await row(db, transaction_id)
        answered.set()
        await others.settle_all()
        assert (found["asked"], found["answered"], found["last_answered"]) == (2, 1, 1)
        assert found["leased_until"] is not None
        for _ in range(3):
            runtime.clock.offset_s += 31
            await turn(runtime, others)
    assert await verdict(db, transaction_id) == (2, 2)
    assert [one["number"] for one in await attempts(db, transaction_id)] == [1, 2, 3]


# After one check the transaction is in doubt, after three its row is gone, or parked.
@pytest.mark.parametrize("others_first", [1, 3])
@pytest.mark.parametrize("on_exhausted", ["rollback", "park"])
async def test_an_unknown_that_does_not_count_is_not_on_record(
    client: httpx.AsyncClient,
    db: Connection,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    on_exhausted: str,
    others_first: int,
) -> None:
    """A later check was answered and settled first, so the late answer counts no more."""
    late, others = CheckBack(), CheckBack()
    waits, back = hold_first_settle(monkeypatch)
    async with Responder(content=UNKNOWN) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=3, on_exhausted=on_exhausted)
        transaction_id = await in_doubt(client, runtime)
        await late.step(runtime, runtime.clock.now())
        async with asyncio.timeout(30):
            await waits.wait()
        runtime.clock.offset_s += 100
        for n in range(3):
            if n == others_first:
                back.set()
                await late.settle_all()
            await turn(runtime, others)
            runtime.clock.offset_s += 31
        back.set()
        await late.settle_all()
    if on_exhausted == "park":
        found = await row(db, transaction_id)
        assert (found["state"], found["asked"], found["answered"], found["last_answered"]) == (2, 4, 3, 4)
    else:
        assert await verdict(db, transaction_id) == (2, 2)
        assert await row(db, transaction_id) is None
    found = await attempts(db, transaction_id)
    assert [(one["number"], one["outcome"]) for one in found] == [(n, "unknown") for n in (2, 3, 4)]


@pytest.mark.parametrize("on_exhausted", ["rollback", "park"])
async def test_a_last_answer_counts_only_under_its_lease(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, on_exhausted: str
) -> None:
    """The late answer is the last that policy allows, and so is that of the check which is out meanwhile."""
    late, others = CheckBack(), CheckBack()
    asked, answered = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]

    async def slow(call: Call) -> web.StreamResponse:
        place = call.json()["check"] - 1
        asked[place].set()
        await answered[place].wait()
        return web.json_response(UNKNOWN)

    async with Responder(slow) as shop:
        await register_group(
            db, "shop", check_urls=[shop.url], max_checks=1, check_timeout_s=60, on_exhausted=on_exhausted
        )
        transaction_id = await in_doubt(client, runtime)
        for checks, one in zip((late, others), asked, strict=True):
            await checks.step(runtime, runtime.clock.now())
            async with asyncio.timeout(30):
                await one.wait()
            runtime.clock.offset_s += 100
        for checks, one in zip((late, others), answered, strict=True):
            one.set()
            await checks.settle_all()
    if on_exhausted == "park":
        found = await row(db, transaction_id)
        assert (found["state"], found["answered"], found["last_answered"]) == (2, 1, 2)
    else:
        assert await verdict(db, transaction_id) == (2, 2)
    assert [one["number"] for one in await attempts(db, transaction_id)] == [2]


async def close_day(db: Connection, transaction_id: UUID | None, state: str = "archiving") -> None:
    """Set the state of the transaction's day."""
    await db.execute("update day set state = $2 where low <= $1 and high > $1", transaction_id, state)


@pytest.mark.parametrize("on_exhausted", ["rollback", "park"])
async def test_an_answer_that_comes_after_its_day_was_closed_counts_once_the_day_is_open_again(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, on_exhausted: str
) -> None:
    transaction_id: UUID | None = None
    closing = True

    async def answer(call: Call) -> web.StreamResponse:
        if closing:
            await close_day(db, transaction_id)
        return web.json_response(UNKNOWN)

    async with Responder(answer) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=1, on_exhausted=on_exhausted)
        transaction_id = await in_doubt(client, runtime)
        checks = CheckBack()
        await turn(runtime, checks)
        assert len(shop.calls) == 1
        found = await row(db, transaction_id)
        assert (found["state"], found["answered"], found["last_answered"]) == (1, 0, 0)
        assert found["next_check_at"] > runtime.clock.now()
        assert await attempts(db, transaction_id) == []
        assert await db.fetchval("select count(*) from attempt where kind = 'parked'") == 0

        closing = False
        await close_day(db, transaction_id, "open")
        runtime.clock.offset_s += 61
        await turn(runtime, checks)
        assert len(shop.calls) == 2
    assert [(one["number"], one["outcome"]) for one in await attempts(db, transaction_id)] == [(2, "unknown")]
    if on_exhausted == "park":
        assert (await row(db, transaction_id))["state"] == 2
        assert await db.fetchval("select count(*) from attempt where kind = 'parked'") == 1
    else:
        assert await verdict(db, transaction_id) == (2, 2)


async def ended_first(client: httpx.AsyncClient, db: Connection, runtime: Runtime, *, closed: bool) -> tuple[UUID, str]:
    """Answer a check after the producer's own end, and after its day was closed if wanted.

    Return the transaction and the check's URL.
    """
    transaction_id: UUID | None = None

    async def end_first(call: Call) -> web.StreamResponse:
        await end(client, transaction_id, "commit", from_check=False)
        if closed:
            await close_day(db, transaction_id)
        return web.json_response(COMMIT)

    async with Responder(end_first) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
        assert len(shop.calls) == 1
    assert await verdict(db, transaction_id) == (1, 0)
    return transaction_id, shop.url


async def test_a_late_answer_leaves_no_attempt_in_a_closed_day(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    transaction_id, _ = await ended_first(client, db, runtime, closed=True)
    assert await attempts(db, transaction_id) == []
    assert await row(db, transaction_id) is None


async def test_a_check_that_was_not_first_names_the_source_that_was(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    transaction_id, url = await ended_first(client, db, runtime, closed=False)
    assert await evidence(db, transaction_id) == [(1, "commit", 1, 0, url, False)]


async def test_ends_of_producers_and_of_checks_share_a_flush(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    """The ends of producers leave no attempt, whatever statement takes them."""
    await register_group(db, "shop")
    ids = sorted([await in_doubt(client, runtime) for _ in range(3)])
    now = runtime.clock.now()
    check = AnsweredCheck(ids[1], 7, now - timedelta(seconds=1), CheckOutcome.ROLLBACK, Verdict.ROLLBACK, *[None] * 5)
    ends = [
        End(ids[0], "shop", Verdict.COMMIT),
        End(ids[1], None, Verdict.ROLLBACK, Source.CHECK, check=check),
        # No check of it was sent.
        End(ids[2], "shop", Verdict.COMMIT, from_check=True),
    ]
    flushes = LaneFlushes(runtime.clock, runtime.metrics, lambda topics, messages, complete: None)
    outcomes = await flushes.ends(db, ends)
    assert [(one.verdict, one.source) for one in outcomes if not isinstance(one, Exception)] == [(1, 0), (2, 1), (1, 0)]
    assert [await evidence(db, one) for one in ids] == [[], [(7, "rollback", 2, 1, None, True)], []]
