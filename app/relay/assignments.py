"""Assign shards and replays to this process: take their leases, and open and close their streams."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import ceil

import structlog

from app.database.connection import Connection
from app.database.notifier import CLAIMABLE
from app.destinations.base import Destination
from app.destinations.registry import NotInstalled, destination_of, installed
from app.policy.rate_limiter import AnyPacer, JointPacer, Pacer
from app.relay.stream import Stream
from app.relay.stream_source import StreamContext, StreamSource
from app.runtime.state import Runtime
from app.store.relay import checkpoints
from app.store.relay.checkpoints import Shard, StartPosition
from app.store.relay.leases import LeaseKind, claim, leave, release, renew, unheld, workers_present
from app.store.relay.log import ReplayFilter
from app.store.subscriptions import replays
from app.store.subscriptions.subscriptions import Known, Subscription, streamed
from app.topic_patterns import TopicPatterns
from app.verdicts import OnDead, Ordered

log = structlog.get_logger(__name__)


# Another worker takes over a dead worker's shards after at most one lease and one refresh.
LEASE = timedelta(seconds=10)
RENEW_EVERY = timedelta(seconds=3)
# After a destination cannot be created here, this process leaves the subscription to others for this long.
UNAVAILABLE_FOR = timedelta(seconds=30)
# After no worker has taken a shard for this long, one takes it beyond its fair share: the worker whose share it is
# cannot create its destination.
UNHELD_FOR = timedelta(seconds=30)
UNHELD_AGAIN_FOR = timedelta(seconds=6)
RATES_EVERY = timedelta(seconds=5)
# How often a full stream looks for rows that upkeep removed, and for due ones that it has not reached. It reads all
# rows that are held.
ROOM_EVERY = timedelta(seconds=30)
# By how much the clock of the process that redelivered a message may be ahead of this one's.
CLOCKS_APART = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class DesiredAssignments:
    """What the tables say should be delivered: shards of subscriptions, and replays, with their configuration.

    `pulled`: the topics that consumers claim. No worker delivers them.
    """

    shards: Mapping[Shard, Subscription]
    replays: Mapping[Shard, replays.Replay]
    # Subscriptions whose checkpoints have another number of shards than is configured.
    to_resize: Sequence[Subscription]
    pulled: Sequence[str]


class Assignments:
    """The streams of one process by shard. `refresh` makes them match what the tables ask for.

    Invariants: a live stream has a lease of its own; a replay runs under the lease of its subscription's shard 0, and
    its stream ends before that of the shard. A stream is closed before its lease is released.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.streams: dict[Shard, Stream] = {}
        self._runtime = runtime
        self._context = StreamContext(runtime.clock, runtime.metrics, runtime.wake_ups.request_turn, runtime.tracing)
        self._renewed_at: datetime | None = None
        self._rated_at: datetime | None = None
        self._room_at: datetime | None = None
        self._workers = frozenset({runtime.owner})
        self._desired = DesiredReader()
        # When this process last failed to create the destination of a subscription, by its id.
        self._unavailable: dict[int, datetime] = {}
        # Since when this process has seen that no worker holds a shard, and those that it took beyond its share.
        self._unheld: dict[Shard, datetime] = {}
        self._beyond: set[Shard] = set()
        # The subscriptions of which it ever took one.
        self._taken_before: set[int] = set()
        # Leases of streams that were dropped while they were held, name → epoch.
        self._dropped: dict[str, int] = {}

    async def refresh(self, connection: Connection, now: datetime) -> None:
        """Renew leases, close streams that changed or exceed a fair share, and claim what is free."""
        await self._release_dropped(connection, now)
        is_renewing = due(self._renewed_at, RENEW_EVERY, now)
        if is_renewing:
            await self._renew(connection, now)
            self._renewed_at = now
        desired = await self._desired.read(connection)
        self._close_changed(desired)
        share = ceil(len(desired.shards) / len(self._workers))
        live = [s for shard, s in self.streams.items() if not shard.replay and shard not in self._beyond]
        for stream in live[share:]:
            self.close(stream)
        for subscription in desired.to_resize:
            await self._resize(connection, subscription, now)
        await self._claim(connection, desired.shards, share - len(live), now)
        if is_renewing:
            await self._claim_beyond_share(connection, desired.shards, len(live) >= share, now)
        await self._update_replays(connection, desired.replays, now)
        if due(self._room_at, ROOM_EVERY, now):
            self._room_at = now
            await self._make_room(connection)
        await self._free_dead_keys(connection)
        await self._store_rates(connection, now)
        self._runtime.wake_ups.elsewhere = self._elsewhere(desired)

    def drop_all(self) -> int:
        """Drop every stream, and forget what was read; return how many were dropped.

        The next refresh claims the shards again, with new epochs, and reads from their stored checkpoints.
        """
        live = [stream for stream in self.streams.values() if not stream.lost]
        self._dropped |= _epochs(stream for stream in live if not stream.source.shard.replay)
        for stream in live:
            stream.drop()
        self._desired = DesiredReader()
        # Other processes may take the topics meanwhile.
        self._runtime.wake_ups.elsewhere = None
        return len(live)

    async def _release_dropped(self, connection: Connection, now: datetime) -> None:
        # First, because a destination can take a second to close. Others may be dropped meanwhile.
        dropped, self._dropped = self._dropped, {}
        if dropped:
            await release(connection, dropped, self._runtime.owner, now)
            await self.forget([stream for stream in self.streams.values() if stream.lost])

    async def release(self, connection: Connection, streams: Sequence[Stream], now: datetime) -> None:
        """Release the leases of these streams and forget them; a replay has no lease of its own."""
        if not streams:
            return
        await release(connection, _epochs(s for s in streams if not s.source.shard.replay), self._runtime.owner, now)
        await self.forget(streams)

    async def forget(self, streams: Sequence[Stream]) -> None:
        """Drop streams whose leases are over, together with the replays under those leases."""
        if not streams:
            return
        # Another process may take their topics. The next refresh shows which topics are taken elsewhere.
        self._runtime.wake_ups.elsewhere = None
        dropped = [one for stream in streams for one in self._popped(stream.source.shard)]
        for one in dropped:
            one.drop()
        # At the same time: a destination can take seconds to close, and meanwhile no lease is renewed.
        await asyncio.gather(*(one.close_destination() for one in dropped))

    def _popped(self, shard: Shard) -> list[Stream]:
        """Take a stream out, with the replays under its lease."""
        replays_of_it = (
            [] if shard.replay else [key for key in self.streams if key.replay and key._replace(replay=0) == shard]
        )
        keys = (shard, *replays_of_it)
        self._beyond.difference_update(keys)
        return [self.streams.pop(key) for key in keys if key in self.streams]

    async def leave(self, connection: Connection, now: datetime) -> None:
        """Release every lease, and withdraw this worker's presence."""
        await self._release_dropped(connection, now)
        await self.release(connection, list(self.streams.values()), now)
        await leave(connection, LeaseKind.WORKER, self._runtime.owner)

    def _elsewhere(self, desired: DesiredAssignments) -> TopicPatterns:
        """Return the topics of the shards that this process does not hold, or will not hold for long, and those that
        consumers claim, who may wait at any process."""
        held = {shard for shard, stream in self.streams.items() if not (stream.closing or stream.lost)}
        resized = [pattern for subscription in desired.to_resize for pattern in subscription.topics]
        return TopicPatterns(
            [p for shard, subscription in desired.shards.items() if shard not in held for p in subscription.topics]
            + resized
            + list(desired.pulled)
        )

    async def _renew(self, connection: Connection, now: datetime) -> None:
        until, owner = now + LEASE, self._runtime.owner
        workers = await workers_present(connection, LeaseKind.WORKER, owner, until, now)
        if workers != self._workers:
            # The shares are others now, and a worker that joined may have what this one lacked.
            self._workers, self._beyond = workers, set()
        renewed = await renew(connection, _epochs(self.streams.values()), owner, until) if self.streams else set()
        over = []
        for stream in self.streams.values():
            if stream.lease.name in renewed:
                stream.renewed(until)
            elif not stream.lost:
                log.warning("lease_lost", subscription=stream.subscription.name, epoch=stream.lease.epoch)
                over.append(stream)
        await self.forget(over)

    def _close_changed(self, desired: DesiredAssignments) -> None:
        for shard, stream in self.streams.items():
            wanted = desired.shards.get(shard._replace(replay=0) if shard.replay else shard)
            # An unchanged subscription is the same object, and to compare two takes longer.
            changed = wanted is not stream.subscription and wanted != stream.subscription
            if changed or (shard.replay and not _runs_on(stream, desired.replays.get(shard))):
                self.close(stream)

    def close(self, stream: Stream) -> None:
        """Close a stream, after the replays under its lease: without them it could not end."""
        shard = stream.source.shard
        for key, other in self.streams.items():
            if not shard.replay and key.replay and key._replace(replay=0) == shard:
                other.close()
        stream.close()

    async def _resize(self, connection: Connection, subscription: Subscription, now: datetime) -> None:
        if any(shard.subscription_id == subscription.subscription_id for shard in self.streams):
            return
        async with connection.transaction():
            done = await checkpoints.resize(connection, subscription.subscription_id, subscription.shards, now)
        if done:
            log.info("shards_resized", subscription=subscription.name, shards=subscription.shards)

    async def _claim_beyond_share(
        self, connection: Connection, wanted: Mapping[Shard, Subscription], is_full: bool, now: datetime
    ) -> None:
        """Claim a part of what no worker has held for `UNHELD_FOR`: another one, with room, cannot create it.

        What was once taken so waits for `UNHELD_AGAIN_FOR`, as after a change of its subscription.
        """
        others = {shard.lease_name: shard for shard in wanted if is_full and shard not in self.streams}
        free = {others[name] for name in await unheld(connection, list(others), now)} if others else set()
        self._unheld = {shard: self._unheld.get(shard, now) for shard in free if self._can_open(wanted[shard], now)}
        waiting = {
            shard: wanted[shard]
            for shard, since in self._unheld.items()
            if now - since >= (UNHELD_AGAIN_FOR if shard.subscription_id in self._taken_before else UNHELD_FOR)
        }
        if not waiting:
            return
        before = set(self.streams)
        await self._claim(connection, waiting, ceil(len(waiting) / max(len(self._workers) - 1, 1)), now)
        taken = {shard for shard in self.streams if shard not in before}
        self._beyond |= taken
        self._taken_before |= {shard.subscription_id for shard in taken}
        if taken:
            log.warning("shards_taken_beyond_share", shards=len(taken), unheld_s=UNHELD_FOR.total_seconds())

    async def _claim(
        self, connection: Connection, wanted: Mapping[Shard, Subscription], at_most: int, now: datetime
    ) -> None:
        if at_most <= 0:
            return
        free = {
            shard.lease_name: shard
            for shard, subscription in wanted.items()
            if shard not in self.streams and self._can_open(subscription, now)
        }
        if not free:
            return
        until = now + LEASE
        leases = await claim(connection, list(free), self._runtime.owner, until, at_most, now)
        # A second statement, after the leases are committed: it sees what the former holders settled, and their
        # later settles are refused.
        taken = {free[lease.name]: lease for lease in leases}
        starts = await checkpoints.start_positions(connection, list(taken))
        unused = []
        for shard, lease in taken.items():
            source = StreamSource(wanted[shard], shard, lease)
            if shard not in starts or not await self._open(connection, source, starts[shard], until, now):
                unused.append(lease)
        if unused:
            await release(connection, {lease.name: lease.epoch for lease in unused}, self._runtime.owner, now)

    def _can_open(self, subscription: Subscription, now: datetime) -> bool:
        """Return whether this process should try: it may lack a library that another worker has."""
        at = self._unavailable.get(subscription.subscription_id)
        if at is not None and not due(at, UNAVAILABLE_FOR, now):
            return False
        kind: str = subscription.destination["type"]
        if not installed(kind):
            self._leave_to_others(subscription, NotInstalled(kind), now)
        return installed(kind)

    def _leave_to_others(self, subscription: Subscription, error: Exception, now: datetime) -> None:
        log.error("destination_unavailable", subscription=subscription.name, error=str(error))
        self._unavailable[subscription.subscription_id] = now

    async def _open(
        self, connection: Connection, source: StreamSource, start: StartPosition, until: datetime, now: datetime
    ) -> bool:
        """Open the stream of a source; False if its destination cannot be created here, or its lease was lost."""
        subscription, shard = source.subscription, source.shard
        try:
            destination = self._destination(subscription)
        except Exception as error:
            self._leave_to_others(subscription, error, now)
            return False
        if not await checkpoints.free_claims(connection, source.lease, shard):
            return False
        if subscription.ordered is Ordered.KEY:
            # Dead letters first: one that a person redelivers between the two reads has its row in the second one. Read
            # the other way round, neither would have it, and a later message of its key could pass it.
            holds = subscription.on_dead is OnDead.HOLD
            dead = await checkpoints.dead_keys(connection, shard) if holds else frozenset[str]()
            stored = await checkpoints.stored_keys(connection, shard, now + CLOCKS_APART)
            start = replace(start, stored=stored, dead=dead)
        stream = Stream(self._context, source, destination, until, start, self._pacer(source))
        self.streams[shard] = stream
        log.info(
            "lease_taken",
            subscription=subscription.name,
            epoch=source.lease.epoch,
            after=stream.position,
            **({"shard": f"{shard.shard}/{shard.shards}"} if shard.shards > 1 else {}),
            **({"replay": shard.replay} if shard.replay else {}),
        )
        return True

    def _destination(self, subscription: Subscription) -> Destination:
        runtime = self._runtime
        return destination_of(
            subscription, runtime.deliveries_http, runtime.network_policy, runtime.vault, runtime.settings.origin
        )

    def _pacer(self, source: StreamSource) -> AnyPacer | None:
        """Return the rate limiter of a source. Each shard has its share; a replay shares those of the shards here.

        What another worker's shards leave of the rate is not known here, so a replay does not use it.
        """
        rate, shard = source.subscription.rate_per_s, source.shard
        if rate is None:
            return None
        if shard.replay:
            return JointPacer(lambda: self._pacers_here(shard))
        return Pacer(rate / shard.shards)

    def _pacers_here(self, replay: Shard) -> list[Pacer]:
        """Return the rate limiters of the shards of a replay's subscription that no other worker can hold now."""
        now, found = self._runtime.clock.now(), []
        for number in range(replay.shards):
            stream = self._live_of(replay._replace(shard=number))
            if stream is not None and now < stream.sender.lease_until and isinstance(stream.sender.pacer, Pacer):
                found.append(stream.sender.pacer)
        return found

    async def _update_replays(
        self, connection: Connection, wanted: Mapping[Shard, replays.Replay], now: datetime
    ) -> None:
        """Open the replays of subscriptions whose shard 0 is held here, and mark those that are over."""
        new = [shard for shard in wanted if shard not in self.streams and self._live_of(shard) is not None]
        starts = await checkpoints.start_positions(connection, new)
        for shard, start in starts.items():
            live, replay = self._live_of(shard), wanted[shard]
            assert live is not None
            wanted_of_it = ReplayFilter.of(replay.filters)
            source = StreamSource(live.subscription, shard, live.lease, replay.until, wanted_of_it, replay.created_at)
            await self._open(connection, source, start, live.sender.lease_until, now)
        if wanted:
            await checkpoints.end_replays(connection, now)

    def _live_of(self, shard: Shard) -> Stream | None:
        live = self.streams.get(shard._replace(replay=0))
        return None if live is None or live.closing or live.lost else live

    async def _make_room(self, connection: Connection) -> None:
        """Let full streams forget the rows that upkeep removed with their day: else they would read nothing more.

        And let them read on to rows that are due now and ahead of what they have read: else no claim takes those.
        """
        for shard, stream in self.streams.items():
            keys = stream.queue.keys
            if keys is None or not keys.held_full:
                continue
            # What is to be stored has no row before its settle, and no settle runs during a refresh. A claimed message
            # has its row until its settle; if upkeep removed it, its key stays busy all the same.
            unsettled = stream.outcomes.buffer.offsets
            settled = keys.stored_offsets() - unsettled
            until = self._runtime.clock.now() + CLOCKS_APART
            stored = await checkpoints.stored_keys(connection, shard, until)
            keys.removed(settled.difference(*stored.values()))
            # A delivered message has its row until its settle, and then keeps nothing back.
            keys.stored_ahead({key: set(offsets) - unsettled for key, offsets in stored.items()})

    async def _free_dead_keys(self, connection: Connection) -> None:
        """Free the keys whose dead letters a person redelivered or discarded."""
        for shard, stream in self.streams.items():
            if stream.queue.keys is not None and stream.queue.keys.dead:
                freed = stream.queue.keys.dead - await checkpoints.dead_keys(connection, shard)
                if not freed:
                    continue
                # A redelivered message goes before anything new of its key, also if there is no room to claim it now.
                # Its row is in delivery_retry until its outcome is settled, and until then this process knows it.
                until = self._runtime.clock.now() + CLOCKS_APART
                stored = await checkpoints.stored_keys(connection, shard, until)
                stream.queue.keys.freed(freed, stored)
                stream.outcomes.reclaim = True

    async def _store_rates(self, connection: Connection, now: datetime) -> None:
        if not due(self._rated_at, RATES_EVERY, now):
            return
        self._rated_at = now
        measured = {
            shard: stream.outcomes.rates.measure(now) for shard, stream in self.streams.items() if not shard.replay
        }
        rates = {shard: rate for shard, rate in measured.items() if rate is not None}
        if rates:
            await checkpoints.set_rates(connection, rates, now)


