"""What follows when a producer has started: Halfnote asks the checks that none answered.

The request that says so begins a round and asks what it reaches in its time. A loop goes on with what is left, one
batch of each group a step. Neither asks while many checks of the group are due, so that newer transactions do not wait
behind all of them. Of the workers, one is at a round at a time; a request may be at it too, because each asks only what
is not asked.
"""

import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from enum import Enum
from typing import TypeAlias

import structlog

from app.database.connection import Connection
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.checkback import rounds
from app.store.checkback.rounds import AskedBatch, AskingRound
from app.store.retention.index_plans import probe

log = structlog.get_logger(__name__)

# A statement that asks.
Ask: TypeAlias = Callable[[Connection, AskingRound, datetime], Awaitable[AskedBatch]]

# No batch begins after this time, because the answer of a registration waits. The loop goes on.
ASKED_WITHIN_S = 2.0
# While no round is left, and while any is.
EVERY_S = 2.0
LEFT_EVERY_S = 1.0
# The groups of one step of the loop.
GROUPS_AT_ONCE = 20


class RoundProgress(Enum):
    """What a batch of a round came to: it asked all that were left, or some, or has to wait for a later step."""

    ALL = 1
    SOME = 2
    LATER = 3


async def ask_unanswered(connection: Connection, group: str, now: datetime) -> None:
    """Ask the checks of a group's round that wait for their next try or are in flight, for ASKED_WITHIN_S.

    It ends sooner if rounds.DUE_MOST checks of the group are due. Each batch is a database transaction of its own, so
    `connection` must be in none. Raises the database's errors.
    """
    one = await rounds.round_of(connection, group)
    if one is None:
        return
    until = time.monotonic() + ASKED_WITHIN_S
    while not await rounds.many_due(connection, group, now):
        if await _ask_batch(connection, one, now) is not RoundProgress.SOME or time.monotonic() >= until:
            return


class Rounds:
    """The part of one process in the rounds that requests did not complete."""

    def __init__(self) -> None:
        # The last group that had its turn.
        self._after = ""

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Ask one batch of each of some groups in turn. Raises an error only if each of them failed."""
        async with runtime.database.keyed() as connection:
            left = await rounds.rounds_left(connection, now, self._after, GROUPS_AT_ONCE)
        if not left:
            return StepResult()
        # All others have had their turn once the names begin again.
        turn_is_over = len(left) < GROUPS_AT_ONCE or left[-1].group <= self._after
        self._after = left[-1].group
        made: list[RoundProgress] = []
        errors: list[Exception] = []
        for one in left:
            try:
                made.append(await _go_on(runtime, one, now))
            except Exception as error:
                errors.append(error)
                log.warning("round_failed", group=one.group, error=str(error), kind=type(error).__name__)
        if len(errors) == len(left):
            raise errors[0]
        asked = sum(one is not RoundProgress.LATER for one in made)
        others = len(left) == GROUPS_AT_ONCE and (asked > 0 or not turn_is_over)
        return StepResult(asked, more=others or RoundProgress.SOME in made, within_s=LEFT_EVERY_S)


async def _go_on(runtime: Runtime, one: AskingRound, now: datetime) -> RoundProgress:
    """Ask a batch of a round, unless another worker does or many checks of its group are due."""
    if one.began_at > now:
        # The clock went back.
        async with runtime.database.connection() as connection:
            await rounds.begin_again(connection, one, now)
        return RoundProgress.LATER
    async with runtime.database.connection() as connection:
        if await rounds.many_due(connection, one.group, now):
            return RoundProgress.LATER
        return await _ask_batch(connection, one, now, alone=True)


async def _ask_batch(connection: Connection, one: AskingRound, now: datetime, *, alone: bool = False) -> RoundProgress:
    """Ask a batch of the checks that wait, and after the last one those in flight; `alone`: as the only worker.

    One statement that asks in each database transaction, because each locks its rows in an order of their own. The row
    of the group is written after them.
    """
    left = False
    # One that was in flight before, and is settled now, waits.
    for ask in (rounds.ask_waiting, rounds.ask_in_flight, rounds.ask_waiting):
        batch = await _asked(connection, one, now, ask, alone=alone)
        if batch is None:
            return RoundProgress.LATER
        if batch.left and batch.found:
            return RoundProgress.SOME
        left = left or batch.left
    if left:
        # They are due now or soon.
        return RoundProgress.LATER
    await rounds.complete_round(connection, one)
    return RoundProgress.ALL


async def _asked(
    connection: Connection, one: AskingRound, now: datetime, ask: Ask, *, alone: bool
) -> AskedBatch | None:
    """Return what a statement asked; None: it is to ask alone, and another worker is at the round."""
    async with connection.transaction():
        if alone and not await rounds.take_round(connection, one.group):
            return None
        await probe(connection)
        return await ask(connection, one, now)
