"""Reads of Postgres in one snapshot: values, visibility, locks, and plans."""

import io
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from pyspark.sql import DataFrame, SparkSession

from spark.engine.progress import Progress
from spark.errors import RunFailedError, SnapshotLostError
from spark.frames import Frames, empty
from spark.postgres import copy
from spark.postgres.connections import REDELIVERED, Snapshot, open_snapshot, partition_name
from spark.postgres.standby import StandbySettings, cancelled_by_replay, standby_warning
from spark.schemas import FINDING, FOUND
from spark.sources import frames, id_ranges, scan
from spark.sources.frames import frames_from_parquet, frames_from_postgres, page_ranges, receipts_since
from spark.transforms.joined import Joined
from spark.transforms.rules import RULES, found_in, joined
from tests.spark.days import Connection, add_day, days_ago, fill_day

DAY = 3  # days ago


@pytest.fixture
def day() -> date:
    return days_ago(DAY)


@pytest.fixture
def other(dsn: str) -> Iterator[Connection]:
    """A second session beside the reader; like upkeep, it waits for locks for a limited time only."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set lock_timeout = '100ms'")
        yield connection


def read(spark: SparkSession, snapshot: Snapshot, day: date, directory: Path) -> Frames:
    snapshot.lock([day])
    return frames_from_postgres(spark, snapshot, day, str(directory), Progress(io.StringIO()))


@pytest.mark.parametrize("way", ["copy", pytest.param("jdbc", marks=pytest.mark.slow)])
def test_rows_arrive_as_they_are(
    way: str,
    spark: SparkSession,
    dsn: str,
    day: date,
    other: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read here, or by executors that are elsewhere."""
    monkeypatch.setattr("spark.sources.frames.is_local", lambda session: way == "copy")
    add_day(dsn, day)
    [low] = other.execute("select low from day where day = %s", [day]).fetchone() or []
    at = datetime(day.year, day.month, day.day, 23, 59, 59, 999_999, tzinfo=UTC)
    for position in (0, 1):
        other.execute(
            "insert into half (transaction_id, position, producer_group, topic, key, tag, headers, content_type, body, "
            "body_digest, deliver_after_s, born_at, first_check_at, digest, policy) "
            "values (%s, %s, 'shöp', 'order', null, %s, %s, 'text/plain', 'x', %s, %s, %s, %s, 'y', %s)",
            [
                low,
                position,
                'it\'s "quoted", | \\ and\nbroken',
                Jsonb({"b": "ü", "a": "1"}),
                b"\x00\xff\x10",
                0.1,
                at,
                at + timedelta(microseconds=1),
                Jsonb({"max_checks": 3}),
            ],
        )
    other.execute(
        "insert into subscription (name, topics, filters, destination, secrets, start, max_in_flight, timeout_s, "
        "retry, state, created_at, updated_at, started_after, matches_since, deleted_at) values "
        "('billing', %s, %s, '{}', '[]', '\"latest\"', 1, 1, '{}', 'active', %s, %s, 9007199254740993, %s, null)",
        [["order", 'a,"b*'], Jsonb({"tags": ["x"]}), at, at, at],
    )
    other.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, due_at) '
        "values (1, %s, 0, 5, 'order', 2, %s), (1, 'ffffffff-ffff-7fff-8fff-ffffffffffff', 0, 6, 'order', 2, %s)",
        [low, at, at],
    )
    with open_snapshot(dsn) as snapshot:
        f = read(spark, snapshot, day, tmp_path)
    first, second = [row.asDict() for row in f.half.orderBy("position").collect()]
    micros = f.half.selectExpr("unix_micros(born_at) as born", "unix_micros(first_check_at) as check").first()
    assert micros is not None
    assert (micros["born"], micros["check"]) == (_micros(at), _micros(at) + 1)
    assert {name: first[name] for name in first if not name.endswith("_at")} == {
        "transaction_id": str(low),
        "position": 0,
        "producer_group": "shöp",
        "topic": "order",
        "tag": 'it\'s "quoted", | \\ and\nbroken',
        "headers": '{"a": "1", "b": "ü"}',
        "body_digest": bytearray(b"\x00\xff\x10"),
        "digest": bytearray(b"y"),
        "policy": '{"max_checks": 3}',
    }
    assert (second["position"], second["policy"]) == (1, None)
    [subscription] = f.subscription.collect()
    assert (subscription["topics"], subscription["filters"]) == (["order", 'a,"b*'], '{"tags": ["x"]}')
    assert (subscription["started_after"], subscription["deleted_at"]) == (9007199254740993, None)
    assert [row["offset"] for row in f.delivery_retry.collect()] == [5]
    assert f.rules["interval_s"] == 30
    assert (f.rows["half"], f.rows["op"], f.rows["delivery_retry"]) == (2, 0, 1)
    assert f.op.collect() == []


