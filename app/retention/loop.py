"""Upkeep: creates days before they are needed, and removes them when everything in them is over."""

from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta
from time import monotonic
from uuid import UUID

import asyncpg
import structlog

from app.config import Settings
from app.database.connection import Connection
from app.migrate import ensure_days
from app.policy.day_failures import DayFailure, failed
from app.retention import day_reading
from app.retention.day_removal import remove_day
from app.retention.heartbeat import beat, beating
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.admin import audit
from app.store.proof.shared_settings import longest_id_skew_s
from app.store.relay import announcements as announcement_store
from app.store.retention import day_blockers, days, orphans
from app.store.retention.days import Day
from app.store.retention.index_plans import probe
from app.store.subscriptions import redeliveries
from app.verdicts import DayState

log = structlog.get_logger(__name__)

EVERY_S = 60.0
TURN = timedelta(seconds=EVERY_S)
# The cause that keeps a day whose removal failed.
FAILED = "failed"
# A half of a day can arrive until its id is refused as too old, and be written a little later.
WRITTEN_LATER = timedelta(minutes=10)
# Longer than a step can lag behind in deleting the rows that belong to a removed day.
GONE_LATELY = timedelta(days=2)
# From the removal of a day until its findings are resolved. A run that had read the day writes them later, and they are
# to be announced first.
RESOLVED_AFTER = timedelta(days=1)
# How long the rate limit of a cause is kept after its last operational message.
ANNOUNCED_KEPT = timedelta(days=45)
# Upkeep's waits block no other session. They end by timeout, so that a stop does not wait for them. The session holds
# upkeep's lock: that of a process that is frozen between two statements ends too, so that another worker goes on.
SESSION = "set lock_timeout = '2s'; set statement_timeout = '10min'; set idle_session_timeout = '15min'"
# A frozen server ends no statement of its own. Longer than `statement_timeout`, which ends one of a server that works.
ANSWER_WITHIN_S = 660.0


