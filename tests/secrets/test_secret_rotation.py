"""The steps of docs/operations/secrets.md for passwords: the database's and a broker's."""

import asyncio
import os
import re
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest
from redis import asyncio as redis_client

from app.database.connection import Connection, connect
from app.migrate import migrate
from tests.conftest import app_of, register_group
from tests.coordinator.test_half_end import ORDER
from tests.sdk.servers import asgi_server
from tests.support import brokers, postgres
from tests.support.processes import ROOT, Service

PAGE = ROOT / "docs" / "operations" / "secrets.md"


@dataclass(frozen=True)
class Owned:
    """A database of the only login `<owner>_a`, and a superuser's connection to it. `owner` does not exist yet."""

    url: str
    owner: str
    db: Connection

    def statements(self) -> list[str]:
        """Return the page's statements: those that make the owner, and those that make the second login."""
        section = PAGE.read_text().partition("\n## The database's password\n")[2].partition("\n## ")[0]
        shown = re.findall(r"^ *```sql\n(.*?)```", section, re.DOTALL | re.MULTILINE)
        assert len(shown) == 2
        database = urlsplit(self.url).path[1:]
        named = [sql.replace("database halfnote", f"database {database}") for sql in shown]
        return [re.sub(r"\bhalfnote", self.owner, sql).replace("…", "two") for sql in named]

    def with_password(self, name: str, password: str) -> str:
        place = urlsplit(self.url)
        return place._replace(netloc=f"{name}:{password}@{place.netloc.rpartition('@')[2]}").geturl()


@pytest.fixture
async def owned() -> AsyncIterator[Owned]:
    url = await asyncio.to_thread(postgres.create_database)
    db = await connect(url)
    owner = f"owner{secrets.token_hex(4)}"
    await db.execute(f"create role {owner}_a login password 'one'")
    await db.execute(f"alter database {urlsplit(url).path[1:]} owner to {owner}_a")
    yield Owned(url, owner, db)
    await db.close()
    await asyncio.to_thread(postgres.drop_database, url)
    admin = await connect(postgres.server().url)
    for (role,) in await admin.fetch("select rolname from pg_roles where starts_with(rolname, $1)", owner):
        await admin.execute(f"drop role {role}")
    await admin.close()


async def assert_stores_halves(service: Service) -> None:
    """Assert that this replica stores a half and is ready."""
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        half = await client.post("/half", json={"producer_group": "shop", "messages": [ORDER]})
        assert half.status_code == 201, half.text
        ready = await client.get("/readyz")
        assert ready.status_code == 200, ready.text


async def test_the_database_password_is_changed_by_a_second_login(owned: Owned, tmp_path: Path) -> None:
    first, second = f"{owned.owner}_a", f"{owned.owner}_b"
    url = owned.with_password(first, "one")
    await migrate(url, days_ahead=2)
    make_owner, make_login = owned.statements()
    await register_group(owned.db, "shop")
    replicas = [Service(tmp_path / "1", "serve", HALFNOTE_DATABASE_URL=url)]
    try:
        await replicas[0].start()
        await assert_stores_halves(replicas[0])
        await owned.db.execute(make_owner)
        await assert_stores_halves(replicas[0])
        await owned.db.execute(make_login)
        other = owned.with_password(second, "two")
        replicas.append(Service(tmp_path / "2", "serve", HALFNOTE_DATABASE_URL=other))
        await replicas[1].start()
        for replica in replicas:
            await assert_stores_halves(replica)
        assert await asyncio.to_thread(replicas.pop(0).stop) == 0
        # Upkeep may have made a partition in a session from before.
        await owned.db.execute(f"reassign owned by {first} to {owned.owner}")
        await owned.db.execute(f"drop role {first}")
        owners = await owned.db.fetch("select distinct tableowner from pg_tables where schemaname = 'public'")
        assert [row["tableowner"] for row in owners] == [owned.owner]
        await assert_stores_halves(replicas[0])
        await migrate(other, days_ahead=3)
        # The login gets another password: open connections continue, new ones need the new password.
        await owned.db.execute(f"alter role {second} password 'three'")
        await assert_stores_halves(replicas[0])
        with pytest.raises(asyncpg.InvalidPasswordError):
            await connect(other)
        await migrate(owned.with_password(second, "three"), days_ahead=4)
    finally:
        for replica in replicas:
            replica.stop()


async def test_the_password_of_a_broker_is_changed_while_both_are_valid(client: httpx.AsyncClient) -> None:
    server = brokers.redis()
    user = f"halfnote-{secrets.token_hex(4)}"

    async def put(password: str) -> str:
        destination = {"type": "redis", "url": server.url, "stream": user, "username": user}
        destination["password"] = password
        subscription = {"topics": ["order"], "destination": destination}
        assert (await client.put("/subscriptions/stock", json=subscription)).is_success
        outcome: str = (await client.post("/subscriptions/stock/test")).json()["outcome"]
        return outcome

    async with redis_client.Redis(host=server.host, port=server.port) as redis:
        try:
            await redis.execute_command("ACL", "SETUSER", user, "on", ">one", "~*", "&*", "+@all")
            assert await put("one") == "delivered"
            await redis.execute_command("ACL", "SETUSER", user, ">two")
            assert await put("two") == "delivered"
            await redis.execute_command("ACL", "SETUSER", user, "<one")
            assert (await client.post("/subscriptions/stock/test")).json()["outcome"] == "delivered"
            assert await put("one") == "failed"
        finally:
            await redis.execute_command("ACL", "DELUSER", user)
            await redis.delete(user)


async def test_a_secret_of_your_choice_is_sent_from_a_file(
    client: httpx.AsyncClient, db: Connection, tmp_path: Path
) -> None:
    await register_group(db, "shop")
    before = await db.fetchval("select secrets from producer_group where name = 'shop'")
    section = PAGE.read_text().partition("\n### A secret of your choice\n")[2]
    [commands] = re.findall(r"```sh\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    program = 'halfnote() { "$PYTHON" -m app.cli "$@"; }\n'
    async with asgi_server(app_of(client)) as url:
        environment = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "HALFNOTE_URL": url}
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c", program + commands.replace("NAME", "shop")),
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, (out, err)
    assert await db.fetchval("select secrets from producer_group where name = 'shop'") != before
