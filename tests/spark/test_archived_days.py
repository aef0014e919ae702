"""Whole runs of the proof over days that are archived: what is wrong with an archive is a finding of its day."""

import shutil
from datetime import date
from pathlib import Path
from typing import Any

import psycopg
import pytest

from spark.jobs import archive
from spark.proof import read_days
from tests.spark.archives import path_of, row_of
from tests.spark.days import days_ago, fill_day, prove, rows

pytestmark = pytest.mark.usefixtures("spark")

OLD, OTHER = days_ago(6), days_ago(2)


def archived(dsn: str, root: Path, *options: object) -> Path:
    """Run `halfnote archive`; return the directory of OLD's."""
    assert archive.main(["--database-url", dsn, "--archive", str(root), *map(str, options)]) == 0
    return path_of(row_of(dsn, OLD).archive)


def open_findings(dsn: str) -> list[dict[str, Any]]:
    return rows(dsn, "select day, kind, subject, detail from finding where resolved_at is null order by day, subject")


def files_of(findings: list[dict[str, Any]]) -> dict[str, str]:
    return {found["subject"]: "; ".join(found["detail"]["files"]) for found in findings}


def seen_at_night(dsn: str) -> list[date]:
    [last] = rows(dsn, "select days from reconciliation_run order by run_id desc limit 1")
    return list(last["days"])


@pytest.fixture
def place(dsn: str, tmp_path: Path) -> Path:
    """The archive of a day; another day has a fault. No run has seen either."""
    fill_day(dsn, OLD, 20)
    place = archived(dsn, tmp_path / "archive", "--day", OLD)
    fill_day(dsn, OTHER, 5, first=1000)
    with psycopg.connect(dsn) as db:
        db.execute("update op set verdict = 2 where decided_at = (select max(decided_at) from op)")
    return place


def only(place: Path, table: str) -> Path:
    [file] = (place / table).glob("*.parquet")
    return file


def test_a_damaged_archive_is_a_finding_and_other_days_are_proved(
    dsn: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half, op, receipt = (only(place, table) for table in ("half", "op", "receipt"))
    half.unlink()
    op.write_bytes(op.read_bytes()[:-1])
    content = bytearray(receipt.read_bytes())
    content[len(content) // 2] ^= 1
    receipt.write_bytes(content)
    (place / "manifest.json").write_text("{}")
    assert prove(dsn) == 3
    assert {OLD, OTHER} <= set(seen_at_night(dsn))
    *damaged, other = open_findings(dsn)
    assert (other["day"], other["kind"]) == (OTHER, "published_after_rollback")
    assert {(found["day"], found["kind"]) for found in damaged} == {(OLD, "archive_differs")}
    details = files_of(damaged)
    assert details.keys() == {"half", "op", "receipt", "manifest.json"}
    assert f"{half.name} is missing" in details["half"]
    assert f"bytes instead of {op.stat().st_size + 1}" in details["op"]
    assert "has other bytes than were written" in details["receipt"]
    assert "manifest.json cannot be read" in details["manifest.json"]

    # What the proof found wrong is archived again without being named, and the next proof finds nothing.
    again = archived(dsn, tmp_path / "archive")
    assert again != place
    assert archived(dsn, tmp_path / "archive") == again
    assert prove(dsn) == 3
    assert open_findings(dsn) == [other]


def test_an_archive_that_is_gone_is_a_finding_for_each_table(dsn: str, place: Path) -> None:
    shutil.rmtree(place)
    assert prove(dsn, "--day", OLD) == 3
    details = files_of(open_findings(dsn))
    assert details.keys() == {"half", "op", "outbox", "receipt", "attempt", "beside", "manifest.json"}
    assert all("missing" in details[table] for table in ("half", "op", "outbox", "receipt", "attempt"))


def test_an_archive_that_was_replaced_while_it_was_read_is_left_to_the_next_run(
    dsn: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What took its place removes its files, which is nothing wrong."""
    beside = read_days.beside

    def after_archive(*given: Any) -> Any:
        # The run has read the day's row by now.
        archived(dsn, tmp_path / "archive", "--day", OLD)
        return beside(*given)

    monkeypatch.setattr(read_days, "beside", after_archive)
    assert prove(dsn, "--day", OLD) == 0
    assert not place.exists()
    assert '"note": "archive_replaced"' in capsys.readouterr().err
    [seen] = rows(dsn, "select signature from reconciliation_day where day = %s", OLD)
    # So the watermark has it compared next time.
    assert path_of(seen["signature"]["archive"]) == place
