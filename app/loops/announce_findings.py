"""Announces the findings of the nightly proof on `halfnote.finding`: one message per day and kind.

The proof itself publishes nothing, so Spark never takes the lock that orders the log (docs/decisions/0014).
"""

from datetime import datetime

import structlog

from app.announcements import findings
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.proof.findings import AT_ONCE, take_unannounced
from app.store.relay.announcements import announce

log = structlog.get_logger(__name__)

EVERY_S = 5.0


async def step(runtime: Runtime, now: datetime, *, at_once: int = AT_ONCE) -> StepResult:
    """Announce the findings that were not announced yet. Findings that were resolved meanwhile are skipped.

    The database transaction that writes the messages marks the findings, so each is announced once. Findings over the
    rate limit are counted and announced when the limit's time is over. Concurrent replicas skip each other's rows.
    """
    async with runtime.database.transaction() as connection:
        taken = await take_unannounced(connection, now, at_once=at_once)
        written = await announce(connection, [findings(one, at=now) for one in taken], now)
    if written:
        runtime.wake_ups.published()
    for one in taken:
        log.info("findings_announced", day=str(one.day), kind=one.kind, new=one.new, open=one.open)
    done = sum(one.new for one in taken)
    return StepResult(done, more=done == at_once)
