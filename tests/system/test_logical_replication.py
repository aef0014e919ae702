"""A new server by logical replication, with the commands of docs/operations/upgrade.md."""

import asyncio
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

from app.embedded_postgres import EmbeddedPostgres
from app.migrate import migrate
from tests.support.check_responder import Responder
from tests.support.load import until
from tests.support.postgres_copies import execute, is_true
from tests.support.processes import ROOT
from tests.support.relay_stepping import order, publish, subscribe
from tests.system.test_restore_point import served

PAGE = ROOT / "docs" / "operations" / "upgrade.md"
COPIED = "select not exists (select from pg_subscription_rel where srsubstate <> 'r')"


def shown(language: str) -> list[str]:
    section = PAGE.read_text().partition("\n## A new server by logical replication\n")[2]
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", section, re.DOTALL | re.MULTILINE)


async def act(client: httpx.AsyncClient, receiver: Responder, name: str) -> list[int]:
    """Do what draws numbers from each kind of sequence; return the offsets of two messages."""
    policy = {"check_urls": [receiver.url]}
    for path, body in ((f"/producer-groups/{name}", policy), (f"/topics/{name}", {"description": name})):
        answer = await client.put(path, json=body)
        assert answer.is_success, answer.text
    await subscribe(client, receiver, name)
    key = await client.post("/api-keys", json={"name": name, "role": "viewer"})
    assert key.status_code == 201, key.text
    paused = await client.post(f"/subscriptions/{name}/pause", json={"reason": "a test", "actor": "dana"})
    assert paused.is_success, paused.text
    return await publish(client, order(1), order(2))


async def test_a_service_goes_on_with_a_server_that_was_filled_by_logical_replication(data_dir: Path) -> None:
    old = await asyncio.to_thread(EmbeddedPostgres.start, data_dir, settings={"wal_level": "logical"})
    new = await asyncio.to_thread(EmbeddedPostgres.start, data_dir.parent / "new")
    [copy, move], [behind] = shown("sh"), shown("sql")

    async def run(commands: str) -> None:
        path = f"{old.bin('psql').parent}:{os.environ['PATH']}"
        passwords = data_dir.parent / "pgpass"
        passwords.write_text("".join(f"*:{urlsplit(one.url).port}:*:*:{password_of(one)}\n" for one in (old, new)))
        passwords.chmod(0o600)
        environment = {**os.environ, "PATH": path, "OLD": without_password(old), "NEW": without_password(new)}
        environment |= {"PGPASSFILE": str(passwords), "OLD_WITH_PASSWORD": old.url}
        bash: Any = ["bash", "-euo", "pipefail", "-c", commands]
        done = await asyncio.to_thread(subprocess.run, bash, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    async with Responder(status=200) as receiver:
        try:
            await migrate(old.url, days_ahead=8)
            async with served(data_dir, old.url) as client:
                await client.put("/producer-groups/shop", json={"check_urls": [receiver.url]})
                offsets = await act(client, receiver, "before")
                await run(copy)
                await until(lambda: is_true(new.url, COPIED))
                offsets += await act(client, receiver, "meanwhile")
            await until(lambda: is_true(old.url, behind.replace("count(*)", "count(*) = 0")))
            await run(move)
            assert await numbers(new.url) == await numbers(old.url)
            async with served(data_dir, new.url) as client:
                offsets += await act(client, receiver, "after")
            assert offsets == sorted(set(offsets))
            assert await execute(new.url, "select count(*) from outbox") == 6
        finally:
            await asyncio.to_thread(old.stop)
            await asyncio.to_thread(new.stop)


def password_of(server: EmbeddedPostgres) -> str:
    return unquote(urlsplit(server.url).password or "")


def without_password(server: EmbeddedPostgres) -> str:
    url = urlsplit(server.url)
    return url._replace(netloc=f"{url.username}@{url.hostname}:{url.port}").geturl()


async def numbers(url: str) -> Any:
    sequences = "select array_agg((sequencename, last_value)::text order by sequencename) from pg_sequences"
    return await execute(url, sequences)
