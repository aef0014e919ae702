"""Announces what the nightly proof found, on `halfnote.finding`: one message a day and kind.

The proof itself publishes nothing, so Spark never takes the lock that orders the log (docs/decisions/0014).
"""

from datetime import datetime

import structlog

from app.announcing import findings
from app.loops.runner import Turned
from app.runtime import Runtime
from app.store.announcements import announce
from app.store.findings import AT_ONCE, tell_findings

log = structlog.get_logger(__name__)

EVERY_S = 5.0


async def step(runtime: Runtime, now: datetime, *, at_once: int = AT_ONCE) -> Turned:
    """Announce the findings that nobody was told of; those that are resolved meanwhile need no telling.

    Marked in the database transaction that writes the messages, so each is told once; what the rate limit holds back is
    counted there, and told when its time is over. Replicas that do it at once pass over each other's rows.
    """
    async with runtime.database.transaction() as connection:
        told = await tell_findings(connection, now, at_once=at_once)
        written = await announce(connection, [findings(one, at=now) for one in told], now)
    if written:
        runtime.wake_ups.published()
    for one in told:
        log.info("findings_announced", day=str(one.day), kind=one.kind, new=one.new, open=one.open)
    done = sum(one.new for one in told)
    return Turned(done, more=done == at_once)
