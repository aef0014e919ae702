"""Settle finished checks in batches: verdicts first, then all other columns in one statement.

The order matters. A policy's verdict is recorded only under a lease that was extended first, so that no other replica
parks the transaction meanwhile. Rows are settled after the verdicts, so a row is removed only when its op exists.

Whatever policy decides, it decides by the group as it is while the outcome is written: a changed group that was
answered holds also for the checks that are out.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

import structlog

from app.announcements import parked
from app.checkback.attempts import attempt_of, clean
from app.checkback.check import FinishedCheck, in_doubt
from app.checkback.verdicts import RecordedBatch, by_policy, parked_by_current, record_verdicts
from app.database.connection import Database, PoolShare
from app.observability.trace_context import log_fields
from app.policy.check_schedule import CheckAgain, LeaveParked, Park, Settle
from app.runtime.state import Runtime
from app.store.checkback.results import CLOSED_DAY_RETRY_S, Lease, SettledCheck, hold, settle
from app.store.coordinator.ops import Recorded
from app.store.relay.announcements import announce
from app.verdicts import CheckOutcome, Source, Verdict

log = structlog.get_logger(__name__)


async def settle_batch(
    runtime: Runtime, batch: Sequence[FinishedCheck], pool: Database | PoolShare | None = None
) -> RecordedBatch:
    """Record the verdicts of a batch (ids distinct) and settle each check. Left out: those whose lease was lost.

    `pool` lends the connections; None: the process's. Raises the database's errors. The batch may then be settled
    again: an End is answered as a repeat, and only attempts may be recorded twice.
    """
    pool = pool or runtime.database
    done, settled = RecordedBatch(batch, {}), None
    while settled is None:
        done = await _record(runtime, done, pool)
        done, settled = await _write(runtime, done, pool)
    for finished, row in zip(done.checks, settled, strict=True):
        _report(runtime, finished, row)
    return done


async def _record(runtime: Runtime, done: RecordedBatch, pool: Database | PoolShare) -> RecordedBatch:
    """Record the verdicts of a batch that are not recorded yet; leave out those of policy whose lease was lost."""
    new = [finished for finished in done.checks if _is_new(finished, done)]
    if not new:
        return done
    held = await _hold(runtime, new, pool)
    new = [finished for finished in new if not by_policy(finished) or _lease(finished) in held]
    added = await record_verdicts(runtime, new, pool)
    others = [finished for finished in done.checks if not _is_new(finished, done)]
    return RecordedBatch([*others, *added.checks], done.recorded | added.recorded)


async def _hold(runtime: Runtime, batch: Sequence[FinishedCheck], pool: Database | PoolShare) -> set[Lease]:
    leases = [_lease(finished) for finished in batch if by_policy(finished)]
    if not leases:
        return set()
    async with pool.connection() as connection:
        return await hold(connection, leases, runtime.clock.now())


async def _write(
    runtime: Runtime, done: RecordedBatch, pool: Database | PoolShare
) -> tuple[RecordedBatch, list[SettledCheck] | None]:
    """Write the rows of a batch; announce the transactions that they park in the same database transaction.

    Returns the batch as it was decided in the end, and its rows. Rows None: nothing is written, because the changed
    policy of a group rolls back what the former one parked. That verdict is to be recorded first.
    """
    now = runtime.clock.now()
    if not any(isinstance(finished.decision, Park) for finished in done.checks):
        settled = _rows(done, now)
        if settled:
            async with pool.connection() as connection:
                await settle(connection, settled, now)
        return done, settled
    async with pool.transaction() as connection:
        # Groups are locked before the rows of check_back, as by a PUT.
        done = replace(done, checks=await parked_by_current(connection, done.checks, now))
        if any(_is_new(finished, done) for finished in done.checks):
            return done, None
        settled = _rows(done, now)
        stored = await settle(connection, settled, now)
        parks = [(one, row) for one, row in zip(done.checks, settled, strict=True) if row.transaction_id in stored]
        announcements = [parked(in_doubt(one), reason=row.parked_reason, at=now) for one, row in parks]
        written = await announce(connection, announcements, now)
    if written:
        runtime.wake_ups.published()
    return done, settled


def _is_new(finished: FinishedCheck, done: RecordedBatch) -> bool:
    """Return whether a check has a verdict that is not recorded yet."""
    return isinstance(finished.decision, Settle) and _id(finished) not in done.recorded


def _rows(done: RecordedBatch, now: datetime) -> list[SettledCheck]:
    return [_settled(finished, done.recorded.get(_id(finished)), now) for finished in done.checks]


def _settled(finished: FinishedCheck, recorded: Recorded | None, now: datetime) -> SettledCheck:
    """Return the row that settles a check; `recorded` is the state after its verdict was recorded, if it had one."""
    row = attempt_of(finished)
    match finished.decision:
        case None:
            return replace(row, outcome=None, over=True)
        case Settle(verdict=verdict):
            assert recorded is not None
            return _decided(row, finished, verdict, recorded, now)
        case CheckAgain(at=at):
            return replace(row, next_check_at=at)
        case Park(reason=reason):
            return replace(row, parked_reason=clean(reason))
        case LeaveParked():
            return row


def _decided(
    row: SettledCheck, finished: FinishedCheck, verdict: Verdict, recorded: Recorded, now: datetime
) -> SettledCheck:
    if recorded.fresh:
        return replace(row, noted=True, over=True)
    if recorded.verdict is not None:
        if _by_producer(finished) and recorded.verdict != verdict:
            return replace(row, outcome=CheckOutcome.LOST, over=True)
        assert recorded.source is not None
        return replace(row, source=recorded.source if row.verdict is not None else row.source, over=True)
    if recorded.owner is None:
        return replace(row, outcome=None, over=True)
    # The half exists and is not decided: its day is closed, or a crash undid the End that won a race.
    later = now if recorded.open else now + timedelta(seconds=CLOSED_DAY_RETRY_S)
    return replace(row, outcome=None, answered=False, next_check_at=later)


def _report(runtime: Runtime, finished: FinishedCheck, row: SettledCheck) -> None:
    """Count and log one check."""
    if row.outcome is not None:
        runtime.metrics.checkback.checks.labels(row.outcome).inc()
        if finished.tried:
            runtime.metrics.checkback.check_seconds.observe((row.duration_ms or 0) / 1000)
    claim = finished.check.claim
    log.info(
        "check",
        transaction_id=str(claim.transaction_id),
        producer_group=claim.producer_group,
        check=claim.number,
        outcome=row.outcome or "not asked",
        decided_by=_source(finished),
        parked=row.parked_reason,
        url=row.url,
        status=row.status,
        duration_ms=row.duration_ms,
        error=row.error,
        **log_fields(finished.trace),
    )


def _id(finished: FinishedCheck) -> UUID:
    return finished.check.claim.transaction_id


def _lease(finished: FinishedCheck) -> Lease:
    return _id(finished), finished.check.claim.epoch


def _by_producer(finished: FinishedCheck) -> bool:
    return isinstance(finished.decision, Settle) and finished.decision.source == Source.CHECK


def _source(finished: FinishedCheck) -> str | None:
    return finished.decision.source.word if isinstance(finished.decision, Settle) else None
