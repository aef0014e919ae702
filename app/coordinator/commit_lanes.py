"""The three lanes of group commit: how each flushes, and how each answers a repeated request."""

import asyncio
from collections import Counter as Counted
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from uuid import UUID

import asyncpg
import structlog
from msgspec.structs import replace
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

# The statements that take repeats take up to a fourth longer than those that fail on one. After a repeat a lane takes
# repeats until none has come for so long. The database logs each failed statement as an error, so there are few.
REPEATS_REST_S = 60.0
# Bounded, because producers choose topics. A forgotten topic is only inserted again.
TOPICS_REMEMBERED = 10_000


@dataclass(slots=True)
class PlainOutcome:
    """The outcome of `/messages`: the half that is stored, and its commit (None if other content is stored)."""

    half: StoredHalf
    recorded: Recorded | None


class Repeats:
    """Whether a lane may get requests for what is recorded already: within REPEATS_REST_S of the last one."""

    def __init__(self) -> None:
        self._until = 0.0

    @property
    def are_expected(self) -> bool:
        """Whether the next flush takes repeats."""
        return monotonic() < self._until

    def note(self) -> None:
        """Note a repeat."""
        self._until = monotonic() + REPEATS_REST_S


class LaneFlushes:
    """The flush functions. Remembers the topics that are stored, so that a flush inserts only new ones."""

    def __init__(self, clock: Clock, metrics: Metrics, published: Published, recent_halves_bytes: int = 0) -> None:
        self._clock = clock
        self._published = published
        self._recent = RecentHalves(recent_halves_bytes) if recent_halves_bytes else None
        self._topics: set[str] = set()
        self._repeated_halves, self._repeated_ends = Repeats(), Repeats()
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

    async def halves(self, connection: Connection, halves: Sequence[Half]) -> Sequence[StoredHalf | Exception]:
        """Store a batch. Returns one outcome for each half, in order; repeats are answered from the stored rows."""
        stored = await self._insert(connection, halves)
        fresh = _fresh(halves, stored)
        self._count_halves(fresh)
        # The guard of timelines closes a connection to a former primary, and then nothing of it is kept.
        if self._recent is not None and not connection.is_closed():
            for half in fresh:
                self._recent.keep(half)
        missing = [half for half, one in zip(halves, stored, strict=True) if one is None]
        if not missing:
            return [one for one in stored if one is not None]
        # A half that is missing because its group is not registered counts as a repeat, which costs little.
        self._repeated_halves.note()
        read = await _after_commit(connection, missing, _stored(connection, missing))
        return [read[half.transaction_id] if one is None else one for half, one in zip(halves, stored, strict=True)]

    async def ends(self, connection: Connection, ends: Sequence[End]) -> Sequence[Recorded | Exception]:
        """Record a batch of verdicts. Returns one outcome for each, in order: a loser's names the recorded verdict."""
        now = self._clock.now()
        found = await self._record(connection, ends, now)
        lost = {
            end.transaction_id: one
            for end, one in zip(ends, found, strict=True)
            if one.verdict is None and _is_owner(end, one)
        }
        if not lost:
            self._count(ends, found)
            return found
        self._repeated_ends.note()
        # The others are published before the wait for what the losers lost to, which may be one for a standby.
        won = [(end, one) for end, one in zip(ends, found, strict=True) if end.transaction_id not in lost]
        self._count([end for end, _ in won], [one for _, one in won])
        losers = [end for end in ends if end.transaction_id in lost]
        read = await _after_commit(connection, losers, self._recorded(connection, losers, lost))
        outcomes = [read.get(end.transaction_id, one) for end, one in zip(ends, found, strict=True)]
        self._count(losers, [read.get(end.transaction_id, lost[end.transaction_id]) for end in losers])
        return outcomes

    async def _record(self, connection: Connection, ends: Sequence[End], now: datetime) -> list[Recorded]:
        if not self._repeated_ends.are_expected:
            try:
                return await record_ends(connection, ends, now, are_first=True)
            except asyncpg.UniqueViolationError:
                self._repeated_ends.note()
        return await record_ends(connection, ends, now)

    async def plains(self, connection: Connection, halves: Sequence[Half]) -> list[PlainOutcome | Exception]:
        """Store and commit a batch in one database transaction. Repeats are answered from the stored rows."""
        async with connection.transaction():
            try:
                stored = await self._insert(connection, halves)
                fresh = _fresh(halves, stored)
                ends = [End(half.transaction_id, half.producer_group, Verdict.COMMIT) for half in fresh]
                found = await record_ends(connection, ends, self._clock.now()) if ends else []
            except asyncio.CancelledError:
                # The flush took too long. A rollback would wait for the server, which may hang.
                connection.terminate()
                raise
        self._count_halves(fresh)
        # As in `halves`: what a former primary stored is not handed over.
        self._count(ends, found, () if connection.is_closed() else fresh)
        missing = [half for half, one in zip(halves, stored, strict=True) if one is None]
        read = await _after_commit(connection, missing, self._stored_plains(connection, missing)) if missing else {}
        recorded = iter(found)
        return [
            read[half.transaction_id] if one is None else PlainOutcome(one, next(recorded))
            for half, one in zip(halves, stored, strict=True)
        ]

    async def _stored_plains(self, connection: Connection, repeats: Sequence[Half]) -> dict[UUID, PlainOutcome]:
        stored = await _stored(connection, repeats)
        found = await self._read_recorded(connection, [half.transaction_id for half in repeats])
        return {
            half.transaction_id: PlainOutcome(stored[half.transaction_id], found.get(half.transaction_id))
            for half in repeats
        }

    async def _insert(self, connection: Connection, halves: Sequence[Half]) -> list[StoredHalf | None]:
        """Store a batch. Returns what is stored now for each half, in order; None: not stored, or stored before."""
        now = self._clock.now()
        topics = {message.topic for half in halves for message in half.messages} - self._topics
        first_checks = await self._insert_rows(connection, halves, sorted(topics), now)
        if topics and not (connection.is_closed() or connection.is_in_transaction()):
            self._remember(topics)
        return [
            None
            if first_check_at is None
            else StoredHalf(half.digest, now, first_check_at, half.producer_group, True, True)
            for half, first_check_at in zip(halves, first_checks, strict=True)
        ]

    async def _insert_rows(
        self, connection: Connection, halves: Sequence[Half], topics: Sequence[str], now: datetime
    ) -> list[datetime | None]:
        # A statement that fails ends the database transaction that it is in.
        if not (self._repeated_halves.are_expected or connection.is_closed() or connection.is_in_transaction()):
            try:
                return await insert_halves(connection, halves, topics, now, are_new=True)
            except asyncpg.UniqueViolationError:
                self._repeated_halves.note()
        return await insert_halves(connection, halves, topics, now)

    def _count_halves(self, fresh: Sequence[Half]) -> None:
        """Count the halves that a batch stored, after their commit."""
        self._halves.count += len(fresh)
        for group, count in Counted(half.producer_group for half in fresh).items():
            self._traffic.count_halves(group, count)
        self._tallies.publish_soon()

    def _remember(self, topics: set[str]) -> None:
        if len(self._topics) + len(topics) > TOPICS_REMEMBERED:
            self._topics.clear()
        self._topics |= topics

    async def _recorded(
        self, connection: Connection, losers: Sequence[End], found: Mapping[UUID, Recorded]
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

    def _count(self, ends: Sequence[End], found: Sequence[Recorded | Exception], halves: Sequence[Half] = ()) -> None:
        """Count verdicts after their commit, and announce the messages that became visible, by their topics at least.

        `found`: the outcome of each End. `halves`: those that the same flush stored.
        """
        decided: Counted[tuple[str | None, Verdict, Source]] = Counted()
        topics: Counted[str] = Counted()
        messages: list[Logged] = []
        recent = self._recent
        own = {half.transaction_id: half for half in halves} if recent is not None else {}
        for end, recorded in zip(ends, found, strict=True):
            if isinstance(recorded, Exception) or recorded.verdict is None or recorded.source is None:
                continue
            if recorded.fresh:
                decided[recorded.owner, recorded.verdict, recorded.source] += 1
                for message in recorded.messages:
                    topics[message.topic] += 1
                if recent is not None:
                    half = (own and own.get(end.transaction_id)) or recent.take(end.transaction_id)
                    if half is not None:
                        _log(messages, half, recorded.messages)
            elif recorded.verdict != end.verdict:
                self._refused[end.source].inc()
        for (owner, verdict, source), count in decided.items():
            self._verdicts[verdict, source].count += count
            assert owner is not None
            self._traffic.count_verdicts(owner, verdict, count)
        for topic, count in topics.items():
            self._traffic.count_messages(topic, count)
        self._tallies.publish_soon()
        if topics:
            try:
                self._published(topics.keys(), messages, len(messages) == topics.total())
            except Exception as error:
                # The batch is committed, so its callers get their answers. The relay reads the log at its next look.
                log.error("defect", part="publications", exc_info=error)


def _log(found: list[Logged], half: Half, recorded: Sequence[RecordedMessage]) -> None:
    """Add the messages of a commit as the log has them, but for those with a delay: the log has their due times."""
    for one in recorded:
        message = half.messages[one.position]
        if message.deliver_after_s is None:
            found.append(
                (
                    one.offset,
                    half.transaction_id,
                    one.position,
                    one.topic,
                    message.key,
                    message.tag,
                    None,
                    one.committed_at,
                    half.producer_group,
                    message.headers,
                    message.content_type,
                    message.body,
                    half.traceparent,
                )
            )


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


def _is_owner(end: End, recorded: Recorded) -> bool:
    """Return whether an End is of the owner. If it did not decide, another End did, or the day is closed."""
    return recorded.owner is not None and end.producer_group in (None, recorded.owner)


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


def _fresh(halves: Sequence[Half], stored: Sequence[StoredHalf | None]) -> Sequence[Half]:
    """Return the halves that a batch stored."""
    return [half for half, one in zip(halves, stored, strict=True) if one is not None]


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
