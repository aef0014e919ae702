"""What the relay reads of the log: the window, and how far the log goes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from app.database import Connection
from app.store.subscriptions import Route

# How far one window looks, and how many bytes of bodies it brings (at least one message).
SPAN = 2000
WINDOW_BYTES = 8 * 1024 * 1024

# What divides the messages of a subscription among its shards: the key, so that one shard has all of it.
HASH = (
    """(hashtextextended(coalesce({0}.key, {0}.transaction_id::text || '-' || {0}.position::text), 0) & 2147483647)"""
)

# Served by outbox_by_offset: one descent in each partition.
LOG_HEAD = 'select max("offset") from outbox'

# One statement, so one snapshot: offsets become visible in order (see RECORD_ENDS), so what this snapshot does not show
# has a higher offset than all it shows, and `reached` skips nothing.
# 1. `span`: the next offsets in log order, served by outbox_by_offset of each partition, merged, up to the limit.
# 2. `matched`: by topic (exact or prefix; `halfnote.…` only by a prefix that begins so itself), tag and headers (half
#    by primary key, only if headers are asked for), and shard; a day that is being archived is upkeep's. An empty list
#    of tags or headers null asks for all. Up to the offset $10, what a former holder settled is left out, by the
#    primary keys of receipt, delivery_retry and dead_letter; read after the lease was committed, when what that holder
#    would still settle is refused.
# 3. `bodies`: half by primary key, each lookup in one partition (LATERAL … OFFSET 0); sizes come without reading TOAST.
WINDOW = f"""
with span as materialized (
  select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.due_at, o.committed_at
  from outbox o where o."offset" > $1 order by o."offset" limit {SPAN}
), matched as materialized (
  select s.* from span s
  where s."offset" <= $13
    and (s.topic = any($2::text[]) or (
      s.topic ^@ any($3::text[]) and (not s.topic ^@ 'halfnote.' or s.topic ^@ any($4::text[]))
    ))
    and ($5::text[] is null or s.tag = any($5::text[]))
    and ($6::jsonb is null or exists (
      select from half h
      where h.transaction_id = s.transaction_id and h.position = s.position and h.headers @> $6::jsonb offset 0
    ))
    and ($8::int = 1 or {HASH.format("s")} % $8 = $9::int)
    and not exists (
      select from day d where d.low <= s.transaction_id and d.high > s.transaction_id and d.state <> 'open'
    )
    and (s."offset" > $10::bigint or not (exists (
      select from receipt r where r.transaction_id = s.transaction_id and r.position = s.position
        and r.subscription_id = $11::int and r.replay = $12::int offset 0
    ) or exists (
      select from delivery_retry r where r.subscription_id = $11 and r.replay = $12
        and r.transaction_id = s.transaction_id and r.position = s.position offset 0
    ) or exists (
      select from dead_letter r where r.subscription_id = $11 and r.replay = $12
        and r.transaction_id = s.transaction_id and r.position = s.position offset 0
    )))
  order by s."offset" limit $7
), bodies as materialized (
  select m.*, h.producer_group, h.headers, h.content_type, h.body, h.traceparent,
    sum(octet_length(h.body)) over (order by m."offset") - octet_length(h.body) as before
  from matched m, lateral (
    select producer_group, headers, content_type, body, traceparent from half h
    where h.transaction_id = m.transaction_id and h.position = m.position offset 0
  ) h
), taken as materialized (
  select * from bodies where before < {WINDOW_BYTES}
)
select "offset", transaction_id, position, topic, key, tag, due_at, committed_at, producer_group, headers, content_type,
  body, traceparent, null::bigint as reached
from taken
union all
select null, null, null, null, null, null, null, null, null, null, null, null, null,
  case when t.count < m.count or m.count >= $7 then t.last else (select least(max("offset"), $13) from span) end
