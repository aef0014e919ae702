"""A rolling upgrade under load by the steps of docs/operations/upgrade.md: from the version before the newest
migrations to this one and back, on one database."""

import asyncio
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from math import inf
from pathlib import Path

import httpx
import pytest

from app.database.connection import connect
from app.embedded_postgres import EmbeddedPostgres
from app.migrate import OLDEST_SERVED, head
from tests.support.check_responder import Responder
from tests.support.load import CLOSED, Load, Replicas, recorded, until
from tests.support.processes import ROOT, Service, external_database_options
from tests.support.relay_stepping import subscribe
from tests.support.requirements import absent

PRODUCERS = 6
# The number of transactions that are acknowledged between two steps.
MEANWHILE = 150
LEAVES = 4
HELD_S = 0.7


def version_before(into: Path) -> Path:
    """Extract the service as it was before the newest migrations; skips where git does not have it."""
    if head() == OLDEST_SERVED:
        return ROOT
    number = f"{int(OLDEST_SERVED) + 1:04}"
    adding = git("log", "--diff-filter=A", "--format=%H", "--", f"migrations/versions/{number}_*").split()
    if not adding:
        absent(f"git does not know what there was before migration {number}: this is no full clone", "MACHINE")
    with tarfile.open(fileobj=BytesIO(git_bytes("archive", f"{adding[-1]}^", "app", "migrations"))) as tree:
        tree.extractall(into, filter="data")
    return into


def git(*arguments: str) -> str:
    return git_bytes(*arguments).decode()


def git_bytes(*arguments: str) -> bytes:
    try:
        completed = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    except FileNotFoundError:
        absent("git is not installed", "MACHINE")
    if completed.returncode != 0:
        absent(f"git cannot tell: {completed.stderr.decode().strip()}", "MACHINE")
    return completed.stdout


async def halfnote(root: Path, url: str, *arguments: str) -> str:
    """Run a command of a version; return what it printed."""
    command = [sys.executable, "-m", "app.cli", *arguments]
    environment = {"PATH": "", **external_database_options(), "HALFNOTE_DATABASE_URL": url}
    completed = await asyncio.to_thread(subprocess.run, command, cwd=root, env=environment, capture_output=True)
    assert completed.returncode == 0, completed.stderr.decode()
    return completed.stdout.decode()


@asynccontextmanager
async def writes_blocked(url: str) -> AsyncIterator[None]:
    """Block halves and ends in the database until the context ends: no other session can write to their tables."""
    holder = await connect(url)
    try:
        async with holder.transaction():
            await holder.execute("lock table half, op in share mode")
            yield
    finally:
        await holder.close()


async def leave(replicas: Replicas, load: Load, service: Service, url: str) -> None:
    """Stop a replica that has requests which it cannot answer before it has begun to stop."""
    while True:
        async with writes_blocked(url):
            await until(load.all_wait)
            if load.unanswered_at(service):
                removal = asyncio.create_task(replicas.remove(service))
                await until(lambda: refused(service.port))
                # Longer than any timeout of the web server.
                await asyncio.sleep(HELD_S)
                break
        await load.until_more(1)
    await removal


async def refused(port: int) -> bool:
    """Return whether the port is closed."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


HERE, SIGNALED_AT = "http://127.0.0.1:9", 1030.0
CUT = httpx.RemoteProtocolError("peer closed connection without sending complete message body")


@pytest.mark.parametrize(
    ("url", "sent_after_s", "error", "allowed"),
    [
        (HERE, inf, httpx.ConnectError("refused"), True),
        (HERE, 0.1, httpx.RemoteProtocolError(CLOSED), True),
        (HERE, 0.1, httpx.ReadError("reset"), True),
        # The replica had read these.
        (HERE, -1.0, httpx.RemoteProtocolError(CLOSED), False),
        (HERE, -1.0, httpx.ReadError("reset"), False),
        (HERE, 0.1, CUT, False),
        (HERE, 0.1, httpx.ReadTimeout("late"), False),
        ("http://127.0.0.1:10", inf, httpx.ConnectError("refused"), False),
    ],
)
def test_which_errors_of_a_leaving_replica_are_allowed(
    url: str, sent_after_s: float, error: httpx.TransportError, allowed: bool
) -> None:
    replicas = Replicas()
    replicas.signaled_at[HERE] = SIGNALED_AT
    assert replicas.may_be_unread(url, SIGNALED_AT + sent_after_s, error) is allowed


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_while_versions_change(data_dir: Path, tmp_path: Path) -> None:
    before = version_before(tmp_path)
    server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    replicas = Replicas()
    load = Load(replicas, PRODUCERS)

    def service(root: Path) -> Service:
        return Service(data_dir, "serve", root=root, HALFNOTE_DATABASE_URL=server.url)

    async with Responder() as receiver:
        try:
            await halfnote(before, server.url, "migrate")
            for _ in range(2):
                await replicas.add(service(before))
            async with httpx.AsyncClient(base_url=replicas.serving[0].url, timeout=60) as client:
                policy = {"check_urls": ["http://127.0.0.1:9/"], "immunity_s": 86_400}
                assert (await client.put("/producer-groups/shop", json=policy)).status_code == 201
                await subscribe(client, receiver, max_in_flight=32)
            load.begin()
            await load.until_more(MEANWHILE)
            # First the schema, under load, then replica by replica; then the replicas back again, but not the schema.
            await halfnote(ROOT, server.url, "migrate")
            await load.until_more(MEANWHILE)
            for root in (ROOT, ROOT, before, before):
                await replicas.add(service(root))
                await load.until_more(MEANWHILE)
                await leave(replicas, load, replicas.serving[0], server.url)
                await load.until_more(MEANWHILE)
            await load.end()
            await until(lambda: load.committed <= {call.headers["ce-id"] for call in receiver.calls})
            assert await recorded(server.url) == load.verdicts
            assert "Could not be opened: 0." in await halfnote(ROOT, server.url, "rotate-keys")
        finally:
            load.cancel()
            for one in list(replicas.serving):
                await replicas.remove(one)
            await asyncio.to_thread(server.stop)
    assert load.faults == []
    # At most the one connection that each producer keeps to each replica that left.
    assert load.closed <= PRODUCERS * LEAVES
    # Nothing arrived that was not committed.
    assert {call.headers["ce-id"] for call in receiver.calls} == load.committed
