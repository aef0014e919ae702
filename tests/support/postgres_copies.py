"""Copies of a running Postgres, made by its own programs, and simple queries."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg

from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import ServerPaths, find_paths
from tests.support.load import until
from tests.support.processes import free_port


def base_backup(server: EmbeddedPostgres, place: ServerPaths, into: ServerPaths, *options: str) -> None:
    """Copy a running server, with its password, into the directory of another one; as the user of that server."""
    into.cluster.mkdir(mode=0o700)
    into.account.own(into.cluster)
    for file in place.cluster.iterdir():
        if file.is_file():
            shutil.copy2(file, into.cluster / file.name)
            into.account.own(into.cluster / file.name)
    url = urlsplit(server.url)
    environment = {"PGHOST": str(url.hostname), "PGPORT": str(url.port), "PGUSER": str(url.username)}
    environment["PGPASSWORD"] = unquote(url.password or "")
    copy: list[str | Path] = [server.bin("pg_basebackup"), "-D", into.pgdata, "-c", "fast", *options]
    subprocess.run(copy, env=os.environ | environment, check=True, **as_user(into))


@contextlib.contextmanager
def standby(server: EmbeddedPostgres, place: ServerPaths, home: Path) -> Iterator[str]:
    """Copy a running server, start the copy as its standby, and yield the standby's url; it may be promoted."""
    into = find_paths(home)
    base_backup(server, place, into, "-X", "stream", "-R")
    for file in place.home.glob("*.conf"):
        shutil.copy(file, into.home / file.name)
    port = free_port()
    command: list[str | Path] = [
        server.bin("postgres"),
        "-D",
        into.pgdata,
        "-c",
        f"port={port}",
        "-c",
        "hot_standby=on",
    ]
    command += ["-c", "logging_collector=off"]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, **as_user(into))
    try:
        url = urlsplit(server.url)
        yield url._replace(netloc=f"{url.netloc.rpartition(':')[0]}:{port}").geturl()
    finally:
        # A fast shutdown.
        process.send_signal(signal.SIGINT)
        process.wait()


def as_user(place: ServerPaths) -> dict[str, Any]:
    """Return the options of `subprocess` that run a program as the account of a server."""
    if place.account.uid is None:
        return {}
    return {"user": place.account.uid, "group": place.account.gid, "extra_groups": [], "cwd": "/"}


async def execute(url: str, statement: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def is_true(url: str, query: str) -> bool:
    return bool(await execute(url, query))


def url_of_both(first: str, second: str) -> str:
    """Return a URL of two servers that connects to the first of them that accepts writes."""
    one, other = urlsplit(first), urlsplit(second)
    hosts = f"{one.netloc},{other.hostname}:{other.port}"
    return one._replace(netloc=hosts, query="target_session_attrs=primary").geturl()


async def follow_no_more(primary: str, other: str) -> None:
    """Let a standby apply all that its primary has written, and then cut it off: from now on it falls behind."""
    written = await execute(primary, "select pg_current_wal_flush_lsn()::text")
    await until(lambda: is_true(other, f"select pg_last_wal_replay_lsn() >= '{written}'"))
    await execute(other, "alter system set primary_conninfo = ''")
    await execute(other, "select pg_reload_conf()")
    await until(lambda: is_true(other, "select not exists (select from pg_stat_wal_receiver)"))
