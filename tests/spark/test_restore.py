"""An archived day is restored, and a body is redacted from the archive."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pyarrow.parquet as pq
import pytest

from app.cli.os_user import person
from app.config import Settings
from app.database.connection import Connection
from app.retention import loop as retention_loop
from app.runtime.state import Runtime
from spark.jobs import archive, redact, restore
from spark.manifest import TABLES
from tests.spark.archives import DAY, NOW, THEN, MadeDay, path_of, row_of, secret

pytestmark = pytest.mark.usefixtures("spark")

SCHEMA = f"restored_{DAY:%Y%m%d}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def dsn(archived_day_made: MadeDay, root: Path) -> Iterator[str]:
    with archived_day_made.copied(root) as url:
        yield url


@pytest.fixture
def settings(dsn: str, root: Path) -> Settings:
    return Settings(_env_file=None, database_url=dsn, pool_size=8, linger_s=0, archive=str(root))  # type: ignore[call-arg]


@pytest.fixture
def ids(archived_day_made: MadeDay, runtime: Runtime) -> list[str]:
    """The transactions of an archived day, which is still in Postgres."""
    runtime.clock.fixed = THEN
    return archived_day_made.ids


def bring_back(dsn: str, *options: str) -> int:
    return restore.main(["--database-url", dsn, str(DAY), *options])


def take_out(dsn: str, message_id: str) -> int:
    return redact.main(["--database-url", dsn, message_id, "--reason", "request 17", "--actor", "ada"])


async def rows_of(db: Connection, table: str) -> list[str]:
    """Return a table's rows as text, sorted."""
    return [row["text"] for row in await db.fetch(f"select x::text as text from {table} x order by 1")]


async def acts(client: httpx.AsyncClient, *whats: str) -> list[tuple[str, str, str]]:
    """Return the audit's entries of some kinds, oldest first: action, actor, target."""
    items = (await client.get("/audit")).json()["items"]
    return [(one["what"], one["actor"], one["target"]) for one in reversed(items) if one["what"] in whats]


def verify(dsn: str) -> int:
    return archive.main(["--database-url", dsn, "--verify"])


def bodies_below(root: Path) -> list[bytes]:
    """Return every body in every Parquet file below a directory, whether the manifest names the file or not."""
    files = [file for file in root.rglob("*") if file.is_file() and file.read_bytes()[:4] == b"PAR1"]
    columns = [pq.ParquetFile(file).read() for file in files]
    return [body for column in columns if "body" in column.column_names for body in column["body"].to_pylist() if body]


