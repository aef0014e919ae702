"""SQL that reads the log for the relay: a window of messages, and the log's head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

from app.database.columns import Column, Parameters, field_names, listed
from app.database.connection import Connection
from app.store.subscriptions.subscriptions import Route
from app.topic_patterns import TopicPatterns, match_sql

# How many log entries one window scans, and how many bytes of bodies it returns (at least one message).
SPAN = 2000
WINDOW_BYTES = 8 * 1024 * 1024

# Messages are divided among shards by the hash of their key, so that one shard has all messages of a key.
HASH = (
    """(hashtextextended(coalesce({0}.key, {0}.transaction_id::text || '-' || {0}.position::text), 0) & 2147483647)"""
)


@dataclass(slots=True)
class Outgoing:
    """A committed message to deliver; `headers` is JSON text. Only its claim changes after it is created.

    `traceparent` is the context of its trace; None for a message whose day is gone.

    The last fields come from its delivery_retry row: tries used up, the start of the first one, the epoch of the claim,
    since when it waits, and the error of the last try; 0 and None for a message from the log.
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
    waiting_since: datetime | None = None
    last_error: str | None = None

    @property
    def waits_from(self) -> datetime:
        """When the message began to wait: its commit, its due time, or its redelivery."""
        return self.waiting_since or self.due_at or self.committed_at


# The values of the fields that the log has: offset, transaction id, position, topic, key, tag, due time, commit time,
# producer group, headers, content type, body, trace context.
Logged: TypeAlias = tuple[
    int,
    UUID,
    int,
    str,
    str | None,
    str | None,
    datetime | None,
    datetime,
    str,
    str | None,
    str,
    bytes,
    str | None,
]
# The names of these fields, and of the others, which come from a delivery_retry row.
OF_ROW = ("used", "first_at", "claim", "waiting_since", "last_error")
LOGGED = tuple(name for name in field_names(Outgoing) if name not in OF_ROW)
assert field_names(Outgoing)[: len(LOGGED)] == LOGGED

# Served by outbox_by_offset: one descent in each partition. Most of the time, no message waits for a retry.
LOG_HEAD = 'select (select max("offset") from outbox) as head, exists (select from delivery_retry) as retries'

# The parameters of a Reader, and those of them that a route has.
OF_ROUTE = (
    Column("topics", "text[]", "route.topics.patterns"),
    Column("tags", "text[]", "route.tags"),
    Column("headers", "jsonb", "route.headers"),
)
OF_READER = (
    *OF_ROUTE,
    Column("shards", "int"),
    Column("shard", "int"),
    Column("settled_to", "bigint"),
    Column("subscription_id", "int"),
    Column("replay", "int"),
    Column("until", "bigint"),
)
# The parameters of WINDOW: those of a Reader, the offset `after` which it reads, and the most messages that it takes.
READER = Parameters(Column("after", "bigint", given=True), Column("at_most", "int", given=True), *OF_READER)


def takes_sql(reader: Parameters) -> str:
    """Return the SQL condition that a route takes a log entry `s`, and that its day is not being archived.

    A reader without the parameter `headers` has no condition on them: to prepare its lookup in each day takes time.
    """
    headers = ""
    if "headers" in reader.names:
        headers = f"""
    and ({reader["headers"]} is null or exists (
      select from half h
      where h.transaction_id = s.transaction_id and h.position = s.position and h.headers @> {reader["headers"]}
      offset 0
    ))"""
    return f"""{match_sql("s.topic", reader["topics"])}
    and ({reader["tags"]} is null or s.tag = any({reader["tags"]})){headers}
    and not exists (
      select from day d where d.low <= s.transaction_id and d.high > s.transaction_id and d.state <> 'open'
    )"""


def matches(reader: Parameters) -> str:
    """Return the SQL condition that a log entry `s` is one of the reader's and is not settled."""
    settled = " or ".join(
        f"""exists (
      select from {table} r where r.subscription_id = {reader["subscription_id"]} and r.replay = {reader["replay"]}
        and r.transaction_id = s.transaction_id and r.position = s.position offset 0
    )"""
        for table in ("receipt", "delivery_retry", "dead_letter")
    )
    return f"""s."offset" <= {reader["until"]}
    and {takes_sql(reader)}
    and ({reader["shards"]} = 1 or {HASH.format("s")} % {reader["shards"]} = {reader["shard"]})
    and (s."offset" > {reader["settled_to"]} or not ({settled}))"""