from (select count(*), max("offset") as last from taken) t, (select count(*) from matched) m
order by 1 nulls last
"""  # noqa: S608 -- numbers and expressions of ours

NEWEST = 2**63 - 1
RESERVED = "halfnote."


@dataclass(slots=True)
class Outgoing:
    """A committed message that is to be delivered; `headers` is JSON text. Never changed once it is made.

    `traceparent` is its trace's context; a message whose day has left goes without.

    `used`, `first_at` and `claim` are those of its delivery_retry row: tries used up, when the first one began, and the
    epoch it was claimed in; 0, None and None for one that comes from the log.
    """

    offset: int
    transaction_id: UUID
    position: int
    topic: str
    key: str | None
    tag: str | None
    due_at: datetime | None
    committed_at: datetime
    producer_group: str
    headers: str | None
    content_type: str
    body: bytes
    traceparent: str | None = None
    used: int = 0
    first_at: datetime | None = None
    claim: int | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads a window: which part of the log is its own, and what of it was settled by others.

    `shard` of `shards`; nothing above `until`; up to `settled_to` there may be messages that a former holder settled.
    """

    subscription_id: int
    replay: int
    route: Route
    shards: int
    shard: int
    settled_to: int
    until: int = NEWEST


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a replay takes besides what its subscription does: any of the topics, keys and tags, all of the headers.

    None asks for nothing.
    """

    topics: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    tags: frozenset[str] | None = None
    headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, filters: Mapping[str, Any] | None) -> "Wanted | None":
        """Return what the JSON of a replay's filters asks for."""
        if not filters:
            return None
        sets = {name: frozenset(filters[name]) for name in ("topics", "keys", "tags") if filters.get(name)}
        return cls(**sets, headers=filters.get("headers") or None)


def wants(wanted: Wanted, message: Outgoing) -> bool:
    """Tell whether a replay takes a message that its subscription takes."""
    for asked, given in ((wanted.topics, message.topic), (wanted.keys, message.key), (wanted.tags, message.tag)):
        if asked is not None and given not in asked:
            return False
    if wanted.headers is None:
        return True
    headers = msgspec.json.decode(message.headers) if message.headers else {}
    return all(headers.get(name) == value for name, value in wanted.headers.items())


async def log_head(connection: Connection) -> int:
    """Return the highest offset that is visible, 0 if the log is empty."""
    return await connection.fetchval(LOG_HEAD) or 0


async def window(connection: Connection, reader: Reader, after: int, at_most: int) -> tuple[list[Outgoing], int | None]:
    """Return up to `at_most` of a reader's messages after an offset, and the offset that was reached (None: nothing
    there).

    Nothing between `after` and the offset reached is the reader's but what is returned.
    """
    route = reader.route
    *rows, last = await connection.fetch(
        WINDOW,
        after,
        route.exact,
        route.prefixes,
        [prefix for prefix in route.prefixes if prefix.startswith(RESERVED)],
        route.tags,
        route.headers,
        at_most,
        reader.shards,
        reader.shard,
        reader.settled_to,
        reader.subscription_id,
        reader.replay,
        reader.until,
    )
    return [Outgoing(*row[:13]) for row in rows], last["reached"]


def takes(route: Route, message: Outgoing) -> bool:
    """Tell whether a message is of a route by topic and tag, as WINDOW judges; headers are not looked at."""
    topic = message.topic
    if topic not in route.exact:
        reserved = topic.startswith(RESERVED)
        if not any(topic.startswith(p) and (not reserved or p.startswith(RESERVED)) for p in route.prefixes):
            return False
    return route.tags is None or message.tag in route.tags


def union(routes: Sequence[Route]) -> Route:
    """Return a route that takes all that any of these takes, whose headers are not asked for."""
    exact = sorted({topic for route in routes for topic in route.exact})
    prefixes = sorted({prefix for route in routes for prefix in route.prefixes})
    open_to_all = any(route.tags is None for route in routes)
    tags = None if open_to_all else sorted({tag for route in routes for tag in route.tags or ()})
    return Route(exact, prefixes, tags, None)
