"""Redactions that a kill or an earlier state of the database interrupted: they finish, and no row is lost."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from spark.archive import records
from spark.engine.filesystem import FilesOfSpark
from spark.jobs import archive, reconcile, redact
from spark.postgres import audit
from tests.spark.archives import DAY, MadeDay, path_of, row_of
from tests.spark.days import rows

pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def dsn(archived_day_made: MadeDay, root: Path) -> Iterator[str]:
    """A database with a day that is archived below `root` and that upkeep has removed."""
    with archived_day_made.copied(root) as url:
        with psycopg.connect(url) as db:
            db.execute("update day set state = 'gone' where day = %s", [DAY])
        yield url


@pytest.fixture
def place(dsn: str) -> Path:
    return path_of(row_of(dsn).archive)


def run(dsn: str, root: Path, *options: str) -> int:
    return archive.main(["--database-url", dsn, "--archive", str(root), *options])


def take_out(dsn: str, message_id: str) -> int:
    return redact.main(["--database-url", dsn, message_id, "--reason", "request 17"])


def write_row(dsn: str, manifest: str) -> None:
    with psycopg.connect(dsn) as db:
        db.execute("update day set archive_manifest = %s where day = %s", [manifest, DAY])


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def body_of(place: Path, message_id: str) -> bytes | None:
    """Return a message's body, read from the files that manifest.json names."""
    transaction_id, _, position = message_id.rpartition("-")
    listed = json.loads((place / "manifest.json").read_text())["tables"]["half"]["files"]
    found = [row for file in listed for row in pq.ParquetFile(place / file["path"]).read().to_pylist()]
    [body] = [
        row["body"] for row in found if (row["transaction_id"], str(row["position"])) == (transaction_id, position)
    ]
    assert body is None or isinstance(body, bytes)
    return body


def test_a_database_that_went_back_to_a_time_during_a_redaction_loses_no_row(
    archived_day_made: MadeDay, dsn: str, root: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = (f"{archived_day_made.ids[number]}-0" for number in range(3))
    before = row_of(dsn).archive_manifest
    assert before is not None
    assert take_out(dsn, one) == 0
    [first] = (place / "half").iterdir()
    # The row as it was while the first redaction wrote its file; the second one is later.
    during = json.dumps({**before, "rubbish": ["redact-1", f"half/{first.name}"]})
    for later in (False, True):
        if later:
            assert take_out(dsn, two) == 0
        kept, true = contents(place), (place / "manifest.json").read_text()
        write_row(dsn, during)
        stored = row_of(dsn)
        capsys.readouterr()
        missing = f"{before['tables']['half']['files'][0]['path']} is missing"
        assert run(dsn, root) == 1
        said = capsys.readouterr().err
        assert f"A redaction of {DAY} is not finished" in said
        assert missing in said
        assert "A redaction that the database does not know" in said
        assert take_out(dsn, three) == 1
        assert missing in capsys.readouterr().err
        assert (contents(place), row_of(dsn)) == (kept, stored)
        # What docs/archive.md says.
        assert run(dsn, root, "--verify") == 3
        write_row(dsn, true)
        assert (run(dsn, root, "--verify"), run(dsn, root), take_out(dsn, one)) == (0, 0, 0)
    assert take_out(dsn, three) == 0
    assert [body_of(place, message_id) for message_id in (one, two, three)] == [None] * 3


def test_a_redaction_that_the_database_forgot_is_named(
    archived_day_made: MadeDay, dsn: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message_id, before = f"{archived_day_made.ids[0]}-0", json.dumps(row_of(dsn).archive_manifest)
    assert take_out(dsn, message_id) == 0
    write_row(dsn, before)
    assert take_out(dsn, message_id) == 1
    said = capsys.readouterr().err
    assert "Nothing was redacted" in said
    assert "A redaction that the database does not know" in said
    write_row(dsn, (place / "manifest.json").read_text())
    assert take_out(dsn, message_id) == 0


def test_a_redaction_whose_commit_was_not_answered_says_so(
    archived_day_made: MadeDay,
    dsn: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message_id, recorded = f"{archived_day_made.ids[0]}-0", audit.record

    def lost(connection: psycopg.Connection[Any], *given: Any, **named: Any) -> None:
        recorded(connection, *given, **named)
        with psycopg.connect(dsn) as other:
            other.execute("select pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])

    monkeypatch.setattr(audit, "record", lost)
    assert take_out(dsn, message_id) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"The database did not answer, so it is not known whether {message_id} is redacted.")
    assert "Nothing was redacted" not in said

    monkeypatch.undo()
    assert take_out(dsn, message_id) == 0
    assert body_of(place, message_id) is None


class Killed(BaseException):
    """No program catches it, as none catches a kill."""


def killed_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Have the next program end before this step: a write in the archive, or to the day's row."""
    left = [step]

    def counted(does: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*given: Any, **named: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return does(*given, **named)

        return instead

    for name in ("write_text", "remove", "replace"):
        monkeypatch.setattr(FilesOfSpark, name, counted(getattr(FilesOfSpark, name)))
    monkeypatch.setattr(records, "redescribe", counted(records.redescribe))


@pytest.mark.slow
def test_a_redaction_that_is_killed_before_any_step_is_no_damage_and_is_finished(
    archived_day_made: MadeDay,
    dsn: str,
    root: Path,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    messages = [f"{one}-{position}" for one in archived_day_made.ids[:3] for position in (0, 1)]
    proof = ["--from-parquet", str(place), "--out", str(tmp_path / "out"), "--staging", str(tmp_path / "staging")]
    intact, done, step = reconcile.main(proof), 0, 0
    assert intact in (0, 3)
    while True:
        message_id = messages[done]
        before = json.dumps(row_of(dsn).archive_manifest)
        with monkeypatch.context() as patch:
            killed_before(patch, step)
            try:
                ended = take_out(dsn, message_id)
            except Killed:
                ended = None
        if ended is not None:
            break
        capsys.readouterr()
        assert run(dsn, root, "--verify") == 0, (step, capsys.readouterr().err)
        unfinished = "rubbish" in (row_of(dsn).archive_manifest or {})
        assert (f"A redaction of {DAY} is not finished" in capsys.readouterr().err) == unfinished
        assert unfinished == (step > 0)
        assert reconcile.main(proof) == intact, (step, capsys.readouterr().err)
        body_of(place, message_id)
        assert run(dsn, root) == 0
        stored = row_of(dsn).archive_manifest
        assert stored is not None
        assert json.loads((place / "manifest.json").read_text()) == stored
        listed = [file["path"] for file in stored["tables"]["half"]["files"]]
        assert [f"half/{file.name}" for file in (place / "half").iterdir()] == listed
        assert not list(place.glob("redact-*"))
        is_done = json.dumps(stored) != before
        assert (body_of(place, message_id) is None) == is_done
        done += is_done
        step += 1
    assert ended == 0
    # The row is written three times, manifest.json three times, two paths are removed, and one takes another's place.
    assert step >= 9
    assert 0 < done < len(messages)
    redacted = rows(dsn, "select target from audit where what = 'archive.redact' order by audit_id")
    assert [row["target"] for row in redacted] == messages[: done + 1]
