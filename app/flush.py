"""The three lanes: what each flushes, and how a repeat is answered from the first request with its id."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from prometheus_client import Counter

from app.clock import Clock
from app.database import Connection, Database
from app.lanes import Lane, LaneLimits
from app.polling import Polling
from app.store.halves import Half, StoredHalf, insert_halves, stored_halves
from app.store.ops import End, Recorded, read_recorded, record_ends
from app.telemetry import Metrics
from app.verdicts import Source, Verdict

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.tracing import Flush, Found, Tracing

# A producer that invents topics without end must not fill memory; a forgotten one is only named again.
TOPICS_REMEMBERED = 10_000


@dataclass(slots=True)
class PlainOutcome:
    """What `/messages` got: the half that is stored, and its commit (None if another content is stored)."""

    half: StoredHalf
    recorded: Recorded | None


class Flushes:
    """The flush functions over one clock; remembers which topics it has named already."""

    def __init__(self, clock: Clock, metrics: Metrics, published: Callable[[Collection[str]], None]) -> None:
        self._clock = clock
        self._published = published
        self._topics: set[str] = set()
        self._halves = metrics.halves
        self._verdicts: dict[tuple[int, int], Counter] = {
            (verdict, source): metrics.verdicts.labels(verdict.word, source.word)
            for verdict in Verdict
            for source in Source
        }
        self._refused: dict[int, Counter] = {source: metrics.verdicts_refused.labels(source.word) for source in Source}

    async def halves(self, connection: Connection, halves: Sequence[Half]) -> list[StoredHalf]:
        """Store a batch; one outcome each, in order."""
        fresh = await self._insert(connection, halves)
        missing = [half for half in halves if half.transaction_id not in fresh]
        if missing:
            fresh |= await stored_halves(
                connection, [half.transaction_id for half in missing], [half.producer_group for half in missing]
            )
        return [fresh[half.transaction_id] for half in halves]

    async def ends(self, connection: Connection, ends: Sequence[End]) -> list[Recorded]:
        """Record a batch of verdicts; one outcome each, in order, losers told the verdict that stands."""
        now = self._clock.now()
        found = await record_ends(connection, ends, now)
        losers = [end for end in ends if _lost(end, found[end.transaction_id])]
        if losers:
            found |= await self._standing(connection, losers, found)
        self._count(ends, found)
        return [found[end.transaction_id] for end in ends]

    async def plains(self, connection: Connection, halves: Sequence[Half]) -> list[PlainOutcome]:
        """Store and commit a batch in one database transaction; repeats are answered from what is stored."""
        async with connection.transaction():
            stored = await self._insert(connection, halves)
            ends = [
                End(half.transaction_id, half.producer_group, Verdict.COMMIT)
                for half in halves
                if half.transaction_id in stored
            ]
            found = await record_ends(connection, ends, self._clock.now()) if ends else {}
        self._count(ends, found)
        missing = [half for half in halves if half.transaction_id not in stored]
        if missing:
            ids = [half.transaction_id for half in missing]
            stored |= await stored_halves(connection, ids, [half.producer_group for half in missing])
            # Reading alone: verdict 0 contradicts nothing, so no refused end is written.
            found |= await read_recorded(connection, [End(key, None, 0) for key in ids], self._clock.now())
        return [PlainOutcome(stored[half.transaction_id], found.get(half.transaction_id)) for half in halves]

    async def _insert(self, connection: Connection, halves: Sequence[Half]) -> dict[UUID, StoredHalf]:
        now = self._clock.now()
        topics = {message.topic for half in halves for message in half.messages} - self._topics
        stored = await insert_halves(connection, halves, sorted(topics), now)
        if topics and not connection.is_in_transaction():
            self._remember(topics)
        self._halves.inc(len(stored))
        return {
            half.transaction_id: StoredHalf(
                half.digest, now, stored[half.transaction_id], half.producer_group, True, True
            )
            for half in halves
            if half.transaction_id in stored
        }

    def _remember(self, topics: set[str]) -> None:
        if len(self._topics) + len(topics) > TOPICS_REMEMBERED:
            self._topics.clear()
        self._topics |= topics

    async def _standing(
        self, connection: Connection, losers: Sequence[End], found: dict[UUID, Recorded]
    ) -> dict[UUID, Recorded]:
        standing = await read_recorded(connection, losers, self._clock.now())
        return {key: replace(recorded, open=found[key].open) for key, recorded in standing.items()}

    def _count(self, ends: Sequence[End], found: dict[UUID, Recorded]) -> None:
        """Count verdicts after their commit, and say so if messages became visible."""
        topics: set[str] = set()
        for end in ends:
            recorded = found[end.transaction_id]
            if recorded.verdict is None or recorded.source is None:
                continue
            if recorded.fresh:
                self._verdicts[recorded.verdict, recorded.source].inc()
                topics.update(message[1] for message in recorded.messages)
            elif recorded.verdict != end.verdict:
                self._refused[end.source].inc()
        if topics:
            self._published(topics)


def _lost(end: End, recorded: Recorded) -> bool:
    """Tell whether the owner asked and this End did not decide: somebody else did, or the day is closed."""
    mine = recorded.owner is not None and end.producer_group in (None, recorded.owner)
    return mine and recorded.verdict is None


def follow_half(half: Half, outcome: StoredHalf) -> StoredHalf | None:
    """Answer a repeated half from the first one's outcome, if the content is the same."""
    return replace(outcome, fresh=False) if outcome.digest == half.digest else None


