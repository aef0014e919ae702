"""The relay's loop: read the log for all streams and settle their outcomes. A turn waits for no delivery."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from time import monotonic

import structlog

from app import announcements
from app.database.connection import Connection
from app.ids import message_id
from app.relay.assignments import Assignments, due
from app.relay.expiry_turn import expire
from app.relay.handed_messages import HandedMessages
from app.relay.lost_claims import closing_if_lost
from app.relay.stream import Stream
from app.relay.unknown_settle import UnknownSettle
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.relay.announcements import Announcement, announce
from app.store.relay.checkpoints import Shard, set_breaker
from app.store.relay.log import NEWEST, Outgoing, Read, Reader, log_head, read_bodies, takes, union, window
from app.store.relay.results import DEAD, Batch, Settlement, settle
from app.store.relay.retries import FoundRetries, claim_retries, is_full
from app.store.relay.settle_numbers import is_last_settle, number_settle
from app.store.subscriptions.subscriptions import disable
from app.topic_patterns import is_reserved

log = structlog.get_logger(__name__)

# The longest time between two turns. A turn that nothing woke looks for messages and retries.
EVERY_S = 0.5
# A turn that outcomes asked for looks too if the last look was this long ago. So a publication that woke no relay is
# read within 0.75 s.
LOOK_EVERY = timedelta(seconds=EVERY_S / 2)
# The average time from one turn to the next: at least twice the time of a turn, within these bounds. Each flush that
# publishes wakes the relay, and a read of the log for each would cost as much as the flush. Long turns are those of a
# busy machine, or those that read much.
INTERVALS_S = (0.004, 0.008)
# So many turns may follow each other sooner after a rest: at 100 messages a second, few of them wait for their turn.
BURST = 3
# How often assignments are refreshed, and how often due retries are claimed.
REFRESH_EVERY = timedelta(seconds=1)
RETRIES_EVERY = timedelta(seconds=0.5)
# How often the lags of streams are shown while all rest: they do not change, but other processes may withdraw them.
SHOW_RESTING_EVERY = timedelta(seconds=5)
# After a claim that found nothing for a stream with due rows, as many times its duration pass before the next regular
# one of that stream, within a limit: a claim passes all rows that wait behind a failed message of their key, thousands
# for hours. The other streams are claimed for meanwhile.
CLAIM_REST_TIMES, CLAIM_REST_MOST = 20, timedelta(seconds=5)
# A claimed retry that is not settled may be claimed again after this: the stream that still has it goes on with the new
# claim. A new holder of the shard frees it at once.
RETRY_LEASE = timedelta(minutes=15)
# Windows that are read at once; few, because the connection pool serves the API as well.
CONNECTIONS = 3
# The share of the drain's time for deliveries in flight; the rest is for the last settle.
DRAIN_SHARE = 0.7


class Relay:
    """The relay of one process: `step` is its loop's step, `drain` its end."""

    def __init__(self, runtime: Runtime) -> None:
        runtime.publications.relay = self.hand_over
        runtime.database.guard.on_promotion.append(self.forget)
        self._wake_ups = runtime.wake_ups
        self._assignments = Assignments(runtime)
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._head = 0
        self._head_at: datetime | None = None
        # Whether something was published that no read or look has covered, and when the last one began.
        self._unread = False
        # Whether this turn reads without the head, and whether such a read left something.
        self._direct = self._more = False
        self._looked_at: datetime | None = None
        self._handed = HandedMessages()
        # The streams, if each of them rested at the end of the last turn.
        self._resting: list[Stream] = []
        # When the lags were last shown since all streams rest.
        self._shown_resting_at: datetime | None = None
        # Whether the last look found any message that waits for a retry.
        self._retries_wait = True
        self._refreshed_at: datetime | None = None
        self._retries_at: datetime | None = None
        # A settle in a database transaction whose commit got no answer.
        self._unknown: UnknownSettle | None = None
        # How often the log was forgotten. It can happen at any await: what was read before it says nothing of the log.
        self._times_forgotten = 0

    @property
    def streams(self) -> dict[Shard, Stream]:
        """The streams that this process holds."""
        return self._assignments.streams

    def forget(self) -> None:
        """Forget what was read of the log: the database may have less of it now, and reuse the offsets after that."""
        head, dropped = self._head, self._assignments.drop_all()
        self._handed, self._unknown = HandedMessages(), None
        self._head, self._resting, self._retries_wait = 0, [], True
        self._head_at = self._looked_at = self._refreshed_at = self._retries_at = None
        self._times_forgotten += 1
        self._wake_ups.wake()
        log.warning("log_forgotten", head=head, streams=dropped)

    def hand_over(self, messages: Sequence[Outgoing], now: datetime) -> bool:
        """Give the streams messages that were committed just now, without reading the log.

        Return whether no stream must read the log for them. Messages that a stream cannot take yet, because it has not
        read those before them, are kept for a moment: a read that is under way may reach them.
        """
        self._handed.add(messages, now)
        return self._take_handed(now)

    def _take_handed(self, now: datetime) -> bool:
        """Give the streams what was handed over; return whether no stream must read the log for it."""
        reads = False
        for run in self._handed.runs(now):
            behind = [stream for stream in self.streams.values() if not stream.accept_handed(run, now)]
            if not behind:
                self._handed.taken(run)
            # The others read the log at their next look, or when they have room.
            reads = reads or any(_reads_for(stream, run) for stream in behind)
            self._head = max(self._head, run[-1].offset)
            self._resting = []
        return not reads

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Refresh the assignments, look for messages, read for each stream that has room, and settle."""
        woken = runtime.wake_ups.take()
        self._unread, self._direct, self._more = self._unread or woken.published, False, False
        if due(self._refreshed_at, REFRESH_EVERY, now):
            async with runtime.database.keyed() as connection:
                await self._assignments.refresh(connection, now)
            self._refreshed_at = now
        if woken.idle and self._resting and await self._still_rests(runtime, now):
            if self._refreshed_at == now and due(self._shown_resting_at, SHOW_RESTING_EVERY, now):
                self._measure(runtime, now)
                self._shown_resting_at = now
            return StepResult()
        self._shown_resting_at = None
        if self.streams:
            groups = await self._look(runtime, now, looks=woken.looks)
            await expire(runtime, self._assignments, now)
            await self._read_and_settle(runtime, groups, now)
            await self._release_ended(runtime, now)
        if self._refreshed_at == now:
            self._measure(runtime, now)
        streams = self.streams.values()
        more = self._more or any(stream.needs_turn(self._head, now) for stream in streams)
        works = not woken.idle or more or self._unread or self._retries_wait
        rests = not works and all(stream.rests(self._head) for stream in streams)
        self._resting = list(streams) if rests else []
        return StepResult(more=more)

    async def _still_rests(self, runtime: Runtime, now: datetime) -> bool:
        """Return whether a turn that nothing woke has nothing to do: the log is as it was, and no retry waits."""
        if self._resting != list(self.streams.values()) or any(s.outcomes.reclaim for s in self._resting):
            return False
        async with runtime.database.keyed() as connection:
            head, retries = await log_head(connection)
        # The log may have been forgotten meanwhile: then no stream rests.
        if head != self._head or retries or not self._resting:
            return False
        self._head_at = self._looked_at = self._retries_at = now
        return True

    async def drain(self, runtime: Runtime) -> None:
        """Send nothing more, wait for what is in flight, settle it, and release the leases."""
        for stream in self.streams.values():
            stream.close()
        try:
            async with asyncio.timeout(runtime.settings.drain_s * DRAIN_SHARE):
                await asyncio.gather(*(stream.sender.wait_idle() for stream in self.streams.values()))
        except TimeoutError:
            log.warning("relay_drain_cut_short")
        now = runtime.clock.now()
        async with runtime.database.keyed() as connection:
            await self.settle(runtime, connection, now)
            # Outcomes that were settled once more went without the others.
            await self.settle(runtime, connection, now)
            await self._assignments.leave(connection, now)

    async def _look(self, runtime: Runtime, now: datetime, *, looks: bool) -> list[list[Stream]]:
        """Return the groups of streams that read now, after reading the log's head if it must be known for that.

        The head is read on a timer too: a stream without room does not reach it, and the lag must still rise. With the
        head, retries that are due are claimed.
        """
        streams = self.streams.values()
        looks = looks or self._unread or due(self._looked_at, LOOK_EVERY, now)
        at_head = looks and any(stream.position >= self._head for stream in streams)
        groups = _groups(stream for stream in streams if stream.wants_messages(self._head))
        if at_head and self._unread and not groups:
            # Most often one window serves all streams, and shows the head.
            groups = _groups(stream for stream in streams if stream.wants_messages(NEWEST))
            self._direct = len(groups) == 1
            at_head = not self._direct
        reads_head = at_head or due(self._head_at, timedelta(seconds=runtime.settings.lag_refresh_s), now)
        reclaiming = any(stream.outcomes.reclaim for stream in streams)
        claims = reclaiming or due(self._retries_at, RETRIES_EVERY, now)
        if not (reads_head or claims):
            return groups
        async with runtime.database.keyed() as connection:
            before, times_forgotten = self._head, self._times_forgotten
            head, retries_wait = await log_head(connection)
            if self._times_forgotten != times_forgotten:
                return []
            if head < before:
                # The database went back and no timeline showed it, or upkeep removed the day of the newest message.
                # Then the streams read again from their checkpoints, which are at the end, and claim then.
                self.forget()
                claims = False
            self._head, self._retries_wait = head, retries_wait
            self._head_at = self._looked_at = now
            self._unread = self._direct = False
            if claims:
                await self._claim_retries(runtime, connection, now, any_wait=self._retries_wait)
        return _groups(stream for stream in streams if stream.wants_messages(self._head))

    async def _claim_retries(
        self, runtime: Runtime, connection: Connection, now: datetime, *, any_wait: bool = True
    ) -> None:
        self._retries_at = now
        with_room = [
            (s, claimant) for s in self.streams.values() if (claimant := s.claimant(self._head, now)) is not None
        ]
        for stream in self.streams.values():
            stream.outcomes.reclaim = False
        if not any_wait:
            for stream in self.streams.values():
                stream.sender.no_retry_due()
            return
        claimants = [claimant for _, claimant in with_room]
        with closing_if_lost(connection, [stream for stream, _ in with_room], self._assignments.close):
            until, began = now + RETRY_LEASE, monotonic()
            claimed = await claim_retries(connection, runtime.owner, claimants, until, now) if claimants else []
        rest = timedelta(seconds=CLAIM_REST_TIMES * (monotonic() - began))
        for stream in _in_vain([stream for stream, _ in with_room], claimed):
            stream.rest_claims(min(rest, CLAIM_REST_MOST), now)
        for (stream, _), found in zip(with_room, claimed, strict=True):
            if found.messages:
                stream.retry(found.messages, until, now)
            else:
                stream.sender.no_retry_due()
        # If all room was used, more may be due, so the next turn claims again.
        if any(is_full(claimant, found.messages) for claimant, found in zip(claimants, claimed, strict=True)):
            self._retries_at = None

    async def _read_and_settle(self, runtime: Runtime, groups: list[list[Stream]], now: datetime) -> None:
        """Read windows and settle at the same time; a failure of one does not stop the others."""

        async def read(group: list[Stream]) -> None:
            times_forgotten = self._times_forgotten
            async with self._connections, runtime.database.keyed() as connection:
                found = await _read(connection, group, now)
            if self._times_forgotten != times_forgotten:
                return
            self._head = max(self._head, found.reached or 0)
            if self._direct:
                self._unread = self._more = found.more
                self._looked_at = now

        async def settling() -> None:
            if self._unknown is not None or any(stream.settle_due(now) for stream in self.streams.values()):
                async with runtime.database.keyed() as connection:
                    # The turn may have begun before these deliveries, and a receipt must not be older than its attempt.
                    await self.settle(runtime, connection, runtime.clock.now())

        bodies = [
            self._read_bodies(runtime, stream, messages)
            for stream in self.streams.values()
            if (messages := stream.bodies_to_read())
        ]
        results = await asyncio.gather(settling(), *bodies, *map(read, groups), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if len(self._handed) and not self._take_handed(now):
            runtime.wake_ups.wake()

    async def _read_bodies(self, runtime: Runtime, stream: Stream, messages: Sequence[Outgoing]) -> None:
        """Read the bodies of messages whose turn in their key comes soon."""
        async with self._connections, runtime.database.keyed() as connection:
            found = await read_bodies(connection, messages)
        stream.bodies_read(found, runtime.clock.now())
        if len(found) < len(messages):
            # Upkeep owns the others by now, and the next holder does not read them.
            self._assignments.close(stream)

    async def settle(self, runtime: Runtime, connection: Connection, now: datetime) -> None:
        """Record the outcomes of all streams in one statement; announce what a person must know with its cause.

        Nothing is recorded before it is known whether an earlier settle whose answer was lost was committed.
        """
        if self._unknown is not None:
            await self._resolve(self._unknown, runtime, connection, now)
        streams = [stream for stream in self.streams.values() if stream.wants_settle(now)]
        if not streams:
            return
        batches = [stream.batch(now) for stream in streams]
        unknown: UnknownSettle | None = None
        try:
            if any(map(_is_announced, streams, batches)):
                async with connection.transaction():
                    held = await settle(connection, runtime.owner, batches, now)
                    recorded = [(stream, b) for stream, b, ok in zip(streams, batches, held, strict=True) if ok]
                    unknown = UnknownSettle(await number_settle(connection, runtime.owner), recorded)
                    published = await _announce(connection, recorded, now)
                if published:
                    runtime.wake_ups.published()
            else:
                held = await settle(connection, runtime.owner, batches, now)
        except BaseException:
            self._unknown = unknown
            waiting = set() if unknown is None else unknown.streams
            for stream in streams:
                if stream not in waiting:
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

    async def _resolve(self, unknown: UnknownSettle, runtime: Runtime, connection: Connection, now: datetime) -> None:
        """Find out whether a settle was committed, and tell its streams.

        If it was, nothing of it is settled or announced once more: a person may have redelivered or dropped its dead
        letters already.
        """
        committed = await is_last_settle(connection, runtime.owner, unknown.number)
        self._unknown = None
        for stream, batch in unknown.recorded:
            if stream.lost:
                continue
            if committed:
                stream.recorded(batch.target, now)
            else:
                stream.unrecorded()
        if committed:
            runtime.wake_ups.published()

    async def _release_ended(self, runtime: Runtime, now: datetime) -> None:
        """Release the leases of streams that ended, and forget streams that lost theirs."""
        await self._assignments.forget([stream for stream in self.streams.values() if stream.lost])
        ended = [stream for stream in self.streams.values() if stream.ended and not self._replays_under(stream)]
        if ended:
            async with runtime.database.keyed() as connection:
                await self._assignments.release(connection, ended, now)
            # The next holder may be this worker with a changed subscription: refresh in the next turn.
            self._refreshed_at = None

    def _replays_under(self, stream: Stream) -> bool:
        """Return whether replays still run under a stream's lease."""
        if stream.source.shard.replay:
            return False
        return any(s is not stream and s.lease.name == stream.lease.name for s in self.streams.values())

    def _measure(self, runtime: Runtime, now: datetime) -> None:
        """Show the lag of each subscription: the oldest age of its shards, and the messages of all of them."""
        lags: dict[str, tuple[float, int]] = {}
        used: dict[str, float] = {}
        for shard, stream in self.streams.items():
            if stream.expiry is not None and not shard.replay:
                name = stream.subscription.name
                used[name] = max(used.get(name, 0.0), stream.expiry.used)
            if stream.outcomes.sends and not shard.replay:
                age_s, messages = lags.get(stream.subscription.name, (0.0, 0))
                shard_age_s, more = stream.window.lag(self._head, now)
                lags[stream.subscription.name] = max(age_s, shard_age_s), messages + more
        runtime.metrics.relay.show_lags("relay", lags)
        runtime.metrics.relay.show_limits_used("relay", used)


