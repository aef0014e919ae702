"""The split of roles in docs/operations/roles.md: its SQL is run, and each role does its work and no more."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from app.database.connection import connect
from app.lifecycle.loops import all_loops
from app.migrate import ensure_days, migrate
from app.retention import loop as retention_loop
from app.store.retention import day_blockers
from spark.postgres.connections import open_snapshot
from tests.conftest import assembled, client_of, register_group, settings_of
from tests.support import postgres
from tests.support.days import post_end, post_half
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "operations" / "roles.md"
ROLES = ("halfnote_worker", "halfnote_api", "halfnote_read", "halfnote")


@dataclass(frozen=True)
class Roles:
    """A migrated database with the page's roles, under names of their own: the logins' URLs, and the owner's name."""

    admin: str
    owner: str
    worker: str
    api: str
    read: str


@pytest.fixture
async def roles() -> AsyncIterator[Roles]:
    admin = postgres.create_database()
    unique = f"r{secrets.token_hex(5)}"
    [sql] = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    sql = sql.replace("database halfnote", f"database {urlsplit(admin).path[1:]}")
    # The names of roles are the server's, which other tests use too.
    sql = re.sub(r"\bhalfnote", unique, sql)
    passwords = dict(re.findall(r"create role (\w+) login password '(.*?)'", sql))
    connection = await connect(admin)
    await connection.execute(sql)

    def url(role: str) -> str:
        parts = urlsplit(admin)
        name = role.replace("halfnote", unique)
        host = parts.netloc.rpartition("@")[2]
        password = passwords[name].replace(" ", "%20")
        return urlunsplit(parts._replace(netloc=f"{name}:{password}@{host}"))

    try:
        worker = url("halfnote_worker")
        await migrate(worker, days_ahead=1)
        yield Roles(admin, unique, worker, url("halfnote_api"), url("halfnote_read"))
    finally:
        await connection.close()
        postgres.drop_database(admin)
        other = await connect(postgres.server().url)
        for role in ROLES:
            await other.execute(f"drop role if exists {role.replace('halfnote', unique)}")
        await other.close()


async def test_each_role_does_its_work(roles: Roles) -> None:
    """A half, an End and all loops of an API process; days made and removed by a worker; the proof's reads."""
    admin = await connect(roles.admin)
    await register_group(admin, "shop")
    async with assembled(settings_of(roles.api, role="api"), roles.api) as api:
        for loop in all_loops(api):
            await loop.step(api, api.clock.now())
        async with client_of(api) as client:
            transaction_id = await post_half(client, {"topic": "order", "body": {"order": 1030}})
            assert (await post_end(client, transaction_id)).status_code == 200
            assert (await client.get(f"/transactions/{transaction_id}")).json()["state"] == "committed"
            assert (await client.put("/topics/order", json={})).status_code == 204
    async with assembled(settings_of(roles.worker, days_ahead=3), roles.worker) as worker:
        now = worker.clock.now()
        async with worker.database.connection() as connection:
            assert await connection.fetchval("select session_user") != await connection.fetchval("select current_user")
            old = await ensure_days(connection, now - timedelta(days=60), days_ahead=-1)
        for loop in all_loops(worker):
            await loop.step(worker, now)
            if loop.drain is not None:
                await loop.drain(worker)
        await retention_loop.step(worker, now)
    assert old
    states = dict(await admin.fetch("select day::text, state from day"))
    assert [states[day] for day in old] == ["gone"] * len(old)
    assert len(states) - len(old) == 5
    # The partition that the worker has just made is open to the API.
    last = max(states).replace("-", "")
    api_connection = await connect(roles.api)
    await api_connection.fetch(f"select from half_{last}")
    await api_connection.close()
    owners = await admin.fetch("select distinct tableowner from pg_tables where schemaname = 'public'")
    assert [row["tableowner"] for row in owners] == [roles.owner]
    await admin.close()

    def read() -> int:
        with open_snapshot(roles.read) as snapshot:
            days = [day for day in snapshot.days() if str(day.day) not in old]
            snapshot.lock(day.day for day in days)
            return sum(snapshot.signature(day)["half"] for day in days)

    assert await asyncio.to_thread(read) == 1


FORBIDDEN_TO_API = [
    "create table mine (n int)",
    "create schema mine",
    "create temporary table mine (n int)",
    "drop table outbox",
    "truncate half",
    "alter table half add column n int",
    "alter table half disable trigger all",
    "select * from elsewhere.secret",
    "set role {owner}",
    "alter role {owner} superuser",
    "drop database {database}",
]


async def test_the_other_roles_may_do_no_more(roles: Roles) -> None:
    admin = await connect(roles.admin)
    await admin.execute("create schema elsewhere; create table elsewhere.secret (n int)")
    database = urlsplit(roles.admin).path[1:]
    api, read, worker = await connect(roles.api), await connect(roles.read), await connect(roles.worker)
    for statement in FORBIDDEN_TO_API:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await api.execute(statement.format(owner=roles.owner, database=database))
    for statement in (*FORBIDDEN_TO_API, "delete from half", "insert into shared_rule values ('x', 1)"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await read.execute(statement.format(owner=roles.owner, database=database))
    for statement in ("select * from elsewhere.secret", "create role another", f"alter role {roles.owner} superuser"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await worker.execute(statement)
    for connection in (api, read, worker, admin):
        await connection.close()


async def test_upkeep_sees_the_snapshots_of_other_logins(roles: Roles) -> None:
    """Else a day could be removed while another session still writes to it."""
    admin, api, worker = await connect(roles.admin), await connect(roles.api), await connect(roles.worker)
    async with api.transaction(isolation="repeatable_read"):
        await api.fetch("select from half")
        later = await api.fetchval("select now() + interval '1 minute'")
        assert await day_blockers.writers_since_before(worker, later)
        # Postgres then hides when the other session's database transaction began.
        await admin.execute(f"revoke pg_read_all_stats from {roles.owner}")
        assert not await day_blockers.writers_since_before(worker, later)
    for connection in (api, worker, admin):
        await connection.close()
