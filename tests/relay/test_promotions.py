"""The relay over a failover to a standby that was behind: the promoted server gives offsets that were read before."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from app.database.connection import Connection
from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.ids import uuid7
from app.migrate import migrate
from app.permissions import Role, digest_of
from app.relay.loop import Relay
from app.runtime.live_settings import follow_keys, follow_topics
from app.runtime.state import Runtime
from tests.conftest import assembled, client_of, settings_of
from tests.relay.test_faults import running
from tests.support.api_keys import make
from tests.support.check_responder import Responder
from tests.support.load import until
from tests.support.postgres_copies import execute, follow_no_more, is_true, standby, url_of_both
from tests.support.relay_stepping import offsets, order, subscribe, turn_until

# More than the 32 numbers by which Postgres logs a sequence ahead.
LOST = 80


@dataclass(frozen=True, slots=True)
class Failover:
    """A primary, and a standby that has what the primary had when `fall_behind` was called."""

    primary: EmbeddedPostgres
    standby: str

    async def fall_behind(self) -> None:
        """Let the standby take all that is there, and nothing more."""
        await follow_no_more(self.primary.url, self.standby)

    async def fail_over(self) -> None:
        """Kill the primary and promote the standby."""
        await asyncio.to_thread(self.primary.kill)
        await execute(self.standby, "select pg_promote()")


@pytest.fixture
async def failover(data_dir: Path) -> AsyncIterator[Failover]:
    primary = await asyncio.to_thread(EmbeddedPostgres.start, data_dir, settings={"fsync": "off"})
    try:
        await migrate(primary.url, days_ahead=2)
        with standby(primary, find_paths(data_dir), data_dir.parent / "standby") as other:
            await until(lambda: is_true(primary.url, "select count(*) = 1 from pg_stat_replication"))
            yield Failover(primary, other)
    finally:
        await asyncio.to_thread(primary.stop)


@asynccontextmanager
async def service(failover: Failover) -> AsyncIterator[tuple[Runtime, httpx.AsyncClient]]:
    """The parts of a process over both servers, with a producer group."""
    url = url_of_both(failover.primary.url, failover.standby)
    async with assembled(settings_of(url), url) as runtime, client_of(runtime) as client:
        policy = {"check_urls": ["http://127.0.0.1:9/"]}
        assert (await client.put("/producer-groups/shop", json=policy)).status_code == 201
        yield runtime, client


async def publish(client: httpx.AsyncClient, message: dict[str, object]) -> str:
    """Commit a message, once the database takes it; return its message id."""
    body = {"producer_group": "shop", "messages": [message]}

    async def stored() -> httpx.Response | None:
        answer = await client.post("/messages", json=body)
        return answer if answer.status_code == 201 else None

    async with asyncio.timeout(180):
        while (answer := await stored()) is None:
            await asyncio.sleep(0.05)
    found = answer.json()
    return f"{found['transaction_id']}-0"


def received(receiver: Responder) -> set[str]:
    return {call.headers["webhook-id"] for call in receiver.calls}


async def test_what_is_published_after_the_failover_is_delivered(failover: Failover) -> None:
    async with Responder() as plain, Responder() as ordered, service(failover) as (runtime, client):
        await subscribe(client, plain)
        await subscribe(client, ordered, "ordered", ordered="key")
        async with running(runtime):

            async def publish_until_received(count: int) -> None:
                sent = {await publish(client, order(number)) for number in range(count)}
                await until(lambda: sent <= received(plain) & received(ordered))

            await publish_until_received(5)
            await until(lambda: is_true(failover.primary.url, "select count(*) = 10 from receipt"))
            await failover.fall_behind()
            await publish_until_received(LOST)
            await failover.fail_over()
            await publish_until_received(2 * LOST)
            count = 2 * (5 + 2 * LOST)
            await until(lambda: is_true(failover.standby, f"select count(*) = {count} from receipt"))


async def test_what_was_read_of_the_former_primary_is_read_again(failover: Failover) -> None:
    """Topics, keys and halves that the promoted server lacks; it gives their versions, and their ids, to others."""
    half = {"transaction_id": str(uuid7(datetime.now(UTC))), "producer_group": "shop"}
    async with Responder() as receiver, service(failover) as (runtime, client), running(runtime):
        await subscribe(client, receiver, topics=["order", "late"])
        await failover.fall_behind()
        assert (await client.post("/half", json={**half, "messages": [order(1, topic="late")]})).status_code == 201
        lost = await changed(runtime, client, "lost")
        await follow_both(runtime)
        assert runtime.declared == {"lost"}
        assert runtime.authenticator.holder(lost) is not None
        # The settings of this process let it accept any topic.
        runtime.declared = None
        await failover.fail_over()
        async with (
            assembled(settings_of(failover.standby), failover.standby) as other,
            client_of(other) as beside,
        ):
            assert (await beside.post("/half", json={**half, "messages": [order(2)]})).status_code == 201
            new = await changed(other, beside, "new")
        await publish(client, order(3))
        another = {"producer_group": "shop", "messages": [order(4, topic="late")]}
        assert (await client.post("/half", json=another)).status_code == 201
        await follow_both(runtime)
        assert runtime.declared == {"new"}
        assert runtime.authenticator.holder(new) is not None
        assert runtime.authenticator.holder(lost) is None
        assert await is_true(failover.standby, "select exists (select from topic where name = 'late')")
        assert (await client.post("/end", json={**half, "verdict": "commit"})).status_code == 200
        await until(lambda: f"{half['transaction_id']}-0" in received(receiver))
    bodies = {call.headers["webhook-id"]: call.json() for call in receiver.calls}
    assert bodies[f"{half['transaction_id']}-0"] == {"order": 2}


async def changed(runtime: Runtime, client: httpx.AsyncClient, name: str) -> bytes:
    """Declare a topic and make a key; return the key's digest."""
    assert (await client.put(f"/topics/{name}", json={})).status_code in (201, 204)
    return digest_of(await make(runtime, Role.METRICS))


async def follow_both(runtime: Runtime) -> None:
    """Read keys and declared topics if they changed."""
    await follow_keys(runtime, runtime.clock.now())
    await follow_topics(runtime)


async def test_a_log_that_went_back_without_a_new_timeline_is_read_again(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Where no timeline can be read, and for two standbys that were promoted from the same timeline."""
    relay = Relay(runtime)
    async with Responder() as receiver:
        await subscribe(client, receiver)
        *_, last = [await publish(client, order(number)) for number in range(5)]
        await turn_until(relay, runtime, lambda: last in received(receiver))
        [stream] = relay.streams.values()
        await turn_until(relay, runtime, lambda: not stream.window.checkpoint_lags())
        await db.execute(
            """
            with gone as (delete from outbox where "offset" > 3), undone as (delete from receipt where "offset" > 3)
            update checkpoint set "offset" = 3
            """
        )
        await db.execute("select setval('outbox_offset', 3)")
        await turn_until(relay, runtime, lambda: [one.position for one in relay.streams.values()] == [3])
        new = [await publish(client, order(number)) for number in range(2)]
        await turn_until(relay, runtime, lambda: set(new) <= received(receiver))
        await relay.drain(runtime)
    assert offsets(receiver) == [1, 2, 3, 4, 5, 4, 5]
