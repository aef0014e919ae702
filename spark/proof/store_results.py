"""Writes a run's results to the database, in one database transaction at its end."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, Literal

import psycopg
from psycopg.types.json import Jsonb

from spark.day_selection import Seen, State
from spark.errors import RunFailedError
from spark.postgres.connections import Connection, first_line
from spark.schemas import FINDING
from spark.usual import Volumes

# The most findings stored of one kind and day; `found` has the full count.
MOST_FINDINGS = 100_000
# The most findings in the page. They are enough to see the faults; the others are in the database and in Parquet.
MOST_SHOWN = 200
TREND_DAYS = 30

SEEN = """
select d.day, d.state, d.signature, d.counts,
  (select r.seen_at from reconciliation_run r where r.run_id = d.run_id) as seen_at,
  (select count(*) from finding f where f.day = d.day and f.resolved_at is null) as findings
from reconciliation_day d
"""
# Primary key. A run with the same number in another database has another time.
COMMITTED = "select from reconciliation_run where run_id = %s and started_at = %s and state <> 'failed'"
ADD_RUN = """
insert into reconciliation_run (state, engine, source, seen_at, started_at, ended_at, days, open, new, resolved,
  seconds, error)
values (%(state)s, %(engine)s, %(source)s, %(seen_at)s, %(started_at)s, clock_timestamp(), %(days)s, 0, 0, 0,
  %(seconds)s, %(error)s)
returning run_id, ended_at
"""
FOUND = """
create temp table found (day date not null, kind text not null, subject text not null, transaction_id uuid,
  position smallint, subscription_id int, producer_group text, detail jsonb not null) on commit drop
"""
COPY = "copy found (day, kind, subject, transaction_id, position, subscription_id, producer_group, detail) from stdin"
# Only one run at a time writes (RUN_LOCK); the service changes only announced_at. Served by finding_subject. A resolved
# finding that occurs again is announced again.
COUNT_NEW = """
select count(distinct (day, kind, subject)) as new from found f
where not exists (
  select from finding g where g.day = f.day and g.kind = f.kind and g.subject = f.subject and g.resolved_at is null
)
"""
# A rule that names one subject twice does not end the run.
MERGE = """
insert into finding (day, kind, subject, transaction_id, position, subscription_id, producer_group, detail, first_run,
  first_seen_at, last_run, last_seen_at)
select distinct on (day, kind, subject)
  day, kind, subject, transaction_id, position, subscription_id, producer_group, detail, %(run_id)s, %(at)s,
  %(run_id)s, %(at)s
from found order by day, kind, subject
on conflict (day, kind, subject) do update set
  transaction_id = excluded.transaction_id, position = excluded.position, subscription_id = excluded.subscription_id,
  producer_group = excluded.producer_group, detail = excluded.detail, last_run = excluded.last_run,
  last_seen_at = excluded.last_seen_at, resolved_run = null, resolved_at = null,
  announced_at = case when finding.resolved_at is null then finding.announced_at end
"""
# Only kinds whose search was complete. Served by finding_open.
RESOLVE = """
update finding set resolved_run = %(run_id)s, resolved_at = %(at)s
where resolved_at is null and day = %(day)s and kind = any(%(kinds)s) and last_run <> %(run_id)s
"""
PUT_DAY = """
insert into reconciliation_day (day, run_id, state, reconciled_at, counts, found, signature, figures, volumes,
  score)
values (%(day)s, %(run_id)s, %(state)s, %(at)s, %(counts)s, %(found)s, %(signature)s, %(figures)s, %(volumes)s,
  %(score)s)
on conflict (day) do update set run_id = excluded.run_id, state = excluded.state,
  reconciled_at = excluded.reconciled_at, counts = excluded.counts, found = excluded.found,
  signature = excluded.signature, figures = excluded.figures, volumes = excluded.volumes,
  score = excluded.score
