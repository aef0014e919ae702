"""Which parts of which subscriptions this process holds: their leases, and the streams over them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import ceil

import structlog

from app.database import Connection
from app.destinations.base import Destination
from app.destinations.kinds import NotInstalled, destination_of, installed
from app.loops.stream import Holder, Part, Stream
from app.pacing import Pacer
from app.runtime import Runtime
from app.store import places, replays
from app.store.leases import claim, leave, release, renew, workers_present
from app.store.places import Place, Shard
from app.store.relay import Wanted
from app.store.subscriptions import Known, Subscription, active

log = structlog.get_logger(__name__)

WORKER = "relay-worker"
# A dead worker's subscriptions are taken over after at most a lease and a turn.
LEASE = timedelta(seconds=10)
RENEW_EVERY = timedelta(seconds=3)
# A subscription whose destination could not be made is tried again this much later.
UNMADE_FOR = timedelta(seconds=30)
RATES_EVERY = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the tables want delivered: which shards of which subscriptions, and which replays, each as it shall be."""

    shards: Mapping[Shard, Subscription]
    replays: Mapping[Shard, replays.Replay]
    # Subscriptions that are laid out into another number of shards than they shall have.
    misfits: Sequence[Subscription]


class Holdings:
    """The streams of one process by part. `keep` makes them what the tables say they should be."""

    def __init__(self, runtime: Runtime) -> None:
        self.streams: dict[Shard, Stream] = {}
        self._runtime = runtime
        self._holder = Holder(runtime.clock, runtime.metrics, runtime.wake_ups.relay.set, runtime.tracing)
        self._renewed_at: datetime | None = None
        self._rated_at: datetime | None = None
        self._workers = 1
        self._known: Known = {}
        # What this process could not make, and until when it leaves it to others.
        self._unmade: dict[int, datetime] = {}

    async def keep(self, connection: Connection, now: datetime) -> None:
        """Renew what is held, close what changed or is more than a fair share, and claim what is free."""
        if due(self._renewed_at, RENEW_EVERY, now):
            await self._renew(connection, now)
            self._renewed_at = now
        wish = await _wish(connection, self._known)
        self._close_changed(wish)
        share = ceil(len(wish.shards) / self._workers)
        live = [stream for shard, stream in self.streams.items() if not shard.replay]
        for stream in live[share:]:
            self._close(stream)
        for subscription in wish.misfits:
            await self._lay_out(connection, subscription, now)
        await self._claim(connection, wish.shards, share - len(live), now)
        await self._rerun(connection, wish.replays, now)
        await self._free_keys(connection)
        await self._rate(connection, now)

    async def release(self, connection: Connection, streams: Sequence[Stream], now: datetime) -> None:
        """Give up the leases of these streams and forget them; a replay has none of its own."""
        if not streams:
            return
        await release(connection, _epochs(s for s in streams if not s.part.shard.replay), self._runtime.owner, now)
        for stream in streams:
            await self.forget(stream)

    async def forget(self, stream: Stream) -> None:
        """Let go of a stream whose lease is over; its replays go with it."""
        shard = stream.part.shard
        of_it = [] if shard.replay else [key for key in self.streams if key.replay and replace(key, replay=0) == shard]
        for key in (shard, *of_it):
            gone = self.streams.pop(key, None)
            if gone is not None:
                gone.drop()
                await gone.ends()

    async def leave(self, connection: Connection, now: datetime) -> None:
        """Give up every lease, and this worker's sign of life."""
        await self.release(connection, list(self.streams.values()), now)
        await leave(connection, WORKER, self._runtime.owner)

    async def _renew(self, connection: Connection, now: datetime) -> None:
        until, owner = now + LEASE, self._runtime.owner
        self._workers = await workers_present(connection, WORKER, owner, until, now)
        kept = await renew(connection, _epochs(self.streams.values()), owner, until) if self.streams else set()
        for stream in list(self.streams.values()):
            if stream.lease.name in kept:
                stream.renewed(until)
            elif not stream.lost:
                log.warning("lease_lost", subscription=stream.subscription.name, epoch=stream.lease.epoch)
                await self.forget(stream)

    def _close_changed(self, wish: Wish) -> None:
        for shard, stream in self.streams.items():
            wanted = wish.shards.get(replace(shard, replay=0))
            if wanted != stream.subscription or (shard.replay and shard not in wish.replays):
                self._close(stream)

    def _close(self, stream: Stream) -> None:
        """Close a stream, and first the replays under its lease."""
        shard = stream.part.shard
        for key, other in self.streams.items():
            if not shard.replay and key.replay and replace(key, replay=0) == shard:
                other.close()
        stream.close()

    async def _lay_out(self, connection: Connection, subscription: Subscription, now: datetime) -> None:
        if any(shard.subscription_id == subscription.subscription_id for shard in self.streams):
            return
        async with connection.transaction():
            done = await places.lay_out(connection, subscription.subscription_id, subscription.shards, now)
        if done:
            log.info("shards_laid_out", subscription=subscription.name, shards=subscription.shards)

    async def _claim(
        self, connection: Connection, wanted: Mapping[Shard, Subscription], room: int, now: datetime
    ) -> None:
        free = {
            shard.lease_name: shard
            for shard, subscription in wanted.items()
            if shard not in self.streams and self._makes(subscription, now)
        }
        if not free or room <= 0:
            return
        until = now + LEASE
        leases = await claim(connection, list(free), self._runtime.owner, until, room, now)
        # A second statement, after the leases are committed: what former holders settled is visible to it, and what
        # they would settle from now on is refused.
        taken = {free[lease.name]: lease for lease in leases}
        begins = await places.places(connection, list(taken))
        unused = []
        for shard, lease in taken.items():
            part = Part(wanted[shard], shard, lease)
            if shard not in begins or not await self._begin(connection, part, begins[shard], until, now):
                unused.append(lease)
        if unused:
            await release(connection, {lease.name: lease.epoch for lease in unused}, self._runtime.owner, now)

    def _makes(self, subscription: Subscription, now: datetime) -> bool:
        """Tell whether this process should try: it may lack what a destination needs, and another worker have it."""
        at = self._unmade.get(subscription.subscription_id)
        if at is not None and not due(at, UNMADE_FOR, now):
            return False
        kind: str = subscription.destination["type"]
        if not installed(kind):
            self._leave_to_others(subscription, NotInstalled(kind), now)
        return installed(kind)

    def _leave_to_others(self, subscription: Subscription, error: Exception, now: datetime) -> None:
        log.error("destination_unmade", subscription=subscription.name, error=str(error))
        self._unmade[subscription.subscription_id] = now

    async def _begin(self, connection: Connection, part: Part, place: Place, until: datetime, now: datetime) -> bool:
        """Make the stream of a part; False if its destination can't be made here."""
        subscription, shard = part.subscription, part.shard
        try:
            destination = self._destination(subscription)
        except Exception as error:
            self._leave_to_others(subscription, error, now)
            return False
        await places.free_claims(connection, shard)
        if subscription.ordered == "key":
            stored = await places.stored_keys(connection, shard, now)
            dead = await places.dead_keys(connection, shard) if subscription.on_dead == "hold" else frozenset[str]()
            place = replace(place, stored=stored, dead=dead)
        stream = Stream(self._holder, part, destination, until, place, self._pacer(part))
        self.streams[shard] = stream
        log.info(
            "lease_taken",
            subscription=subscription.name,
            epoch=part.lease.epoch,
            after=stream.position,
            **({"shard": f"{shard.shard}/{shard.shards}"} if shard.shards > 1 else {}),
            **({"replay": shard.replay} if shard.replay else {}),
        )
        return True

    def _destination(self, subscription: Subscription) -> Destination:
        runtime = self._runtime
        return destination_of(
            subscription, runtime.deliveries_http, runtime.dialling, runtime.vault, runtime.settings.origin
        )

    def _pacer(self, part: Part) -> Pacer | None:
        """Return what paces a part: each shard its share; a replay goes at the pace of the shard that it runs with."""
        rate, shard = part.subscription.rate_per_s, part.shard
        if rate is None:
            return None
        if shard.replay:
            return self.streams[replace(shard, replay=0)].sender.pacer
        return Pacer(rate / shard.shards)

    async def _rerun(self, connection: Connection, wanted: Mapping[Shard, replays.Replay], now: datetime) -> None:
        """Begin the replays of subscriptions whose first shard is held here, and end those that are over."""
        new = [shard for shard in wanted if shard not in self.streams and self._live_of(shard) is not None]
        begins = await places.places(connection, new)
        for shard, place in begins.items():
            live, replay = self._live_of(shard), wanted[shard]
            assert live is not None
            part = Part(live.subscription, shard, live.lease, replay.until, Wanted.of(replay.filters))
            await self._begin(connection, part, place, live.sender.lease_until, now)
        if wanted:
            await places.end_replays(connection, now)

    def _live_of(self, shard: Shard) -> Stream | None:
        live = self.streams.get(replace(shard, replay=0))
        return None if live is None or live.closing or live.lost else live

    async def _free_keys(self, connection: Connection) -> None:
        """See which keys that a dead letter stopped a person has freed."""
        for shard, stream in self.streams.items():
            if stream.keys is not None and stream.keys.dead:
                freed = stream.keys.dead - await places.dead_keys(connection, shard)
                stream.keys.freed(freed)
                # What was redelivered goes before anything new of its key.
                stream.reclaim = stream.reclaim or bool(freed)

    async def _rate(self, connection: Connection, now: datetime) -> None:
        if not due(self._rated_at, RATES_EVERY, now):
            return
        self._rated_at = now
        measured = {shard: stream.rates.measure(now) for shard, stream in self.streams.items() if not shard.replay}
        rates = {shard: rate for shard, rate in measured.items() if rate is not None}
        if rates:
            await places.set_rates(connection, rates, now)


async def _wish(connection: Connection, known: Known) -> Wish:
    """Return what the tables want. A subscription whose shards are not laid out as they shall be has none yet."""
    subscriptions = await active(connection, known)
    layout = await places.layouts(connection)
    fitting = [s for s in subscriptions if layout.get(s.subscription_id) == s.shards]
    shards = {Shard(s.subscription_id, s.shards, number): s for s in fitting for number in range(s.shards)}
    by_id = {s.subscription_id: s for s in fitting}
    running = {
        Shard(r.subscription_id, by_id[r.subscription_id].shards, 0, r.replay_id): r
        for r in await replays.running(connection)
        if r.subscription_id in by_id
    }
    return Wish(shards, running, [s for s in subscriptions if layout.get(s.subscription_id, s.shards) != s.shards])


def due(last: datetime | None, every: timedelta, now: datetime) -> bool:
    """Tell whether `every` has passed since `last`; a clock that stepped back does not put it off."""
    return last is None or abs(now - last) >= every


def _epochs(streams: Iterable[Stream]) -> dict[str, int]:
    return {stream.lease.name: stream.lease.epoch for stream in streams}
