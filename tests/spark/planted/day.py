"""The day in which faults are planted: besides what tests/spark/real.py makes, enough victims of each sort."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

from aiohttp import web

from app.checkback.loop import CheckBack
from app.store.checkback.sweeps import remove_decided
from spark.postgres.connections import Connection
from tests.conftest import register_group
from tests.relay.test_kills import until
from tests.spark.real import Maker
from tests.support.check_responder import Call
from tests.support.check_stepping import in_doubt, turn

# How many victims of each sort the day has.
COUNTS = {
    "plain": 100,
    "sale": 75,
    "back": 30,
    "tried": 14,
    "dead": 18,
    "dropped": 10,
    "later": 14,
    "failing": 16,
    "checked": 14,
    "denied": 8,
    "exhausted": 10,
    "decided": 18,
    "reissued": 10,
}
# Each has three messages, and a subscription of its own.
LINES = 30
EU = {"region": "eu"}
SALE = [
    {"topic": "sale", "key": "k", "tag": "new", "headers": EU, "body": {"n": 1}},
    {"topic": "sale", "tag": "old", "deliver_after_s": 0.2, "body": {"n": 2}},
]
# Sorts by what the rows of a victim are like: id, position, offset and the subscription that takes it.
_SENT = """
select o.transaction_id::text as id, o.position, o."offset", s.subscription_id as subscription, s.name
from outbox o, subscription s where o.topic = '{topic}' and o.position = 0 and s.name = '{name}' order by o."offset"
"""
_DECIDED = """
select p.transaction_id::text as id, 0 as position, coalesce(o."offset", 0) as "offset",
  (select subscription_id from subscription where name = 'doubts') as subscription, 'doubts' as name
from op p join half h on h.transaction_id = p.transaction_id and h.position = 0
left join outbox o on o.transaction_id = p.transaction_id and o.position = 0
where h.producer_group = '{group}' and p.verdict = {verdict} and p.source = {source} and h.topic <> 'reissue'
order by 1
"""
SORTS = {
    "plain": _SENT.format(topic="plain", name="plains"),
    "sale": _SENT.format(topic="sale", name="sales"),
    "tried": _SENT.format(topic="tried", name="trying"),
    "dead": _SENT.format(topic="dead", name="deadly"),
    "dropped": _SENT.format(topic="dropped", name="dropping"),
    "later": _SENT.format(topic="later", name="waiting"),
    "failing": _SENT.format(topic="failing", name="failing"),
    "back": _DECIDED.format(group="seller", verdict=2, source=0),
    "checked": _DECIDED.format(group="doubtful", verdict=1, source=1),
    "denied": _DECIDED.format(group="doubtful", verdict=2, source=1),
    "exhausted": _DECIDED.format(group="doubtful", verdict=2, source=2),
    "decided": _DECIDED.format(group="unsure", verdict=1, source=3),
    "reissued": """
select r.reissued_as::text as id, 0 as position, o."offset", s.subscription_id as subscription, s.name
from reissue r join outbox o on o.transaction_id = r.reissued_as and o.position = 0, subscription s
where s.name = 'reissues' and o.topic = 'reissue' order by 1
""",
    "line": """
select min(o.transaction_id::text) as id, 0 as position, min(o."offset") as "offset",
  s.subscription_id as subscription, s.name
