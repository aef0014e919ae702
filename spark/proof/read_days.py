"""Reads a run's days from one snapshot, with their ledgers and archives."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession

from spark import manifest, schemas
from spark.archive import layout
from spark.archive.verification import beside
from spark.audit_retention import AUDIT_KEEP_S
from spark.day_selection import Candidate, Seen, days_to_run, telling_day
from spark.engine.filesystem import FAILURES, Files, files_for
from spark.engine.kept_files import LIST
from spark.engine.progress import Progress
from spark.engine.session import is_local
from spark.errors import DamagedError, RunFailedError, SnapshotLostError
from spark.frames import Frames
from spark.postgres.connections import Day, Snapshot, connect, open_snapshot
from spark.postgres.standby import standby_warning
from spark.proof.early_search import EarlySearch
from spark.proof.prove_day import ReadDay
from spark.sources.failures import root_cause
from spark.sources.frames import days_of_parquet, frames_from_parquet, frames_from_postgres
from spark.sources.ledgers import Ledger, consumer_ledger, producer_ledger, write_set_aside
from spark.sources.same_offsets import others_with_same

T = TypeVar("T")

# Days that were removed lately without a proof that made them final. The table `day` is small.
REMOVED_EARLY = """
select d.day from day d
where d.state = 'gone' and d.changed_at > %(seen)s::timestamptz - interval '7 days'
  and not exists (select from reconciliation_day r where r.day = d.day and r.state = 'final')
