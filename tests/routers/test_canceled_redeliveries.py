"""A replay that runs again for redelivered dead letters, and is canceled: they are dead letters again."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.pull import sweep
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.retention.orphans import OF_CANCELLED_REPLAYS, clear_cancelled_replays
from app.store.subscriptions.replays import CANCEL
from tests.support.check_responder import Call, Responder
from tests.support.consumers import Consumer, put_pulled, sweep_after
from tests.support.dead_letters import (
    bury,
    by_filter,
    committed,
    listed,
    mailer,
    redeliver,
    relay,
    subscription,
)
from tests.support.explain import scans
from tests.support.relay_stepping import order, publish, subscribe, turn_until

__all__ = ["mailer", "relay"]

pytestmark = pytest.mark.usefixtures("group")


async def done_replay(db: Connection) -> int:
    """Write a replay that is done; return its id."""
    number: int = await db.fetchval(
        """insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at, ended_at)
           select subscription_id, 0, 1000, 1000, 'done', now(), now(), now() from subscription returning replay_id"""
    )
    return number


async def dead_of(client: httpx.AsyncClient, db: Connection, replay: int, number: int, **columns: Any) -> str:
    """Commit order `number` and write its dead letter of a replay; return the message's id."""
    message_id = await committed(client, order(number, tag="created"))
    await bury(db, message_id, "mailer", replay=replay, **columns)
    return message_id


async def cancel(client: httpx.AsyncClient, replay: int, name: str = "mailer") -> dict[str, Any]:
    """Cancel a replay; return what is shown of it."""
    path = f"/subscriptions/{name}/replays/{replay}"
    assert (await client.delete(path)).status_code == 204
    shown: dict[str, Any] = (await client.get(path)).json()
    return {name: shown[name] for name in ("state", "retrying", "dead")}