def _in_vain(streams: Sequence[Stream], claimed: Sequence[FoundRetries]) -> list[Stream]:
    """Return the streams for which a claim passed rows in vain: those with many of them, if any has many.

    Few rows can be slow too, for example behind many delayed ones. Then the time is theirs only if nothing was claimed.
    """
    many = [stream for stream, found in zip(streams, claimed, strict=True) if found.passed_many]
    if many or any(found.messages for found in claimed):
        return many
    return [stream for stream, found in zip(streams, claimed, strict=True) if found.passed]


def _reads_for(stream: Stream, messages: Sequence[Outgoing]) -> bool:
    """Return whether a stream has room and takes any of these messages, as far as topics and tags tell."""
    route = stream.window.route
    return stream.wants_messages(NEWEST) and any(takes(route, message) for message in messages)


def _groups(streams: Iterable[Stream]) -> list[list[Stream]]:
    """Return the groups of streams that share a read: same position, and messages chosen without the database."""
    together: dict[int, list[Stream]] = {}
    alone = []
    for stream in streams:
        if stream.window.shares_reads:
            together.setdefault(stream.position, []).append(stream)
        else:
            alone.append([stream])
    return [*together.values(), *alone]


async def _read(connection: Connection, group: list[Stream], now: datetime) -> Read:
    at_most = max(stream.window.capacity for stream in group)
    if len(group) == 1:
        [stream] = group
        found = await window(connection, stream.window.reader, stream.position, at_most)
        # Meanwhile messages may have been handed over.
        stream.accept_window(_after(stream.position, found.messages), found.reached, now)
        return found
    position = group[0].position
    reader = Reader(
        subscription_id=0,
        replay=0,
        route=union([stream.window.route for stream in group]),
        shards=1,
        shard=0,
        settled_to=0,
    )
    found = await window(connection, reader, position, at_most)
    for stream in group:
        if stream.position >= position:
            messages = [m for m in _after(stream.position, found.messages) if takes(stream.window.route, m)]
            stream.accept_window(messages, found.reached, now)
    return found


