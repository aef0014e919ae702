"""The three lanes of group commit: how each flushes, and how each answers a repeated request."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from uuid import UUID

import asyncpg
import structlog
from prometheus_client import Counter

from app.clock import Clock
from app.coordinator.group_commit import GroupCommitLane, Identified, LaneLimits
from app.coordinator.recent_halves import RecentHalves
from app.database.connection import Connection, Database
from app.database.errors import BROKEN
from app.observability.metrics import Metrics
from app.observability.tallies import Tally
from app.store.coordinator.halves import Half, StoredHalf, insert_halves, stored_halves
from app.store.coordinator.ops import End, Recorded, RecordedMessage, read_recorded, record_ends
from app.store.relay.log import Logged
from app.verdicts import Source, Verdict

if TYPE_CHECKING:  # the module imports OpenTelemetry
    from app.observability.tracing import Flush, Found, Tracing

log = structlog.get_logger(__name__)

T = TypeVar("T")

# What a flush published: its topics; its messages by offset, as far as they are known here and due at once; whether
# these are all of its messages.
Published: TypeAlias = Callable[[Collection[str], Sequence[Logged], bool], None]

# Bounded, because producers choose topics. A forgotten topic is only inserted again.
TOPICS_REMEMBERED = 10_000


@dataclass(slots=True)
class PlainOutcome:
    """The outcome of `/messages`: the half that is stored, and its commit (None if other content is stored)."""

    half: StoredHalf
    recorded: Recorded | None


class LaneFlushes:
    """The flush functions. Remembers the topics that are stored, so that a flush inserts only new ones."""

    def __init__(self, clock: Clock, metrics: Metrics, published: Published, recent_halves_bytes: int = 0) -> None:
        self._clock = clock
        self._published = published
        self._recent = RecentHalves(recent_halves_bytes) if recent_halves_bytes else None
        self._topics: set[str] = set()
        self._tallies, self._traffic = metrics.tallies, metrics.traffic
        self._halves = self._tallies.of(metrics.http.halves)
        self._verdicts: dict[tuple[int, int], Tally] = {
            (verdict, source): self._tallies.of(metrics.http.verdicts.labels(verdict.word, source.word))
            for verdict in Verdict
            for source in Source
        }
        self._refused: dict[int, Counter] = {
            source: metrics.http.verdicts_refused.labels(source.word) for source in Source
        }

    def forget(self) -> None:
        """Forget what is stored: after a promotion, the database may lack the last of it."""
        self._topics.clear()
        if self._recent is not None:
            self._recent.clear()

    async def halves(self, connection: Connection, halves: Sequence[Half]) -> list[StoredHalf | Exception]:
        """Store a batch. Returns one outcome for each half, in order; repeats are answered from the stored rows."""
        stored = await self._insert(connection, halves)
        self._count_halves(halves, stored)
        # The guard of timelines closes a connection to a former primary, and then nothing of it is kept.
        if self._recent is not None and not connection.is_closed():
            for half in halves:
                if half.transaction_id in stored:
                    self._recent.keep(half)
        outcomes: dict[UUID, StoredHalf | Exception] = {**stored}
        missing = [half for half in halves if half.transaction_id not in outcomes]
        if missing:
            outcomes |= await _after_commit(connection, missing, _stored(connection, missing))
        return [outcomes[half.transaction_id] for half in halves]

    async def ends(self, connection: Connection, ends: Sequence[End]) -> list[Recorded | Exception]:
        """Record a batch of verdicts. Returns one outcome for each, in order: a loser's names the recorded verdict."""
        now = self._clock.now()
        found = await record_ends(connection, ends, now)
        losers = [end for end in ends if _lost(end, found[end.transaction_id])]
        outcomes: dict[UUID, Recorded | Exception] = {**found}
        # The others are published before the wait for what the losers lost to, which may be one for a standby.
        lost = {end.transaction_id for end in losers}
        self._count([end for end in ends if end.transaction_id not in lost] if lost else ends, outcomes)
        if losers:
            outcomes |= await _after_commit(connection, losers, self._recorded(connection, losers, found))
            self._count(losers, outcomes)
        return [outcomes[end.transaction_id] for end in ends]

    async def plains(self, connection: Connection, halves: Sequence[Half]) -> list[PlainOutcome | Exception]:
        """Store and commit a batch in one database transaction. Repeats are answered from the stored rows."""
        async with connection.transaction():
            try:
                stored = await self._insert(connection, halves)
                ends = [
                    End(half.transaction_id, half.producer_group, Verdict.COMMIT)
                    for half in halves
                    if half.transaction_id in stored
                ]
                found = await record_ends(connection, ends, self._clock.now()) if ends else {}
            except asyncio.CancelledError:
                # The flush took too long. A rollback would wait for the server, which may hang.
                connection.terminate()
                raise
        self._count_halves(halves, stored)
        # As in `halves`: what a former primary stored is not handed over.
        self._count(ends, found, () if connection.is_closed() else halves)
        outcomes: dict[UUID, PlainOutcome | Exception] = {
            key: PlainOutcome(half, found.get(key)) for key, half in stored.items()
        }
        missing = [half for half in halves if half.transaction_id not in stored]
        if missing:
            outcomes |= await _after_commit(connection, missing, self._stored_plains(connection, missing))
        return [outcomes[half.transaction_id] for half in halves]

    async def _stored_plains(self, connection: Connection, repeats: Sequence[Half]) -> dict[UUID, PlainOutcome]:
        stored = await _stored(connection, repeats)
        found = await self._read_recorded(connection, [half.transaction_id for half in repeats])
        return {
            half.transaction_id: PlainOutcome(stored[half.transaction_id], found.get(half.transaction_id))
            for half in repeats
        }

    async def _insert(self, connection: Connection, halves: Sequence[Half]) -> dict[UUID, StoredHalf]:
        now = self._clock.now()
        topics = {message.topic for half in halves for message in half.messages} - self._topics
        stored = await insert_halves(connection, halves, sorted(topics), now)
        if topics and not (connection.is_closed() or connection.is_in_transaction()):
            self._remember(topics)
        return {
            half.transaction_id: StoredHalf(
                half.digest, now, stored[half.transaction_id], half.producer_group, True, True
            )
            for half in halves
            if half.transaction_id in stored
        }

    def _count_halves(self, halves: Sequence[Half], stored: Collection[UUID]) -> None:
        """Count the halves of a batch that are stored, after their commit."""
        self._halves.count += len(stored)
        for half in halves:
            if half.transaction_id in stored:
                self._traffic.count_half(half.producer_group)
        self._tallies.publish_soon()

    def _remember(self, topics: set[str]) -> None:
        if len(self._topics) + len(topics) > TOPICS_REMEMBERED:
            self._topics.clear()
        self._topics |= topics

    async def _recorded(
        self, connection: Connection, losers: Sequence[End], found: dict[UUID, Recorded]
    ) -> dict[UUID, Recorded]:
        """Return the recorded verdicts for Ends that did not decide. The refusals are recorded as far as possible."""
        try:
            recorded = await read_recorded(connection, losers, self._clock.now())
        except asyncpg.PostgresError as error:
            log.warning("refused_ends_not_recorded", ends=len(losers), error=str(error))
            recorded = await self._read_recorded(connection, [end.transaction_id for end in losers])
        return {key: replace(one, open=found[key].open) for key, one in recorded.items()}

    async def _read_recorded(self, connection: Connection, ids: Sequence[UUID]) -> dict[UUID, Recorded]:
        # An End without a verdict contradicts nothing, so no refused End is written.
        return await read_recorded(connection, [End(key, None, None) for key in ids], self._clock.now())

    def _count(
        self, ends: Sequence[End], found: Mapping[UUID, Recorded | Exception], halves: Sequence[Half] = ()
    ) -> None:
        """Count verdicts after their commit, and announce the messages that became visible, by their topics at least.

        `halves`: those that the same flush stored.
        """
        topics: set[str] = set()
        messages: list[Logged] = []
        published = 0
        recent = self._recent
        own = {half.transaction_id: half for half in halves} if recent is not None else {}
        for end in ends:
            recorded = found[end.transaction_id]
            if isinstance(recorded, Exception) or recorded.verdict is None or recorded.source is None:
                continue
            if recorded.fresh:
                self._verdicts[recorded.verdict, recorded.source].count += 1
                assert recorded.owner is not None
                committed = [message.topic for message in recorded.messages]
                self._traffic.count_verdict(recorded.owner, recorded.verdict, committed)
                topics.update(committed)
                published += len(recorded.messages)
                if recent is not None:
                    half = own.get(end.transaction_id) or recent.take(end.transaction_id)
                    if half is not None:
                        messages += _logged(half, recorded.messages)
            elif recorded.verdict != end.verdict:
                self._refused[end.source].inc()
        self._tallies.publish_soon()
        if topics:
            try:
                self._published(topics, messages, len(messages) == published)
            except Exception as error:
                # The batch is committed, so its callers get their answers. The relay reads the log at its next look.
                log.error("defect", part="publications", exc_info=error)


