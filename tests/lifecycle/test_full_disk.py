"""The embedded Postgres on a real file system of a few megabytes that is full."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest
from structlog.testing import capture_logs

from app.database.connection import connect
from app.embedded_postgres import EmbeddedPostgres, EmbeddedPostgresError
from app.lifecycle.database import watch
from app.policy.server_restarts import FIRST_WAIT_S

FAILED = "embedded_postgres_not_restarted"


@pytest.fixture
def disk(data_dir: Path) -> Iterator[Path]:
    """Mount a file system that has room for a cluster, and for little more."""
    mount = data_dir.parent / "disk"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=90m,mode=755", "tmpfs", mount], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted: {mounted.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


async def fill(disk: Path, url: str) -> Path:
    """Fill the disk, and let the server write WAL until it dies; return the file that takes the room."""
    filling = disk / "filling"
    connection = await connect(url)
    with filling.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))
    write = "select pg_logical_emit_message(false, 'test', repeat('x', 1000000)) from generate_series(1, 100)"
    # The answer says that the disk is full, or the connection is lost.
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await connection.execute(write)
    connection.terminate()
    return filling


async def test_a_server_on_a_full_disk_is_restarted_ever_more_rarely_and_the_log_names_the_disk(disk: Path) -> None:
    server = await asyncio.to_thread(EmbeddedPostgres.start, disk / "halfnote")
    stopping = asyncio.Event()
    with capture_logs() as logs:
        watching = asyncio.create_task(watch(server, stopping))
        try:
            filling = await fill(disk, server.url)
            async with asyncio.timeout(120):
                while sum(line["event"] == FAILED for line in logs) < 3:
                    await asyncio.sleep(0.05)
                with pytest.raises(EmbeddedPostgresError, match=f"The disk {disk} is full"):
                    await asyncio.to_thread(server.restart)
                filling.unlink()
                while "embedded_postgres_restarted" not in [line["event"] for line in logs]:
                    await asyncio.sleep(0.05)
            await (await connect(server.url)).close()
        finally:
            stopping.set()
            await watching
            await asyncio.to_thread(server.kill)
    failed = [line for line in logs if line["event"] == FAILED]
    assert [line["retry_s"] for line in failed] == [FIRST_WAIT_S * 2**n for n in range(len(failed))]
    assert all(f"The disk {disk} is full" in line["error"] and "\n" not in line["error"] for line in failed)
    assert sum(line["event"] == "embedded_postgres_died" for line in logs) == 1