async def test_a_gone_day_is_restored_once_as_its_tables_were_and_removed(
    ids: list[str],
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    dsn: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = {table: await rows_of(db, table) for table in TABLES}
    await retention_loop.step(runtime, NOW)
    assert row_of(dsn).state == "gone"
    assert bring_back(dsn) == 0
    assert await db.fetchval(f"select count(*) from {SCHEMA}.half") == 10
    for table in TABLES:
        assert await rows_of(db, f"{SCHEMA}.{table}") == kept[table] != []
    primary_keys = (
        "select relname, pg_get_constraintdef(c.oid) from pg_constraint c join pg_class r on r.oid = conrelid "
        "where contype = 'p' and relnamespace = to_regnamespace($1) and relname = any($2) order by 1"
    )
    restored_keys = await db.fetch(primary_keys, SCHEMA, list(TABLES))
    assert len(restored_keys) == len(TABLES)
    assert restored_keys == await db.fetch(primary_keys, "public", list(TABLES))
    # The service does not see it.
    assert await db.fetchval("select count(*) from half") == 0
    assert bring_back(dsn) == 1
    assert "exists already" in capsys.readouterr().err
    assert bring_back(dsn, "--drop") == 0
    assert await db.fetchval(f"select to_regnamespace('{SCHEMA}')") is None
    assert bring_back(dsn, "--drop") == 1
    # Failed commands are not in the audit.
    assert await acts(client, "archive.restore", "archive.drop_restored") == [
        ("archive.restore", person().name, str(DAY)),
        ("archive.drop_restored", person().name, str(DAY)),
    ]


async def test_a_damaged_archive_is_not_restored(
    ids: list[str], db: Connection, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (path_of(row_of(dsn).archive) / "op").glob("*.parquet")
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    assert bring_back(dsn) == 1
    assert "other bytes than were written" in capsys.readouterr().err
    assert await db.fetchval("select count(*) from pg_namespace where nspname like 'restored%'") == 0


async def test_a_day_that_is_not_archived_is_not_restored(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert restore.main(["--database-url", dsn, "2020-01-01"]) == 1
    assert "The database has no record of the day 2020-01-01" in capsys.readouterr().err


@pytest.mark.slow
async def test_who_takes_out_a_body_is_on_record(
    ids: list[str], client: httpx.AsyncClient, runtime: Runtime, dsn: str
) -> None:
    assert take_out(dsn, f"{ids[0]}-0") == 1
    await retention_loop.step(runtime, NOW)
    for _ in range(2):
        assert take_out(dsn, f"{ids[0]}-0") == 0
    assert await acts(client, "archive.redact") == [("archive.redact", person().name, f"{ids[0]}-0")]
    [one] = (await client.get("/audit", params={"what": "archive.redact"})).json()["items"]
    assert one["detail"] == {"actor": "ada", "reason": "request 17"}


async def test_a_redacted_body_is_nowhere(
    ids: list[str], runtime: Runtime, db: Connection, dsn: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await retention_loop.step(runtime, NOW)
    before = row_of(dsn).archive_manifest
    assert before is not None
    kept = bodies_below(root)
    gone = json.dumps({"text": secret(1)}, separators=(",", ":")).encode()
    assert kept.count(gone) == 1
    assert take_out(dsn, f"{ids[1]}-0") == 0
    left = bodies_below(root)
    assert sorted([*left, gone]) == sorted(kept)
    place = path_of(row_of(dsn).archive)
    described = row_of(dsn).archive_manifest
    assert described is not None
    assert "rubbish" not in described
    assert json.loads((place / "manifest.json").read_text()) == described
    # The directory holds exactly the files that the manifest names.
    assert [f"half/{file.name}" for file in (place / "half").iterdir()] == [
        file["path"] for file in described["tables"]["half"]["files"]
    ]
    assert not list(place.glob("redact-*"))
    (record,) = described["redacted"]
    assert (record["message_id"], record["actor"], record["reason"]) == (f"{ids[1]}-0", "ada", "request 17")
    # The proof still holds: rows, ids and digests are unchanged.
    same = ("rows", "first_id", "last_id", "digest")
    assert [described["tables"]["half"][name] for name in same] == [before["tables"]["half"][name] for name in same]
    assert verify(dsn) == 0
    assert take_out(dsn, f"{ids[1]}-0") == 0
    assert "was redacted before" in capsys.readouterr().out
    assert bring_back(dsn) == 0
    nulls = await db.fetch(
        f"select transaction_id::text || '-' || position as id from {SCHEMA}.half where body is null"
    )
    assert [row["id"] for row in nulls] == [f"{ids[1]}-0"]
    # Postgres has copies of the other bodies again.
    assert take_out(dsn, f"{ids[2]}-0") == 1
    assert f"{SCHEMA} also has the body" in capsys.readouterr().err


async def test_a_body_is_not_called_redacted_while_a_reissue_has_it(
    ids: list[str],
    client: httpx.AsyncClient,
    db: Connection,
    dsn: str,
    root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = await client.post(f"/transactions/{ids[3]}/reissue", json={"reason": "a mistake"})
    old, new = f"{ids[3]}-0", f"{answer.json()['transaction_id']}-0"
    assert archive.main(["--database-url", dsn, "--archive", str(root)]) == 0
    [body] = {row["body"] for row in await db.fetch("select body from half where reissued_from = $1", ids[3])}
    assert bodies_below(root).count(body) == 2
    await db.execute("update day set state = 'gone' where day = $1", DAY)
    for _ in range(2):
        for one, other in ((old, new), (new, old)):
            assert take_out(dsn, one) == 1
            assert f"{other} has the same body" in capsys.readouterr().err
        # Retention removes it with the day.
        await db.execute("delete from reissue")
    assert redact.main(["--database-url", dsn, old, new, "--reason", "request 17"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{old} is redacted.", f"{new} is redacted."]
    assert bodies_below(root).count(body) == 0
    assert (take_out(dsn, old), take_out(dsn, new), verify(dsn)) == (0, 0, 0)


@pytest.mark.slow
async def test_what_an_interrupted_redaction_left_is_removed(
    ids: list[str], runtime: Runtime, db: Connection, dsn: str, root: Path
) -> None:
    """Killed before the row moved: files of a new try. After: the old file, and the old manifest.json."""
    await retention_loop.step(runtime, NOW)
    place = path_of(row_of(dsn).archive)
    (old,) = (place / "half").iterdir()
    content, described = old.read_bytes(), (place / "manifest.json").read_text()
    begun = "update day set archive_manifest = archive_manifest || $2 where day = $1"
    (place / "redact-1").mkdir()
    for path in ("redact-1/part-0.parquet", "half/redacted-1.parquet"):
        (place / path).write_bytes(content)
    await db.execute(begun, DAY, json.dumps({"rubbish": ["redact-1", "half/redacted-1.parquet"]}))
    assert archive.main(["--database-url", dsn, "--archive", str(root)]) == 0
    assert list((place / "half").iterdir()) == [old]
    assert not (place / "redact-1").exists()
    assert json.loads((place / "manifest.json").read_text()) == json.loads(described)
    assert take_out(dsn, f"{ids[0]}-0") == 0
    old.write_bytes(content)
    (place / "manifest.json").write_text(described)
    await db.execute(begun, DAY, json.dumps({"rubbish": [f"half/{old.name}", "redact-0"]}))
    assert archive.main(["--database-url", dsn, "--archive", str(root)]) == 0
    assert not old.exists()
    assert json.loads((place / "manifest.json").read_text()) == row_of(dsn).archive_manifest
    assert verify(dsn) == 0


async def test_what_is_still_in_postgres_is_not_redacted(
    ids: list[str], runtime: Runtime, db: Connection, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert take_out(dsn, f"{ids[0]}-0") == 1
    assert "still in Postgres" in capsys.readouterr().err
    await db.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
        "died_at) values (1, $1, 0, 1, 'order', 5, 'refused', now())",
        ids[0],
    )
    await retention_loop.step(runtime, NOW)
    assert row_of(dsn).state == "gone"
    assert take_out(dsn, f"{ids[0]}-0") == 1
    assert "Postgres has copies of the body: a dead letter of billing" in capsys.readouterr().err
    for message_id in (f"{ids[0]}-9", f"{ids[0][:-1]}x-0"):
        assert ended(dsn, message_id) == (1 if message_id.endswith("-9") else 2)
    await db.execute("delete from dead_letter")
    assert take_out(dsn, f"{ids[0]}-0") == 0


def ended(dsn: str, message_id: str) -> int:
    """The exit status, also of wrong usage."""
    try:
        return take_out(dsn, message_id)
    except SystemExit as wrong:
        return int(str(wrong.code))


@pytest.mark.slow
async def test_a_body_is_not_taken_out_of_an_archive_that_has_none(
    ids: list[str], runtime: Runtime, dsn: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archive.main(["--database-url", dsn, "--archive", str(root), "--no-bodies", "--day", str(DAY)]) == 0
    await retention_loop.step(runtime, NOW)
    assert take_out(dsn, f"{ids[0]}-0") == 1
    assert "has no bodies" in capsys.readouterr().err
    assert bring_back(dsn) == 0
    with psycopg.connect(dsn) as connection:
        row = connection.execute(f"select count(*), count(body), count(body_digest) from {SCHEMA}.half").fetchone()
    assert row == (10, 0, 10)
