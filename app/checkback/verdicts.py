"""Record the verdicts of finished checks: producers' through the End lane, policy's with their announcements.

Each is recorded together with the attempt of the check that leads to it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from msgspec.structs import replace

from app.announcements import rolled_back
from app.checkback.attempts import answered_check
from app.checkback.check import FinishedCheck, decided_by, in_doubt
from app.database.connection import Connection, Database, PoolShare
from app.policy.check_schedule import Park, Settle
from app.runtime.state import Runtime
from app.store.checkback.claims import locked_groups
from app.store.coordinator.ops import End, Recorded, read_recorded, record_ends
from app.store.relay.announcements import Announcement, announce
from app.verdicts import Source, Verdict


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A batch with the decisions that were recorded, and the recorded state of each transaction that has a verdict."""

    checks: Sequence[FinishedCheck]
    recorded: dict[UUID, Recorded]


def by_policy(finished: FinishedCheck) -> bool:
    """Return whether policy decides the transaction, rather than its producer's answer."""
    return isinstance(finished.decision, Settle) and finished.decision.source == Source.POLICY


async def record_verdicts(
    runtime: Runtime, batch: Sequence[FinishedCheck], pool: Database | PoolShare
) -> RecordedBatch:
    """Record the verdicts of a batch (ids distinct).

    Where the policy of a group was changed since the claim, the new one decides: the answer to the change promised it.
    Raises the errors of the End lane and the database; it may be called again with the same batch.
    """
    ends = _ends([finished for finished in batch if not by_policy(finished)])
    outcomes = await asyncio.gather(*(runtime.lanes.end.enqueue(end) for end in ends))
    found = {end.transaction_id: outcome for end, outcome in zip(ends, outcomes, strict=True)}
    of_policy = [finished for finished in batch if by_policy(finished)]
    if not of_policy:
        return RecordedBatch(batch, found)
    policy = await _record_policy(runtime, of_policy, pool)
    checks = iter(policy.checks)
    return RecordedBatch([next(checks) if by_policy(one) else one for one in batch], found | policy.recorded)


async def parked_by_current(
    connection: Connection, checks: Sequence[FinishedCheck], now: datetime
) -> list[FinishedCheck]:
    """Return checks (ids distinct), those that a policy parks decided by their groups as they are now.

    Their groups stay as they are until the database transaction ends. Another decision than to park may come of it,
    also a verdict.
    """
    parks = [finished for finished in checks if isinstance(finished.decision, Park)]
    decided = iter(await _decided_by_current(connection, parks, now))
    return [next(decided) if isinstance(one.decision, Park) else one for one in checks]


async def _decided_by_current(
    connection: Connection, checks: Sequence[FinishedCheck], now: datetime
) -> list[FinishedCheck]:
    """Return checks with the decisions by their groups as they are now; lock these groups."""
    names = {finished.check.claim.producer_group for finished in checks}
    groups = await locked_groups(connection, list(names))
    return [decided_by(finished, groups.get(finished.check.claim.producer_group), now) for finished in checks]


async def _record_policy(
    runtime: Runtime, checks: Sequence[FinishedCheck], pool: Database | PoolShare
) -> RecordedBatch:
    """Record the verdicts of policy and announce the rollbacks, in one database transaction.

    Not through the End lane: a flush with a commit holds the offset lock, which must come after the rows that an
    announcement locks. Policy itself only rolls back.
    """
    now = runtime.clock.now()
    async with pool.transaction() as connection:
        checks = await _decided_by_current(connection, checks, now)
        batch = [finished for finished in checks if by_policy(finished)]
        ends = sorted(_ends(batch), key=lambda end: end.transaction_id)
        recorded = await record_ends(connection, ends, now) if ends else []
        found = {end.transaction_id: one for end, one in zip(ends, recorded, strict=True)}
        fresh = [finished for finished in batch if found[finished.check.claim.transaction_id].fresh]
        written = await announce(connection, [_rolled_back(finished, now) for finished in fresh], now)
    runtime.metrics.http.verdicts.labels(Verdict.ROLLBACK.word, Source.POLICY.word).inc(len(fresh))
    for finished in fresh:
        runtime.metrics.traffic.count_verdicts(finished.check.claim.producer_group, Verdict.ROLLBACK)
    runtime.metrics.tallies.publish_soon()
    if written:
        runtime.wake_ups.published()
    lost = [end for end in ends if found[end.transaction_id].owner and not found[end.transaction_id].fresh]
    return RecordedBatch(checks, found | await _read_losers(runtime, lost, found, pool, now) if lost else found)


async def _read_losers(
    runtime: Runtime, lost: Sequence[End], found: dict[UUID, Recorded], pool: Database | PoolShare, now: datetime
) -> dict[UUID, Recorded]:
    """Return the recorded state where policy's verdict was refused: another End won, or the day is closed."""
    async with pool.connection() as connection:
        stored = await read_recorded(connection, lost, now)
    committed = sum(recorded.verdict == Verdict.COMMIT for recorded in stored.values())
    runtime.metrics.http.verdicts_refused.labels(Source.POLICY.word).inc(committed)
    return {key: replace(recorded, open=found[key].open) for key, recorded in stored.items()}


def _ends(batch: Sequence[FinishedCheck]) -> list[End]:
    return [
        End(
            finished.check.claim.transaction_id,
            None,
            decision.verdict,
            decision.source,
            reason=decision.reason,
            check=answered_check(finished),
        )
        for finished in batch
        if isinstance(decision := finished.decision, Settle)
    ]


def _rolled_back(finished: FinishedCheck, at: datetime) -> Announcement:
    assert isinstance(finished.decision, Settle)
    return rolled_back(in_doubt(finished), reason=finished.decision.reason, at=at)
