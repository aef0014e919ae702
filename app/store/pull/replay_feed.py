"""SQL that feeds the replays of subscriptions whose consumers claim: their messages become rows of delivery_retry."""

from datetime import datetime

import msgspec

from app.database.columns import Column, Parameters
from app.database.connection import Connection
from app.store.relay.log import OF_READER, Reader, matches
from app.store.subscriptions.replays import Replay
from app.store.subscriptions.subscriptions import Subscription

# A replay is fed while fewer of its messages wait, with the next so many log entries.
WAITING_MOST, SPAN = 2000, 1000

FEEDER = Parameters(
    Column("topics_wanted", "text[]", given=True),
    Column("keys_wanted", "text[]", given=True),
    Column("tags_wanted", "text[]", given=True),
    Column("headers_wanted", "jsonb", given=True),
    Column("now", "timestamptz", given=True),
    *OF_READER,
)


def _wanted(column: str, names: str) -> str:
    return f"({FEEDER[names]} is null or s.{column} = any({FEEDER[names]}))"


# One statement: the rows and the replay's offset are written together, and the lock on the replay leaves it to one
# worker. Served by the primary keys of replay and half, delivery_retry_due, and outbox_by_offset.
FEED = f"""
with fed as materialized (
  select p.* from replay p
  where p.replay_id = {FEEDER["replay"]} and p.state = 'running' and p."offset" < p.until and (
    select count(*) from (
      select from delivery_retry w where w.subscription_id = p.subscription_id and w.replay = p.replay_id
      limit {WAITING_MOST}
    ) w
  ) < {WAITING_MOST}
  for update skip locked
), span as materialized (
  select n.* from fed f cross join lateral (
    select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.due_at, o.committed_at
    from outbox o where o."offset" > f."offset" and o."offset" <= f.until order by o."offset" limit {SPAN}
  ) n
), added as (
  insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, due_at,
    waiting_since)
  select f.subscription_id, f.replay_id, s.transaction_id, s.position, s."offset", s.topic, s.key, 0,
    case when s.due_at > {FEEDER["now"]} then s.due_at else {FEEDER["now"]} end,
    greatest(coalesce(s.due_at, s.committed_at), f.created_at)
  from fed f cross join span s
  where {matches(FEEDER)} and {_wanted("topic", "topics_wanted")} and {_wanted("key", "keys_wanted")}
    and {_wanted("tag", "tags_wanted")} and ({FEEDER["headers_wanted"]} is null or exists (
      select from half h
      where h.transaction_id = s.transaction_id and h.position = s.position and h.headers @> {FEEDER["headers_wanted"]}
      offset 0
    ))
  on conflict do nothing
)
update replay p set moved_at = {FEEDER["now"]},
  "offset" = case when (select count(*) from span) < {SPAN} then f.until else (select max("offset") from span) end
from fed f where p.replay_id = f.replay_id
returning p."offset" < p.until as more
"""  # noqa: S608 -- constants


async def feed(connection: Connection, replay: Replay, subscription: Subscription, now: datetime) -> bool:
    """Store the next messages of a replay; return whether more follow that may be stored now."""
    reader = Reader(subscription.subscription_id, replay.replay_id, subscription.route, 1, 0, 0, replay.until)
    wanted = replay.filters or {}
    headers = wanted.get("headers")
    arguments = FEEDER.arguments(
        reader,
        topics_wanted=wanted.get("topics") or None,
        keys_wanted=wanted.get("keys") or None,
        tags_wanted=wanted.get("tags") or None,
        headers_wanted=msgspec.json.encode(headers).decode() if headers else None,
        now=now,
    )
    return bool(await connection.fetchval(FEED, *arguments))