order by 1
"""
# A standby that cancels this many reads cancels the next one as well.
MOST_SNAPSHOTS = 6


@dataclass(frozen=True)
class Read:
    """The days of one snapshot, oldest first."""

    seen_at: datetime
    standby: bool
    days: list[ReadDay]


@dataclass(frozen=True)
class Wish:
    """The days to prove: those `asked` for, or by watermark from the last results (`seen`); and final days' age.

    `if_stored`: requested days that are not stored are left out. `sla_s`: how many seconds a delivery may take.
    `ledgers`: whether the days are compared with ledgers. `audit_keep_s`: how many seconds audit rows are kept.
    """

    asked: Collection[date]
    seen: Mapping[date, Seen]
    margin_s: float
    if_stored: bool = False
    sla_s: float = 0.0
    ledgers: bool = False
    audit_keep_s: int = AUDIT_KEEP_S


def read_days(
    spark: SparkSession,
    url: str,
    wish: Wish,
    staging_dir: str,
    progress: Progress,
) -> Read:
    """Read the days in one snapshot, or in a new one if the server ended the first. Raises RunFailedError."""
    files = files_for(spark)

    def in_one() -> Read:
        with progress.stage("snapshot"), open_snapshot(url, wish.audit_keep_s) as snapshot:
            read = _read(spark, snapshot, wish, staging_dir, progress)
        # Archives need no snapshot, which holds up vacuum.
        days = [_with_archive(spark, url, day, f"{staging_dir}/{day.frames.day}", progress) for day in read.days]
        return replace(read, days=days)

    return _in_a_lasting_snapshot(in_one, lambda: files.remove(staging_dir), progress)


def choose_days(url: str, wish: Wish, progress: Progress) -> list[date]:
    """Return the days that `read_days` would read. Raises RunFailedError."""

    def in_one() -> list[date]:
        with open_snapshot(url) as snapshot:
            return _chosen(snapshot, {day.day: day for day in snapshot.days()}, wish, progress)

    return _in_a_lasting_snapshot(in_one, lambda: None, progress)


def _in_a_lasting_snapshot(work: Callable[[], T], clear: Callable[[], None], progress: Progress) -> T:
    """Do the work, again with a new snapshot if the server ended the first; before that, `clear`."""
    for number in range(1, MOST_SNAPSHOTS + 1):
        try:
            return work()
        except SnapshotLostError as lost:
            clear()
            if number == MOST_SNAPSHOTS:
                raise RunFailedError(f"None of {number} snapshots stayed open long enough. {lost}") from lost
            progress.say("snapshot_lost", f"{lost} The run begins again with a new snapshot.", snapshots=number)
    raise AssertionError("unreachable: the last try returns or raises")


def _read(spark: SparkSession, snapshot: Snapshot, wish: Wish, staging_dir: str, progress: Progress) -> Read:
    settings = snapshot.standby_settings()
    warning = None if settings is None else standby_warning(settings)
    if warning is not None:
        progress.say("standby", warning)
    days = {day.day: day for day in snapshot.days()}
    if not wish.asked and (removed := [row["day"] for row in snapshot.rows(REMOVED_EARLY, {"seen": snapshot.seen_at})]):
        progress.say(
            "removed_early",
            f"Removed lately before a run made them final: {', '.join(map(str, removed))}. Run the proof each "
            "night, and keep days long enough: HALFNOTE_RETENTION_S of 432000 (5 days) or more.",
            days=removed,
        )
    chosen = _chosen(snapshot, days, wish, progress)
    snapshot.telling_day = telling_day(days, chosen, snapshot.seen_at)
    read = [_read_day(spark, snapshot, days[day], wish, f"{staging_dir}/{day}", progress) for day in chosen]
    return Read(snapshot.seen_at, snapshot.standby, read)


def _candidates(snapshot: Snapshot, days: Mapping[date, Day], wish: Wish) -> list[Candidate]:
    final = {day: seen for day, seen in wish.seen.items() if day in days and seen.state == "final"}
    touched = set() if wish.asked else snapshot.touched_since(final)
    return [Candidate(day.day, day.archive, wish.seen.get(day.day), day.day in touched) for day in days.values()]


def _may_run(wish: Wish, one: Candidate) -> bool:
    if wish.asked:
        return one.day in wish.asked
    return one.seen is None or one.seen.state != "final" or one.archive is not None or one.touched


def _chosen(snapshot: Snapshot, days: Mapping[date, Day], wish: Wish, progress: Progress) -> list[date]:
    """Return the days to read, locked."""
    candidates = _candidates(snapshot, days, wish)
    # Lock all candidate days, so that they still exist when they are counted and read.
    snapshot.lock([one.day for one in candidates if _may_run(wish, one)])
    asked = [day for day in wish.asked if day in days] if wish.if_stored else wish.asked
    if wish.asked and not asked:
        return []
    try:
        chosen = days_to_run(
            candidates, snapshot.seen_at, wish.margin_s, lambda day: snapshot.signature(days[day]), asked
        )
    except KeyError as missing:
        here = ", ".join(map(str, days)) or "none"
        raise RunFailedError(f"The day {missing.args[0]} is not stored. Stored days: {here}.") from None
    for day, why in chosen.items():
        progress.say("day", f"{day}: {why}", day=day, reason=why)
    return list(chosen)


def _read_day(
    spark: SparkSession, snapshot: Snapshot, day: Day, wish: Wish, staging_dir: str, progress: Progress
) -> ReadDay:
    # Ledgers and archives make suspects too. They are read without the snapshot, which holds up vacuum.
    alone = day.archive_manifest is None and not wish.ledgers
    search = EarlySearch(snapshot, wish.sla_s, f"{staging_dir}/searched") if alone and is_local(spark) else None
    with progress.stage("read same offsets", day.day):
        same = others_with_same(spark, snapshot, day, staging_dir)
    try:
        frames = frames_from_postgres(spark, snapshot, day.day, staging_dir, progress, search)
    except SnapshotLostError:
        if search is not None:
            search.wait()
        raise
    frames = replace(frames, same_offset=same)
    if day.archive is not None and day.archive_manifest is not None:
        with progress.stage("manifest", day.day):
            found = manifest.of_day(snapshot.connection, day.day)
            if day.open_since is not None:
                found = manifest.before_growth(day.archive_manifest, found)
        frames = replace(frames, archive_manifest=day.archive_manifest, found_manifest=found)
    signature = snapshot.signature(day, frames.rows)
    if search is None:
        return ReadDay(frames, signature)
    return ReadDay(search.beside(frames), signature, search.found, search.joined)


def _with_archive(spark: SparkSession, url: str, read: ReadDay, staging_dir: str, progress: Progress) -> ReadDay:
    frames, place = read.frames, read.signature["archive"]
    described = frames.archive_manifest
    if described is None:
        return read
    with progress.stage("archive", frames.day):
        frames = beside(frames, spark, place, staging_dir)
    if frames.archive_problems and not _is_archive(url, frames.day, place, described):
        # Its files were removed because a new archive replaced it. No run has covered the new archive.
        progress.say("archive_replaced", f"{frames.day}: its archive was replaced; the next run compares it.")
        frames = replace(frames, archive=None, archive_manifest=None, found_manifest=None, archive_problems={})
    return replace(read, frames=frames)


def _is_archive(url: str, day: date, place: str, described: Mapping[str, Any]) -> bool:
    """Return whether an archive is still the day's."""
    with closing(connect(url)) as connection:
        row = connection.execute("select archive, archive_manifest from day where day = %s", [day]).fetchone()
    return row is not None and (row["archive"], row["archive_manifest"]) == (place, described)


