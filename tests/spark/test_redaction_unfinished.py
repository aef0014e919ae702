"""Redactions of which the database has an earlier state: no row is lost."""

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow.parquet as pq
import pytest

from spark.jobs import archive, redact
from tests.spark.archives import DAY, MadeDay, path_of, row_of

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