def _micros(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def test_what_was_written_after_the_snapshot_is_not_seen(
    spark: SparkSession, dsn: str, day: date, other: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several connections read ranges of ids long after the snapshot was taken, and none sees later rows."""
    monkeypatch.setattr(id_ranges, "PAGES_AT_ONCE", 2)
    fill_day(dsn, day, 300)
    with open_snapshot(dsn) as snapshot:
        assert len(id_ranges.id_ranges(snapshot, snapshot.day(day))) > 3
        fill_day(dsn, day, 300, first=301)
        other.execute("update checkpoint set \"offset\" = 1000; update subscription set name = 'another'")
        other.execute("delete from op where true")
        later = days_ago(DAY + 4)
        fill_day(dsn, later, 5, first=1000)
        assert later not in [found.day for found in snapshot.days()]
        f = read(spark, snapshot, day, tmp_path)
    assert dict(f.rows) | {"half": 300, "op": 300, "outbox": 300, "receipt": 300} == f.rows
    assert {frame.count() for frame in (f.half, f.op, f.outbox, f.receipt)} == {300}
    assert f.half.select("transaction_id").distinct().count() == 300
    assert [row["offset"] for row in f.checkpoint.collect()] == [300]
    assert [row["name"] for row in f.subscription.collect()] == ["billing"]


def test_a_reader_whose_session_is_ended_ends_the_others(
    spark: SparkSession, dsn: str, day: date, other: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_ranges, "PAGES_AT_ONCE", 2)
    fill_day(dsn, day, 2000)
    copied, begun = copy._copy, itertools.count(1)

    def copy_third_without_session(*arguments: Any) -> int:
        number, stop = next(begun), arguments[-1]
        if number == 3:
            other.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                "where application_name = 'halfnote proof' and datname = current_database()"
            )
        elif number > 3:
            # A reader that connected after that would be through before the end of the sessions is known.
            stop.wait(30)
        return copied(*arguments)

    monkeypatch.setattr(copy, "_copy", copy_third_without_session)
    with open_snapshot(dsn) as snapshot:
        many = len(id_ranges.id_ranges(snapshot, snapshot.day(day)))
        with pytest.raises(RunFailedError, match=r"A read failed: .*(terminating connection|closed the connection)"):
            read(spark, snapshot, day, tmp_path)
    assert next(begun) < many


@pytest.mark.parametrize("busy", [True, False])
def test_readers_rest_while_others_are_at_work(
    spark: SparkSession,
    dsn: str,
    day: date,
    other: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    busy: bool,
) -> None:
    rests: list[float] = []

    class Unhurried(threading.Event):
        """Records the wait instead of waiting."""

        def wait(self, timeout: float | None = None) -> bool:
            """Come back at once."""
            rests.append(timeout or 0.0)
            return self.is_set()

    monkeypatch.setattr(id_ranges, "PAGES_AT_ONCE", 2)
    fill_day(dsn, day, 500)
    with open_snapshot(dsn) as snapshot, ThreadPoolExecutor() as pool:
        if busy:
            working = pool.submit(other.execute, "select pg_sleep(600)")
        while snapshot.rows(copy.OTHERS_AT_WORK) != [{"exists": busy}]:
            snapshot.rows("select pg_stat_clear_snapshot()")
        with monkeypatch.context() as context:
            context.setattr(copy, "threading", SimpleNamespace(Event=Unhurried))
            read(spark, snapshot, day, tmp_path)
        if busy:
            other.cancel()
            assert isinstance(working.exception(), psycopg.errors.QueryCanceled)
        ranges = 3 * len(id_ranges.id_ranges(snapshot, snapshot.day(day)))
    if busy:
        assert len(rests) > ranges
        assert all(rest > 0 for rest in rests)
    else:
        assert rests == []


def test_each_range_of_pages_is_a_tid_range_scan(dsn: str, day: date) -> None:
    fill_day(dsn, day, 2000)
    with open_snapshot(dsn) as snapshot:
        source = frames.source_of(snapshot, snapshot.day(day), "half")
        # As it is asked: the wanted columns of the query, cut by a condition.
        asked = f'select "transaction_id", "born_at" from ({source.query}) source where {page_ranges(9)[0]}'
        plan = "\n".join(row["QUERY PLAN"] for row in snapshot.rows(f"explain {asked}"))
    assert f"Tid Range Scan on {partition_name('half', day)}" in plan
    assert "Seq Scan" not in plan


def test_ranges_of_ids_leave_nothing_out_and_are_scans_by_index(
    dsn: str, day: date, other: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_day(dsn, day, 2000)
    other.execute("analyze")
    monkeypatch.setattr(id_ranges, "PAGES_AT_ONCE", 4)
    with open_snapshot(dsn) as snapshot:
        found = snapshot.day(day)
        ranges = id_ranges.id_ranges(snapshot, found)
        assert len(ranges) > 10
        for name in ("half", "op", "outbox", "receipt"):
            queries = frames.copy_queries(snapshot, found, name, ranges)
            counts = [len(snapshot.rows(query)) for query in queries]
            assert sum(counts) == 2000
            assert max(counts) < 1000
            plan = "\n".join(row["QUERY PLAN"] for row in snapshot.rows(f"explain {queries[5]}"))
            assert "Index" in plan, plan
            assert "Seq Scan" not in plan, plan
        sampled = id_ranges.SAMPLED.format(half=partition_name("half", day))
        plan = "\n".join(row["QUERY PLAN"] for row in snapshot.rows(f"explain {sampled}", [["(0,1)", "(4,1)"]]))
        assert "Tid Scan" in plan
    monkeypatch.undo()
    with open_snapshot(dsn) as snapshot:
        assert id_ranges.id_ranges(snapshot, snapshot.day(day)) == ("true",)


def test_the_ranges_of_a_comparison_have_as_many_halves_each(
    spark: SparkSession, dsn: str, day: date, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The day's transactions are all of its first minutes."""
    fill_day(dsn, day, 2000)
    monkeypatch.setattr(scan, "PAGES_AT_ONCE", 4)
    query = "select count(*) as halves from {half} where transaction_id >= '{low}' and transaction_id < '{high}'"
    counts: list[int] = []

    def found_in(batches: Any) -> list[dict[str, Any]]:
        counts.extend(row["halves"] for one in batches for row in one.to_pylist())
        return []

    with open_snapshot(dsn) as snapshot:
        scan.write_found(spark, snapshot, snapshot.day(day), query, str(tmp_path), found_in)
    assert sum(counts) == 2000
    assert len(counts) > 10
    assert max(counts) < 2 * 2000 / len(counts)


def test_the_redeliveries_of_a_day_are_counted_by_an_index_alone(dsn: str, day: date, other: Connection) -> None:
    fill_day(dsn, day, 3)
    other.execute(
        """
        insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at,
          died_because, attempts)
        select 1, 0, low, 0, 1, 'redelivered', now(), now(), 'exhausted', 1 from day, generate_series(1, 3)
        where day = %s
        """,
        [day],
    )
    with open_snapshot(dsn) as snapshot:
        # Of few rows any plan would do.
        for scan in ("seqscan", "bitmapscan"):
            snapshot.connection.execute(f"set local enable_{scan} = off")
        found = snapshot.day(day)
        bounds = {"low": found.low, "high": found.high}
        assert snapshot.rows(REDELIVERED, bounds) == [{"redelivery": 3, "newest_redelivery": 3}]
        plan = "\n".join(row["QUERY PLAN"] for row in snapshot.rows(f"explain {REDELIVERED}", bounds))
    assert "Index Only Scan using redelivery_transaction" in plan
    assert plan.count("Scan") == 1


def test_ranges_of_pages_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PAGES_AT_ONCE", 10)
    assert page_ranges(0) == ()
    assert page_ranges(10) == ("ctid >= '(0,0)'::tid and ctid < '(10,0)'::tid",)
    assert page_ranges(11)[1] == "ctid >= '(10,0)'::tid and ctid < '(20,0)'::tid"


def test_a_drop_waits_for_the_reader(dsn: str, day: date, other: Connection) -> None:
    fill_day(dsn, day, 3)
    name = partition_name("outbox", day)
    other.execute(f"alter table outbox detach partition {name}")
    with open_snapshot(dsn) as snapshot:
        snapshot.lock([day])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute(f"drop table {name}")
        # Detached, but here: what the snapshot shows is read.
        assert snapshot.rows(f"select count(*) as rows from {name}") == [{"rows": 3}]
    other.execute(f"drop table {name}")


def test_a_day_that_was_dropped_before_the_lock_needs_a_new_snapshot(dsn: str, day: date, other: Connection) -> None:
    add_day(dsn, day)
    with open_snapshot(dsn) as snapshot:
        assert day in [found.day for found in snapshot.days()]
        with other.transaction():
            for table in ("outbox", "half", "op", "receipt", "attempt"):
                other.execute(f"drop table {partition_name(table, day)}")
            other.execute("update day set state = 'gone' where day = %s", [day])
        with pytest.raises(SnapshotLostError, match=partition_name("half", day)):
            snapshot.lock([day])
    with open_snapshot(dsn) as snapshot:
        assert day not in [found.day for found in snapshot.days()]


def test_the_layout_is_that_of_parquet(spark: SparkSession, dsn: str, day: date, tmp_path: Path) -> None:
    fill_day(dsn, day, 3)
    with open_snapshot(dsn) as snapshot:
        f = read(spark, snapshot, day, tmp_path)
    described = json.loads((tmp_path / "frames.json").read_text())
    assert described["day"] == str(day)
    assert datetime.fromisoformat(described["seen_at"]) == f.seen_at
    assert f.seen_at <= datetime.now(UTC) + timedelta(seconds=1)
    assert f.receipts_since == datetime(day.year, day.month, day.day, tzinfo=UTC)
    again = frames_from_parquet(spark, str(tmp_path))
    assert (again.day, again.seen_at, again.rules, again.rows) == (f.day, f.seen_at, f.rules, f.rows)
    assert again.receipts_since == f.receipts_since
    assert again.receipt.orderBy("offset").collect() == f.receipt.orderBy("offset").collect() != []
    # Empty ones are left out.
    assert not (tmp_path / "attempt").exists()
    assert again.attempt.schema == f.attempt.schema


def test_a_day_that_lost_all_its_halves_is_compared(
    spark: SparkSession, dsn: str, day: date, other: Connection, tmp_path: Path
) -> None:
    """What is not compared resolves no finding, so "nothing found" may be said only of what was compared."""
    fill_day(dsn, day, 3)
    other.execute("delete from half where true")
    other.execute('update receipt set status = 500 where "offset" = 2')
    for number, lost in enumerate(("op", "outbox")):
        with open_snapshot(dsn) as snapshot:
            f = read(spark, snapshot, day, tmp_path / str(number))
        assert f.wrong_receipt is not None
        assert [(row["offset"], row["differs"]) for row in f.wrong_receipt.collect()] == [(2, "status")]
        other.execute(f"delete from {lost} where true")


@pytest.mark.slow
def test_rules_over_frames_without_rows_have_looked_without_a_plan(
    spark: SparkSession, dsn: str, day: date, tmp_path: Path
) -> None:
    fill_day(dsn, day, 3)
    with open_snapshot(dsn) as snapshot:
        f = replace(read(spark, snapshot, day, tmp_path), absent=[])
    j = joined(f, 3600.0)
    planned: set[str] = set()

    def find(kind: str, j: Joined) -> DataFrame:
        planned.add(kind)
        return empty(spark, FINDING)

    found_in(j, rules=[replace(rule, find=partial(find, rule.kind)) for rule in RULES])
    asked = {rule.kind for rule in RULES if rule.looks_in_full(j.whole)}
    # What the comparisons find, retries, and what joins and figures found already.
    compared = {rule.kind for rule in RULES if rule.needs in FOUND}
    assert len(compared) == 11
    assert asked - planned == compared | {"retry_overdue", "delivery_late", "fewer_than_usual"}


def test_only_a_frame_without_files_is_known_to_have_no_rows(
    spark: SparkSession, dsn: str, day: date, other: Connection, tmp_path: Path
) -> None:
    fill_day(dsn, day, 3)
    other.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, due_at) '
        "select 1, transaction_id, 0, \"offset\", 'order', 2, now() from outbox limit 1"
    )
    with open_snapshot(dsn) as snapshot:
        read(spark, snapshot, day, tmp_path)
    described = json.loads((tmp_path / "frames.json").read_text())
    assert described["rows"]["delivery_retry"] == 1
    described["rows"] |= {"delivery_retry": 0}
    (tmp_path / "frames.json").write_text(json.dumps(described))
    f = frames_from_parquet(spark, str(tmp_path))
    assert "delivery_retry" not in f.nothing
    assert {"dead_letter", "never_due"} <= f.nothing


