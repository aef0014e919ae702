"""Reads a day's half messages in ranges of ids, in the snapshot, and writes what is found in them."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from pyspark.sql import SparkSession

from spark.engine.filesystem import files_for
from spark.postgres import copy
from spark.postgres.connections import Day, Snapshot, partition_name
from spark.sources.id_ranges import borders

# A statement names so many transactions.
IDS_AT_ONCE = 1000

# Processes keep time by the database's clock, each by its own measurement, and the clock can be set. This much is no
# disagreement. It is the default of HALFNOTE_CLOCK_SKEW_MAX_S, above which a process is not ready.
CLOCKS_DIFFER_S = 5
# The pages of half messages of one range of ids.
PAGES_AT_ONCE = 4096
# For the joins of one range: with Postgres's default of 4 MB they are written to disk.
WORK_MEM = "32MB"
# The time of a half's id: its first 48 bits are milliseconds. Postgres has a function for it since version 18, which
# takes a fraction of the time; it returns null for an id of another kind.
_ID_TIME = """to_timestamp(
  ('x' || encode(substr(uuid_send(h.transaction_id), 1, 6), 'hex'))::bit(48)::bigint::float8 / 1000)"""
_ID_TIME_18 = f"coalesce(uuid_extract_timestamp(h.transaction_id), {_ID_TIME})"


def receipts_since(day: Day) -> datetime | None:
    """Return the time since which each finished redelivery leaves a receipt; None if it is unknown.

    A day is closed an hour after its end at the earliest, and may be opened again: redeliveries that finished meanwhile
    left no receipt.
    """
    begun = datetime(day.day.year, day.day.month, day.day.day, tzinfo=UTC)
    if day.open_since is None or day.open_since >= begun + timedelta(hours=25):
        return day.open_since
    return begun


def reported_once(kind: str, subject: str, at: str | None = None, detail: str = "true") -> str:
    """Return an SQL condition for what is of no day and stays: the day before the run has it, or another if that one
    is removed (`telling_day` of spark/day_selection.py).

    What an earlier run found for another day is not repeated each night. A day whose findings are open keeps those that
    are still there. `subject`: the SQL of the finding's subject. `at`: the SQL of the time of what is found, if several
    may have one subject; the first finding whose first run could see it has it. `detail`: the condition that a finding
    `f` is about such things.
    """
    found = f"""
    select f.day from finding f where f.kind = '{kind}' and f.subject = {subject} and f.resolved_at is null
      and {detail}"""  # noqa: S608
    if at is not None:
        found += f"""
      and coalesce((select r.seen_at from reconciliation_run r where r.run_id = f.first_run), f.first_seen_at)
        > {at} + interval '{CLOCKS_DIFFER_S} seconds'
    order by f.first_seen_at, f.day limit 1"""  # noqa: S608
    return f"""(
  exists (select from ({found}) f where f.day = '{{day}}'::date)
  or '{{day}}'::date = '{{tells}}'::date and not exists (
    select from ({found}) f where f.day <> '{{day}}'::date
  )
)"""  # noqa: S608 -- texts of ours


def write_found(
    spark: SparkSession,
    snapshot: Snapshot,
    day: Day,
    query: str,
    directory: str,
    found_in: Callable[[Any], Iterable[Mapping[str, Any]]],
    *,
    whole: bool = False,
    among: Sequence[str] | None = None,
    planned: Sequence[str] = (),
) -> int:
    """Write what `found_in` finds in the record batches of a query as JSON to files in `directory`; return the number.

    The query has the names of the day's partitions (`{half}`, `{op}`, `{outbox}`, `{receipt}`, `{attempt}`), a
    half-open range of ids, `{low}` and `{high}`, the day, `{day}`, the day that tells what is of no day, `{tells}`, and
    times: `{seen}`, of the snapshot; `{closes}`, before which the day was surely open; `{since}`, from which on it is;
    and what `receipts_since` returns. `{id_time}` is the time of the id of a half `h`, `{audit_keep_s}` how long audit
    rows are kept. `whole`: it runs once, over the whole day. `among`: the ids, sorted, to which `{among}`, a condition
    that follows a column of ids, restricts it; None: any. `planned`: statements that set how the query is planned.
    Without findings, there is no directory. Raises copy.FAILURES.
    """
    files, number_of = files_for(spark), 0
    given = {table: partition_name(table, day.day) for table in ("half", "op", "outbox", "receipt", "attempt")}
    # Upkeep closes a day an hour after its end at the earliest, and may open it again.
    closes = datetime(day.day.year, day.day.month, day.day.day, tzinfo=UTC) + timedelta(hours=25)
    since = "infinity" if day.open_since is None else day.open_since.isoformat()
    given |= {"seen": snapshot.seen_at.isoformat(), "day": str(day.day), "closes": closes.isoformat(), "since": since}
    given["tells"] = str(snapshot.telling_day)
    given |= {"receipts_since": str(receipts_since(day)), "audit_keep_s": str(snapshot.audit_keep_s)}
    given["id_time"] = _ID_TIME_18 if snapshot.connection.info.server_version >= 180_000 else _ID_TIME
    with snapshot.readers.cursor() as cursor:
        cursor.execute(f"set local work_mem = '{WORK_MEM}'")
        for statement in planned:
            cursor.execute(statement)
        pages = 0 if whole or among is not None else snapshot.pages(given["half"])
        ranges = _ranges(snapshot, day, pages) if among is None else _named(among)
        for number, (low, high, those) in enumerate(ranges):
            if snapshot.ended.is_set():
                break
            began = time.monotonic()
            cursor.execute(query.format(**given, low=low, high=high, among=those))
            with cursor.fetch_record_batch() as batches:
                lines = [json.dumps(one) for one in found_in(batches)]
            if lines:
                files.write_text(f"{directory}/part-{number:05}.json", "\n".join(lines))
                number_of += len(lines)
            if copy.others_are_at_work(cursor):
                snapshot.ended.wait(copy.RESTS * (time.monotonic() - began))
    return number_of


def rows_of(batches: Any) -> list[dict[str, Any]]:
    """Return the rows of record batches: all that a query finds."""
    return [row for one in batches for row in one.to_pylist()]


def _ranges(snapshot: Snapshot, day: Day, pages: int) -> Iterator[tuple[UUID, UUID, str]]:
    """Return half-open ranges of ids with about as many half messages each, so that the joins of each fit WORK_MEM."""
    parts = pages // PAGES_AT_ONCE
    found = borders(snapshot, day, pages, parts) if parts > 1 else []
    for low, high in zip((day.low, *found), (*found, day.high), strict=True):
        yield low, high, "is not null"


def _named(ids: Sequence[str]) -> Iterator[tuple[UUID, UUID, str]]:
    """Return ranges of a few of the ids each, with the condition that names them."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        those = ids[start : start + IDS_AT_ONCE]
        yield UUID(those[0]), UUID(int=UUID(those[-1]).int + 1), f"= any('{{{','.join(those)}}}'::uuid[])"
