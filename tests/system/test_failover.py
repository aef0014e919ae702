"""Failovers under load, as docs/operations/failover.md describes them: the primary is killed, its standby promoted."""

import asyncio
from pathlib import Path

import httpx
import pytest

from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.migrate import migrate
from tests.support.check_responder import Responder
from tests.support.load import Load, Replicas, recorded, until
from tests.support.postgres_copies import execute, follow_no_more, is_true, standby, url_of_both
from tests.support.processes import Service
from tests.support.relay_stepping import order, subscribe

PRODUCERS = 6
MEANWHILE = 200
END_SESSIONS = "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = 'halfnote'"


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
                    await require_standby(primary.url)
                    await replicas.add(
                        Service(data_dir, "serve", HALFNOTE_DATABASE_URL=url_of_both(primary.url, other))
                    )
                    async with httpx.AsyncClient(base_url=replicas.serving[0].url, timeout=60) as client:
                        policy = {"check_urls": ["http://127.0.0.1:9/"], "immunity_s": 86_400}
                        assert (await client.put("/producer-groups/shop", json=policy)).status_code == 201
                        await subscribe(client, receiver, max_in_flight=32)
                    load.begin()
                    await load.until_more(MEANWHILE)
                    await asyncio.to_thread(primary.kill)
                    await execute(other, "select pg_promote()")
                    await load.until_more(MEANWHILE)
                    await load.end()
                    await until(lambda: load.committed <= {call.headers["ce-id"] for call in receiver.calls})
                    assert await recorded(other) == load.verdicts
                finally:
                    load.cancel()
                    for one in list(replicas.serving):
                        await replicas.remove(one)
        finally:
            await asyncio.to_thread(primary.stop)
    assert load.faults == []
    assert {call.headers["ce-id"] for call in receiver.calls} == load.committed


async def until_ready(client: httpx.AsyncClient) -> None:
    """Wait until the service is ready. Raises AssertionError with what is not."""
    for _ in range(300):
        answer = await client.get("/readyz")
        if answer.status_code == 200:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(answer.text)


async def require_standby(primary: str) -> None:
    """Make commits wait for the standby, once it is connected."""
    await until(lambda: is_true(primary, "select count(*) = 1 from pg_stat_replication where state = 'streaming'"))
    await execute(primary, "alter system set synchronous_standby_names = '*'")
    await execute(primary, "select pg_reload_conf()")
    await until(lambda: is_true(primary, "select count(*) = 1 from pg_stat_replication where sync_state = 'sync'"))


@pytest.mark.slow
async def test_what_follows_a_failover_to_a_standby_that_was_behind_is_delivered(data_dir: Path) -> None:
    """The promoted server gives the offsets of the lost messages to new ones, and no process is restarted."""
    primary = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    replicas = Replicas()
    async with Responder() as receiver:
        try:
            await migrate(primary.url, days_ahead=7)
            with standby(primary, find_paths(data_dir), data_dir.parent / "standby") as other:
                both = url_of_both(primary.url, other)
                try:
                    await replicas.add(Service(data_dir, "serve", HALFNOTE_DATABASE_URL=both))
                    async with httpx.AsyncClient(base_url=replicas.serving[0].url, timeout=60) as client:
                        policy = {"check_urls": ["http://127.0.0.1:9/"], "immunity_s": 86_400}
                        assert (await client.put("/producer-groups/shop", json=policy)).status_code == 201
                        await subscribe(client, receiver, max_in_flight=32)
                        await publish_until_received(client, receiver, 5)
                        await follow_no_more(primary.url, other)
                        await publish_until_received(client, receiver, MEANWHILE)
                        await asyncio.to_thread(primary.kill)
                        await execute(other, "select pg_promote()")
                        await publish_until_received(client, receiver, 2 * MEANWHILE)
                finally:
                    for one in list(replicas.serving):
                        await replicas.remove(one)
        finally:
            await asyncio.to_thread(primary.stop)


async def publish_until_received(client: httpx.AsyncClient, receiver: Responder, count: int) -> None:
    """Commit messages, each as soon as the database takes it, and wait until all of them are delivered."""
    sent = set()
    async with asyncio.timeout(180):
        while len(sent) < count:
            answer = await client.post("/messages", json={"producer_group": "shop", "messages": [order(len(sent))]})
            if answer.status_code == 201:
                sent.add(f"{answer.json()['transaction_id']}-0")
            else:
                assert answer.status_code == 503, answer.text
                await asyncio.sleep(0.05)
    await until(lambda: sent <= {call.headers["webhook-id"] for call in receiver.calls})


@pytest.mark.slow
async def test_nothing_is_acknowledged_on_a_former_primary(data_dir: Path) -> None:
    """The former primary restarts under load and accepts writes, and the service loses all of its connections."""
    former = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    replicas = Replicas()
    load = Load(replicas, PRODUCERS)
    try:
        await migrate(former.url, days_ahead=7)
        with standby(former, find_paths(data_dir), data_dir.parent / "standby") as promoted:
            try:
                await require_standby(former.url)
                service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=url_of_both(former.url, promoted))
                await replicas.add(service)
                async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
                    policy = {"check_urls": ["http://127.0.0.1:9/"], "immunity_s": 86_400}
                    assert (await client.put("/producer-groups/shop", json=policy)).status_code == 201
                    load.begin()
                    await load.until_more(MEANWHILE)
                    await asyncio.to_thread(former.kill)
                    await execute(promoted, "select pg_promote()")
                    await load.until_more(MEANWHILE)
                    # It starts on its former port.
                    former = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
                    # Otherwise a commit there would wait for a standby forever.
                    await execute(former.url, "alter system reset synchronous_standby_names")
                    await execute(former.url, "select pg_reload_conf()")
                    before = await recorded(former.url)
                    for _ in range(5):
                        await execute(promoted, END_SESSIONS)
                        await load.until_more(MEANWHILE // 5)
                    await load.end()
                    # A look at the database fails if a session ends under it.
                    await until_ready(client)
                assert await recorded(promoted) == load.verdicts
                assert await recorded(former.url) == before
            finally:
                load.cancel()
                for one in list(replicas.serving):
                    await replicas.remove(one)
    finally:
        await asyncio.to_thread(former.stop)
    assert load.faults == []