"""
END_RUN = """
update reconciliation_run set (state, open, new, resolved) = (
  select case when count(*) = 0 then 'proved' else 'findings' end, count(*), %(new)s, %(resolved)s
  from finding where day = any(%(days)s) and resolved_at is null
)
where run_id = %(run_id)s
returning *
"""
# A few of each kind, the open ones first, each with the name of its subscription, which may be deleted.
SHOWN = """
select numbered.*, coalesce(s.name, (
  select v.name from subscription_version v where v.subscription_id = numbered.subscription_id
  order by v.version_id desc limit 1
)) as subscription
from (
  select f.*, row_number() over (partition by day, kind order by resolved_at is not null, subject) as place
  from finding f where day = any(%(days)s) and (resolved_at is null or resolved_run = %(run_id)s)
) numbered left join subscription s using (subscription_id)
where place <= %(most)s order by day, kind, place
"""
# Open findings of the other days; served by finding_open. A final day is seldom proved again; its findings stay.
ELSEWHERE = """
select day, count(*) as findings from finding where resolved_at is null and not day = any(%(days)s)
group by day order by day desc
"""
# Served by finding_open.
OPEN_KINDS = """
select kind, count(*) as findings from finding where resolved_at is null and day = any(%(days)s) group by kind
"""
TREND = "select day, state, counts, found, score from reconciliation_day order by day desc limit %s"


@dataclass(frozen=True)
class DayResult:
    """A run's result for a day. `counts`: rows by table, and `undecided` and `unsettled`. `found`: findings by kind.
    `looked_for`: the kinds whose rules ran and whose findings are all among those stored. `volumes`: counts by topic,
    group and subscription. `score`: by part, see spark/score.py."""

    day: date
    state: State
    counts: Mapping[str, int]
    found: Mapping[str, int]
    signature: Mapping[str, Any]
    figures: Mapping[str, Any]
    looked_for: Collection[str]
    volumes: Volumes = field(default_factory=dict)
    score: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """A run as it is recorded. `seconds`: by stage."""

    engine: str
    source: Literal["primary", "standby", "archive"]
    started_at: datetime
    seen_at: datetime | None = None
    days: Sequence[date] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """The rows as the database has them, for the report: the run, its days, some findings of theirs, the last days.

    `elsewhere`: how many findings are open of days that the run did not look at, newest first. `open_kinds`: how many
    are open of the run's days, by kind, also those that an earlier run found with a ledger.
    """

    run: Mapping[str, Any]
    days: Sequence[Mapping[str, Any]]
    findings: Sequence[Mapping[str, Any]]
    trend: Sequence[Mapping[str, Any]]
    elsewhere: Mapping[date, int] = field(default_factory=dict)
    open_kinds: Mapping[str, int] = field(default_factory=dict)


def seen_days(connection: Connection) -> dict[date, Seen]:
    """Return the last results by day. Raises RunFailedError if the database has no tables for them."""
    try:
        rows = connection.execute(SEEN).fetchall()
    except psycopg.errors.UndefinedTable:
        raise RunFailedError("The database has no tables for findings. Migrate it: halfnote migrate") from None
    return {
        row["day"]: Seen(
            row["state"],
            bool(row["counts"].get("undecided") or row["counts"].get("unsettled")),
            row["findings"],
            row["signature"],
            row["seen_at"],
        )
        for row in rows
    }


def is_committed(connection: Connection, run_id: int, started_at: datetime) -> bool:
    """Return whether the database has a run's result."""
    row = connection.execute(COMMITTED, [run_id, started_at]).fetchone()
    return row is not None


@contextmanager
def writing(
    connection: Connection, run: RunResult, days: Sequence[DayResult], findings: Iterable[tuple[Any, ...]]
) -> Iterator[Written]:
    """Write a successful run; it is committed at the end of the block, or rolled back if the block raises.

    `findings`: rows of FINDING, in its order. Raises RunFailedError if the database does not take it.
    """
    try:
        with connection.transaction():
            row = _add_run(connection, run, "proved", None)
            run_id, at = row["run_id"], row["ended_at"]
            new, resolved = _merge(connection, run_id, at, days, findings)
            for day in days:
                _put_day(connection, run_id, at, day)
            here = {"run_id": run_id, "days": list(run.days)}
            ended = connection.execute(END_RUN, here | {"new": new, "resolved": resolved}).fetchone()
            assert ended is not None
            yield _written(connection, ended, here)
    except psycopg.Error as error:
        raise RunFailedError(f"The database did not accept the result: {first_line(error)}") from error


