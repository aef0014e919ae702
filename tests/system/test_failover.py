"""A failover under load, as docs/operations/failover.md has it: the primary is killed, its standby promoted."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.migrate import migrate
from tests.support.check_responder import Responder
from tests.support.load import Load, Replicas, recorded, until
from tests.support.postgres_copies import execute, is_so, standby
from tests.support.processes import Service
from tests.support.relay_stepping import subscribe

PRODUCERS = 6
MEANWHILE = 200


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_with_the_primary(data_dir: Path) -> None:
    primary = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    replicas = Replicas()
    load = Load(replicas, PRODUCERS)
    async with Responder() as receiver:
        try:
            await migrate(primary.url, days_ahead=7)
            with standby(primary, find_paths(data_dir), data_dir.parent / "standby") as other:
                try:
                    await follows(primary.url)
                    await replicas.add(Service(data_dir, "serve", HALFNOTE_DATABASE_URL=either(primary.url, other)))
                    async with httpx.AsyncClient(base_url=replicas.serving[0].url, timeout=60) as client:
                        policy = {"check_urls": ["http://127.0.0.1:9/"], "immunity_s": 86_400}
                        assert (await client.put("/producer-groups/shop", json=policy)).status_code == 201
                        await subscribe(client, receiver, max_in_flight=32)
                    load.begin()
                    await load.go_on(MEANWHILE)
                    await asyncio.to_thread(primary.kill)
                    await execute(other, "select pg_promote()")
                    await load.go_on(MEANWHILE)
                    await load.end()
                    await until(lambda: load.committed <= {call.headers["ce-id"] for call in receiver.calls})
                    assert await recorded(other) == load.verdicts
                finally:
                    load.cancel()
                    for one in list(replicas.serving):
                        await replicas.take_out(one)
        finally:
            await asyncio.to_thread(primary.stop)
    assert load.wrong == []
    assert {call.headers["ce-id"] for call in receiver.calls} == load.committed


async def follows(primary: str) -> None:
    """Have commits wait for the standby, once it is there."""
    await until(lambda: is_so(primary, "select count(*) = 1 from pg_stat_replication where state = 'streaming'"))
    await execute(primary, "alter system set synchronous_standby_names = '*'")
    await execute(primary, "select pg_reload_conf()")
    await until(lambda: is_so(primary, "select count(*) = 1 from pg_stat_replication where sync_state = 'sync'"))


def either(primary: str, standby: str) -> str:
    """Return a url that leads to whichever of two servers takes writes."""
    one, other = urlsplit(primary), urlsplit(standby)
    hosts = f"{one.netloc},{other.hostname}:{other.port}"
    return one._replace(netloc=hosts, query="target_session_attrs=primary").geturl()
