"""The verdicts of finished checks: producers' through the End lane, policy's own together with their announcement."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from app.announcing import rolled_back
from app.loops.check_acts import Finished, in_doubt
from app.policy import Settle
from app.runtime import Runtime
from app.store.announcements import Announcement, announce
from app.store.ops import End, Recorded, read_recorded, record_ends
from app.verdicts import Source, Verdict


def by_policy(finished: Finished) -> bool:
    """Tell whether policy decides the transaction, rather than its producer's answer or nobody."""
    return isinstance(finished.decision, Settle) and finished.decision.source == Source.POLICY


async def record_verdicts(runtime: Runtime, batch: Sequence[Finished]) -> dict[UUID, Recorded]:
    """Record the verdicts of a batch (ids distinct); return what stands of each transaction that had one.

    Raises what the End lane and the database raise; it may be called again with the same batch.
    """
    ends = _ends([finished for finished in batch if not by_policy(finished)])
    outcomes = await asyncio.gather(*(runtime.lanes.end.submit(end) for end in ends))
    found = {end.transaction_id: outcome for end, outcome in zip(ends, outcomes, strict=True)}
    given_up = [finished for finished in batch if by_policy(finished)]
    return found | await _give_up(runtime, given_up) if given_up else found


async def _give_up(runtime: Runtime, batch: Sequence[Finished]) -> dict[UUID, Recorded]:
    """Record what policy decides, and announce what that rolled back, in one database transaction.

    Not by the End lane: a flush with somebody's commit in it holds the offset lock, which comes after the rows that an
    announcement locks. Policy itself only rolls back.
    """
    ends = sorted(_ends(batch), key=lambda end: end.transaction_id)
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        found = await record_ends(connection, ends, now)
        fresh = [finished for finished in batch if found[finished.check.claim.transaction_id].fresh]
        written = await announce(connection, [_rolled_back(finished, now) for finished in fresh], now)
    runtime.metrics.verdicts.labels(Verdict.ROLLBACK.word, Source.POLICY.word).inc(len(fresh))
    if written:
        runtime.wake_ups.published()
    lost = [end for end in ends if found[end.transaction_id].owner and not found[end.transaction_id].fresh]
    return found | await _standing(runtime, lost, found, now) if lost else found


async def _standing(
    runtime: Runtime, lost: Sequence[End], found: dict[UUID, Recorded], now: datetime
) -> dict[UUID, Recorded]:
    """Return what stands where somebody else decided, if anybody did: the day may be closed."""
    async with runtime.database.connection() as connection:
        standing = await read_recorded(connection, lost, now)
    committed = sum(recorded.verdict == Verdict.COMMIT for recorded in standing.values())
    runtime.metrics.verdicts_refused.labels(Source.POLICY.word).inc(committed)
    return {key: replace(recorded, open=found[key].open) for key, recorded in standing.items()}


def _ends(batch: Sequence[Finished]) -> list[End]:
    return [
        End(finished.check.claim.transaction_id, None, decision.verdict, decision.source, reason=decision.reason)
        for finished in batch
        if isinstance(decision := finished.decision, Settle)
    ]


def _rolled_back(finished: Finished, at: datetime) -> Announcement:
    assert isinstance(finished.decision, Settle)
    return rolled_back(in_doubt(finished), reason=finished.decision.reason, at=at)