def _logged(half: Half, recorded: Sequence[RecordedMessage]) -> list[Logged]:
    """Return the messages of a commit as the log has them, but for those with a delay: the log has their due times."""
    found: list[Logged] = []
    for position, topic, offset, committed_at in recorded:
        message = half.messages[position]
        if message.deliver_after_s is None:
            found.append(
                (
                    offset,
                    half.transaction_id,
                    position,
                    topic,
                    message.key,
                    message.tag,
                    None,
                    committed_at,
                    half.producer_group,
                    message.headers,
                    message.content_type,
                    message.body,
                    half.traceparent,
                )
            )
    return found


async def _after_commit(
    connection: Connection, requests: Sequence[Identified], reading: Awaitable[Mapping[UUID, T]]
) -> dict[UUID, T | Exception]:
    """Return what is read after the commit of a batch, or the error for each of the requests that are read for.

    The other requests of the batch are committed, so they must not get this error.
    """
    try:
        return {**await reading}
    except asyncpg.PostgresError as error:
        return {request.transaction_id: error for request in requests}
    except BROKEN as error:
        # The lane opens another connection.
        connection.terminate()
        return {request.transaction_id: error for request in requests}


async def _stored(connection: Connection, repeats: Sequence[Half]) -> dict[UUID, StoredHalf]:
    ids, groups = [half.transaction_id for half in repeats], [half.producer_group for half in repeats]
    return await stored_halves(connection, ids, groups)


