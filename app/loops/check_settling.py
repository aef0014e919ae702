"""What becomes of finished checks, a batch at a time: verdicts first, then everything else in one statement.

The order matters: a policy's verdict is given only under a lease that is made sure of first, so that nobody parks the
transaction meanwhile; rows are settled after the verdicts, so that a row is removed only when its op is there.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

import structlog

from app.announcing import parked
from app.callback_urls import without_query
from app.loops.check_acts import Finished, in_doubt
from app.loops.check_verdicts import by_policy, record_verdicts
from app.policy import Answered, CheckAgain, LeaveParked, Park, Settle, Unanswered
from app.runtime import Runtime
from app.store.announcements import announce
from app.store.check_settles import SettledCheck, hold, settle
from app.store.ops import Recorded
from app.trace_context import log_fields
from app.verdicts import Source, Verdict

log = structlog.get_logger(__name__)

# A day that is being archived takes no verdict; it is looked at again this much later.
CLOSED_DAY_AGAIN_S = 60
ERROR_MAX = 2000


async def settle_batch(runtime: Runtime, batch: Sequence[Finished]) -> None:
    """Record the verdicts of a batch (ids distinct) and write what became of each check.

    Raises what the database raises; then nothing of the batch is lost, and it may be settled again: an End is
    answered as a repeat, and only attempts may stand twice.
    """
    held = await _hold(runtime, batch)
    batch = [finished for finished in batch if not by_policy(finished) or _id(finished) in held]
    recorded = await record_verdicts(runtime, batch)
    now = runtime.clock.now()
    settled = [_settled(finished, recorded.get(_id(finished)), now) for finished in batch]
    if settled:
        await _write(runtime, batch, settled, now)
    for finished, row in zip(batch, settled, strict=True):
        _tell(runtime, finished, row)


async def _hold(runtime: Runtime, batch: Sequence[Finished]) -> set[UUID]:
    leases = [(_id(finished), finished.check.claim.epoch) for finished in batch if by_policy(finished)]
    if not leases:
        return set()
    async with runtime.database.connection() as connection:
        return await hold(connection, leases, runtime.clock.now())


async def _write(runtime: Runtime, batch: Sequence[Finished], settled: Sequence[SettledCheck], now: datetime) -> None:
    """Write the rows of a batch; what they park is announced in the same database transaction."""
    parks = {row.transaction_id: row.parked_reason for row in settled if row.parked_reason is not None}
    if not parks:
        async with runtime.database.connection() as connection:
            await settle(connection, settled, now)
        return
    async with runtime.database.transaction() as connection:
        done = await settle(connection, settled, now)
        news = [parked(in_doubt(one), reason=parks[_id(one)], at=now) for one in batch if _id(one) in done]
        written = await announce(connection, news, now)
    if written:
        runtime.wake_ups.published()


def _settled(finished: Finished, recorded: Recorded | None, now: datetime) -> SettledCheck:
    """Return the row that settles a check; `recorded` is what stands after its verdict was sent, if it had one."""
    row = _asked(finished)
    match finished.decision:
        case None:
            return replace(row, outcome=None, over=True)
        case Settle(verdict=verdict):
            assert recorded is not None
            return _decided(row, finished, verdict, recorded, now)
        case CheckAgain(at=at):
            return replace(row, next_check_at=at)
        case Park(reason=reason):
            return replace(row, parked_reason=_clean(reason))
        case LeaveParked():
            return row


def _asked(finished: Finished) -> SettledCheck:
    """Return what the check itself left, without what becomes of the transaction."""
    claim, brought = finished.check.claim, finished.brought
    row = SettledCheck(claim.transaction_id, claim.epoch, claim.number, finished.at)
    if brought is None:
        return row
    last = finished.tried[-1] if finished.tried else None
    errors = [f"{without_query(tried.url)}: {tried.error}" for tried in finished.tried[:-1]]
    if isinstance(brought, Unanswered):
        errors = [brought.error]
    outcome = "unanswered"
    if isinstance(brought, Answered):
        outcome = brought.verdict.word if brought.verdict is not None else "unknown"
    return replace(
        row,
        outcome=outcome,
        verdict=brought.verdict if isinstance(brought, Answered) else None,
        url=without_query(last.url) if last else None,
        status=last.status if last else None,
        duration_ms=sum(tried.duration_ms for tried in finished.tried),
        error=_clean("; ".join(errors)) or None,
        response=finished.response,
        answered=isinstance(brought, Answered),
        unanswered=isinstance(brought, Unanswered),
    )


def _decided(
    row: SettledCheck, finished: Finished, verdict: Verdict, recorded: Recorded, now: datetime
) -> SettledCheck:
    if recorded.verdict is not None:
        lost = _by_producer(finished) and recorded.verdict != verdict
        return replace(row, outcome="lost" if lost else row.outcome, over=True)
    if recorded.owner is None:
        return replace(row, outcome=None, over=True)
    # Not decided, and the half is there: its day is closed, or the winner of a race was undone by a crash.
    later = now if recorded.open else now + timedelta(seconds=CLOSED_DAY_AGAIN_S)
    return replace(row, outcome=None, answered=False, next_check_at=later)


def _tell(runtime: Runtime, finished: Finished, row: SettledCheck) -> None:
    """Count and log one check."""
    if row.outcome is not None:
        runtime.metrics.checks.labels(row.outcome).inc()
        runtime.metrics.check_seconds.observe((row.duration_ms or 0) / 1000)
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


def _id(finished: Finished) -> UUID:
    return finished.check.claim.transaction_id


def _by_producer(finished: Finished) -> bool:
    return isinstance(finished.decision, Settle) and finished.decision.source == Source.CHECK


def _source(finished: Finished) -> str | None:
    return finished.decision.source.word if isinstance(finished.decision, Settle) else None


def _clean(text: str) -> str:
    return text[:ERROR_MAX].replace("\x00", "\ufffd")
