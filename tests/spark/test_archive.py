"""The archive of a day that the real service made: written, checked, dropped, damaged."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from app.cli.os_user import person
from app.config import Settings
from app.database.connection import Connection
from app.ids import uuid7
from app.retention import loop as retention_loop
from app.runtime.state import Runtime
from spark import manifest
from spark.archive.layout import frames_from_archive
from spark.archive.records import ARCHIVE_LOCK
from spark.jobs import archive
from spark.manifest import TABLES
from spark.options.common import keep_s
from tests.conftest import migrated_template
from tests.spark.archives import DAY, NOW, THEN, MadeDay, changed, path_of, row_of, written
from tests.support import postgres
from tests.support.days import partitions_of

pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "the archive"


@pytest.fixture
def made(request: pytest.FixtureRequest) -> MadeDay:
    """The day that the test's database is a copy of: archived if the test takes `archived`, else settled."""
    name = "archived_day_made" if "archived" in request.fixturenames else "settled_day_made"
    day: MadeDay = request.getfixturevalue(name)
    return day


@pytest.fixture
def dsn(request: pytest.FixtureRequest, root: Path) -> Iterator[str]:
    """A copy of the database of `made`; of a migrated one, if the test takes no transactions."""
    if "made" in request.fixturenames:
        with request.getfixturevalue("made").copied(root) as url:
            yield url
    else:
        url = postgres.create_database(migrated_template())
        yield url
        postgres.drop_database(url)


@pytest.fixture
def settings(dsn: str, root: Path) -> Settings:
    return Settings(_env_file=None, database_url=dsn, pool_size=8, linger_s=0, archive=str(root))  # type: ignore[call-arg]


@pytest.fixture
def ids(made: MadeDay, runtime: Runtime) -> list[str]:
    """The transactions of the day: three committed, one rolled back. The service's clock is within it."""
    runtime.clock.fixed = THEN
    return made.ids


@pytest.fixture
def archived(ids: list[str]) -> list[str]:
    """The transactions of the day, which is archived."""
    return ids


def run(dsn: str, root: Path, *options: str) -> int:
    return archive.main(["--database-url", dsn, "--archive", str(root), *options])


