"""HALFNOTE_DATABASE_URL_FILE: a password that changes while the service runs needs no restart."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx
import pytest

from app.cli.errors import Refusal
from app.cli.serve import settings_with
from app.config import Settings
from app.database.connection import Connection, Database, connect, timeline_guard
from app.database.url_file import BadUrlFile, url_of
from app.migrate import migrate
from spark.postgres.connections import connect as connect_proof
from tests.conftest import register_group
from tests.support.processes import Service


class Login:
    """A role whose password changes, and the file with its URL."""

    def __init__(self, dsn: str, db: Connection, file: Path) -> None:
        self.name = f"login_{secrets.token_hex(6)}"
        self.file = file
        self._dsn, self._db = dsn, db

    async def create(self) -> None:
        """Make the role, which acts as the database's owner."""
        owner = await self._db.fetchval("select current_user")
        await self._db.execute(f"create role {self.name} login")
        await self._db.execute(f"grant {owner} to {self.name}")
        await self._db.execute(f"alter role {self.name} set role = {owner}")
        await self.rotate()

    async def rotate(self) -> str:
        """Change the password and the file. End all sessions of the role. Return the new URL."""
        password = secrets.token_hex(16)
        parts = urlsplit(self._dsn)
        host = parts.netloc.rpartition("@")[2]
        url = urlunsplit(parts._replace(netloc=f"{self.name}:{password}@{host}"))
        await self._db.execute(f"alter role {self.name} password '{password}'")
        new = self.file.with_suffix(".new")
        new.write_text(url + "\n")
        new.rename(self.file)
        await self._db.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = $1", self.name
        )
        return url

    async def drop(self) -> None:
        """Remove the role."""
        await self._db.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = $1", self.name
        )
        await self._db.execute(f"drop role {self.name}")


@pytest.fixture
async def login(dsn: str, db: Connection, tmp_path: Path) -> AsyncIterator[Login]:
    login = Login(dsn, db, tmp_path / "database-url")
    await login.create()
    yield login
    await login.drop()


async def test_every_connection_reads_the_file(login: Login) -> None:
    """The pool, a connection outside of it, the migration and the proof."""
    address = f"file:{login.file}"
    former = url_of(address)
    database = Database(address, pool_size=2)
    try:
        for _ in range(2):
            async with database.connection() as connection:
                assert await connection.fetchval("select session_user") == login.name
            dedicated = await database.dedicated()
            assert await dedicated.fetchval("select session_user") == login.name
            dedicated.terminate()
            await migrate(address, days_ahead=1)
            proof = await asyncio.to_thread(connect_proof, address)
            assert proof.info.user == login.name
            proof.close()
            await login.rotate()
            async with asyncio.timeout(30):
                # Until then a statement fails on a connection that has read the server's error, but not yet its end.
                while not connection.is_closed():
                    await asyncio.sleep(0.01)
        # The server does ask for the password.
        with pytest.raises(asyncpg.InvalidPasswordError):
            await connect(former)
    finally:
        await database.close()


async def test_the_timelines_are_read_with_the_file(login: Login) -> None:
    """With several hosts in the URL, the look at all of them is a connection of its own."""
    parts = urlsplit(await login.rotate())
    host = parts.netloc.rpartition("@")[2]

    def name_two_hosts() -> None:
        parts = urlsplit(url_of(f"file:{login.file}"))
        login.file.write_text(urlunsplit(parts._replace(netloc=f"{parts.netloc},{host}")))

    guard = timeline_guard(f"file:{login.file}")
    assert len(guard.hosts) == 1
    for _ in range(2):
        name_two_hosts()
        assert len(guard.hosts) == 2
        # What an earlier look found is not what this one finds, and it looks now.
        guard = timeline_guard(f"file:{login.file}")
        await guard.look()
        assert guard.highest is not None
        await login.rotate()


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "mysql://there/halfnote",
        "postgresql://a/b\npostgresql://c/d",
        # Passwords that must be percent-encoded. The drivers quote what they take for the port.
        "postgresql://u:pass/word@there/halfnote",
        "postgresql://u:pass?word@there/halfnote",
        "postgresql://u:pass#word@there/halfnote",
        "postgresql://u:pass[word@there/halfnote",
        "postgresql://u:@there:pass/halfnote",
    ],
)
async def test_a_file_without_a_url_is_refused_and_not_quoted(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "database-url"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadUrlFile, match=r"HALFNOTE_DATABASE_URL_FILE: .*database-url") as refused:
        await connect(f"file:{file}")
    assert not content or content not in str(refused.value)
    assert "'pass" not in str(refused.value)


@pytest.mark.parametrize(
    "hosts",
    ["", "there", "u:p%2F@there:1", "u:p@one:1,two,[::1]:3", "u:p@[::1],[::2]:2", "%2Frun%2Fpostgresql", "u:a@b@there"],
)
def test_a_url_that_the_drivers_understand_is_taken(tmp_path: Path, hosts: str) -> None:
    file = tmp_path / "database-url"
    file.write_text(f"postgres://{hosts}/halfnote?sslmode=require\n")
    assert url_of(f"file:{file}") == f"postgresql://{hosts}/halfnote?sslmode=require"


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings(database_url_file=tmp_path / "url").database_url == f"file:{tmp_path / 'url'}"
    assert not Settings(database_url_file=tmp_path / "url").embedded
    monkeypatch.setenv("HALFNOTE_DATABASE_URL_FILE", "")
    assert settings_with().embedded
    monkeypatch.setenv("HALFNOTE_DATABASE_URL_FILE", str(tmp_path / "url"))
    assert settings_with().database_url == f"file:{tmp_path / 'url'}"
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", "postgresql://there/halfnote")
    with pytest.raises(Refusal, match="not both"):
        settings_with()


@pytest.mark.slow
async def test_a_running_service_gets_a_new_password(login: Login, db: Connection, tmp_path: Path) -> None:
    """All of its sessions end at once; requests and loops go on with the new password."""
    await register_group(db, "shop")
    service = Service(tmp_path / "data", "serve", HALFNOTE_DATABASE_URL_FILE=str(login.file))
    await service.start()
    order = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}
    try:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client, asyncio.timeout(120):
            for _ in range(2):
                while (await client.post("/half", json=order)).status_code != 201:
                    await asyncio.sleep(0.05)
                while (await client.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.05)
                await login.rotate()
    finally:
        service.stop()