def follow_end(end: End, outcome: Recorded) -> Recorded | None:
    """Answer a repeated end from the first one's outcome; an opposite one is flushed, so that it leaves its trace."""
    same = outcome.verdict == end.verdict and end.producer_group in (None, outcome.owner)
    return replace(outcome, fresh=False) if same else None


def follow_plain(half: Half, outcome: PlainOutcome) -> PlainOutcome | None:
    """Answer a repeated plain message from the first one's outcome, if the content is the same."""
    stored = follow_half(half, outcome.half)
    if stored is None or outcome.recorded is None:
        return None
    return PlainOutcome(stored, replace(outcome.recorded, fresh=False))


def _unspanned(lane: str, flush: "Flush[Found]") -> "Flush[Found]":
    return flush


class Lanes:
    """The lanes of one process: halves, ends and plain messages, each on a connection of its own."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        metrics: Metrics,
        limits: LaneLimits,
        published: Callable[[Collection[str]], None] = lambda topics: None,
        tracing: "Tracing | None" = None,
    ) -> None:
        flushes = Flushes(clock, metrics, published)

        def observe(lane: str) -> Callable[[int, float, int], None]:
            rows, seconds = metrics.flush_rows.labels(lane), metrics.flush_seconds.labels(lane)
            depth = metrics.queue_depth.labels(lane)

            def note(count: int, taken: float, waiting: int) -> None:
                rows.observe(count)
                seconds.observe(taken)
                depth.set(waiting)

            return note

        connect, polling = database.dedicated, Polling(limits.poll_s)
        spanned = tracing.spanned if tracing is not None else _unspanned
        self.half = Lane(connect, spanned("half", flushes.halves), follow_half, limits, observe("half"), polling)
        self.end = Lane(connect, spanned("end", flushes.ends), follow_end, limits, observe("end"), polling)
        self.plain = Lane(connect, spanned("plain", flushes.plains), follow_plain, limits, observe("plain"), polling)

    def give_up(self) -> None:
        """Answer whoever still waits for a flush, because the process must end."""
        for lane in (self.half, self.end, self.plain):
            lane.give_up()

    async def close(self) -> None:
        """Flush what is queued and close the connections."""
        await asyncio.gather(self.half.close(), self.end.close(), self.plain.close())