# One statement, so one snapshot: offsets become visible in order (see RECORD_ENDS), so messages outside this snapshot
# have higher offsets than those in it, and `reached` skips none.
# 1. `span` reads the next offsets in log order: outbox_by_offset of each partition, merged, up to the limit.
# 2. `matched` selects by topic, tag, headers (half by primary key, only if the route has headers) and shard. It leaves
#    out the days that are being archived, because upkeep owns them. Null tags or headers match all. Up to the offset
#    `settled_to` it leaves out messages that a former holder settled, by the primary keys of receipt, delivery_retry
#    and dead_letter. The window is read after the lease was committed, so that holder can settle nothing more.
# 3. `bodies` reads half by primary key, each lookup in one partition (LATERAL … OFFSET 0). Body sizes need no TOAST
#    read.
WINDOW = f"""
with span as materialized (
  select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.due_at, o.committed_at
  from outbox o where o."offset" > {READER["after"]} order by o."offset" limit {SPAN}
), matched as materialized (
  select s.* from span s
  where {matches(READER)}
  order by s."offset" limit {READER["at_most"]}
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
select {listed(LOGGED)}, null::bigint as reached, null::boolean as more
from taken
union all
select {", ".join(["null"] * len(LOGGED))},
  case when t.count < m.count or m.count >= {READER["at_most"]} then t.last
    when s.count > 0 then least(s.last, {READER["until"]}) end,
  t.count < m.count or m.count >= {READER["at_most"]} or s.count >= {SPAN}
from (select count(*), max("offset") as last from taken) t, (select count(*) from matched) m,
  (select count(*), max("offset") as last from span) s
order by "offset" nulls last
"""  # noqa: S608 -- constants

# The headers and the body of messages that were read before, by their numbers in the arrays; none of a day that is not
# open, as in WINDOW.
BODIES = """
select n.number::int, h.headers, h.body
from unnest($1::uuid[], $2::smallint[]) with ordinality n (transaction_id, position, number), lateral (
  select headers, body from half h
  where h.transaction_id = n.transaction_id and h.position = n.position offset 0
) h
where not exists (
  select from day d where d.low <= n.transaction_id and d.high > n.transaction_id and d.state <> 'open'
)
"""

NEWEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of windows: its route and shard, and where others may have settled messages.

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
class ReplayFilter:
    """The filters of a replay: any of the topics, keys and tags, and all of the headers. None does not filter."""

    topics: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    tags: frozenset[str] | None = None
    headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, filters: Mapping[str, Any] | None) -> "ReplayFilter | None":
        """Return the filters that the JSON of a replay has; None if it has none."""
        if not filters:
            return None
        sets = {name: frozenset(filters[name]) for name in ("topics", "keys", "tags") if filters.get(name)}
        return cls(**sets, headers=filters.get("headers") or None)


def wants(wanted: ReplayFilter, message: Outgoing) -> bool:
    """Return whether a replay takes a message that its subscription takes."""
    for wanted_values, given in (
        (wanted.topics, message.topic),
        (wanted.keys, message.key),
        (wanted.tags, message.tag),
    ):
        if wanted_values is not None and given not in wanted_values:
            return False
    if wanted.headers is None:
        return True
    headers = msgspec.json.decode(message.headers) if message.headers else {}
    return all(headers.get(name) == value for name, value in wanted.headers.items())


@dataclass(frozen=True, slots=True)
class Read:
    """A window of the log: all of a reader's messages after an offset and up to `reached`.

    `reached` is None if nothing follows the offset. `more`: whether the log may go on after `reached`.
    """

    messages: list[Outgoing]
    reached: int | None
    more: bool


async def log_head(connection: Connection) -> tuple[int, bool]:
    """Return the highest offset that is visible, 0 if the log is empty, and whether any message waits for a retry."""
    row = await connection.fetchrow(LOG_HEAD)
    assert row is not None
    return row[0] or 0, row[1]


async def window(connection: Connection, reader: Reader, after: int, at_most: int) -> Read:
    """Return up to `at_most` of a reader's messages after an offset."""
    *rows, last = await connection.fetch(WINDOW, *READER.arguments(reader, after=after, at_most=at_most))
    logged = len(LOGGED)
    return Read([Outgoing(*row[:logged]) for row in rows], last["reached"], last["more"])


async def read_bodies(connection: Connection, messages: Sequence[Outgoing]) -> list[Outgoing]:
    """Return copies of messages with their headers and bodies, without those whose day is gone or being archived."""
    ids, positions = [one.transaction_id for one in messages], [one.position for one in messages]
    rows = await connection.fetch(BODIES, ids, positions)
    return [replace(messages[number - 1], headers=headers, body=body) for number, headers, body in rows]


def takes(route: Route, message: Outgoing) -> bool:
    """Return whether a route matches a message by topic and tag, as WINDOW does; headers are not compared."""
    return route.topics.match(message.topic) and (route.tags is None or message.tag in route.tags)


def union(routes: Sequence[Route]) -> Route:
    """Return a route that matches what any of these routes matches, without headers."""
    topics = TopicPatterns(pattern for route in routes for pattern in route.topics.patterns)
    open_to_all = any(route.tags is None for route in routes)
    tags = None if open_to_all else sorted({tag for route in routes for tag in route.tags or ()})
    return Route(topics, tags, None)