def read_parquet(spark: SparkSession, directory: str, asked: Collection[date]) -> Iterator[ReadDay]:
    """Return the requested days that a directory has as frames or archives. Raises DamagedError for damaged files.

    An archive's files are compared with its manifest before any rule reads them, because damage looks like findings.
    """
    for place in days_of_parquet(spark, directory):
        try:
            frames = _intact_frames(spark, place)
        except DamagedError:
            raise
        except RunFailedError as error:
            raise DamagedError(str(error)) from error
        if not asked or frames.day in asked:
            yield ReadDay(frames, {})


def _intact_frames(spark: SparkSession, place: str) -> Frames:
    """Return the frames of a directory, which lacks nothing that was written. Raises RunFailedError.

    Frames without a manifest must have as many rows as frames.json says, and the files that LIST names, if there is
    one.
    """
    files = files_for(spark)
    if files.exists(f"{place}/{layout.MANIFEST}"):
        described = layout.manifest_of(files, place)
        _refuse(place, [word for words in layout.damage(files, place, described).values() for word in words])
        return layout.frames_from_archive(spark, place)
    if files.exists(f"{place}/{LIST}"):
        _refuse(place, _damaged_of_list(files, place))
    frames = frames_from_parquet(spark, place)
    try:
        found = {name: getattr(frames, name).count() for name in schemas.FRAMES if name in frames.rows}
    except FAILURES as error:
        raise DamagedError(f"{place} is damaged, so nothing was proved: {root_cause(str(error))}") from error
    wrong = [
        f"{name} has {count} rows instead of {frames.rows[name]}"
        for name, count in found.items()
        if count != frames.rows[name]
    ]
    _refuse(place, wrong)
    return frames


def _damaged_of_list(files: Files, place: str) -> list[str]:
    try:
        return layout.damaged_files(files, place, json.loads(files.read_text(f"{place}/{LIST}")))
    except (*FAILURES, ValueError, KeyError, TypeError) as error:
        return [f"{LIST} cannot be read: {root_cause(str(error))}"]


def _refuse(place: str, damage: Sequence[str]) -> None:
    """Raise DamagedError if there is damage."""
    if damage:
        named = "; ".join(damage[: layout.NAMED_AT_MOST])
        more = f" and {len(damage) - layout.NAMED_AT_MOST} more" if len(damage) > layout.NAMED_AT_MOST else ""
        raise DamagedError(f"{place} is damaged, so nothing was proved: {named}{more}.")


@dataclass(frozen=True)
class Ledgers:
    """The ledgers of producers and consumers, for all days."""

    producer: DataFrame | None
    consumer: DataFrame | None
    # Whether the producers' ledger has all their commits.
    complete: bool = False

    def beside(self, day: ReadDay) -> ReadDay:
        """Return the day with the ledgers; the rules select the day's rows from them."""
        frames = replace(
            day.frames,
            producer_ledger=self.producer,
            consumer_ledger=self.consumer,
            producer_ledger_complete=self.complete,
        )
        return replace(day, frames=frames)


def read_ledgers(
    spark: SparkSession,
    producer: str | None,
    consumer: str | None,
    staging_dir: str,
    out: str | None,
    progress: Progress,
    *,
    complete: Collection[str] = (),
) -> Ledgers:
    """Read the named ledgers; report the rows that were set aside, and write them below `out` if it is given.

    `complete`: which of `producer` and `consumer` are declared complete. Raises LedgerError and RunFailedError.
    """

    def read(name: str, spec: str | None, reader: Callable[..., Ledger]) -> DataFrame | None:
        if spec is None:
            return None
        with progress.stage(f"read {name} ledger") as stage:
            ledger = reader(spark, spec, f"{staging_dir}/{name}", complete=name in complete)
            stage.rows = ledger.counts["read"]
        if ledger.counts["set_aside"]:
            aside = ", ".join(f"{reason} {count}" for reason, count in ledger.counts["set_aside"].items())
            progress.say("set_aside", f"Set aside of the {name} ledger: {aside}", ledger=name, counts=ledger.counts)
            if out is not None:
                write_set_aside(ledger, f"{out}/set-aside/{name}")
        return ledger.rows

    rows = read("producer", producer, producer_ledger), read("consumer", consumer, consumer_ledger)
    return Ledgers(*rows, complete="producer" in complete)
