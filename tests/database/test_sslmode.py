"""TLS to Postgres: what the URL's `sslmode` and `sslrootcert` do, for the service, the migration and the proof."""

import asyncio
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import asyncpg
import pytest
from adbc_driver_postgresql import dbapi

from app.database.connection import connect
from app.migrate import migrate
from spark.errors import RunFailedError
from spark.postgres.connections import connect as connect_proof
from spark.postgres.readers import _reach
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.requirements import absent

pytestmark = pytest.mark.slow
Url = Callable[..., str]
# How each driver refuses: by the handshake, or because the server has no TLS.
REFUSED = (ssl.SSLError, OSError, asyncpg.PostgresError)


@dataclass(frozen=True)
class Secured:
    """A server whose certificate is for `localhost` alone, its CA and another one."""

    url: Url
    ca: Path
    other_ca: Path


@pytest.fixture
async def secured(data_dir: Path, tmp_path: Path) -> AsyncIterator[Secured]:
    """A server of the system's, because the embedded Postgres is built without TLS."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs or os.getuid() != 0:
        absent("no Debian's Postgres here, or no root to run it as its user", "MACHINE")
    authority = Authority(tmp_path / "ca")
    directory, port = data_dir.parent / "secured", free_port()
    directory.mkdir()
    shutil.chown(directory, "postgres", "postgres")

    def run(program: str, *arguments: str) -> None:
        command = [str(programs[-1] / program), "--pgdata", str(directory), *arguments]
        subprocess.run(command, user="postgres", cwd="/", check=True, stdout=subprocess.DEVNULL)

    run("initdb", "--auth=trust", "--username=halfnote", "--encoding=UTF8", "--no-sync")
    pair = authority.issue("localhost")
    for name, content in (("server.crt", pair.certificate), ("server.key", pair.key)):
        (directory / name).touch(mode=0o600)
        (directory / name).write_bytes(content)
        shutil.chown(directory / name, "postgres", "postgres")
    options = f"-c ssl=on -c fsync=off -c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories=''"
    run("pg_ctl", "--wait", "--log", str(directory / "log"), "--options", options, "start")
    try:

        def url(host: str = "localhost", **options: str) -> str:
            return f"postgresql://halfnote@{host}:{port}/postgres?{urlencode(options)}"

        yield Secured(url, authority.file, Authority(tmp_path / "other").file)
    finally:
        run("pg_ctl", "--wait", "--mode=immediate", "stop")


async def is_encrypted(url: str) -> set[bool]:
    """Return whether the service's and the proof's connections are encrypted: the proof has two drivers."""
    query = "select ssl from pg_stat_ssl where pid = pg_backend_pid()"
    connection = await connect(url)
    found = {await connection.fetchval(query)}
    await connection.close()

    def of_proof() -> set[bool]:
        with closing(connect_proof(url)) as proof:
            row = proof.execute(query).fetchone()
            assert row is not None
            with closing(dbapi.connect(_reach(proof))) as copying, closing(copying.cursor()) as cursor:
                cursor.execute(query)
                return {row["ssl"], cursor.fetchone()[0]}

    return found | await asyncio.to_thread(of_proof)


async def refuse(url: str) -> None:
    """Expect that both refuse to connect."""
    with pytest.raises(REFUSED):
        await connect(url)
    with pytest.raises(RunFailedError):
        await asyncio.to_thread(connect_proof, url)


async def test_modes(secured: Secured) -> None:
    url, ca, other = secured.url, str(secured.ca), str(secured.other_ca)
    assert await is_encrypted(url(sslmode="disable")) == {False}
    assert await is_encrypted(url(sslmode="require")) == {True}
    assert await is_encrypted(url(sslmode="verify-ca", sslrootcert=ca)) == {True}
    assert await is_encrypted(url(sslmode="verify-full", sslrootcert=ca)) == {True}
    # The certificate is for `localhost`: only verify-full compares the name.
    assert await is_encrypted(url("127.0.0.1", sslmode="verify-ca", sslrootcert=ca)) == {True}
    await refuse(url("127.0.0.1", sslmode="verify-full", sslrootcert=ca))
    await refuse(url(sslmode="verify-full", sslrootcert=other))
    await refuse(url(sslmode="verify-ca", sslrootcert=other))
    await refuse(url(sslmode="require", sslrootcert=other))
    await migrate(url(sslmode="verify-full", sslrootcert=ca), days_ahead=1)
