"""Lanes that are given up or closed: each request gets a problem of status 503, and none a connection of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import httpx
import pytest

from app.coordinator.commit_lanes import answer_repeat_half
from app.coordinator.group_commit import GroupCommitLane, LaneLimits
from app.database.connection import Connection, UnusableDatabase
from app.errors import DatabaseReadOnly, DatabaseUnavailable, OutcomeUnknown, Problem
from app.ids import uuid7
from app.runtime.state import Runtime
from app.store.coordinator.halves import Half
from tests.coordinator.test_group_commit import ORDER, _holding, lanes_with, new_half
from tests.coordinator.test_races import now, until_waiting

WITHIN_S = 10.0
Connect = Callable[[], Awaitable[Connection]]


def lane_with(connect: Connect, flushed: list[int], **limits: Any) -> "GroupCommitLane[Half, Any]":
    async def flush(connection: Connection, halves: Any) -> list[Any]:
        flushed.append(len(halves))
        return list(halves)

    return GroupCommitLane(connect, flush, answer_repeat_half, LaneLimits(**limits), lambda *figures: None)


async def problems_of(*asked: Awaitable[Any]) -> list[Problem]:
    """Return the problem of each request; each has one, and soon."""
    async with asyncio.timeout(WITHIN_S):
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, Problem) for one in found), found
    assert {(one.status, one.retry_after_s) for one in found} == {(503, 1)}  # type: ignore[union-attr]
    return found  # type: ignore[return-value]


async def test_a_repeat_of_a_batch_that_is_given_up_is_answered_with_it(
    runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    lanes = lanes_with(runtime)
    opened = 0

    async def connect() -> Connection:
        nonlocal opened
        opened += 1
        return await runtime.database.dedicated()

    lanes.half._connect = connect
    stuck = new_half()
    async with _holding(dsn, stuck.transaction_id):
        asked = [lanes.half.enqueue(half) for half in (stuck, stuck, new_half(), stuck)]
        await until_waiting(db)
        late = lanes.half.enqueue(new_half())
        lanes.give_up()
        found = await problems_of(*asked, late)
    assert [type(one) for one in found] == [OutcomeUnknown] * 4 + [DatabaseUnavailable]
    assert found[1].extra["transaction_id"] == str(stuck.transaction_id)
    assert opened == 1
    await lanes.close()


async def test_a_request_after_a_lane_was_given_up_is_refused(runtime: Runtime, group: str) -> None:
    lanes = lanes_with(runtime)
    lanes.give_up()
    with pytest.raises(DatabaseUnavailable) as refused:
        lanes.half.enqueue(new_half())
    assert refused.value.retry_after_s == 1
    [found] = await problems_of(lanes.half.commit(new_half()))
    assert isinstance(found, DatabaseUnavailable)
    await lanes.close()


async def test_a_lane_that_is_given_up_while_it_connects_flushes_nothing(runtime: Runtime) -> None:
    connecting, may_go_on = asyncio.Event(), asyncio.Event()
    opened: list[Connection] = []

    async def connect() -> Connection:
        connecting.set()
        await may_go_on.wait()
        opened.append(await runtime.database.dedicated())
        return opened[0]

    flushed: list[int] = []
    lane = lane_with(connect, flushed)
    asked = lane.enqueue(new_half())
    await connecting.wait()
    lane.give_up()
    may_go_on.set()
    # It was not sent, so its outcome is known.
    assert [type(one) for one in await problems_of(asked)] == [DatabaseUnavailable]
    assert (flushed, opened[0].is_closed()) == ([], True)
    await lane.close()


@pytest.mark.parametrize("batch", [1, 2])
async def test_a_lane_that_is_closed_in_a_flush_answers_all(runtime: Runtime, batch: int) -> None:
    began = asyncio.Event()

    async def hangs(connection: Connection, halves: Any) -> list[Any]:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    lane: GroupCommitLane[Half, Any] = GroupCommitLane(
        runtime.database.dedicated, hangs, answer_repeat_half, LaneLimits(), lambda *figures: None
    )
    halves = [new_half() for _ in range(batch)]
    sent = [lane.enqueue(half) for half in halves]
    if batch > 1:
        sent.append(lane.enqueue(halves[0]))
    await began.wait()
    waiting = [lane.enqueue(new_half()) for _ in range(2)]
    await lane.close()
    found = await problems_of(*sent, *waiting)
    assert [type(one) for one in found] == [OutcomeUnknown] * len(sent) + [DatabaseUnavailable] * 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnusableDatabase("the encoding is LATIN1"), DatabaseUnavailable),
        (ValueError("the URL's file has no URL"), DatabaseUnavailable),
        (asyncpg.InvalidParameterValueError("no such setting"), DatabaseUnavailable),
        (asyncpg.CannotConnectNowError("the database starts"), DatabaseReadOnly),
        (ConnectionRefusedError(), DatabaseUnavailable),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
)
async def test_a_lane_that_cannot_connect_says_so(error: Exception, kind: type[Problem]) -> None:
    async def connect() -> Connection:
        raise error

    flushed: list[int] = []
    lane = lane_with(connect, flushed)
    found = await problems_of(lane.commit(new_half()), lane.enqueue(new_half()))
    assert [type(one) for one in found] == [kind] * 2
    assert flushed == []
    await lane.close()


async def test_requests_of_a_service_that_gives_up_get_a_problem(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    chosen = uuid7(now())
    request = {"producer_group": "shop", "transaction_id": str(chosen), "messages": [ORDER]}
    async with _holding(dsn, chosen):
        asked = [asyncio.create_task(client.post("/half", json=request)) for _ in range(3)]
        await until_waiting(db)
        runtime.lanes.give_up()
        async with asyncio.timeout(WITHIN_S):
            answers = [*await asyncio.gather(*asked), await client.post("/half", json=request)]
    assert [(one.status_code, one.headers.get("retry-after")) for one in answers] == [(503, "1")] * 4
    assert all(one.headers["content-type"] == "application/problem+json" for one in answers)