def test_a_day_that_was_closed_left_no_receipts_meanwhile(dsn: str, day: date, other: Connection) -> None:
    add_day(dsn, day)
    begun = datetime(day.year, day.month, day.day, tzinfo=UTC)
    # Made, decided when it was over, opened again, and closed.
    for state, changed, since in (
        ("open", begun - timedelta(days=2), begun),
        ("open", begun + timedelta(hours=24), begun),
        ("open", begun + timedelta(hours=50), begun + timedelta(hours=50)),
        ("archiving", begun + timedelta(hours=60), None),
    ):
        other.execute("update day set state = %s, changed_at = %s where day = %s", [state, changed, day])
        with open_snapshot(dsn) as snapshot:
            assert receipts_since(snapshot.day(day)) == since


def test_what_is_no_directory_of_frames_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"frames\.json is missing"):
        frames_from_parquet(spark, str(tmp_path))
    (tmp_path / "frames.json").write_text('{"day": "2026-11-20"}')
    with pytest.raises(RunFailedError, match="seen_at"):
        frames_from_parquet(spark, str(tmp_path))
    (tmp_path / "frames.json").write_text('{"day": "2026-11-20", "seen_at": "2026-11-21T00:00:00+00:00"}')
    with pytest.raises(RunFailedError, match="half is missing"):
        frames_from_parquet(spark, str(tmp_path))
    with pytest.raises(RunFailedError, match="not of 2026-11-19"):
        frames_from_parquet(spark, str(tmp_path), date(2026, 11, 19))


