"""A day that the real service made: everything that it can do, with a worker killed in the midst of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from app.checkback.claim_loops import Lapses
from app.checkback.loop import CheckBack
from app.config import LOOPBACK, Settings
from app.database.connection import Connection, connect
from app.lifecycle.startup import assemble
from app.runtime.state import Runtime
from tests.conftest import client_of, register_group
from tests.relay.test_kills import Workers, until
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import in_doubt, turn

# Tests damage plain messages of this topic, and transactions that were rolled back with it.
VICTIMS = 60
# Everything is over: whatever a subscription takes and is due has a receipt or is dead, and no replay runs. Checkpoints
# say less: those of whom no message is for move when it suits them.
SETTLED = """
select not exists (
  select from subscription s, outbox o join half h using (transaction_id, position)
  where s.deleted_at is null and s.state = 'active' and o."offset" > s.started_after
    and o.committed_at >= s.matches_since and coalesce(o.due_at, o.committed_at) < now() + interval '30 minutes'
    and (o.topic = any(s.topics) or exists (
      select from unnest(s.topics) t where right(t, 1) = '*' and o.topic ^@ rtrim(t, '*')
        and (not o.topic ^@ 'halfnote.' or t ^@ 'halfnote.')
    ))
    and (jsonb_typeof(s.filters -> 'tags') is distinct from 'array' or s.filters -> 'tags' ? o.tag)
    and (jsonb_typeof(s.filters -> 'headers') is distinct from 'object' or h.headers @> (s.filters -> 'headers'))
    and not exists (
      select from receipt r where r.transaction_id = o.transaction_id and r.position = o.position
        and r.subscription_id = s.subscription_id and r.replay = 0
    )
    and not exists (
      select from dead_letter d where d.transaction_id = o.transaction_id and d.position = o.position
        and d.subscription_id = s.subscription_id and d.replay = 0
    )
    and not exists (
      select from delivery_retry w where w.transaction_id = o.transaction_id and w.position = o.position
        and w.subscription_id = s.subscription_id and w.replay = 0 and w.due_at > now() + interval '30 minutes'
    )
) and not exists (select from replay where state = 'running')
"""
# The destination of the topic's subscription refuses all of them.
DEAD = "select count(*) = 3 from dead_letter where topic = 'dying'"


@dataclass
class Maker:
    """Who makes the day: a client of the service in this process, whose clock says noon of yesterday."""

    client: httpx.AsyncClient
    runtime: Runtime
    db: Connection
    workers: Workers
    receivers: dict[str, Responder] = field(default_factory=dict)

    async def call(self, method: str, path: str, **body: Any) -> Any:
        """Send a request that must succeed; return the answer's JSON."""
        answer = await self.client.request(method, path, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    async def subscribe(self, name: str, *topics: str, **fields: Any) -> None:
        """Subscribe a receiver of its own."""
        destination = {"type": "webhook", "url": self.receivers[name].url}
        await self.call("PUT", f"/subscriptions/{name}", topics=list(topics), destination=destination, **fields)

    async def transaction(self, verdict: str, *messages: dict[str, Any]) -> str:
        """Post a half and its end; return the id."""
        half = await self.call("POST", "/half", producer_group="shop", messages=list(messages))
        one: str = half["transaction_id"]
        await self.call("POST", "/end", transaction_id=one, producer_group="shop", verdict=verdict)
        return one

    async def publish(self, topic: str, count: int, **fields: Any) -> None:
        """Post plain messages."""
        for number in range(count):
            message = {"topic": topic, "key": f"k{number % 3}", "body": {"n": number}, **fields}
            await self.call("POST", "/messages", producer_group="shop", messages=[message])


async def nothing_more(maker: Maker) -> None:
    """Add nothing to the day."""


More = Callable[[Maker], Awaitable[None]]


async def make_day(dsn: str, path: Path, before: More = nothing_more, after: More = nothing_more) -> None:
    """Make the day before today in a migrated database; no connection is left.

    `before` adds transactions and subscriptions before the first worker starts; `after` adds what needs deliveries.
    """
    async with _maker(dsn, path) as maker:
        await _subscriptions(maker)
        await _decided(maker)
        await before(maker)
        await _asked(maker)
        first = await maker.workers.start()
        await _published(maker)
        await until(lambda: len(maker.receivers["mailer"].calls) > 30)
        maker.workers.kill(first)
        await maker.publish("order", 10, tag="audit")
        last = await maker.workers.start()
        await _changed(maker)
        await after(maker)
        await until(lambda: maker.db.fetchval(SETTLED), 120)
        last.stop()
        maker.workers.running.remove(last)
        # Days are made ahead, so a day is open before it begins.
        await maker.db.execute("update day set changed_at = changed_at - interval '3 days'")


@asynccontextmanager
async def _maker(dsn: str, path: Path) -> AsyncIterator[Maker]:
    settings = Settings(_env_file=None, database_url=dsn, pool_size=4, linger_s=0, allow_networks=LOOPBACK)  # type: ignore[call-arg]
    names = (
        "mailer",
        "audit",
        "europe",
        "ordered",
        "flaky",
        "dying",
        "paused",
        "ops",
        "former",
        "changing",
        "late",
        "trying",
        "refusing",
        "failing",
    )
    async with AsyncExitStack() as stack:
        runtime = await assemble(settings, dsn, stack)
        noon = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
        runtime.clock.fixed = noon
        client = await stack.enter_async_context(client_of(runtime))
        maker = Maker(client, runtime, await connect(dsn), Workers(path, dsn))
        for name in (*names, "takers", "shop"):
            maker.receivers[name] = await stack.enter_async_context(Responder())
        try:
            yield maker
        finally:
            for one in maker.workers.running:
                one.kill()
            await maker.db.close()


async def _subscriptions(maker: Maker) -> None:
    failed = 0

    async def fail_twice(call: Call) -> web.StreamResponse:
        nonlocal failed
        failed += 1
        return web.Response(status=500 if failed <= 2 else 200)

    maker.receivers["flaky"].answer = fail_twice
    maker.receivers["dying"].status = 500
    await maker.subscribe("mailer", "order")
    await maker.subscribe("audit", "*", filters={"tags": ["audit"]})
    await maker.subscribe("europe", "ord*", filters={"headers": {"region": "eu"}})
    await maker.subscribe("ordered", "keyed.*", ordered="key", shards=2)
    await maker.subscribe("flaky", "flaky", retry=[0.05, 0.05, 0.05])
    await maker.subscribe("dying", "dying", retry=[])
    await maker.subscribe("paused", "order")
    await maker.call("POST", "/subscriptions/paused/pause")
    await maker.subscribe("ops", "halfnote.*")
    await maker.subscribe("former", "order")
    await maker.subscribe("changing", "order", "changed")
    await maker.subscribe("takers", "victim", ordered="key")


async def _decided(maker: Maker) -> None:
    """Commits and rollbacks of one message and of many, with delays and headers, and a reissue."""
    shop = maker.receivers["shop"]
    await register_group(maker.db, "shop", check_urls=[shop.url], interval_s=5, max_checks=2)
    await register_group(maker.db, "careful", check_urls=[shop.url], max_checks=1, on_exhausted="park")
    eu = {"topic": "order", "body": 1, "headers": {"region": "eu", "x": "y"}}
    us = {"topic": "order", "body": 2, "headers": {"region": "us"}}
    # Not for the subscription that is replayed: its replay would wait for this message.
    later = {"topic": "keyed.a", "body": 4, "deliver_after_s": 7200}
    await maker.transaction("commit", eu, us, {"topic": "keyed.a", "key": "k", "body": 3})
    await maker.transaction("commit", {**us, "deliver_after_s": 0.5}, later)
    again = await maker.transaction(
        "rollback", eu, {"topic": "order", "body_base64": "AP8=", "content_type": "image/png"}
    )
    await maker.call("POST", f"/transactions/{again}/reissue", reason="it was paid")
    await maker.publish("victim", VICTIMS)
    for _ in range(VICTIMS):
        await maker.transaction("rollback", {"topic": "victim", "body": 1})


async def _asked(maker: Maker) -> None:
    """Check-back: to a commit, a rollback, exhaustion (which is announced), and a parked one that a person decided."""
    shop, checks = maker.receivers["shop"], CheckBack()
    for said in ({"verdict": "commit"}, {"verdict": "rollback"}):
        shop.content = said
        await in_doubt(maker.client, maker.runtime)
        await turn(maker.runtime, checks)
    await _answered_by_end(maker, checks)
    await _claimed(maker)
    shop.content = {"verdict": "unknown"}
    await in_doubt(maker.client, maker.runtime)
    parked = await in_doubt(maker.client, maker.runtime, "careful")
    for _ in range(3):
        await turn(maker.runtime, checks)
        assert maker.runtime.clock.fixed is not None
        maker.runtime.clock.fixed += timedelta(seconds=6)
    await maker.call("POST", f"/transactions/{parked}/verdict", verdict="commit", reason="asked by phone", actor="ann")
    await in_doubt(maker.client, maker.runtime)
    many = {"producer_group": "shop", "state": "in_doubt", "verdict": "rollback", "reason": "the shop is closed"}
    assert (await maker.call("POST", "/transactions/verdict", **many, dry_run=False))["changed"] == 1
    assert (
        await maker.db.fetchval(
            "select count(*) from half h where not exists (select from op where op.transaction_id = h.transaction_id)"
        )
        == 0
    )


async def _answered_by_end(maker: Maker, checks: CheckBack) -> None:
    """Checks whose answers come by `/end`: a commit, and `unknown` until policy decides. The call has no answer."""
    shop, clock = maker.receivers["shop"], maker.runtime.clock
    shop.status = 500
    for said, times in (("commit", 1), ("unknown", 2)):
        one = await in_doubt(maker.client, maker.runtime)
        end = {"transaction_id": str(one), "producer_group": "shop", "verdict": said, "from_check": True}
        for _ in range(times):
            await turn(maker.runtime, checks)
            await maker.call("POST", "/end", **end)
            assert clock.fixed is not None
            clock.fixed += timedelta(seconds=6)
    await turn(maker.runtime, checks)
    shop.status = 200


async def _claimed(maker: Maker) -> None:
    """Checks that a producer without a URL claims: answered with each verdict, lapsed, and until policy decides."""
    shape = {"check_urls": [], "checks": "claim", "max_checks": 2, "interval_s": 5}
    await maker.call("PUT", "/producer-groups/batch", **shape)
    clock, lapses = maker.runtime.clock, Lapses()
    assert clock.fixed is not None
    ids = [await in_doubt(maker.client, maker.runtime, "batch", context={"n": n}) for n in range(5)]
    for words in (("commit", "rollback", "unknown", None, None), ("unknown", None, "commit")):
        claimed = await maker.call("POST", "/producer-groups/batch/checks/claim", invisible_s=4)
        answers = [
            {"transaction_id": one["transaction_id"], "handle": one["handle"], "verdict": word}
            for one, word in zip(claimed["checks"], words, strict=True)
            if word is not None
        ]
        outcomes = await maker.call("POST", "/producer-groups/batch/checks/answers", answers=answers)
        assert all(one["status"] < 300 for one in outcomes["outcomes"])
        clock.fixed += timedelta(seconds=4)
        await lapses.step(maker.runtime, clock.fixed)
        clock.fixed += timedelta(seconds=4)
    # A verdict that comes after its claim.
    late = {"transaction_id": str(ids[3]), "producer_group": "batch", "verdict": "commit", "from_check": True}
    await maker.call("POST", "/end", **late)


async def _published(maker: Maker) -> None:
    """Plain messages while a worker delivers: failures, dead letters, and what a person does about them."""
    await asyncio.gather(
        maker.publish("order", 60),
        maker.publish("keyed.b", 30),
        maker.publish("flaky", 3),
        maker.publish("dying", 3),
    )
    await until(lambda: maker.db.fetchval(DEAD))
    maker.receivers["dying"].status = 200
    dead = await maker.db.fetch(
        "select transaction_id, position from dead_letter where topic = 'dying' order by transaction_id"
    )
    ids = [{"subscription": "dying", "message_id": f"{row[0]}-{row[1]}"} for row in dead]
    await maker.call("POST", "/dead-letters/redeliver", ids=ids[:1])
    await maker.call("DELETE", "/dead-letters", ids=ids[1:2])
    await maker.subscribe("late", "order")


async def _changed(maker: Maker) -> None:
    """A subscription deleted, one whose topics change, and a replay of all that another one had."""
    await until(lambda: len(maker.receivers["changing"].calls) > 0)
    # What changes does so now, as the log's times have it.
    maker.runtime.clock.fixed, noon = None, maker.runtime.clock.fixed
    await maker.client.delete("/subscriptions/former")
    changing = {"type": "webhook", "url": maker.receivers["changing"].url}
    await maker.call("PUT", "/subscriptions/changing", topics=["changed"], destination=changing)
    maker.runtime.clock.fixed = noon
    await maker.publish("changed", 2)
    await maker.publish("order", 5)
    await maker.call("POST", "/subscriptions/mailer/replay", **{"from": "earliest"})