def _after(position: int, messages: list[Outgoing]) -> list[Outgoing]:
    if not messages or messages[0].offset > position:
        return messages
    return [message for message in messages if message.offset > position]


def _is_announced(stream: Stream, batch: Batch) -> bool:
    return bool(
        stream.outcomes.disabled_reason is not None
        or stream.breaker.settling
        or any(s.result is DEAD for s in batch.settlements)
    )


async def _announce(connection: Connection, recorded: Sequence[tuple[Stream, Batch]], now: datetime) -> bool:
    """Record changes of subscriptions and breakers, and announce what a person must know, with dead letters.

    Needs the database transaction that recorded the batches. Return whether anything was published.
    """
    announced: list[Announcement | None] = []
    for stream, batch in recorded:
        dead = [settlement for settlement in batch.settlements if settlement.result is DEAD]
        announced += [_dead(stream, settlement, now) for settlement in dead if settlement.what is not None]
        announced.append(_expired(stream, [settlement for settlement in dead if settlement.what is None], now))
        announced += await _changes(connection, stream, now)
    return bool(await announce(connection, [one for one in announced if one is not None], now))


def _dead(stream: Stream, settlement: Settlement, now: datetime) -> Announcement | None:
    message = settlement.message
    return announcements.dead_letter(
        stream.subscription.name,
        message_id=message_id(message.transaction_id, message.position),
        topic=message.topic,
        key=message.key,
        reason=settlement.reason or "",
        error=settlement.error,
        attempts=settlement.attempts,
        status=settlement.status,
        replay=stream.source.shard.replay,
        at=now,
    )


