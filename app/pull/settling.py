"""Settle what consumers hold: acknowledge, give back, refuse, and hold for longer.

Each function takes opened handles without duplicates and returns an outcome for each, in their order. A handle whose
message is not held by it any more gets None, and nothing is changed for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import asyncpg
import structlog

from app.announcements import dead_letter
from app.clock import Clock
from app.database.connection import Connection
from app.ids import message_id
from app.pull.settlements import Held, Refusal, acknowledged, refused
from app.store.pull import claims, held_retries
from app.store.pull.claims import HeldMessage
from app.store.pull.held_retries import ToHold
from app.store.pull.settles import HeldSettlement, settle_held
from app.store.relay.announcements import Announcement, announce
from app.store.relay.results import DEAD
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import DeliveryOutcome

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The message has its receipt; `repeated`: it had one already, by the same handle."""

    repeated: bool


ACKNOWLEDGED = Acknowledged(False)


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The message is a retry that is due at `due_at`, or a dead letter (None). `what`: the outcome of the attempt."""

    due_at: datetime | None
    what: DeliveryOutcome | None


@dataclass(frozen=True, slots=True)
class Extended:
    """The message is the consumer's until `until`."""

    until: datetime


async def acknowledge(
    connection: Connection,
    subscription: Subscription,
    handles: Sequence[HeldMessage],
    now: datetime,
    *,
    version: str | None = None,
) -> list[Acknowledged | None] | None:
    """Write the receipts of messages. To acknowledge one again by the same handle changes nothing.

    `version`: of the row of the subscription. None is returned, and nothing changed, if the row has another one; also
    if no message is one of a claim that holds it, because then the subscription must be read.
    """
    subscription_id = subscription.subscription_id
    claimed = [n for n, one in enumerate(handles) if one.place]
    fresh: set[int] = set()
    if claimed:
        wanted = [handles[n] for n in claimed]
        try:
            fresh = await claims.acknowledge(connection, subscription_id, wanted, now, version)
        except asyncpg.UniqueViolationError:
            fresh = await claims.acknowledge(connection, subscription_id, wanted, now, version, any_receipts=True)
    if version is not None and not fresh:
        return None
    if len(fresh) == len(handles):
        return [ACKNOWLEDGED] * len(handles)
    found: list[Acknowledged | None] = [None] * len(handles)
    for index in fresh:
        found[claimed[index]] = ACKNOWLEDGED
    rest = [n for n, one in enumerate(found) if one is None]
    if rest:
        wanted = [handles[n] for n in rest]
        async with connection.transaction():
            held = await held_retries.lock_held(connection, subscription_id, wanted, now)
            left: set[int] = set()
            if held:
                settled = [acknowledged(_of_row(wanted[index], row), wanted[index], now) for index, row in held.items()]
                left = await settle_held(connection, settled, now)
        for place, index in enumerate(held):
            if place not in left:
                found[rest[index]] = ACKNOWLEDGED
    rest = [n for n, one in enumerate(found) if one is None]
    if rest:
        for index in await held_retries.acknowledged(connection, subscription_id, [handles[n] for n in rest]):
            found[rest[index]] = Acknowledged(True)
    return found


async def give_back(
    connection: Connection,
    subscription: Subscription,
    handles: Sequence[HeldMessage],
    outcome: Refusal,
    clock: Clock,
    *,
    retry_after_s: float | None = None,
) -> tuple[list[GivenBack | None], bool]:
    """Record a failed attempt of each message: a retry, or a dead letter after the last try or if it is refused.

    The wait for the retry begins after the wait for the locks of what is held. One that was not begun uses up no try,
    and leaves no attempt. Return also whether something was announced, so that the relay must be woken.
    """
    async with connection.transaction():
        held = await _held(connection, subscription.subscription_id, handles, clock.now())
        now = clock.now()
        settled = {
            n: refused(message, outcome, subscription.retry, now, retry_after_s=retry_after_s)
            for n, message in held.items()
        }
        names = {subscription.subscription_id: subscription.name}
        recorded, published = await record(connection, list(settled.values()), names, now)
        by_place = list(settled.items())
        settled = dict(by_place[place] for place in recorded)
    for one in settled.values():
        _log(subscription.name, one)
    given_back = [GivenBack(settled[n].due_at, settled[n].what) if n in settled else None for n in range(len(handles))]
    return given_back, published


