"""Make dead letters of messages that have waited too long for consumers, or that are too many.

A worker counts each subscription that has limits, as the relay counts its streams (`app.relay.expiry`). What a
consumer holds does not wait. Messages of the log that must go are moved to delivery_retry first, where one statement
settles them.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import structlog

from app import announcements
from app.database.connection import Connection
from app.ids import message_id
from app.policy.expiry import ANNOUNCED_FROM, AT_ONCE, COUNT_EVERY, EXCESS_AT_ONCE, WaitingLimits
from app.pull.settling import record
from app.runtime.state import Runtime
from app.store.pull import ordered_claims, waiting_limits
from app.store.pull.claims import reader_of
from app.store.pull.settles import HeldSettlement
from app.store.pull.waiting_limits import CountingTurn, WaitingRow
from app.store.relay.announcements import Announcement
from app.store.relay.expiry import matching_ahead
from app.store.relay.results import DEAD
from app.store.subscriptions.subscriptions import Subscription, limited_pulled
from app.verdicts import DeadLetterReason

log = structlog.get_logger(__name__)

# A count reads at most so many parts of the log, and one turn passes over at most so many.
SPANS_COUNTED, SPANS_PASSED = 50, 10


@dataclass(frozen=True, slots=True)
class WaitingCount:
    """What waits for the consumers of a subscription: since when the oldest message does, and how many do.

    `stored` is the number of rows, `ahead` that of messages in the log. `committed_at`: when the first one of the log
    was committed.
    """

    oldest_at: datetime | None
    stored: int
    ahead: int
    committed_at: datetime | None

    @property
    def backlog(self) -> int:
        """How many messages wait."""
        return self.stored + self.ahead


async def expire(runtime: Runtime, connection: Connection, now: datetime) -> bool:
    """Make dead letters of what must not wait any longer; return whether more must go at once."""
    more = False
    limited = await limited_pulled(connection)
    for subscription in limited:
        turn = await waiting_limits.take_turn(connection, subscription.subscription_id, COUNT_EVERY, now)
        if turn is None:
            continue
        waiting = await _count(connection, subscription, turn, now)
        gone, published = await _expire(connection, subscription, turn, waiting, now)
        if published:
            runtime.wake_ups.published()
        for one in gone:
            _log(subscription.name, one)
            runtime.metrics.relay.deliveries.labels(subscription.name, DEAD).inc()
            runtime.metrics.relay.expired.labels(subscription.name, one.reason).inc()
        more = more or len(gone) >= AT_ONCE
    used = await waiting_limits.limits_used(connection, [one.subscription_id for one in limited]) if limited else {}
    shown = {one.name: used[one.subscription_id] for one in limited if one.subscription_id in used}
    runtime.metrics.relay.show_limits_used("pull", shown)
    return more


async def _count(connection: Connection, subscription: Subscription, turn: CountingTurn, now: datetime) -> WaitingCount:
    """Count what waits: rows that no consumer holds, and the messages of the log after the cursor."""
    reader, most = reader_of(subscription), _counted_most(subscription)
    oldest_at, stored = await waiting_limits.waiting_rows(connection, subscription.subscription_id, most, now)
    ahead = await waiting_limits.oldest_ahead(connection, reader, turn.offset)
    committed_at, ahead_at = ahead or (None, None)
    after, taken_ahead = turn.offset, 0
    for _ in range(SPANS_COUNTED if subscription.max_backlog is not None else 0):
        found = await matching_ahead(connection, reader, after, now)
        taken_ahead += found.taken
        if not found.more or found.reached is None or stored + taken_ahead >= most:
            break
        after = found.reached
    return WaitingCount(
        min((at for at in (oldest_at, ahead_at) if at is not None), default=None), stored, taken_ahead, committed_at
    )


def _counted_most(subscription: Subscription) -> int:
    return 1 if subscription.max_backlog is None else subscription.max_backlog + EXCESS_AT_ONCE


async def _passed(connection: Connection, subscription: Subscription, after: int, offset: int, now: datetime) -> int:
    """Return how many messages that counted a subscription's cursor has passed; more if it went very far."""
    reader, passed = replace(reader_of(subscription), until=offset), 0
    for _ in range(SPANS_PASSED):
        found = await matching_ahead(connection, reader, after, now)
        passed += found.taken
        if not found.more or found.reached is None or found.reached >= offset:
            return passed
        after = found.reached
    return passed + offset - after