def _lost(end: End, recorded: Recorded) -> bool:
    """Return whether an End of the owner did not decide: another End did, or the day is closed."""
    is_owner = recorded.owner is not None and end.producer_group in (None, recorded.owner)
    return is_owner and recorded.verdict is None


def answer_repeat_half(half: Half, outcome: StoredHalf) -> StoredHalf | None:
    """Answer a repeated half from the first one's outcome if the content is the same, else return None."""
    return replace(outcome, fresh=False) if outcome.digest == half.digest else None


def answer_repeat_end(end: End, outcome: Recorded) -> Recorded | None:
    """Answer a repeated End from the first one's outcome. Returns None for an opposite one: its flush records it."""
    same = outcome.verdict == end.verdict and end.producer_group in (None, outcome.owner)
    return replace(outcome, fresh=False) if same else None


def answer_repeat_plain(half: Half, outcome: PlainOutcome) -> PlainOutcome | None:
    """Answer a repeated plain message from the first one's outcome if the content is the same, else return None."""
    stored = answer_repeat_half(half, outcome.half)
    if stored is None or outcome.recorded is None:
        return None
    return PlainOutcome(stored, replace(outcome.recorded, fresh=False))


def _untraced(lane: str, flush: "Flush[Found]") -> "Flush[Found]":
    return flush


class CommitLanes:
    """The lanes of one process: halves, Ends and plain messages, each on its own connection."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        metrics: Metrics,
        limits: LaneLimits,
        published: Published = lambda topics, messages, complete: None,
        tracing: "Tracing | None" = None,
        recent_halves_bytes: int = 0,
    ) -> None:
        flushes = LaneFlushes(clock, metrics, published, recent_halves_bytes)
        database.guard.on_promotion.append(flushes.forget)
        self._tallies = metrics.tallies

        def observe(lane: str) -> Callable[[int, float, int], None]:
            rows, seconds = metrics.http.flush_rows.labels(lane), metrics.http.flush_seconds.labels(lane)
            depth = metrics.http.queue_depth.labels(lane)

            def note(count: int, taken: float, waiting: int) -> None:
                rows.observe(count)
                seconds.observe(taken)
                depth.set(waiting)

            return note

        connect = database.dedicated
        traced = tracing.trace_flushes if tracing is not None else _untraced
        self.half = GroupCommitLane(
            connect, traced("half", flushes.halves), answer_repeat_half, limits, observe("half")
        )
        self.end = GroupCommitLane(connect, traced("end", flushes.ends), answer_repeat_end, limits, observe("end"))
        self.plain = GroupCommitLane(
            connect, traced("plain", flushes.plains), answer_repeat_plain, limits, observe("plain")
        )

    def give_up(self) -> None:
        """Answer every request that waits for a flush, because the process must end."""
        for lane in (self.half, self.end, self.plain):
            lane.give_up()

    async def close(self) -> None:
        """Flush what is queued and close the connections."""
        await asyncio.gather(self.half.close(), self.end.close(), self.plain.close())
        self._tallies.publish()
