"""The relay: keeps its streams, reads the log for them and settles what they have. It waits for no delivery."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog

from app import announcing
from app.database import Connection
from app.ids import message_id
from app.loops.holdings import Holdings, due
from app.loops.runner import Turned
from app.loops.stream import Stream
from app.runtime import Runtime
from app.store.announcements import Announcement, announce
from app.store.delivery_retries import claim_retries
from app.store.places import Shard, set_breaker
from app.store.relay import Reader, log_head, takes, union, window
from app.store.settling import Batch, Settlement, settle
from app.store.subscriptions import disable

log = structlog.get_logger(__name__)

# The longest rest between two looks at the log.
EVERY_S = 0.5
# The shortest time from one turn to the next: each flush that publishes wakes the relay, and a look at the log for each
# would cost as much as the flush did.
CALM_S = 0.01
# How often subscriptions and leases are looked after, and how often retries that fall due.
KEEP_EVERY = timedelta(seconds=1)
RETRIES_EVERY = timedelta(seconds=0.5)
# A claimed retry that is not settled may be claimed again after this; a new holder need not wait for it.
RETRY_LEASE = timedelta(minutes=15)
# Windows that are read at once: the pool serves the API as well.
CONNECTIONS = 3
# What of the drain's time is left for the last settle.
DRAIN_SHARE = 0.7


class Relay:
    """The relay of one process: `step` is its loop's step, `drain` its end."""

    def __init__(self, runtime: Runtime) -> None:
        self._holdings = Holdings(runtime)
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._head = 0
        self._kept_at: datetime | None = None
        self._retries_at: datetime | None = None

    @property
    def streams(self) -> dict[Shard, Stream]:
        """The streams that this process holds."""
        return self._holdings.streams

    async def step(self, runtime: Runtime, now: datetime) -> Turned:
        """Look after the leases, see whether the log has grown, read for each stream that has room, and settle."""
        if due(self._kept_at, KEEP_EVERY, now):
            async with runtime.database.connection() as connection:
                await self._holdings.keep(connection, now)
            self._kept_at = now
        if self.streams:
            await self._look(runtime, now)
            await self._read_and_settle(runtime, now)
            await self._bury(runtime, now)
        if self._kept_at == now:
            self._measure(runtime, now)
        return Turned(more=any(stream.needs_turn(self._head, now) for stream in self.streams.values()))

    async def drain(self, runtime: Runtime) -> None:
        """Send nothing more, wait for what is in flight, settle it, and give the leases back."""
        for stream in self.streams.values():
            stream.close()
        try:
            async with asyncio.timeout(runtime.settings.drain_s * DRAIN_SHARE):
                await asyncio.gather(*(stream.sender.rested() for stream in self.streams.values()))
        except TimeoutError:
            log.warning("relay_drain_cut_short")
        now = runtime.clock.now()
        async with runtime.database.connection() as connection:
            await self.settle(runtime, connection, now)
            await self._holdings.leave(connection, now)

    async def _look(self, runtime: Runtime, now: datetime) -> None:
        """See how far the log goes, if any stream has read all it knew of, and claim the retries that fall due."""
        looking = any(stream.position >= self._head for stream in self.streams.values())
        reclaiming = any(stream.reclaim for stream in self.streams.values())
        retrying = reclaiming or due(self._retries_at, RETRIES_EVERY, now)
        if not (looking or retrying):
            return
        async with runtime.database.connection() as connection:
            if looking:
                self._head = await log_head(connection)
            if retrying:
                await self._claim_retries(connection, now)

    async def _claim_retries(self, connection: Connection, now: datetime) -> None:
        asking = [(s, claimant) for s in self.streams.values() if (claimant := s.claimant(now)) is not None]
        for stream in self.streams.values():
            stream.reclaim = False
        claimants = [claimant for _, claimant in asking]
        claimed = await claim_retries(connection, claimants, now + RETRY_LEASE, now) if claimants else []
        for (stream, _), messages in zip(asking, claimed, strict=True):
            if messages:
                stream.retry(messages, now)
        # Where all the room was used more may be due; the next turn asks again.
        full = any(len(found) >= claimant.room for claimant, found in zip(claimants, claimed, strict=True))
        self._retries_at = None if full else now

    async def _read_and_settle(self, runtime: Runtime, now: datetime) -> None:
        """Read each window that is wanted and settle, side by side; one that fails does not keep the others."""

        async def read(group: list[Stream]) -> None:
            async with self._connections, runtime.database.connection() as connection:
                await _read(connection, group, now)

        async def settling() -> None:
            if any(stream.wants_settle(now) for stream in self.streams.values()):
                async with runtime.database.connection() as connection:
                    await self.settle(runtime, connection, now)

        hungry = [stream for stream in self.streams.values() if stream.hungry(self._head)]
        results = await asyncio.gather(settling(), *map(read, _groups(hungry)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def settle(self, runtime: Runtime, connection: Connection, now: datetime) -> None:
        """Record what every stream has, in one statement; announce what a person must know with its cause."""
        streams = [stream for stream in self.streams.values() if stream.wants_settle(now)]
        if not streams:
            return
        batches = [stream.batch(now) for stream in streams]
        try:
            if any(map(_is_news, streams, batches)):
                async with connection.transaction():
                    held = await settle(connection, runtime.owner, batches, now)
                    kept = [(stream, b) for stream, b, ok in zip(streams, batches, held, strict=True) if ok]
                    told = await _tell(connection, kept, now)
                if told:
                    runtime.wake_ups.published()
            else:
                held = await settle(connection, runtime.owner, batches, now)
        except BaseException:
            for stream in streams:
                stream.unrecorded()
            raise
        for stream, batch, ok in zip(streams, batches, held, strict=True):
            if ok:
                stream.recorded(batch.target, now)
                continue
            log.warning(
                "lease_lost",
                subscription=stream.subscription.name,
                epoch=stream.lease.epoch,
                unsettled=len(batch.settlements),
            )
            stream.drop()

    async def _bury(self, runtime: Runtime, now: datetime) -> None:
        """Give back the leases of streams that closed, and forget those whose lease is another's."""
        for stream in [stream for stream in self.streams.values() if stream.lost]:
            await self._holdings.forget(stream)
        ended = [stream for stream in self.streams.values() if stream.ended and not self._replays_under(stream)]
        if ended:
            async with runtime.database.connection() as connection:
                await self._holdings.release(connection, ended, now)
            # Whoever wants them next, perhaps this worker with a changed subscription, need not wait for its turn.
            self._kept_at = None

    def _replays_under(self, stream: Stream) -> bool:
        """Tell whether replays still go on under a stream's lease."""
        if stream.part.shard.replay:
            return False
        return any(s is not stream and s.lease.name == stream.lease.name for s in self.streams.values())

    def _measure(self, runtime: Runtime, now: datetime) -> None:
        """Show how far behind each subscription is: its worst shard's age, and the messages of all."""
        lags: dict[str, tuple[float, int]] = {}
        for shard, stream in self.streams.items():
            if not shard.replay:
                age_s, messages = lags.get(stream.subscription.name, (0.0, 0))
                further_s, more = stream.lag(self._head, now)
                lags[stream.subscription.name] = max(age_s, further_s), messages + more
        runtime.metrics.show_lags("relay", lags)


def _groups(hungry: Sequence[Stream]) -> list[list[Stream]]:
    """Return who reads together: streams at the same position that need nothing of the database to tell what is theirs
    share a window."""
    together: dict[int, list[Stream]] = {}
    alone = []
    for stream in hungry:
        if stream.shares_reads:
            together.setdefault(stream.position, []).append(stream)
        else:
            alone.append([stream])
    return [*together.values(), *alone]


async def _read(connection: Connection, group: list[Stream], now: datetime) -> None:
    at_most = max(stream.capacity for stream in group)
    if len(group) == 1:
        [stream] = group
        messages, reached = await window(connection, stream.reader, stream.position, at_most)
        stream.feed(messages, reached, now)
        return
    position = group[0].position
    reader = Reader(0, 0, union([stream.route for stream in group]), 1, 0, 0)
    messages, reached = await window(connection, reader, position, at_most)
    for stream in group:
        if stream.position == position:
            stream.feed([message for message in messages if takes(stream.route, message)], reached, now)


def _is_news(stream: Stream, batch: Batch) -> bool:
    return bool(
        stream.gone is not None
        or stream.breaker_changes[: stream.changes_told]
        or any(s.result == "dead" for s in batch.settlements)
    )


async def _tell(connection: Connection, told: Sequence[tuple[Stream, Batch]], now: datetime) -> bool:
    """Record what became of subscriptions as such, and announce what a person must know: in the database transaction
    of its cause. Return whether anything was published."""
    news: list[Announcement | None] = []
    for stream, batch in told:
        news += [_dead(stream, settlement, now) for settlement in batch.settlements if settlement.result == "dead"]
        news += await _changes(connection, stream, now)
    return bool(await announce(connection, [one for one in news if one is not None], now))


def _dead(stream: Stream, settlement: Settlement, now: datetime) -> Announcement | None:
    message = settlement.message
    return announcing.dead_letter(
        stream.subscription.name,
        message_id=message_id(message.transaction_id, message.position),
        topic=message.topic,
        key=message.key,
        reason=settlement.reason or "",
        error=settlement.error,
        attempts=settlement.attempts,
        status=settlement.status,
        replay=stream.part.shard.replay,
        at=now,
    )


async def _changes(connection: Connection, stream: Stream, now: datetime) -> list[Announcement | None]:
    """Disable a subscription whose destination wants no more, and record what its breaker did."""
    subscription, shard = stream.subscription, stream.part.shard
    news: list[Announcement | None] = []
    if stream.gone is not None:
        disabled = await disable(connection, shard.subscription_id, stream.gone, now)
        if disabled:
            log.warning("subscription_disabled", subscription=subscription.name, because=stream.gone)
            news.append(announcing.disabled(subscription.name, subscription.topics, reason=stream.gone, at=now))
    # A replay's breaker is its own; what people see is the live delivery's.
    changes = [] if shard.replay else stream.breaker_changes[: stream.changes_told]
    for change in changes:
        if change.opened_at is not None:
            because = change.because or ""
            one = announcing.breaker_opened(subscription.name, subscription.topics, because=because, at=change.at)
        else:
            one = announcing.breaker_closed(
                subscription.name, subscription.topics, opened_at=change.was_opened_at, at=change.at
            )
        news.append(one)
    if changes:
        await set_breaker(connection, stream.lease, shard, changes[-1].opened_at, changes[-1].because)
    return news
