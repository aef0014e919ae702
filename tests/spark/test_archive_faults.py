"""An archive that is killed or has no room, as a process of its own: it leaves nothing that counts."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from app.config import Settings
from app.database.connection import Connection
from app.ids import uuid7
from app.runtime.state import Runtime
from spark.jobs import archive
from tests.spark.archives import DAY, THEN, path_of, row_of, settled_day, until_written
from tests.support.processes import ROOT

pytestmark = pytest.mark.usefixtures("group")

MIB = 1024 * 1024
PROGRAM = ("spark.jobs.archive",)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def settings(dsn: str, root: Path) -> Settings:
    return Settings(_env_file=None, database_url=dsn, pool_size=8, linger_s=0, archive=str(root))  # type: ignore[call-arg]


def started(
    dsn: str, root: Path, log: Path, *program: str, largest_file: int | None = None
) -> "subprocess.Popen[bytes]":
    """A program in a session of its own, which may write no file larger than `largest_file`."""

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *(program or PROGRAM), "--master", "local[1]"],
            cwd=ROOT,
            env={**os.environ, "HALFNOTE_DATABASE_URL": dsn, "HALFNOTE_ARCHIVE": str(root)},
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=limit,
        )


async def test_killed_in_mid_write_it_leaves_what_the_next_run_removes(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, root: Path, tmp_path: Path, spark: Any
) -> None:
    await settled_day(client, runtime, db)
    with psycopg.connect(dsn) as other:
        # It waits for this after the big tables, before manifest.json.
        other.execute("lock table subscription in access exclusive mode")
        program = started(dsn, root, tmp_path / "log")
        try:
            left = until_written(root)
        finally:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    assert not (left / "manifest.json").exists()
    assert row_of(dsn).archive is None
    # Its sessions in Postgres hold the lock until the server has seen that they are gone.
    until = time.monotonic() + 60
    while (ended := archive.main(["--database-url", dsn, "--archive", str(root)])) != 0:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert ended == 0
    assert not left.exists()
    assert list((root / f"day={DAY}").iterdir()) == [path_of(row_of(dsn).archive)]
    assert archive.main(["--database-url", dsn, "--verify"]) == 0


async def test_without_room_it_fails_and_leaves_nothing(
    runtime: Runtime, db: Connection, dsn: str, root: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    await settled_day(client, runtime, db)
    # What cannot be packed: larger than any file that may be written, in bodies that may not.
    for _ in range(6):
        await db.execute(
            "insert into half (transaction_id, position, producer_group, topic, content_type, body, body_digest, "
            "born_at, first_check_at) select $1, 0, 'shop', 'x', 'x/x', body, sha256(body), now(), now() "
            "from (select $2::bytea as body) x",
            uuid7(THEN),
            os.urandom(4 * MIB),
        )
    program = started(dsn, root, tmp_path / "log", largest_file=16 * MIB)
    assert program.wait(timeout=240) == 1
    said = (tmp_path / "log").read_text()
    assert f"{DAY} was not archived: half could not be archived: java.io.IOException: File too large" in said
    assert row_of(dsn).archive is None
    assert list((root / f"day={DAY}").iterdir()) == []
    # With room, and as cron calls it.
    again = started(dsn, root, tmp_path / "log", "app.cli", "archive")
    assert again.wait(timeout=240) == 0, (tmp_path / "log").read_text()
    described = row_of(dsn).archive_manifest
    assert described is not None
    assert described["largest_body"] == 4 * MIB
    assert described["tables"]["half"]["rows"] == 16