class _Turn:
    """The time of a turn that begins at `now` and may take hours, to the minute."""

    def __init__(self, now: datetime) -> None:
        self._now, self._began = now, monotonic()

    def now(self) -> datetime:
        return self._now + timedelta(seconds=(monotonic() - self._began) // EVERY_S * EVERY_S)


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Create future days, mark decided days, and remove days whose time is over. One replica at a time."""
    turn = _Turn(now)
    # A separate session: when it ends, its lock and its settings end.
    connection = await runtime.database.dedicated(answer_within_s=ANSWER_WITHIN_S)
    try:
        # First, so that the lock is never held without its limit.
        await connection.execute(SESSION)
        if not await days.take_upkeep(connection):
            # Another worker does it, and its failures are its own.
            runtime.upkeep_failures = 0
            return StepResult()
        async with beating(runtime, connection, ANSWER_WITHIN_S):
            made = await ensure_days(connection, now, days_ahead=runtime.settings.days_ahead)
            await mark_decided(runtime, connection, now)
            gone = await let_leave(runtime, connection, turn.now())
            await clear_leftovers(connection, now)
            await clear_audit(connection, now - timedelta(seconds=runtime.settings.audit_keep_s))
        return StepResult(done=len(made) + gone)
    finally:
        await connection.close(timeout=5)


def ended(day: Day) -> datetime:
    """Return when the UTC day ends."""
    return datetime.combine(day.day, time(), UTC) + timedelta(days=1)


async def mark_decided(runtime: Runtime, connection: Connection, now: datetime) -> None:
    """Mark the past days in which every half has an Op, so that the sweep skips them.

    A day is marked only when no database transaction is open that began while halves of the day could arrive. A
    hanging commit is invisible and would be missed.
    """
    turn = _Turn(now)
    written_later = await _written_later(connection, runtime.settings)
    for day in await days.days(connection):
        last_written = ended(day) + written_later
        if day.state is not DayState.OPEN or day.decided or now < last_written:
            continue
        if await day_blockers.writers_since_before(connection, last_written):
            continue
        failure = runtime.count_failures.get(day.day)
        began, started = turn.now(), monotonic()
        if failure is not None and failure.rests(began, ()):
            continue
        try:
            decided = await _is_decided(connection, day)
        except asyncpg.PostgresError as error:
            # Such as a damaged page. The other days are marked and leave all the same.
            failure = failed(failure, began, timedelta(seconds=monotonic() - started), TURN, ())
            runtime.count_failures[day.day] = failure
            _report("day_not_counted", day, error, failure)
            if connection.is_closed():
                raise
            decided = False
        else:
            runtime.count_failures.pop(day.day, None)
        beat(runtime)
        if decided:
            await days.set_decided(connection, day.day, now)


async def _is_decided(connection: Connection, day: Day) -> bool:
    # Most often a swept one is undecided, and the rest of the day is not read.
    if (await day_reading.undecided(connection, day)).count:
        return False
    return not (await day_reading.undecided(connection, day, whole=True)).count


async def _written_later(connection: Connection, settings: Settings) -> timedelta:
    """Return how long after the end of a day its halves can be written."""
    return timedelta(seconds=await longest_id_skew_s(connection, settings.id_skew_s)) + WRITTEN_LATER


async def let_leave(runtime: Runtime, connection: Connection, now: datetime) -> int:
    """Remove each day whose retention is over, and record what keeps the others. Return the number removed."""
    left, turn = 0, _Turn(now)
    keep = timedelta(seconds=runtime.settings.retention_s)
    longest = timedelta(seconds=runtime.settings.max_retention_s)
    written_later = await _written_later(connection, runtime.settings)
    known = await days.days(connection)
    _forget_closed(runtime, known)
    # Open days that failed come last: a day can take long until it fails, or end the session. Those whose removal has
    # begun keep their place, because Postgres detaches one table at a time.
    for day in sorted(known, key=lambda one: one.state is DayState.OPEN and one.day in runtime.removal_failures):
        # A removal that has begun goes on, even if the retention was raised since.
        if day.state is DayState.GONE or (day.state is DayState.OPEN and now < ended(day) + keep):
            continue
        failure = runtime.removal_failures.get(day.day)
        # Not the beginning of the turn, which other days may have made long.
        began, started = turn.now(), monotonic()
        if failure is not None and failure.rests(began, day.held):
            continue
        try:
            forced = now >= ended(day) + longest
            causes = await remove_day(runtime, connection, day, ended(day) + written_later, now, forced=forced)
        except asyncpg.PostgresError as error:
            # Such as a damaged page. The other days leave all the same.
            causes = day.held if connection.is_closed() else [FAILED]
            failure = failed(failure, began, timedelta(seconds=monotonic() - started), TURN, causes)
            runtime.removal_failures[day.day] = failure
            _report("day_not_removed", day, error, failure)
            if connection.is_closed():
                raise
        else:
            runtime.removal_failures.pop(day.day, None)
        beat(runtime)
        if causes != day.held:
            await days.set_held(connection, day.day, causes)
        if causes and causes != day.held:
            log.warning("day_held", day=day.day.isoformat(), causes=causes)
        left += not causes
    return left


def _report(what: str, day: Day, error: Exception, failure: DayFailure) -> None:
    log.exception(
        what,
        day=day.day.isoformat(),
        error=str(error),
        failures=failure.number,
        failing_since=failure.since.isoformat(),
        retry_at=failure.retry_at.isoformat(),
    )


def _forget_closed(runtime: Runtime, known: Sequence[Day]) -> None:
    """Forget what was found of days that another worker has closed or removed meanwhile."""
    states = {day.day: day.state for day in known}
    for one in [one for one in runtime.day_settled_to if states.get(one) is not DayState.OPEN]:
        del runtime.day_settled_to[one]
    for one in [one for one in runtime.day_readers if states.get(one) is not DayState.ARCHIVING]:
        del runtime.day_readers[one]
    for one in [one for one in runtime.day_looks if states.get(one, DayState.GONE) is DayState.GONE]:
        del runtime.day_looks[one]
    for failures in (runtime.removal_failures, runtime.count_failures):
        for one in [one for one in failures if states.get(one, DayState.GONE) is DayState.GONE]:
            del failures[one]


async def clear_leftovers(connection: Connection, now: datetime) -> None:
    """Delete what removed days, deleted subscriptions and old announcements left; resolve findings of removed days."""
    for gone in await days.gone_days(connection, now - GONE_LATELY):
        await _clear_gone_day(connection, gone)
    # No run reads a removed day again, so no run resolves its findings.
    for day in await orphans.gone_days_with_findings(connection, now - RESOLVED_AFTER):
        while await orphans.resolve_findings(connection, day, now) == orphans.AT_ONCE:
            pass
    for table in orphans.OF_DELETED_SUBSCRIPTIONS:
        while await orphans.clear_deleted_subscriptions(connection, table) == orphans.AT_ONCE:
            pass
    while await orphans.clear_cancelled_replays(connection, now) == orphans.AT_ONCE:
        pass
    await orphans.revive_replays(connection)
    await orphans.clear_leases(connection, now)
    while await redeliveries.forget(connection, now) == redeliveries.FORGOTTEN_AT_ONCE:
        pass
    await announcement_store.forget(connection, now - ANNOUNCED_KEPT)


async def _clear_gone_day(connection: Connection, day: Day) -> None:
    """Delete what a removed day left. Rows of other days stay."""
    for table in orphans.OF_GONE_DAY:
        since: UUID | None = day.low
        while since is not None:
            async with connection.transaction():
                await probe(connection)
                since = await orphans.clear_gone_day(connection, table, day, since)
    place: orphans.RetryPlace | None = orphans.BEFORE_RETRIES
    while place is not None:
        async with connection.transaction():
            await probe(connection)
            place = await orphans.clear_gone_retries(connection, day, place)


async def clear_audit(connection: Connection, before: datetime) -> None:
    """Delete audit rows past their retention, after a note that the nightly proof must expect none of them."""
    await audit.note_since(connection, before)
    while await audit.forget(connection, before) == audit.FORGOTTEN_AT_ONCE:
        pass
