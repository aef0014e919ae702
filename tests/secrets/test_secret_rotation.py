"""The steps of docs/operations/secrets.md for passwords: the database's and a broker's."""

import asyncio
import secrets
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
from tests.conftest import register_group
from tests.coordinator.test_half_end import ORDER
from tests.support import brokers, postgres
from tests.support.processes import Service


@dataclass(frozen=True)
class Owned:
    """A database that belongs to a role without a login, and a superuser's connection to it."""

    url: str
    owner: str
    db: Connection

    async def add_login(self, name: str, password: str) -> str:
        """Create a login as the page does; return the URL with it."""
        await self.db.execute(f"create role {name} login password '{password}' in role {self.owner}")
        await self.db.execute(f"alter role {name} set role = {self.owner}")
        return self.with_password(name, password)

    def with_password(self, name: str, password: str) -> str:
        place = urlsplit(self.url)
        return place._replace(netloc=f"{name}:{password}@{place.netloc.rpartition('@')[2]}").geturl()


@pytest.fixture
async def owned() -> AsyncIterator[Owned]:
    url = await asyncio.to_thread(postgres.create_database)
    db = await connect(url)
    owner = f"owner_{secrets.token_hex(4)}"
    await db.execute(f"create role {owner}")
    await db.execute(f"alter database {urlsplit(url).path[1:]} owner to {owner}")
    yield Owned(url, owner, db)
    await db.close()
    await asyncio.to_thread(postgres.drop_database, url)
    admin = await connect(postgres.server().url)
    for (login,) in await admin.fetch("select rolname from pg_roles where starts_with(rolname, $1)", f"{owner}_"):
        await admin.execute(f"drop role {login}")
    await admin.execute(f"drop role {owner}")
    await admin.close()


async def assert_stores_halves(service: Service) -> None:
    """Assert that this replica stores a half and is ready."""
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        half = await client.post("/half", json={"producer_group": "shop", "messages": [ORDER]})
        assert half.status_code == 201, half.text
        ready = await client.get("/readyz")
        assert ready.status_code == 200, ready.text


async def test_the_database_password_is_changed_by_a_second_login(owned: Owned, tmp_path: Path) -> None:
    first, second = f"{owned.owner}_1", f"{owned.owner}_2"
    url = await owned.add_login(first, "one")
    await migrate(url, days_ahead=2)
    await register_group(owned.db, "shop")
    replicas = [Service(tmp_path / "1", "serve", HALFNOTE_DATABASE_URL=url)]
    try:
        await replicas[0].start()
        await assert_stores_halves(replicas[0])
        other = await owned.add_login(second, "two")
        replicas.append(Service(tmp_path / "2", "serve", HALFNOTE_DATABASE_URL=other))
        await replicas[1].start()
        for replica in replicas:
            await assert_stores_halves(replica)
        assert await asyncio.to_thread(replicas.pop(0).stop) == 0
        # The first login owns nothing, so it can be dropped.
        await owned.db.execute(f"drop role {first}")
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