async def test_what_was_redelivered_is_dead_again_and_can_be_redelivered_again(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    well = False

    async def answer(call: Call) -> web.Response:
        if well or "halfnote-replay" not in call.headers:
            return web.Response()
        return web.Response(status=500, headers={"webhook-delivery": "abort-message", "halfnote-reason": "unknown"})

    async with Responder(answer) as receiver:
        await subscribe(client, receiver)
        await publish(client, *(order(number) for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from receipt"))
        made = await client.post("/subscriptions/mailer/replay", json={"from": "earliest"})
        number = made.json()["replay_id"]

        async def done() -> bool:
            runtime.clock.offset_s += 1
            return bool(await db.fetchval("select state = 'done' from replay"))

        await turn_until(relay, runtime, done)
        dead = await listed(client)
        assert len(dead) == 3
        before = runtime.clock.now()
        answered = await redeliver(client, by_filter(subscription="mailer"))
        assert answered["redelivered"] == 3
        assert await cancel(client, number) == {"state": "cancelled", "retrying": 0, "dead": 3}
        assert sorted(await listed(client)) == sorted(dead)
        for row in await db.fetch("select * from dead_letter"):
            assert (row["reason"], row["replay"], row["attempts"], row["first_at"]) == ("unknown", number, 0, None)
            assert before <= row["died_at"] <= runtime.clock.now()
        # One that is delivered now says nothing about the others: that the replay was canceled stays on record.
        well = True
        first, *others = sorted(dead)
        assert (await redeliver(client, {"ids": [_id(first, number)]}))["redelivered"] == 1
        row = await db.fetchrow("select state, cancelled_at from replay")
        assert row is not None
        assert (row["state"], before <= row["cancelled_at"]) == ("running", True)

        async def over() -> bool:
            runtime.clock.offset_s += 1
            return bool(await db.fetchval("select state <> 'running' from replay"))

        await turn_until(relay, runtime, over)
        path = f"/subscriptions/mailer/replays/{number}"
        shown = (await client.get(path)).json()
        assert (shown["state"], shown["dead"]) == ("done", len(others))
        assert (await redeliver(client, by_filter(subscription="mailer")))["redelivered"] == 2
        await turn_until(relay, runtime, over)
    assert await db.fetchval("select cancelled_at < ended_at from replay where state = 'done'")
    assert await db.fetchval("select count(*) from receipt where replay = $1", number) == 3


async def test_the_replays_own_retries_end(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    replay = await done_replay(db)
    redelivered = await dead_of(client, db, replay, 1)
    dropped = await dead_of(client, db, replay, 2)
    own = await committed(client, order(3))
    await redeliver(client, {"ids": [_id(redelivered, replay)]})
    # A drop by a person, of a message that is in retry all the same, is no redelivery.
    answer = await client.request("DELETE", "/dead-letters", json={"ids": [_id(dropped, replay)]})
    assert answer.json()["dropped"] == 1
    await db.execute(
        """insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, attempts,
             due_at)
           select p.subscription_id, p.replay_id, o.transaction_id, 0, o."offset", o.topic, 1, now()
           from replay p, outbox o where o.transaction_id = any($1::uuid[])""",
        [dropped[:36], own[:36]],
    )
    assert await cancel(client, replay) == {"state": "cancelled", "retrying": 0, "dead": 1}
    assert await listed(client) == [redelivered]


async def test_one_in_flight_is_dead_again_once_no_worker_sends_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, mailer: str
) -> None:
    replay = await done_replay(db)
    message_id = await dead_of(client, db, replay, 1, reason="expired")
    await redeliver(client, {"ids": [_id(message_id, replay)]})
    now = runtime.clock.now()
    await db.execute(
        "update delivery_retry set leased_until = $1, attempts = 2, first_at = $2, last_error = 'timed out'",
        now + timedelta(minutes=1),
        now,
    )
    assert await cancel(client, replay) == {"state": "cancelled", "retrying": 1, "dead": 0}
    assert await clear_cancelled_replays(db, now) == 0
    later = now + timedelta(minutes=2)
    assert await clear_cancelled_replays(db, later) == 1
    row = await db.fetchrow("select * from dead_letter")
    assert row is not None
    assert (row["reason"], row["attempts"], row["first_at"], row["error"]) == ("expired", 2, now, "timed out")
    assert row["died_at"] == later
    assert await db.fetchval("select count(*) from delivery_retry") == 0


async def test_the_copy_of_a_message_whose_day_goes_is_kept(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, mailer: str
) -> None:
    replay = await done_replay(db)
    first, other = await dead_of(client, db, replay, 1), await dead_of(client, db, replay, 2)
    await db.execute("update day set state = 'archiving'")
    await redeliver(client, {"ids": [_id(first, replay), _id(other, replay)]})
    # Its record is no longer kept.
    await db.execute("delete from redelivery where transaction_id = $1", other[:36])
    assert await cancel(client, replay) == {"state": "cancelled", "retrying": 0, "dead": 2}
    for message_id, reason, number in ((first, "retries_exhausted", 1), (other, "day_left", 2)):
        row = await db.fetchrow("select * from dead_letter where transaction_id = $1", message_id[:36])
        assert row is not None
        assert (row["reason"], row["producer_group"], row["tag"]) == (reason, "shop", "created")
        assert row["body"] == b'{"order":%d}' % number
        assert row["committed_at"] is not None
        assert len(row["body_digest"]) == 32


async def test_upkeep_keeps_one_of_a_closed_day_that_has_no_copy(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, mailer: str
) -> None:
    """It makes the dead letters of a day that it removes, with their messages, or opens the day again."""
    replay = await done_replay(db)
    message_id = await dead_of(client, db, replay, 1)
    await redeliver(client, {"ids": [_id(message_id, replay)]})
    await db.execute("update day set state = 'archiving'")
    assert await cancel(client, replay) == {"state": "cancelled", "retrying": 1, "dead": 0}
    assert await clear_cancelled_replays(db, runtime.clock.now()) == 0
    await db.execute("update day set state = 'open'")
    assert await clear_cancelled_replays(db, runtime.clock.now()) == 1
    assert await listed(client) == [message_id]


async def test_what_a_consumer_holds_is_dead_again_when_it_gives_it_back(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    await put_pulled(client, "mailer")
    consumer = Consumer(client, "mailer")
    replay = await done_replay(db)
    made = [await dead_of(client, db, replay, number) for number in range(3)]
    assert await consumer.ack(*await consumer.claim(max=100)) == [200] * 3
    await redeliver(client, {"ids": [_id(one, replay) for one in made]})
    await sweep_after(runtime)
    acknowledged, given_back = await consumer.claim(max=2)
    assert await cancel(client, replay) == {"state": "cancelled", "retrying": 2, "dead": 1}
    assert await consumer.ack(acknowledged) == [200]
    await consumer.settle("nack", given_back["handle"], retry_after_s=0)
    assert (await sweep.step(runtime, runtime.clock.now())).more is False
    assert await consumer.claim() == []
    assert await clear_cancelled_replays(db, runtime.clock.now()) == 1
    assert sorted(await listed(client)) == sorted(one for one in made if one != acknowledged["message_id"])


@pytest.fixture
async def many(client: httpx.AsyncClient, db: Connection) -> int:
    """A running replay with 200 retries, half of them redelivered, beside those of another replay and 20000 records."""
    await subscription(client, "mailer")
    replay, other = await done_replay(db), await done_replay(db)
    await db.execute("update replay set state = 'running'")
    await db.execute(
        """with retries as (
             insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, attempts,
               due_at)
             select p.subscription_id, p.replay_id, gen_random_uuid(), 0, n, 'order', 0, now()
             from replay p, generate_series(1, case when p.replay_id = $1 then 200 else 10000 end) n
             returning *
           )
           insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at,
             died_because, attempts)
           select subscription_id, replay, transaction_id, 0, "offset", 'redelivered', now(), now(), 'x', 1
           from retries where replay = $2 or "offset" % 2 = 0""",
        replay,
        other,
    )
    # Their ids are of no day; upkeep would remove them with it.
    await db.execute(
        "update day set low = '00000000-0000-0000-0000-000000000000', high = 'ffffffff-ffff-ffff-ffff-ffffffffffff' "
        "where day = (select max(day) from day)"
    )
    await db.execute("delete from day where day < (select max(day) from day)")
    await db.execute("analyze delivery_retry, redelivery, replay, day, dead_letter")
    return replay


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
async def test_a_cancellation_reads_the_replays_own_retries(db: Connection, many: int, generic: bool) -> None:
    [subscription_id] = (await db.fetchrow("select subscription_id from subscription")) or [0]
    now = datetime.now(UTC)
    cases: list[tuple[str, list[str], list[Any]]] = [
        (CANCEL, ["int", "int", "timestamptz"], [subscription_id, many, now]),
        (OF_CANCELLED_REPLAYS, ["timestamptz"], [now]),
    ]
    for statement, types, arguments in cases:
        found = await scans(db, statement, types, arguments, generic=generic)
        read = [scan for scan in found if scan.table in ("delivery_retry", "redelivery")]
        assert read
        assert all("Seq" not in scan.node for scan in read), found
        assert sum(scan.rows for scan in read) < 1000, found
        await db.execute("update replay set state = 'cancelled' where replay_id = $1", many)


def _id(message_id: str, replay: int) -> dict[str, Any]:
    return {"subscription": "mailer", "message_id": message_id, "replay": replay}