def unwritten(
    run: RunResult, days: Sequence[DayResult], findings: Sequence[tuple[Any, ...]], names: Mapping[int, str]
) -> Written:
    """Return the rows that a run would write, for a run over Parquet, which uses no database.

    `names`: of subscriptions, by number.
    """
    count = sum(sum(day.found.values()) for day in days)
    at = datetime.now(UTC)
    columns = {"run_id": None, "ended_at": at, "new": count, "resolved": 0, "open": count, "error": None}
    state = "findings" if count else "proved"
    of_days = [
        {name: value for name, value in vars(day).items() if name != "looked_for"}
        | {"run_id": None, "reconciled_at": at}
        for day in days
    ]
    here: dict[str, Any] = {
        "finding_id": None,
        "first_run": None,
        "last_run": None,
        "resolved_run": None,
        "resolved_at": None,
    }
    here |= {"first_seen_at": at, "last_seen_at": at, "announced_at": None}
    rows = [dict(zip(FINDING.names, finding, strict=True)) | here for finding in findings]
    return Written(
        run=vars(run) | columns | {"state": state},
        days=of_days,
        findings=[row | {"subscription": names.get(row["subscription_id"])} for row in rows],
        trend=of_days,
    )


def write_failure(connection: Connection, run: RunResult, error: str) -> None:
    """Write that a run failed, and why."""
    _add_run(connection, run, "failed", error[:2000])


def _add_run(connection: Connection, run: RunResult, state: str, error: str | None) -> dict[str, Any]:
    row = connection.execute(
        ADD_RUN,
        {
            "state": state,
            "engine": run.engine,
            "source": run.source,
            "seen_at": run.seen_at,
            "started_at": run.started_at,
            "days": list(run.days),
            "seconds": Jsonb(run.seconds),
            "error": error,
        },
    ).fetchone()
    assert row is not None
    return row


def _merge(
    connection: Connection,
    run_id: int,
    at: datetime,
    days: Sequence[DayResult],
    findings: Iterable[tuple[Any, ...]],
) -> tuple[int, int]:
    """Update the findings; return how many are new, and how many are resolved."""
    connection.execute(FOUND)
    with connection.cursor() as cursor, cursor.copy(COPY) as copy:
        for finding in findings:
            copy.write_row(finding)
    connection.execute("analyze found")
    counted = connection.execute(COUNT_NEW).fetchone()
    assert counted is not None
    connection.execute(MERGE, {"run_id": run_id, "at": at})
    resolved = 0
    for day in days:
        here = {"run_id": run_id, "at": at, "day": day.day, "kinds": sorted(day.looked_for)}
        resolved += connection.execute(RESOLVE, here).rowcount
    return counted["new"], resolved


def _put_day(connection: Connection, run_id: int, at: datetime, day: DayResult) -> None:
    connection.execute(
        PUT_DAY,
        {
            "day": day.day,
            "run_id": run_id,
            "state": day.state,
            "at": at,
            "counts": Jsonb(day.counts),
            "found": Jsonb(day.found),
            "signature": Jsonb(day.signature),
            "figures": Jsonb(day.figures),
            "volumes": Jsonb(day.volumes),
            "score": Jsonb(day.score),
        },
    )


def _written(connection: Connection, run: dict[str, Any], here: Mapping[str, Any]) -> Written:
    days = "select * from reconciliation_day where day = any(%(days)s) order by day"
    return Written(
        run=run,
        days=connection.execute(days, here).fetchall(),
        findings=connection.execute(SHOWN, dict(here) | {"most": MOST_SHOWN}).fetchall(),
        trend=connection.execute(TREND, [TREND_DAYS]).fetchall()[::-1],
        elsewhere={row["day"]: row["findings"] for row in connection.execute(ELSEWHERE, here)},
        open_kinds={row["kind"]: row["findings"] for row in connection.execute(OPEN_KINDS, here)},
    )