def _expired(stream: Stream, settlements: Sequence[Settlement], now: datetime) -> Announcement | None:
    """Return the announcement of the newest message that expired, which stands for the others."""
    expired = [settlement for settlement in settlements if not is_reserved(settlement.message.topic)]
    if not expired:
        return None
    log.warning(
        "messages_expired",
        subscription=stream.subscription.name,
        messages=len(expired),
        reasons=sorted({str(settlement.reason) for settlement in expired}),
    )
    newest = _dead(stream, expired[-1], now)
    return None if newest is None else replace(newest, stands_for=len(expired))


async def _changes(connection: Connection, stream: Stream, now: datetime) -> list[Announcement | None]:
    """Disable a subscription whose destination is gone, and record the changes of its breaker."""
    subscription, shard = stream.subscription, stream.source.shard
    announced: list[Announcement | None] = []
    if stream.outcomes.disabled_reason is not None:
        disabled = await disable(connection, subscription, stream.outcomes.disabled_reason, now)
        if disabled:
            log.warning(
                "subscription_disabled", subscription=subscription.name, because=stream.outcomes.disabled_reason
            )
            announced.append(
                announcements.disabled(
                    subscription.name, subscription.topics, reason=stream.outcomes.disabled_reason, at=now
                )
            )
    # A replay has a breaker of its own; the one that people see is that of live delivery.
    changes = [] if shard.replay else stream.breaker.settling
    for change in changes:
        if not change.announced:
            continue
        if change.stored.opened_at is not None:
            because = change.stored.because or ""
            one = announcements.breaker_opened(subscription.name, subscription.topics, because=because, at=change.at)
        else:
            one = announcements.breaker_closed(
                subscription.name, subscription.topics, opened_at=change.was_opened_at, at=change.at
            )
        announced.append(one)
    if changes:
        # A reset of the breaker by a person stays if the answer to a probe that was in flight asks for a pause.
        only_pause = all(change.only_pause for change in changes)
        await set_breaker(connection, stream.lease, shard, changes[-1].stored, only_pause=only_pause)
    return announced