def rows_of(place: Path, table: str) -> list[dict[str, Any]]:
    """Read a table's rows with another Parquet reader than Spark."""
    files = sorted((place / table).glob("*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


async def test_a_settled_day_is_archived_whole(
    archived: list[str], made: MadeDay, db: Connection, dsn: str, root: Path
) -> None:
    day = row_of(dsn)
    place = path_of(day.archive)
    assert place.parent == root / f"day={DAY}"
    assert [one.name for one in root.iterdir() if one.is_dir()] == [f"day={DAY}"]
    assert json.loads((place / "manifest.json").read_text()) == day.archive_manifest
    assert await db.fetchval("select archived_at between $2 and now() from day where day = $1", DAY, made.begun)
    for table in TABLES:
        columns = [name for name, _ in manifest.COLUMNS[table]]
        kept = await db.fetch(f"select * from {table} order by 1, 2")
        found = rows_of(place, table)
        assert [list(row) for row in found] == [columns] * len(kept)
        stored = [{**row, "transaction_id": str(row["transaction_id"])} for row in kept]
        assert sorted(found, key=str) == sorted(stored, key=str)
    half = rows_of(place, "half")
    assert [row["transaction_id"] for row in half] == sorted(row["transaction_id"] for row in half)
    assert {row["body"] for row in half} >= {bytes(range(256)), b'""'}
    assert all(hashlib.sha256(row["body"]).digest() == row["body_digest"] for row in half)
    (file,) = (place / "half").glob("*.parquet")
    group = pq.ParquetFile(file).metadata.row_group(0)
    assert {group.column(index).compression for index in range(group.num_columns)} == {"ZSTD"}


async def test_the_manifest_says_what_the_tables_hold(archived: list[str], dsn: str, root: Path) -> None:
    described = row_of(dsn).archive_manifest
    assert described is not None
    with psycopg.connect(dsn) as connection:
        found = manifest.of_day(connection, DAY)
    assert manifest.differing(described, found) == {}
    half = described["tables"]["half"]
    assert (half["rows"], half["first_id"], half["last_id"]) == (10, min(archived), max(archived))
    assert {table: held["rows"] for table, held in described["tables"].items()} == {
        "half": 10,
        "op": 4,
        "outbox": 9,
        "receipt": 9,
        "attempt": 1,
    }
    place = path_of(row_of(dsn).archive)
    for held in described["tables"].values():
        for file in held["files"]:
            content = (place / file["path"]).read_bytes()
            assert (file["bytes"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        assert sum(file["rows"] for file in held["files"]) == held["rows"]


async def test_a_settled_day_waits_for_its_archive(ids: list[str], runtime: Runtime, dsn: str) -> None:
    await retention_loop.step(runtime, NOW)
    assert row_of(dsn).held == ["archive"]


@pytest.mark.slow
async def test_a_day_that_waited_for_its_archive_leaves_once_it_is_archived(
    ids: list[str], runtime: Runtime, dsn: str, root: Path
) -> None:
    await retention_loop.step(runtime, NOW)
    assert row_of(dsn).held == ["archive"]
    assert run(dsn, root) == 0
    await retention_loop.step(runtime, NOW)
    assert (row_of(dsn).state, row_of(dsn).held) == ("gone", [])


async def test_an_archived_day_leaves_and_says_where_it_is(
    archived: list[str], client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, root: Path
) -> None:
    await retention_loop.step(runtime, NOW)
    day = row_of(dsn)
    assert (day.state, day.held) == ("gone", [])
    assert await partitions_of(db, DAY) == {}
    end = {"transaction_id": archived[0], "producer_group": "shop", "verdict": "commit"}
    for answer in (await client.get(f"/transactions/{archived[0]}"), await client.post("/end", json=end)):
        assert (answer.status_code, answer.json()["archive"]) == (410, day.archive)
    assert run(dsn, root, "--verify") == 0


@pytest.mark.slow
async def test_what_is_archived_is_not_archived_again_unless_it_changed(
    archived: list[str], db: Connection, dsn: str, root: Path
) -> None:
    first = row_of(dsn).archive
    assert run(dsn, root) == 0
    assert row_of(dsn).archive == first
    await db.execute(f"insert into op values ('{uuid7(THEN)}', 2, 0, null, null, now())")
    assert run(dsn, root) == 0
    second = row_of(dsn).archive
    assert second != first
    # The archive that it replaced is gone.
    assert [path_of(second)] == list((root / f"day={DAY}").iterdir())


@pytest.mark.slow
async def test_only_final_and_closed_days_are_archived(ids: list[str], db: Connection, dsn: str, root: Path) -> None:
    await db.execute("update reconciliation_day set state = 'provisional'")
    assert run(dsn, root) == 0
    assert row_of(dsn).archive is None
    await db.execute("update day set state = 'archiving' where day = $1", DAY)
    assert run(dsn, root) == 0
    assert row_of(dsn).archive is not None


@pytest.mark.slow
async def test_a_day_that_was_asked_for_is_archived_whatever_it_is(
    ids: list[str], db: Connection, dsn: str, root: Path
) -> None:
    await db.execute("delete from reconciliation_day")
    assert run(dsn, root, "--day", str(DAY)) == 0
    assert row_of(dsn).archive is not None


async def test_a_day_that_is_not_here_is_refused(
    ids: list[str], dsn: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(dsn, root, "--day", "2020-01-01") == 1
    assert "2020-01-01 is not in the database" in capsys.readouterr().err


@pytest.mark.slow
async def test_an_empty_day_is_archived_and_leaves(runtime: Runtime, db: Connection, dsn: str, root: Path) -> None:
    (gone,) = await db.fetch("select day from day order by day limit 1")
    assert run(dsn, root, "--day", str(gone["day"])) == 0
    described = row_of(dsn, gone["day"]).archive_manifest
    assert described is not None
    assert {held["rows"] for held in described["tables"].values()} == {0}
    assert run(dsn, root, "--verify") == 0


@pytest.mark.slow
async def test_bodies_can_be_left_out(
    ids: list[str], db: Connection, dsn: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFNOTE_ARCHIVE_BODIES", "perhaps")
    assert run(dsn, root) == 1
    monkeypatch.setenv("HALFNOTE_ARCHIVE_BODIES", "false")
    assert run(dsn, root) == 0
    day = row_of(dsn)
    assert day.archive_manifest is not None
    assert day.archive_manifest["bodies"] is False
    half = rows_of(path_of(day.archive), "half")
    assert "body" not in half[0]
    assert {row["body_digest"] for row in half} == {row["body_digest"] for row in await db.fetch("select * from half")}
    assert run(dsn, root, "--verify") == 0


@pytest.mark.slow
async def test_a_body_that_is_not_of_its_digest_is_not_archived(
    ids: list[str], db: Connection, dsn: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await db.execute("update half set body = 'other' where transaction_id = $1 and position = 1", ids[1])
    assert run(dsn, root) == 1
    assert f"the body of {ids[1]}-1 is not of its digest" in capfd.readouterr().err
    assert row_of(dsn).archive is None
    assert list((root / f"day={DAY}").iterdir()) == []


@pytest.mark.slow
async def test_an_archive_made_while_the_day_changes_is_made_again(
    ids: list[str], db: Connection, dsn: str, root: Path
) -> None:
    """A row that comes after the snapshot: the pointer does not move, and the next try has it."""
    with written(dsn, root) as (first, ending):
        await db.execute(f"insert into op values ('{uuid7(THEN)}', 2, 0, null, null, now())")
    assert ending.result() == 0
    day = row_of(dsn)
    assert day.archive_manifest is not None
    assert day.archive_manifest["tables"]["op"]["rows"] == 5
    assert path_of(day.archive) != first
    assert list((root / f"day={DAY}").iterdir()) == [path_of(day.archive)]


@pytest.mark.slow
async def test_a_row_that_comes_after_the_archive_keeps_the_day(
    archived: list[str], runtime: Runtime, db: Connection, dsn: str, root: Path
) -> None:
    await db.execute(
        "insert into attempt (transaction_id, kind, at, outcome) values ($1, 'swept', now(), '')", archived[0]
    )
    await retention_loop.step(runtime, NOW)
    assert (row_of(dsn).state, row_of(dsn).held) == ("open", ["archive"])
    assert len(await partitions_of(db, DAY)) == 5
    assert run(dsn, root) == 0
    await retention_loop.step(runtime, NOW)
    assert row_of(dsn).state == "gone"


@pytest.mark.slow
async def test_detached_tables_that_differ_stay_until_a_person_decides_and_are_then_dropped(
    archived: list[str], runtime: Runtime, db: Connection, dsn: str, root: Path
) -> None:
    # The row counts agree; only the digests differ.
    await db.execute("update op set reason = 'another'")
    await retention_loop.step(runtime, NOW)
    assert (row_of(dsn).state, row_of(dsn).held) == ("archiving", ["archive_differs"])
    before = row_of(dsn)
    assert run(dsn, root) == 1
    await retention_loop.step(runtime, NOW)
    assert (row_of(dsn), path_of(before.archive).is_dir()) == (before, True)
    assert run(dsn, root, "--day", str(DAY)) == 0
    await retention_loop.step(runtime, NOW)
    assert (row_of(dsn).state, row_of(dsn).held) == ("gone", [])


@pytest.mark.slow
async def test_a_flipped_byte_is_found(
    archived: list[str], dsn: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = path_of(row_of(dsn).archive)
    (file,) = (place / "outbox").glob("*.parquet")
    whole = file.read_bytes()
    for offset in (5, len(whole) // 2, len(whole) - 5):
        with changed(file, whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :]):
            assert run(dsn, root, "--verify") == 3
        assert f"outbox/{file.name} has other bytes than were written" in capfd.readouterr().err
    assert run(dsn, root, "--verify") == 0


@pytest.mark.slow
async def test_a_byte_that_is_flipped_before_it_is_read_back_is_found(
    ids: list[str], dsn: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with written(dsn, root) as (place, ending):
        (file,) = (place / "receipt").glob("*.parquet")
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    assert ending.result() == 1
    assert "receipt" in capfd.readouterr().err
    assert row_of(dsn).archive is None
    assert list((root / f"day={DAY}").iterdir()) == []


async def test_verify_says_what_is_wrong(
    archived: list[str], dsn: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, described = path_of(row_of(dsn).archive), row_of(dsn).archive_manifest
    assert described is not None
    (half,) = (place / "half").glob("*.parquet")
    (op,) = (place / "op").glob("*.parquet")
    half.unlink()
    op.write_bytes(op.read_bytes()[:-1])
    (place / "manifest.json").write_text(json.dumps({**described, "bodies": False}))
    assert run(dsn, root, "--verify", "--day", str(DAY)) == 3
    said = capfd.readouterr().err
    for words in ("is missing", "bytes instead of", "manifest.json is not what the database has"):
        assert words in said


async def test_the_archive_can_be_proved_again_by_itself(
    archived: list[str], dsn: str, root: Path, spark: SparkSession
) -> None:
    place = row_of(dsn).archive
    assert place is not None
    frames = frames_from_archive(spark, place)
    assert frames.day == DAY
    assert frames.half.count() == 10
    assert frames.archive is not None
    assert frames.archive.count() == 10
    assert frames.archive_manifest is not None
    assert frames.found_manifest is not None
    assert manifest.differing(frames.archive_manifest, frames.found_manifest) == {}
    assert [row["name"] for row in frames.subscription.collect()] == ["billing"]
    assert frames.rules["max_checks"] == 15


@pytest.mark.slow
async def test_an_archive_of_another_database_is_refused(
    ids: list[str], db: Connection, dsn: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root.mkdir()
    (root / "halfnote.json").write_text('{"database": "another"}')
    assert run(dsn, root) == 1
    assert "the archive of another database" in capfd.readouterr().err
    assert row_of(dsn).archive is None
    assert run(dsn, root, "--adopt") == 0
    assert run(dsn, root) == 0
    [adopted] = await db.fetch("select target, detail from audit where what = 'archive.adopt'")
    assert adopted["target"].endswith(str(root))
    assert json.loads(adopted["detail"]) == {"former": "another"}


@pytest.mark.slow
async def test_one_at_a_time(ids: list[str], dsn: str, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("select pg_advisory_lock(%s)", [ARCHIVE_LOCK])
        assert run(dsn, root) == 1
    assert "Another archive, restore or redact is running" in capfd.readouterr().err
    assert run(dsn, root) == 0


async def test_old_days_leave_the_archive_but_never_what_is_in_postgres(
    archived: list[str], client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, root: Path
) -> None:
    assert run(dsn, root, "--keep-s", "86400") == 0
    assert path_of(row_of(dsn).archive).is_dir()
    await retention_loop.step(runtime, NOW)
    assert run(dsn, root, "--keep-s", str(100 * 86400)) == 0
    assert path_of(row_of(dsn).archive).is_dir()
    assert run(dsn, root, "--keep-s", "86400") == 0
    assert row_of(dsn).archive is None
    assert [one.name for one in root.iterdir()] == ["halfnote.json"]
    assert (await client.get(f"/transactions/{archived[0]}")).json()["archive"] is None
    acts = await db.fetch("select what, actor, target from audit where what like 'archive.%' order by audit_id")
    assert [tuple(act) for act in acts] == [
        ("archive.write", person().name, str(DAY)),
        ("archive.expire", person().name, str(DAY)),
    ]


def test_an_archive_is_kept_for_a_day_to_100_years(
    dsn: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = Settings.model_fields["archive_keep_s"].metadata
    least = next(one.ge for one in limits if hasattr(one, "ge"))
    most = next(one.le for one in limits if hasattr(one, "le"))
    assert (keep_s(str(least)), keep_s(str(most))) == (least, most)
    for text in ("0", "-1", str(least - 1), str(most + 1), "1.5", "a week"):
        with pytest.raises(SystemExit) as ended:
            run(dsn, root, f"--keep-s={text}")
        assert (
            ended.value.code,
            f"'{text}' is not a number of seconds, {least} to {most}" in capsys.readouterr().err,
        ) == (
            2,
            True,
        )
        monkeypatch.setenv("HALFNOTE_ARCHIVE_KEEP_S", text)
        assert run(dsn, root) == 1
        assert f"HALFNOTE_ARCHIVE_KEEP_S has the invalid value '{text}'" in capsys.readouterr().err
        monkeypatch.delenv("HALFNOTE_ARCHIVE_KEEP_S")
    assert not root.exists()


async def test_wrong_usage_is_reported(dsn: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HALFNOTE_DATABASE_URL", "HALFNOTE_ARCHIVE"):
        monkeypatch.delenv(name, raising=False)
    for options in ([], ["--database-url", dsn], ["--database-url", dsn, "--day", "yesterday"]):
        with pytest.raises(SystemExit) as ended:
            archive.main(options)
        assert ended.value.code == 2