from subscription s join outbox o on o.topic = s.name where s.name like 'line.%' group by s.subscription_id, s.name
order by s.name
""",
}


async def before(maker: Maker) -> None:
    """Subscribe, and publish what the workers deliver."""
    await register_group(maker.db, "seller", check_urls=[maker.receivers["shop"].url])
    takers = maker.receivers["takers"]
    seen: set[str] = set()

    async def fail_once(call: Call) -> web.StreamResponse:
        one = call.headers["webhook-id"]
        again = one in seen
        seen.add(one)
        return web.Response(status=200 if again or b"fine" in call.body else 500)

    async def fail(call: Call) -> web.StreamResponse:
        return web.Response(status=200 if b"fine" in call.body else 500)

    trying, refusing, failing = (maker.receivers[name] for name in ("trying", "refusing", "failing"))
    trying.answer, failing.answer = fail_once, fail
    refusing.status, refusing.headers = 500, {"webhook-delivery": "abort-message"}
    for name in ("plains", "sales", "doubts", "waiting", "reissues", *_lines()):
        maker.receivers[name] = takers
    for name in ("deadly", "dropping"):
        maker.receivers[name] = refusing
    await maker.subscribe("plains", "plain")
    await maker.subscribe("sales", "sale")
    await maker.subscribe("doubts", "doubt")
    await maker.subscribe("waiting", "later")
    await maker.subscribe("reissues", "reissue")
    await maker.subscribe("trying", "tried", "fine", retry=[0.05, 0.05], max_in_flight=1)
    await maker.subscribe("deadly", "dead", retry=[])
    await maker.subscribe("dropping", "dropped", retry=[])
    await maker.subscribe("failing", "failing", "fine", retry=[36_000], max_in_flight=1)
    for name in _lines():
        await maker.subscribe(name, name)
        await maker.publish(name, 3)
    for topic in ("plain", "dead", "dropped"):
        await maker.publish(topic, COUNTS[topic])
    for topic in ("tried", "failing"):
        # What is received in between keeps the breaker closed.
        for _ in range(COUNTS[topic]):
            await maker.publish(topic, 1)
            await maker.publish("fine", 1, body="fine")
    await maker.publish("later", COUNTS["later"], deliver_after_s=36_000)
    context = {"order": 7}
    for verdict, sort in (("commit", "sale"), ("rollback", "back")):
        for _ in range(COUNTS[sort]):
            half = await maker.call(
                "POST", "/half", producer_group="seller", messages=SALE, context=context, check={"max_checks": 9}
            )
            one = half["transaction_id"]
            await maker.call("POST", "/end", transaction_id=one, producer_group="seller", verdict=verdict)
    for _ in range(COUNTS["reissued"]):
        one = await maker.transaction("rollback", {"topic": "reissue", "body": 1})
        await maker.call("POST", f"/transactions/{one}/reissue", reason="it was paid")
    await _asked(maker)


async def _asked(maker: Maker) -> None:
    shop, checks = maker.receivers["shop"], CheckBack()
    await register_group(maker.db, "doubtful", check_urls=[shop.url], interval_s=5, max_checks=2)
    await register_group(maker.db, "unsure", check_urls=[shop.url], interval_s=5, max_checks=1, on_exhausted="park")
    message = {"topic": "doubt", "key": "k", "body": 1}
    for sort, said in (("checked", "commit"), ("denied", "rollback")):
        shop.content = {"verdict": said}
        for _ in range(COUNTS[sort]):
            await in_doubt(maker.client, maker.runtime, "doubtful", messages=[message])
        await turn(maker.runtime, checks)
    shop.content = {"verdict": "unknown"}
    for _ in range(COUNTS["exhausted"]):
        await in_doubt(maker.client, maker.runtime, "doubtful", messages=[message])
    parked = [
        await in_doubt(maker.client, maker.runtime, "unsure", messages=[message]) for _ in range(COUNTS["decided"])
    ]
    for _ in range(3):
        await turn(maker.runtime, checks)
        _later(maker)
    for one in parked:
        await maker.call("POST", f"/transactions/{one}/verdict", verdict="commit", reason="asked by phone")
    # Upkeep removes the rows of decided transactions in a pass of its own time, which may be after the day is made.
    await remove_decided(maker.db, UUID(int=0), len(parked))
    assert await maker.db.fetchval("select count(*) from check_back") == 0


def _later(maker: Maker) -> None:
    assert maker.runtime.clock.fixed is not None
    maker.runtime.clock.fixed += timedelta(seconds=6)


async def after(maker: Maker) -> None:
    """Drop dead letters, and replay a subscription."""
    dropping = "select transaction_id, position from dead_letter where topic = 'dropped'"
    count = f"select count(*) = {COUNTS['dropped']} from dead_letter where topic = 'dropped'"
    await until(lambda: maker.db.fetchval(count))
    dead = await maker.db.fetch(dropping)
    ids = [{"subscription": "dropping", "message_id": f"{row[0]}-{row[1]}"} for row in dead]
    await maker.call("DELETE", "/dead-letters", ids=ids)
    received = f"select count(*) = {COUNTS['plain']} from receipt where replay = 0 and subscription_id = (select "
    received += "subscription_id from subscription where name = 'plains')"
    await until(lambda: maker.db.fetchval(received))
    await maker.call("POST", "/subscriptions/plains/replay", **{"from": "earliest"})
    tried = f"select count(*) = {COUNTS['failing']} from delivery_retry where topic = 'failing' and attempts = 1"
    await until(lambda: maker.db.fetchval(tried))


def victims(connection: Connection) -> dict[str, Iterator[dict[str, Any]]]:
    """Return the victims of each sort, in order."""
    found = {sort: connection.execute(statement).fetchall() for sort, statement in SORTS.items()}
    for sort, rows in found.items():
        assert len(rows) == (LINES if sort == "line" else COUNTS[sort]), (sort, len(rows))
    return {sort: iter([dict(row) for row in rows]) for sort, rows in found.items()}


def _lines() -> list[str]:
    return [f"line.{number:02}" for number in range(LINES)]
