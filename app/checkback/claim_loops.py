"""The loops of claimed checks: wake the claims that wait, and settle what producers claimed and did not answer."""

from collections.abc import Callable
from datetime import datetime, timedelta

from app.checkback.check import Check, FinishedCheck
from app.checkback.settle import settle_batch
from app.policy.check_schedule import CheckAgain, Decision, Park, Unanswered, after_check
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.checkback import claimed_checks as store
from app.store.checkback.claimed_checks import TakenClaim
from app.store.checkback.claims import asked_groups, asked_messages

# As often as the loop of checks looks while a transaction is in doubt.
WAKE_EVERY_S = 0.5
LAPSES_EVERY_S = 2.0
BATCH = 500
# How often checks that no producer claims are looked over, and how long they stay due before that time begins again.
LEFT_EVERY = timedelta(seconds=30)
STILL_DUE_S = 3600
STILL_DUE_BATCH = 10_000


async def wake_claims(runtime: Runtime, now: datetime) -> StepResult:
    """Wake the claims whose checks are due, by one look for all that wait in this process."""
    waiting = runtime.waiting_claims
    limits = waiting.limits
    if not limits:
        return StepResult()
    async with runtime.database.keyed() as connection:
        found = await store.due_checks(connection, limits, now)
    for group in found:
        waiting.wake(group.name, group.due)
    next_at = min((one.next_at for one in found if one.next_at is not None), default=None)
    return StepResult(len(found), within_s=None if next_at is None else max(0.0, (next_at - now).total_seconds()))


class Lapses:
    """Settles claims whose time is over as unanswered checks, and parks what no producer claims for too long."""

    def __init__(self) -> None:
        self._looked_at: datetime | None = None

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Settle one batch of each."""
        lapsed = await _taken_lapsed(runtime, now)
        await _settle(runtime, lapsed, now, _lapsed)
        left = await self._left(runtime, now)
        await _settle(runtime, left, now, _left)
        return StepResult(len(lapsed) + len(left), more=max(len(lapsed), len(left)) >= BATCH)

    async def _left(self, runtime: Runtime, now: datetime) -> list[TakenClaim]:
        if self._looked_at is not None and abs(now - self._looked_at) < LEFT_EVERY:
            return []
        async with runtime.database.transaction() as connection:
            left = await store.take_left(connection, BATCH, now)
        if len(left) < BATCH:
            self._looked_at = now
            async with runtime.database.connection() as connection:
                await store.keep_due(connection, STILL_DUE_BATCH, STILL_DUE_S, now)
        return left


async def _taken_lapsed(runtime: Runtime, now: datetime) -> list[TakenClaim]:
    # Most often there is none, and a database transaction would take three statements to learn it.
    async with runtime.database.keyed() as connection:
        if not await store.any_lapsed(connection, now):
            return []
    async with runtime.database.transaction() as connection:
        return await store.take_lapsed(connection, BATCH, now)


async def _settle(
    runtime: Runtime,
    taken: list[TakenClaim],
    now: datetime,
    finish: Callable[[Check, TakenClaim, datetime], FinishedCheck],
) -> None:
    if not taken:
        return
    async with runtime.database.connection() as connection:
        groups = await asked_groups(connection, list({one.claim.producer_group for one in taken}))
        messages = await asked_messages(connection, [one.claim.transaction_id for one in taken], bodies=False)
    checks = [
        Check(one.claim, groups.get(one.claim.producer_group), messages.get(one.claim.transaction_id, ()), ())
        for one in taken
    ]
    await settle_batch(runtime, [finish(check, one, now) for check, one in zip(checks, taken, strict=True)])


def _lapsed(check: Check, taken: TakenClaim, now: datetime) -> FinishedCheck:
    assert taken.claimed_at is not None
    assert taken.ended_at is not None
    lasted = taken.ended_at - taken.claimed_at
    result = Unanswered(f"a producer claimed it, and did not answer within {lasted.total_seconds():g} s")
    decision = after_check(check.policy, check.history, result, now) if check.messages else None
    return FinishedCheck(
        check, taken.claimed_at, decision, result, duration_ms=int(lasted.total_seconds() * 1000), trace=_trace(check)
    )


def _left(check: Check, taken: TakenClaim, now: datetime) -> FinishedCheck:
    if not check.messages:
        return FinishedCheck(check, now, None)
    decision: Decision = Park(f"no producer claimed and answered a check since {taken.ended_at:%Y-%m-%dT%H:%M:%SZ}")
    if check.group is None or check.group.updated_at != taken.group_updated_at:
        # By its group as it is now it may wait longer: the next look judges it, from the same time on.
        decision = CheckAgain(taken.due_at or now)
    return FinishedCheck(check, now, decision, trace=_trace(check), due_at=taken.due_at)


def _trace(check: Check) -> str | None:
    return check.messages[0].traceparent if check.messages else None
