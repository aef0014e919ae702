"""Find what consumers did not settle in time, count the attempt, and move the checkpoints and the replays."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

import structlog

from app.pull.expiry import expire
from app.pull.replaying import feed_replays
from app.pull.settlements import NOT_IN_TIME, Held, failed, refused
from app.pull.settling import record
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.pull import held_retries, sweeps
from app.store.pull.held_retries import ToHold
from app.store.pull.settles import HeldSettlement
from app.store.pull.sweeps import LapsedRetry, OverClaimed, Pulled

log = structlog.get_logger(__name__)

# A message comes again at most this long after its time.
EVERY_S = 0.5
# While no subscription is claimed from. The first claim of the first one, or its first replay, may wait this long.
IDLE_EVERY_S = 1.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Take over claims that are over or last long, count an attempt for each message that was not settled in time."""
    follows = False
    async with runtime.database.keyed() as connection:
        subscriptions, any_claims = await sweeps.watched(connection)
        if not (subscriptions or any_claims):
            return StepResult()
        while await sweeps.put_off(connection, now):
            pass
        async with connection.transaction():
            taken = await sweeps.take_over(connection, now)
            lapsed = await sweeps.lapsed(connection, list(subscriptions), now) if subscriptions else []
            settled = _settled(subscriptions, taken, lapsed, now)
            for subscription_id, held in _still_held(subscriptions, taken, now).items():
                await held_retries.hold(connection, subscription_id, held)
            names = {one.subscription_id: one.name for one in subscriptions.values()}
            recorded, published = await record(connection, settled, names, now)
        if subscriptions:
            await sweeps.move_checkpoints(connection, now)
            follows = await feed_replays(connection, list(subscriptions), now)
            follows = await expire(runtime, connection, now) or follows
    if published:
        runtime.wake_ups.published()
    if recorded:
        runtime.wake_ups.claimable()
    for name, times in Counter(names[settled[n].subscription_id] for n in recorded).items():
        log.info("claims_lapsed", subscription=name, messages=times)
        runtime.metrics.relay.deliveries.labels(name, "failed").inc(times)
    more = bool(taken) or len(lapsed) >= sweeps.ROWS_AT_ONCE or follows
    return StepResult(len(recorded), more, within_s=EVERY_S)


def _still_held(
    subscriptions: Mapping[int, Pulled], taken: Sequence[OverClaimed], now: datetime
) -> dict[int, list[ToHold]]:
    """Return what of claims that last long the consumers hold on, by subscription."""
    held: dict[int, list[ToHold]] = {}
    for one in taken:
        if one.held_until > now and one.subscription_id in subscriptions:
            held.setdefault(one.subscription_id, []).append(
                ToHold(
                    one.transaction_id,
                    one.position,
                    one.offset,
                    one.topic,
                    one.key,
                    one.claimed_at,
                    one.held_until,
                    one.claim_id,
                    one.due_at or one.committed_at,
                )
            )
    return held


def _settled(
    subscriptions: Mapping[int, Pulled], taken: Sequence[OverClaimed], lapsed: Sequence[LapsedRetry], now: datetime
) -> list[HeldSettlement]:
    """Return what to record of the messages whose time is over. What belonged to a deleted subscription is dropped."""
    over = [
        *(_of_claim(one) for one in taken if one.held_until <= now and one.subscription_id in subscriptions),
        *map(_of_row, lapsed),
    ]
    # The consumer is gone or slow, so the message is due at once.
    return [
        refused(one, failed(NOT_IN_TIME), subscriptions[one.subscription_id].retry, now, retry_after_s=0)
        for one in over
    ]


def _of_claim(one: OverClaimed) -> Held:
    return Held(
        at=None,
        subscription_id=one.subscription_id,
        replay=0,
        transaction_id=one.transaction_id,
        position=one.position,
        offset=one.offset,
        topic=one.topic,
        key=one.key,
        waits_from=one.due_at or one.committed_at,
        used=0,
        first_at=one.claimed_at,
    )


def _of_row(one: LapsedRetry) -> Held:
    return Held(
        at=one.at,
        subscription_id=one.subscription_id,
        replay=one.replay,
        transaction_id=one.transaction_id,
        position=one.position,
        offset=one.offset,
        topic=one.topic,
        key=one.key,
        waits_from=one.first_at,
        used=one.attempts,
        first_at=one.first_at,
    )