async def _expire(
    connection: Connection, subscription: Subscription, turn: CountingTurn, waiting: WaitingCount, now: datetime
) -> tuple[list[HeldSettlement], bool]:
    """Settle what must go, in one database transaction; return it, and whether anything was announced.

    Nothing goes by a limit that was changed during the count, nor for messages that were claimed during it.
    """
    limits, stored = _limits(subscription), waiting.stored
    excess, used = limits.excess(waiting.backlog), limits.used(waiting.oldest_at, waiting.backlog, now)
    if excess:
        # Before the lock, which claims wait for: there can be many.
        most = _counted_most(subscription)
        _, stored = await waiting_limits.waiting_rows(connection, subscription.subscription_id, most, now)
    async with connection.transaction():
        # No claim takes what is being passed over.
        await ordered_claims.lock(connection, subscription.subscription_id)
        offset = await waiting_limits.offset_as_counted(connection, subscription)
        if offset is None:
            return [], False
        if excess:
            passed = await _passed(connection, subscription, turn.offset, offset, now) if offset > turn.offset else 0
            excess = limits.excess(stored + max(0, waiting.ahead - passed))
        gone: list[HeldSettlement] = []
        if limits.expire_after is not None:
            gone = await _old(connection, subscription, waiting, now - limits.expire_after, now)
        live = sum(not one.replay for one in gone)
        surplus = min(turn.excess, excess, AT_ONCE)
        if surplus > live:
            # The oldest, so those that are too old are among them.
            known = {one.at for one in gone}
            gone += [one for one in await _oldest(connection, subscription, surplus, now) if one.at not in known]
        left = max(0, excess - sum(not one.replay for one in gone))
        await waiting_limits.note(connection, subscription.subscription_id, left, used, again=len(gone) >= AT_ONCE)
        approaching = used >= ANNOUNCED_FROM > turn.used
        also = [_approaching(subscription, waiting, now)] if approaching else []
        _, published = await record(connection, gone, {subscription.subscription_id: subscription.name}, now, also=also)
    return gone, published


async def _old(
    connection: Connection, subscription: Subscription, waiting: WaitingCount, before: datetime, now: datetime
) -> list[HeldSettlement]:
    """Return the dead letters of messages that wait since `before` or longer, up to AT_ONCE."""
    # Entries that the subscription does not take are passed over as well, so that the next count looks behind them.
    passed, more = 0, waiting.committed_at is None or waiting.committed_at <= before
    for _ in range(SPANS_PASSED):
        if not more or passed >= AT_ONCE:
            break
        count, more = await waiting_limits.pass_over(connection, subscription, AT_ONCE - passed, before, now)
        passed += count
    subscription_id = subscription.subscription_id
    rows = await waiting_limits.lock_waiting(connection, subscription_id, before, AT_ONCE, replays=True)
    return [_dead(subscription_id, one, DeadLetterReason.EXPIRED) for one in rows]


async def _oldest(
    connection: Connection, subscription: Subscription, count: int, now: datetime
) -> list[HeldSettlement]:
    """Return the dead letters of the `count` oldest messages that wait: rows first, then those of the log."""
    subscription_id = subscription.subscription_id
    rows = await waiting_limits.lock_waiting(connection, subscription_id, now, count, replays=False)
    missing, more, spans = count - len(rows), True, 0
    while missing > 0 and more and spans < SPANS_PASSED:
        passed, more = await waiting_limits.pass_over(connection, subscription, missing, now, now)
        missing, spans = missing - passed, spans + 1
    if missing < count - len(rows):
        rows = await waiting_limits.lock_waiting(connection, subscription_id, now, count, replays=False)
    return [_dead(subscription_id, one, DeadLetterReason.BACKLOG) for one in rows]


def _limits(subscription: Subscription) -> WaitingLimits:
    after_s = subscription.expire_after_s
    return WaitingLimits(None if after_s is None else timedelta(seconds=after_s), subscription.max_backlog)


def _dead(subscription_id: int, row: WaitingRow, reason: DeadLetterReason) -> HeldSettlement:
    return HeldSettlement(
        at=row.at,
        subscription_id=subscription_id,
        replay=row.replay,
        transaction_id=row.transaction_id,
        position=row.position,
        offset=row.offset,
        topic=row.topic,
        key=row.key,
        waits_from=row.since,
        result=DEAD,
        attempts=row.attempts,
        first_at=row.first_at,
        error=row.last_error,
        reason=reason,
    )


def _approaching(subscription: Subscription, waiting: WaitingCount, now: datetime) -> Announcement | None:
    oldest_s = 0.0 if waiting.oldest_at is None else (now - waiting.oldest_at).total_seconds()
    return announcements.expiring(
        subscription.name,
        subscription.topics,
        state=subscription.state,
        oldest_s=oldest_s,
        backlog=waiting.backlog,
        expire_after_s=subscription.expire_after_s,
        max_backlog=subscription.max_backlog,
        at=now,
    )


def _log(name: str, gone: HeldSettlement) -> None:
    log.info(
        "delivery_dead",
        subscription=name,
        message_id=message_id(gone.transaction_id, gone.position),
        offset=gone.offset,
        reason=gone.reason,
        attempt=gone.attempts,
        error=gone.error,
    )