def test_a_password_that_is_wrong_is_not_shown(dsn: str) -> None:
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    with (
        pytest.raises(RunFailedError) as refused,
        open_snapshot(f"postgresql://{info['user']}:geheim@{info['host']}:{info['port']}/{info['dbname']}"),
    ):
        pass
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (StandbySettings(False, 30), True),
        (StandbySettings(False, 0), True),
        (StandbySettings(True, 30), False),
        (StandbySettings(False, -1), False),
        (StandbySettings(False, 900), False),
    ],
)
def test_a_standby_that_may_cancel_reads_is_told_of(settings: StandbySettings, warned: bool) -> None:
    said = standby_warning(settings)
    assert (said is not None and "hot_standby_feedback" in said) == warned


@pytest.mark.parametrize(
    ("said", "cancelled"),
    [
        # What libpq said when a standby ended a reader between two statements and the reader was sending the next one.
        ("IO: Failed to prepare query: server closed the connection unexpectedly", True),
        ("ERROR: canceling statement due to conflict with recovery", True),
        ("FATAL: terminating connection due to conflict with recovery", True),
        ("ERROR: could not import the requested snapshot", True),
        ('ERROR: snapshot "00000003-0000001B-1" does not exist', True),
        ("FATAL: terminating connection due to administrator command", False),
        ('ERROR: relation "half_20261120" does not exist', False),
    ],
)
def test_what_a_cancelled_read_looks_like(said: str, cancelled: bool) -> None:
    assert cancelled_by_replay(said, standby=True) == cancelled


def test_a_lost_session_of_a_primary_is_no_cancelled_read() -> None:
    assert not cancelled_by_replay("server closed the connection unexpectedly", standby=False)


def test_a_snapshot_whose_session_was_ended_says_so(dsn: str, day: date, other: Connection) -> None:
    add_day(dsn, day)

    def lock() -> None:
        with open_snapshot(dsn) as snapshot:
            other.execute("select pg_terminate_backend(%s)", [snapshot.connection.info.backend_pid])
            snapshot.lock([day])

    with pytest.raises(RunFailedError, match="failed while it was read: terminating connection"):
        lock()
