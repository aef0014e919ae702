"""Whole runs, in this process: what they write, and what they make of what the last one wrote."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.dataset
import pytest

from app.config import Settings
from spark.engine.signals import Interrupts
from spark.options.reconcile import parsed
from spark.postgres.connections import RUN_LOCK
from spark.proof import store_results
from spark.proof.run import Run
from tests.spark.days import days_ago, fill_day, flip_ops, prove, rows

pytestmark = pytest.mark.usefixtures("spark")


def findings(dsn: str) -> list[dict[str, Any]]:
    return rows(dsn, "select * from finding order by day, kind, subject")


def runs(dsn: str) -> list[dict[str, Any]]:
    return rows(dsn, "select * from reconciliation_run order by run_id")


def days(dsn: str) -> dict[date, dict[str, Any]]:
    return {row["day"]: row for row in rows(dsn, "select * from reconciliation_day")}


def parquet(out: Path) -> list[dict[str, Any]]:
    found = pyarrow.dataset.dataset(out / "findings", partitioning="hive").to_table().to_pylist()
    return sorted(found, key=lambda row: (row["day"], row["kind"], row["subject"]))


@pytest.mark.slow
def test_days_without_faults_are_proved_and_looked_at_again_when_they_change(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is full, one with a single transaction, and some that are empty."""
    old, fresh = days_ago(5), days_ago(2)
    fill_day(dsn, old, 1)
    fill_day(dsn, fresh, 200, first=1000)
    assert prove(dsn, "--out", tmp_path) == 0
    [run] = runs(dsn)
    assert (run["state"], run["source"], run["open"], run["new"], run["resolved"]) == ("proved", "primary", 0, 0, 0)
    assert run["engine"] == "local[2]"
    assert run["seen_at"] <= run["ended_at"]
    # Days are made in pairs; today's may be followed by the next, if that has begun.
    assert run["days"][:6] == sorted({days_ago(ago) for near in (5, 2, 0) for ago in (near + 1, near)})
    seen = days(dsn)
    assert {name: seen[fresh]["counts"][name] for name in ("half", "op", "outbox", "receipt")} == dict.fromkeys(
        ("half", "op", "outbox", "receipt"), 200
    )
    assert (seen[old]["counts"]["half"], seen[days_ago(6)]["counts"]["half"]) == (1, 0)
    assert {seen[day]["state"] for day in (days_ago(6), old)} == {"final"}
    assert {seen[day]["state"] for day in (fresh, days_ago(0))} == {"provisional"}
    assert {(day["run_id"], str(day["found"])) for day in seen.values()} == {(run["run_id"], "{}")}
    assert f"report: {(tmp_path / 'report.html').as_uri()}\n" in capsys.readouterr().out
    assert findings(dsn) == parquet(tmp_path) == []
    assert "<html" in (tmp_path / "report.html").read_text()

    # What a final day was found to be stays, and is named.
    found_before = "insert into finding (day, kind, subject, detail, first_run, first_seen_at, last_run, last_seen_at) "
    rows(dsn, found_before + "values (%s, 'unrouted', 'odrer', '{}', 1, now(), 1, now()) returning 1", old)
    capsys.readouterr()
    assert prove(dsn) == 0
    assert capsys.readouterr().out.endswith(f"; open findings of other days: {old} (1)\n")
    assert {fresh, days_ago(0)}.isdisjoint(runs(dsn)[1]["days"])
    fill_day(dsn, fresh, 5, first=2000)
    assert prove(dsn) == 0
    assert runs(dsn)[2]["days"][:1] == [fresh]
    assert days(dsn)[fresh]["counts"]["half"] == 205