async def extend(
    connection: Connection,
    subscription: Subscription,
    handles: Sequence[HeldMessage],
    invisible: timedelta,
    clock: Clock,
) -> list[Extended | None]:
    """Hold messages for a time from now on; their handles stay the same.

    The time begins after the wait for the locks of what is held.
    """
    subscription_id = subscription.subscription_id
    async with connection.transaction():
        now = clock.now()
        taken = await claims.take_back(connection, subscription_id, handles, now)
        rest = [n for n in range(len(handles)) if n not in taken]
        wanted = [handles[n] for n in rest]
        rows = await held_retries.lock_held(connection, subscription_id, wanted, now) if wanted else {}
        until = clock.now() + invisible
        await held_retries.hold(
            connection,
            subscription_id,
            [
                ToHold(
                    handles[n].transaction_id,
                    handles[n].position,
                    handles[n].offset,
                    log_entry.topic,
                    log_entry.key,
                    log_entry.claimed_at,
                    until,
                    handles[n].epoch,
                    log_entry.due_at or log_entry.committed_at,
                )
                for n, log_entry in taken.items()
            ],
        )
        await held_retries.extend_held(connection, [row.at for row in rows.values()], until)
    held = {*taken, *(rest[index] for index in rows)}
    return [Extended(until) if n in held else None for n in range(len(handles))]


async def record(
    connection: Connection,
    settled: Sequence[HeldSettlement],
    names: Mapping[int, str],
    now: datetime,
    *,
    also: Sequence[Announcement | None] = (),
) -> tuple[list[int], bool]:
    """Settle messages and announce dead letters, and `also` others; return whether any was announced.

    Return before it the indexes of what was recorded: upkeep may have closed a day since the messages were locked.
    `names`: of subscriptions, by id. Needs a database transaction, and is its last statement.
    """
    left = await settle_held(connection, settled, now) if settled else set()
    recorded = [n for n in range(len(settled)) if n not in left]
    of_dead = [settled[n] for n in recorded if settled[n].result is DEAD]
    dead = [_dead_letter(names[one.subscription_id], one, now) for one in of_dead]
    return recorded, bool(await announce(connection, [one for one in (*dead, *also) if one is not None], now))


def _log(name: str, settlement: HeldSettlement) -> None:
    log.info(
        "delivery_dead" if settlement.result is DEAD else "delivery_failed",
        subscription=name,
        message_id=message_id(settlement.transaction_id, settlement.position),
        offset=settlement.offset,
        outcome=settlement.what,
        attempt=settlement.attempts,
        error=settlement.error,
        due_at=settlement.due_at.isoformat() if settlement.due_at else None,
    )


def _dead_letter(name: str, settlement: HeldSettlement, now: datetime) -> Announcement | None:
    return dead_letter(
        name,
        message_id=message_id(settlement.transaction_id, settlement.position),
        topic=settlement.topic,
        key=settlement.key,
        reason=settlement.reason or "",
        error=settlement.error,
        attempts=settlement.attempts,
        at=now,
        replay=settlement.replay,
    )


async def _held(
    connection: Connection, subscription_id: int, handles: Sequence[HeldMessage], now: datetime
) -> dict[int, Held]:
    """Take the messages of these handles out of their claims, or lock their rows; return those that are held."""
    taken = await claims.take_back(connection, subscription_id, handles, now)
    held = {n: _of_claim(handles[n], entry) for n, entry in taken.items()}
    rest = [n for n in range(len(handles)) if n not in taken]
    if rest:
        rows = await held_retries.lock_held(connection, subscription_id, [handles[n] for n in rest], now)
        held |= {rest[index]: _of_row(handles[rest[index]], row) for index, row in rows.items()}
    return held


def _of_claim(handle: HeldMessage, entry: claims.TakenBack) -> Held:
    return Held(
        at=None,
        subscription_id=handle.subscription_id,
        replay=0,
        transaction_id=handle.transaction_id,
        position=handle.position,
        offset=handle.offset,
        topic=entry.topic,
        key=entry.key,
        waits_from=entry.due_at or entry.committed_at,
        used=0,
        first_at=entry.claimed_at,
    )


def _of_row(handle: HeldMessage, row: held_retries.HeldRetry) -> Held:
    return Held(
        at=row.at,
        subscription_id=handle.subscription_id,
        replay=handle.replay,
        transaction_id=handle.transaction_id,
        position=handle.position,
        offset=handle.offset,
        topic=row.topic,
        key=row.key,
        waits_from=row.first_at,
        used=row.attempts,
        first_at=row.first_at,
    )
