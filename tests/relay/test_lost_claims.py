"""A claim of retries that is committed and whose answer is lost: the retries are claimed again, and soon."""

from typing import Any

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.relay.test_faults import running
from tests.relay.test_replays import DONE, replay
from tests.support.check_responder import Call, Responder
from tests.support.faulty_proxy import FaultyProxy
from tests.support.load import until
from tests.support.relay_stepping import order, publish, subscribe

KEY = "the-key-of-the-claimed-message"
WAITING = "select leased_until is null from delivery_retry"
CLAIMED = "select leased_until is not null from delivery_retry"


@pytest.mark.parametrize("fields", [{}, {"ordered": "key"}], ids=["plain", "ordered"])
async def test_retries_of_a_lost_claim_are_sent_soon(
    client: httpx.AsyncClient,
    worker: Runtime,
    proxy: FaultyProxy,
    db: Connection,
    group: str,
    fields: dict[str, Any],
) -> None:
    async with Responder(status=500) as receiver, running(worker):
        await subscribe(client, receiver, retry=[1] * 100, **fields)
        await publish(client, order(1, key=KEY))
        await until(lambda: db.fetchval(WAITING))
        proxy.hold_answer(KEY.encode())
        await proxy.holding_answer.wait()
        receiver.status = 200
        await until(lambda: db.fetchval(CLAIMED))
        proxy.cut()
        await until(lambda: db.fetchval("select count(*) = 1 from receipt"))
        await publish(client, order(2, key=KEY))
        await until(lambda: db.fetchval("select count(*) = 2 from receipt"))


async def test_messages_of_a_lost_claim_expire_soon(
    client: httpx.AsyncClient, worker: Runtime, proxy: FaultyProxy, db: Connection, group: str
) -> None:
    async with Responder(status=500) as receiver, running(worker):
        await subscribe(client, receiver, retry=[600] * 100, expire_after_s=60)
        await publish(client, order(1, key=KEY))
        await until(lambda: db.fetchval(WAITING))
        proxy.hold_answer(KEY.encode())
        worker.clock.offset_s += 120
        await proxy.holding_answer.wait()
        await until(lambda: db.fetchval(CLAIMED))
        proxy.cut()
        await until(lambda: db.fetchval("select count(*) = 1 from dead_letter"))


async def test_live_delivery_goes_on_after_a_lost_claim_beside_a_replay_that_waits(
    client: httpx.AsyncClient, worker: Runtime, proxy: FaultyProxy, db: Connection, group: str
) -> None:
    """The shard is taken again only after the streams of its replays have ended."""
    down = True

    async def answer(call: Call) -> web.Response:
        fails = "halfnote-replay" in call.headers or (down and call.json()["order"] > 0)
        return web.Response(status=500 if fails else 200)

    async with Responder(answer) as receiver, running(worker):
        await subscribe(client, receiver, retry=[3600] * 100, max_backlog=100)
        [first] = await publish(client, order(0))
        await until(lambda: db.fetchval("select count(*) = 1 from receipt"))
        await replay(db, 0, first)
        await until(lambda: db.fetchval("select count(*) = 1 from delivery_retry where replay > 0"))
        await publish(client, order(1, key=KEY))
        await until(lambda: db.fetchval("select count(*) = 1 from delivery_retry where replay = 0"))
        proxy.hold_answer(KEY.encode())
        # One message more than the backlog may have.
        await publish(client, *(order(number) for number in range(2, 102)))
        await proxy.holding_answer.wait()
        await until(lambda: db.fetchval("select count(*) = 1 from delivery_retry where leased_until is not null"))
        down = False
        proxy.cut()
        await until(lambda: db.fetchval("select count(*) > 50 from receipt where replay = 0"))
        assert not await db.fetchval(DONE)
