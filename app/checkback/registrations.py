"""What follows when a producer has started: Halfnote asks the checks that none answered.

The request that says so begins a round and asks what it reaches in its time. A loop goes on with what is left, one
batch of each group a step. Two processes may be at one round, because each asks only what is not asked.
"""

import time
from datetime import datetime, timedelta

from app.database.connection import Connection
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.checkback import rounds
from app.store.checkback.rounds import AskingRound

# No batch begins after this time, because the answer of a registration waits. The loop goes on.
ASKED_WITHIN_S = 2.0
EVERY_S = 1.0
# The groups of one step of the loop.
GROUPS_AT_ONCE = 20


async def ask_unanswered(connection: Connection, group: str, now: datetime) -> None:
    """Ask the checks of a group's round that wait for their next try or are in flight, for ASKED_WITHIN_S.

    Each batch is a database transaction of its own, so `connection` must be in none. Raises the database's errors.
    """
    one = await rounds.round_of(connection, group)
    if one is not None:
        await _ask(connection, one, now, ASKED_WITHIN_S)


async def go_on(runtime: Runtime, now: datetime) -> StepResult:
    """Ask one batch of each round that its request did not complete."""
    async with runtime.database.keyed() as connection:
        left = await rounds.rounds_left(connection, now - timedelta(seconds=ASKED_WITHIN_S), GROUPS_AT_ONCE)
    if not left:
        return StepResult()
    async with runtime.database.connection() as connection:
        complete = [await _ask(connection, one, now, 0) for one in left]
    return StepResult(len(left), more=not all(complete))


async def _ask(connection: Connection, one: AskingRound, now: datetime, within_s: float) -> bool:
    """Ask checks of a round, at least one batch; return whether the round is complete."""
    until = time.monotonic() + within_s
    # Those in flight first, because one that is settled meanwhile waits then, maybe before the place of the round.
    while await rounds.ask_in_flight(connection, one, now) >= rounds.AT_ONCE:
        if time.monotonic() >= until:
            return False
    while True:
        found, reached = await rounds.ask_waiting(connection, one, now)
        if found < rounds.AT_ONCE or reached is None:
            await rounds.complete_round(connection, one)
            return True
        await rounds.move_round(connection, one, reached)
        if time.monotonic() >= until:
            return False
