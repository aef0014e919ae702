"""A change of topics or filters, while a worker still delivers by the former ones: nothing after it is lost."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from app.config import Settings
from app.database.connection import Connection
from app.lifecycle.startup import assemble
from app.relay.loop import REFRESH_EVERY, Relay
from app.runtime.state import Runtime
from tests.conftest import client_of
from tests.support.check_responder import Responder
from tests.support.relay_stepping import offsets, order, publish, subscribe, turn_until

CHECKPOINT = 'select "offset" from checkpoint'


@pytest.fixture
async def other(settings: Settings, dsn: str) -> AsyncIterator[Runtime]:
    """A second process over the same database: what it commits is not handed to the relay of the first."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings, dsn, stack)


def refund(number: int) -> dict[str, Any]:
    return {"topic": "refund", "key": f"order-{number}", "tag": "late", "body": {"refund": number}}


async def change(client: httpx.AsyncClient, receiver: Responder, **fields: Any) -> None:
    put = {"topics": ["order"], "destination": {"type": "webhook", "url": receiver.url}, **fields}
    answer = await client.put("/subscriptions/mailer", json=put)
    assert answer.status_code == 200, answer.text


class FormerRoute:
    """A relay whose stream has delivered a message, and does not see changes until `refresh`."""

    def __init__(self, runtime: Runtime, db: Connection) -> None:
        self.relay, self._runtime, self._db = Relay(runtime), runtime, db
        self._now = runtime.clock.now()

    async def open(self, client: httpx.AsyncClient) -> int:
        """Open the stream, and deliver and settle one message; return its offset."""
        await turn_until(self.relay, self._runtime, lambda: self.relay.streams)
        self._now = self._runtime.clock.now()
        await self.refresh()
        [offset] = await publish(client, order(0, tag="new"))
        await self.reads_until(offset)
        await self.settle()
        return offset

    async def reads_until(self, offset: int, *, replay: bool = False) -> None:
        """Take turns at the time of the last refresh, so that none is due, until the log was read up to an offset."""
        [stream] = [stream for shard, stream in self.relay.streams.items() if bool(shard.replay) is replay]
        while stream.position < offset:
            self._runtime.wake_ups.published()
            await self.relay.step(self._runtime, self._now)

    async def settle(self) -> None:
        """Settle what the stream has delivered, once the checkpoint may move again."""
        for stream in self.relay.streams.values():
            await stream.sender.wait_idle()
        async with self._runtime.database.keyed() as connection:
            self._runtime.clock.offset_s += 2
            await self.relay.settle(self._runtime, connection, self._runtime.clock.now())

    async def refresh(self) -> None:
        """Take the turn that sees changes."""
        self._now = max(self._now + REFRESH_EVERY, self._runtime.clock.now())
        await self.relay.step(self._runtime, self._now)


@pytest.mark.parametrize("path", ["handed", "read"])
@pytest.mark.parametrize("settled", ["before the refresh", "after it"])
@pytest.mark.parametrize(
    "wide",
    [{"topics": ["order", "refund"]}, {"topics": ["order", "refund"], "filters": None}],
    ids=["topics", "filters"],
)
@pytest.mark.usefixtures("group")
async def test_a_message_that_follows_a_change_is_judged_by_it(
    client: httpx.AsyncClient,
    runtime: Runtime,
    other: Runtime,
    db: Connection,
    path: str,
    settled: str,
    wide: dict[str, Any],
) -> None:
    narrow = {"topics": ["order", "refund"], "filters": {"tags": ["new"]}} if "filters" in wide else {}
    former = FormerRoute(runtime, db)
    async with Responder() as receiver, client_of(other) as elsewhere:
        await subscribe(client, receiver, **narrow)
        await former.open(client)
        checkpoint = await db.fetchval(CHECKPOINT)
        await change(client, receiver, **wide)
        sent = await publish(client if path == "handed" else elsewhere, refund(1), order(2, tag="new"))
        await former.reads_until(sent[-1])
        if settled == "before the refresh":
            await former.settle()
            assert await db.fetchval(CHECKPOINT) == checkpoint
        await former.refresh()
        await turn_until(former.relay, runtime, lambda: set(offsets(receiver)) >= set(sent))
        sent += await publish(client, order(3), refund(4))
        runtime.clock.offset_s += 2
        await turn_until(former.relay, runtime, lambda: db.fetchval(f"select ({CHECKPOINT}) = $1", sent[-1]))
        await former.relay.drain(runtime)
    received = [offset for offset in offsets(receiver) if offset >= sent[0]]
    assert sorted(received) == sent


@pytest.mark.usefixtures("group")
async def test_after_a_change_to_fewer_topics_the_others_end_and_nothing_is_sent_twice(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    former = FormerRoute(runtime, db)
    async with Responder() as receiver:
        await subscribe(client, receiver, topics=["order", "refund"])
        await former.open(client)
        await change(client, receiver)
        sent = await publish(client, refund(1), order(2))
        await former.reads_until(sent[-1])
        await former.settle()
        await former.refresh()
        await turn_until(former.relay, runtime, lambda: db.fetchval(f"select ({CHECKPOINT}) = $1", sent[-1]))
        later = await publish(client, refund(3), order(4))
        runtime.clock.offset_s += 2
        await turn_until(former.relay, runtime, lambda: db.fetchval(f"select ({CHECKPOINT}) = $1", later[-1]))
        await former.relay.drain(runtime)
    received = [offset for offset in offsets(receiver) if offset >= sent[0]]
    assert sorted(received) == [*sent, later[-1]]


@pytest.mark.usefixtures("group")
async def test_a_replay_does_not_end_by_the_former_topics(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    former = FormerRoute(runtime, db)
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await former.open(client)
        sent = await publish(client, order(1), refund(2))
        await former.reads_until(sent[-1])
        await former.settle()
        begun = await client.post("/subscriptions/mailer/replay", json={"from": {"offset": sent[0]}})
        assert begun.status_code == 202, begun.text
        await former.refresh()
        await former.reads_until(sent[-1], replay=True)
        await change(client, receiver, topics=["order", "refund"])
        await former.settle()
        await turn_until(former.relay, runtime, lambda: db.fetchval("select state = 'done' from replay"))
        await former.relay.drain(runtime)
    again = [int(call.headers["halfnote-offset"]) for call in receiver.calls if "halfnote-replay" in call.headers]
    assert again == sent