@pytest.mark.slow
def test_findings_are_written_resolved_and_can_be_proved_again_without_the_database(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a ledger, whose findings the next run, which has none, does not resolve."""
    monkeypatch.setenv("HALFNOTE_BASE_URL", "https://halfnote.example/")
    day, out, staging = days_ago(2), tmp_path / "out", tmp_path / "staging"
    options = ("--day", day, "--out", out, "--staging", staging)
    fill_day(dsn, day, 20)
    [flipped] = flip_ops(dsn)
    [contradicted] = rows(dsn, "select transaction_id::text as id from half order by 1 offset 1 limit 1")
    ledger = tmp_path / "ledger.csv"
    ledger.write_text(f"transaction_id,verdict\n{contradicted['id']},rollback\nnonsense,commit\n")
    assert prove(dsn, *options, "--producer-ledger", ledger, "--keep-staging") == 3
    assert [(row["kind"], str(row["transaction_id"])) for row in findings(dsn)] == [
        ("ledger_disagrees", contradicted["id"]),
        ("published_after_rollback", flipped),
    ]
    names = ("day", "kind", "subject", "transaction_id", "position", "subscription_id", "producer_group")
    first = parquet(out)
    for found, written in zip(findings(dsn), first, strict=True):
        assert {name: str(written[name]) for name in names} == {name: str(found[name]) for name in names}
        assert json.loads(written["detail"]) == found["detail"]
        assert (found["first_run"], found["last_run"], found["resolved_at"]) == (1, 1, None)
    assert f'href="https://halfnote.example/transactions/{flipped}"' in (out / "report.html").read_text()
    assert "nonsense" in "".join(path.read_text() for path in (out / "set-aside/producer").glob("*.csv"))
    [kept_frames] = staging.glob("halfnote-proof-*/read")

    flip_ops(dsn, verdict=1)
    assert prove(dsn, *options) == 3
    [open_, gone] = findings(dsn)
    assert (open_["kind"], open_["resolved_run"]) == ("ledger_disagrees", None)
    assert (gone["kind"], gone["resolved_run"], gone["last_run"]) == ("published_after_rollback", 2, 1)
    assert parquet(out) == []
    # A run leaves only its results and the frames that it was to keep.
    assert list(staging.iterdir()) == [kept_frames.parent]
    assert sorted(path.name for path in out.iterdir()) == ["findings", "report.html", "set-aside"]

    # As the rows were then.
    assert prove(dsn, "--from-parquet", kept_frames, "--producer-ledger", ledger, "--out", tmp_path / "again") == 3
    assert parquet(tmp_path / "again") == first
    assert (tmp_path / "again/report.html").exists()
    assert [(run["state"], run["open"], run["new"], run["resolved"]) for run in runs(dsn)] == [
        ("findings", 2, 2, 0),
        ("findings", 1, 0, 1),
    ]


@pytest.mark.slow
def test_a_kind_past_the_limit_is_cut_and_resolves_nothing(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are counted and in Parquet, some are in the database, and a few in the report."""
    day, options = days_ago(2), ("--day", days_ago(2), "--out", tmp_path)
    fill_day(dsn, day, 9)
    ids = flip_ops(dsn, 5)
    monkeypatch.setattr(store_results, "MOST_FINDINGS", 3)
    monkeypatch.setattr(store_results, "MOST_SHOWN", 2)
    assert prove(dsn, *options) == 3
    assert [str(row["transaction_id"]) for row in findings(dsn)] == ids[:3]
    assert [row["transaction_id"] for row in parquet(tmp_path)] == ids
    assert days(dsn)[day]["found"] == {"published_after_rollback": 5}
    report = (tmp_path / "report.html").read_text()
    assert [one in report for one in ids] == [True, True, False, False, False]

    # The run cannot distinguish a first run that is over from one that was cut off.
    assert flip_ops(dsn, 1, verdict=1) == ids[:1]
    assert prove(dsn, *options) == 3
    assert [str(row["transaction_id"]) for row in findings(dsn) if row["resolved_at"] is None] == ids[:4]


@pytest.mark.slow
def test_what_is_open_keeps_its_day_provisional(dsn: str) -> None:
    """A transaction without a verdict, and a late message that its subscription has not come to."""
    day = days_ago(5)
    fill_day(dsn, day, 3, first=100)
    with psycopg.connect(dsn) as db:
        for table in ("receipt", "outbox", "op"):
            db.execute(
                f"delete from {table} where transaction_id = (select transaction_id from half order by 1 limit 1)"
            )
        db.execute('delete from receipt where "offset" = 102')
        db.execute('update checkpoint set "offset" = 101')
    assert prove(dsn, "--day", day) == 3
    assert [(row["day"], row["kind"]) for row in findings(dsn)] == [(day, "delivery_late"), (day, "half_stuck")]
    seen = days(dsn)[day]
    assert (seen["state"], seen["counts"]["undecided"], seen["counts"]["unsettled"]) == ("provisional", 1, 1)


@pytest.mark.slow
def test_a_final_day_is_read_again_after_a_replay_of_it_and_one_that_is_not_final_waits_for_its_end(dsn: str) -> None:
    day, later = days_ago(5), days_ago(2)
    fill_day(dsn, day, 3)
    fill_day(dsn, later, 3, first=4)
    assert prove(dsn) == 0
    assert (days(dsn)[day]["state"], days(dsn)[later]["state"]) == ("final", "provisional")
    insert = 'insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at) '
    rows(dsn, insert + "select subscription_id, 0, 6, 0, 'running', now(), now() from subscription returning 1")
    assert prove(dsn, "--day", str(later)) == 0
    assert days(dsn)[later]["counts"]["unsettled"] == 1
    assert prove(dsn) == 0
    assert runs(dsn)[-1]["days"] == [later]
    # It ends, and sent nothing.
    rows(dsn, "update replay set state = 'done', \"offset\" = 6, ended_at = now() returning 1")
    assert prove(dsn) == 3
    assert {(row["day"], row["kind"]) for row in findings(dsn)} == {
        (day, "replay_incomplete"),
        (later, "replay_incomplete"),
    }
    assert days(dsn)[day]["state"] == "final"
    assert prove(dsn) == 3
    assert day not in runs(dsn)[-1]["days"]


def test_two_runs_at_once(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    with psycopg.connect(dsn, autocommit=True, application_name="the other run") as other:
        other.execute("select pg_advisory_lock(%s)", [RUN_LOCK])
        assert prove(dsn) == 1
        assert "the other run from 127.0.0.1, since " in capsys.readouterr().err
        assert runs(dsn) == []


def test_a_day_that_is_not_here(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(dsn, "--day", days_ago(40)) == 1
    assert f"The day {days_ago(40)} is not stored. Stored days: {days_ago(1)}" in capsys.readouterr().err
    [run] = runs(dsn)
    assert run["state"] == "failed"
    assert "is not stored" in run["error"]


@pytest.mark.parametrize(
    "options",
    [
        ["--day", "yesterday"],
        ["--from-parquet", "there", "--read-url", "postgresql://127.0.0.1/x"],
        ["--base-url", "javascript:alert(1)"],
        ["--producer-ledger", "/no/such/ledger.csv"],
        ["--producer-ledger-complete"],
        ["--consumer-ledger-complete"],
        ["--usual-share", "1"],
        ["--usual-share-of", "order=0"],
        ["--audit-keep-s", "86399"],
        ["--audit-keep-s-of", "us=86400"],
    ],
)
def test_wrong_usage(dsn: str, options: list[str]) -> None:
    try:
        status = prove(dsn, *options)
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert runs(dsn) == []


def test_a_base_url_of_the_environment_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HALFNOTE_BASE_URL", "halfnote.example")
    with pytest.raises(SystemExit, match="2"):
        prove("postgresql://127.0.0.1:1/none")
    assert "HALFNOTE_BASE_URL must be an http or https URL" in capsys.readouterr().err


def test_how_long_the_audit_is_kept_is_the_services_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parsed(["--database-url", "x"]).audit_keep_s == Settings.model_fields["audit_keep_s"].default
    monkeypatch.setenv("HALFNOTE_AUDIT_KEEP_S", "86400")
    assert parsed(["--database-url", "x"]).audit_keep_s == 86_400
    two = ["--database-url", "eu=postgresql://x", "--database-url", "us=postgresql://y"]
    options = parsed([*two, "--audit-keep-s-of", "us=172800"])
    kept = [Run(options, Interrupts(), "", installation=one).audit_keep_s for one in options.installations]
    assert kept == [86_400, 172_800]
    monkeypatch.setenv("HALFNOTE_AUDIT_KEEP_S", "a year")
    with pytest.raises(SystemExit, match="2"):
        parsed(["--database-url", "x"])
    assert "--audit-keep-s: 'a year' is not a number of seconds" in capsys.readouterr().err


def test_a_database_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove("postgresql://somebody:secret@127.0.0.1:1/none") == 1
    said = capsys.readouterr().err
    assert "cannot be reached" in said
    assert "secret" not in said
