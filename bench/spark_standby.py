"""Reading from a streaming standby, and from one that cancels reads because the primary vacuumed."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import asyncpg

from app.embedded_postgres.paths import find_paths
from bench.report import Report
from bench.services import free_port
from bench.spark_day import day_before_yesterday, settle
from bench.spark_run import PROVED, generate, reconcile
from bench.stage import Stage, connected
from bench.wrk import BrokenRunError

TRANSACTIONS, TRANSACTIONS_QUICK = 1_000_000, 50_000
NAME = "spark_standby"
READY_S = 120
# Replay waits for readers without a limit, or hardly at all.
PATIENT = {"max_standby_streaming_delay": "-1"}
HASTY = {"max_standby_streaming_delay": "50ms", "hot_standby_feedback": "off"}
# The standby cannot replay the removal of rows that a reader's snapshot still shows.
CHURN = "update checkpoint set moved_at = now()"


async def bench(stage: Stage, report: Report) -> None:
    """Prove a day from the primary, from a standby, and from one whose reads a vacuum cancels."""
    count, day = TRANSACTIONS_QUICK if stage.quick else TRANSACTIONS, str(day_before_yesterday())
    dsn = await stage.database(NAME)
    await generate("--database-url", dsn, "--day", day, "--transactions", str(count))
    await settle(dsn)
    of = ("--database-url", dsn, "--day", day)
    report.notes.append(f"a day of {count:,} transactions; reads are from the snapshot's begin to its release")
    alone = await reconcile(*of)
    report.add("read from the primary", alone.read_s, "s")
    async with standby(stage, dsn, PATIENT) as url:
        run = await reconcile(*of, "--read-url", url)
        report.add("read from a standby", run.read_s, "s", ratio_to="read from the primary")
        _must_prove(run.status, alone.status)
    async with standby(stage, dsn, HASTY) as url:
        lost = await _cancelled(dsn, of, url)
    report.add("reads that a vacuum on the primary cancelled", lost, "")
    report.hold("a cancelled read begins again with a new snapshot, and the day is proved", lost, at_least=1)
    await stage.drop(NAME)


async def _cancelled(dsn: str, of: tuple[str, ...], url: str) -> int:
    """Vacuum the primary while the standby is read, until a read is canceled; return how many were canceled."""
    lost = asyncio.Event()

    async def heard(line: dict[str, Any]) -> None:
        if line.get("note") == "snapshot_lost":
            print(f"  {line['text']}", flush=True)
            lost.set()

    async def vacuum() -> None:
        async with connected(dsn) as connection:
            while not lost.is_set():
                await connection.execute(CHURN)
                await connection.execute("vacuum checkpoint")
                await asyncio.sleep(0.1)

    vacuuming = asyncio.create_task(vacuum())
    try:
        run = await reconcile(*of, "--read-url", url, heard=heard)
    finally:
        lost.set()
        await vacuuming
    _must_prove(run.status)
    return sum(note.get("note") == "snapshot_lost" for note in run.notes)


def _must_prove(*statuses: int) -> None:
    if any(status != PROVED for status in statuses):
        raise BrokenRunError("The proof has findings in a day without planted faults.")


@asynccontextmanager
async def standby(stage: Stage, dsn: str, settings: Mapping[str, str]) -> AsyncIterator[str]:
    """Copy the stage's server, stream from it, and yield the URL of the same database on the copy."""
    place = find_paths(stage.server.data_dir)
    account, port = place.account, free_port()
    # The layout is that of the primary, because the copied configuration includes a file two directories above.
    home = stage.place / f"standby-{os.urandom(4).hex()}"
    directory = home / place.pgdata.relative_to(place.home)
    directory.mkdir(parents=True, mode=0o700)
    for above in (home, directory.parent):
        above.chmod(0o755)
    account.own(directory)
    for file in place.home.glob("*.conf"):
        shutil.copy(file, home / file.name)
    as_server: dict[str, Any] = {"cwd": "/"}
    if account.uid is not None:
        as_server |= {"user": account.uid, "group": account.gid, "extra_groups": []}
    await asyncio.to_thread(_copy, stage, dsn, directory, as_server)
    # These settings override the copied configuration files.
    fixed = {"port": str(port), "hot_standby": "on", "logging_collector": "off", "cluster_name": "standby"}
    overrides = fixed | settings
    options = [part for name, value in overrides.items() for part in ("-c", f"{name}={value}")]
    with (stage.place / "standby.log").open("w") as log:
        server = subprocess.Popen(
            [stage.server.bin("postgres"), "-D", directory, *options], stdout=log, stderr=log, **as_server
        )
    try:
        parts = urlsplit(dsn)
        url = urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{port}"))
        await _caught_up(dsn, url, server)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        await asyncio.to_thread(server.wait, READY_S)


def _copy(stage: Stage, dsn: str, directory: Path, as_server: Mapping[str, Any]) -> None:
    parts = urlsplit(dsn)
    # The password is in the environment, because other users can read a program's arguments.
    reached = {
        "PGHOST": str(parts.hostname),
        "PGPORT": str(parts.port),
        "PGUSER": str(parts.username),
        "PGPASSWORD": unquote(parts.password or ""),
    }
    subprocess.run(
        [stage.server.bin("pg_basebackup"), "-D", directory, "-X", "stream", "-R", "-c", "fast", "--no-sync"],
        env={**os.environ, **reached},
        check=True,
        **as_server,
    )


async def _caught_up(dsn: str, url: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the standby accepts sessions and has all rows of the primary. Raises BrokenRunError if it ends."""
    async with connected(dsn) as connection:
        written = await connection.fetchval("select pg_current_wal_flush_lsn()::text")
    async with asyncio.timeout(READY_S):
        while True:
            if server.poll() is not None:
                raise BrokenRunError("The standby ended while it was starting; see standby.log.")
            try:
                connection = await asyncpg.connect(url)
            except (OSError, asyncpg.PostgresError):
                await asyncio.sleep(0.1)
                continue
            try:
                if await connection.fetchval("select pg_last_wal_replay_lsn() >= $1::text::pg_lsn", written):
                    return
            finally:
                await connection.close()
            await asyncio.sleep(0.1)
