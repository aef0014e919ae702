"""Who takes what: the proof's answer is the database's own, for random topics, tags, headers and patterns."""

import asyncio
import json
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import SparkSession

from app.database.connection import connect
from app.ids import uuid7
from app.store.relay.log import Reader, window
from app.store.subscriptions.subscriptions import streamed
from spark.transforms.joined import deliveries
from tests.spark.frames import Day, digest
from tests.support.days import subscribe

PARTS = ("order", "order.", "new", "halfnote.", "ä%_", "b\\", '"quoted"')
TAGS = (None, "red", "Red", "", "a,b")
NAMES, VALUES = ("region", "x-y", "n.1"), ("eu", "EU", "1", 'say "eu"', "")

MESSAGE = """
with half as (
  insert into half (transaction_id, position, producer_group, topic, tag, headers, content_type, body, body_digest,
    born_at, first_check_at, digest)
  values ($1, 0, 'shop', $2, $3, $4, 'application/json', '1', 'x', now(), now(), 'x')
)
insert into outbox (transaction_id, position, "offset", topic, tag, committed_at)
values ($1, 0, nextval('outbox_offset'), $2, $3, now())
"""


def _topic(chance: random.Random) -> str:
    return "".join(chance.choices(PARTS, k=chance.randrange(1, 4)))


def _pattern(chance: random.Random) -> str:
    topic = _topic(chance)
    return chance.choice((topic, topic, "*", topic[: chance.randrange(1, len(topic) + 1)] + "*"))


def _headers(chance: random.Random, most: int) -> dict[str, str]:
    return {name: chance.choice(VALUES) for name in chance.sample(NAMES, chance.randrange(most + 1))}


def _filters(chance: random.Random) -> dict[str, Any] | None:
    tags = chance.sample([tag for tag in TAGS if tag is not None], chance.randrange(3))
    asked = {"tags": chance.choice((None, tags)), "headers": chance.choice((None, _headers(chance, 2)))}
    return chance.choice((None, asked, {name: value for name, value in asked.items() if value}))


def _messages(chance: random.Random) -> list[dict[str, Any]]:
    now = datetime.now(UTC)
    return [
        {
            "transaction_id": uuid7(now),
            "topic": _topic(chance),
            "tag": chance.choice(TAGS),
            "headers": chance.choice((None, json.dumps(_headers(chance, 3)))),
        }
        for _ in range(300)
    ]


async def _taken(dsn: str, messages: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> tuple[set[Any], list[Any]]:
    """Return what the relay's windows hold (transaction, subscription), and the subscriptions' rows."""
    db = await connect(dsn)
    try:
        for message in messages:
            await db.execute(MESSAGE, *message.values())
        for number, one in enumerate(wanted):
            filters = None if one["filters"] is None else json.dumps(one["filters"])
            await subscribe(db, f"one-{number}", *one["topics"], filters=filters)
        taken = set()
        for one in await streamed(db, {}):
            found = (await window(db, Reader(one.subscription_id, 0, one.route, 1, 0, 0), 0, 1000)).messages
            taken |= {(str(message.transaction_id), one.subscription_id) for message in found}
        return taken, await db.fetch("select subscription_id, name, topics, filters::text from subscription")
    finally:
        await db.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_subscription_takes_what_the_relay_gives_it(spark: SparkSession, dsn: str, seed: int) -> None:
    chance = random.Random(seed)
    messages = _messages(chance)
    wanted = [
        {"topics": [_pattern(chance) for _ in range(chance.randrange(1, 4))], "filters": _filters(chance)}
        for _ in range(60)
    ]
    taken, rows = asyncio.run(_taken(dsn, messages, wanted))
    assert len(taken) > 300
    day = Day()
    for row in rows:
        day.subscribe(row["subscription_id"], *row["topics"], name=row["name"], filters=row["filters"])
    for number, message in enumerate(messages, 1):
        same = {**message, "transaction_id": str(message["transaction_id"])}
        day.half(number, **same, body_digest=digest("1"))
        day.sent(number, **{name: value for name, value in same.items() if name != "headers"})
    matched = deliveries(day.frames(spark)).where("matched").select("transaction_id", "subscription_id").collect()
    assert {(row.transaction_id, row.subscription_id) for row in matched} == taken
