"""A rolling upgrade under load, as docs/operations/upgrade.md has it: the version before the newest migrations and this
one on one database, there and back."""

import asyncio
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from app.embedded import EmbeddedPostgres
from app.migrate import OLDEST_SERVED, head
from tests.loads import Load, Replicas, recorded, until
from tests.processes import ROOT, Service, of_ones_own
from tests.relays import subscribe
from tests.responders import Responder

PRODUCERS = 6
# What is acknowledged between one step and the next.
MEANWHILE = 150


def version_before(into: Path) -> Path:
    """Lay out the service as it was before the newest migrations; skips where git does not know it."""
    if head() == OLDEST_SERVED:
        return ROOT
    number = f"{int(OLDEST_SERVED) + 1:04}"
    adding = git("log", "--diff-filter=A", "--format=%H", "--", f"migrations/versions/{number}_*").split()
    if not adding:
        pytest.skip(f"git does not know what there was before migration {number}: this is no full clone")
    with tarfile.open(fileobj=BytesIO(git_bytes("archive", f"{adding[-1]}^", "app", "migrations"))) as tree:
        tree.extractall(into, filter="data")
    return into


def git(*arguments: str) -> str:
    return git_bytes(*arguments).decode()


def git_bytes(*arguments: str) -> bytes:
    try:
        ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if ran.returncode != 0:
        pytest.skip(f"git cannot tell: {ran.stderr.decode().strip()}")
    return ran.stdout


async def halfnote(root: Path, url: str, *arguments: str) -> str:
    """Run a command of a version; return what it printed."""
    command = [sys.executable, "-m", "app.cli", *arguments]
    environment = {"PATH": "", **of_ones_own(), "HALFNOTE_DATABASE_URL": url}
    ran = await asyncio.to_thread(subprocess.run, command, cwd=root, env=environment, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode()


async def sealed_to(older: Service, url: str) -> None:
    """Seal the database, and hold that a version that cannot read that does not start on it any more."""
    rotated = await halfnote(ROOT, url, "rotate-keys")
    assert "Could not be opened: 0." in rotated
    with pytest.raises(RuntimeError, match="is newer than this Halfnote"):
        await older.start()


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
            await load.go_on(MEANWHILE)
            # The schema first, under load, then replica by replica; and back again, but for the schema.
            await halfnote(ROOT, server.url, "migrate")
            await load.go_on(MEANWHILE)
            for root in (ROOT, ROOT, before, before):
                await replicas.add(service(root))
                await load.go_on(MEANWHILE)
                await replicas.take_out(replicas.serving[0])
                await load.go_on(MEANWHILE)
            await load.end()
            await until(lambda: load.committed <= {call.headers["ce-id"] for call in receiver.calls})
            assert await recorded(server.url) == load.verdicts
            if before != ROOT:
                await sealed_to(service(before), server.url)
        finally:
            load.cancel()
            for one in list(replicas.serving):
                await replicas.take_out(one)
            await asyncio.to_thread(server.stop)
    assert load.wrong == []
    # Nor did anything come that was not committed.
    assert {call.headers["ce-id"] for call in receiver.calls} == load.committed