class DesiredReader:
    """Reads what the tables ask for, and only if that has changed: its version takes one small statement."""

    def __init__(self) -> None:
        self._known: Known = {}
        self._version: checkpoints.Version | None = None
        self._last: DesiredAssignments | None = None

    async def read(self, connection: Connection) -> DesiredAssignments:
        """Return what the tables ask for."""
        # Read before the content: what changes between the two reads changes the version of the next refresh.
        version = await checkpoints.desired_version(connection)
        if self._last is None or version != self._version:
            self._last = await _desired(connection, self._known)
            self._version = version
        return self._last


def _runs_on(stream: Stream, replay: replays.Replay | None) -> bool:
    """Return whether a replay still runs, and to the same end."""
    return replay is not None and replay.until == stream.source.until


async def _desired(connection: Connection, known: Known) -> DesiredAssignments:
    """Return what the tables ask for. A subscription that is to be resized has no shards until that is done."""
    found = await streamed(connection, known)
    subscriptions = [s for s in found if not s.is_pulled]
    shard_counts = await checkpoints.shard_counts(connection)
    fitting = [s for s in subscriptions if shard_counts.get(s.subscription_id) == s.shards]
    shards = {Shard(s.subscription_id, s.shards, number): s for s in fitting for number in range(s.shards)}
    by_id = {s.subscription_id: s for s in fitting}
    running = {
        Shard(r.subscription_id, by_id[r.subscription_id].shards, 0, r.replay_id): r
        for r in await replays.running(connection)
        if r.subscription_id in by_id
    }
    return DesiredAssignments(
        shards,
        running,
        [s for s in subscriptions if shard_counts.get(s.subscription_id, s.shards) != s.shards],
        [topic for s in found if s.is_pulled for topic in (*s.topics, CLAIMABLE)],
    )


def due(last: datetime | None, every: timedelta, now: datetime) -> bool:
    """Return whether `every` has passed since `last`; a clock that stepped back does not delay it."""
    return last is None or abs(now - last) >= every


def _epochs(streams: Iterable[Stream]) -> dict[str, int]:
    return {stream.lease.name: stream.lease.epoch for stream in streams}
