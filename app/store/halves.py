"""Half messages: written once, never updated, read by id."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from app.database import Connection

# Position 0 first; the others only for ids that came back, or a repeat with more messages would mix two requests in
# one transaction. ON CONFLICT waits for a concurrent insert of the same id and then yields, so one request wins.
# Ids are sorted, so that two flushes never wait for each other. The join with producer_group (small, by primary key)
# is what registers a group for every replica at once, and gives the immunity.
INSERT_HALVES = """
with asked as materialized (
  select * from unnest($1::uuid[], $2::smallint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::jsonb[],
    $8::text[], $9::bytea[], $10::bytea[], $11::float8[], $12::bytea[], $13::jsonb[], $14::jsonb[], $15::int[],
    $16::text[], $17::uuid[])
  as a(transaction_id, position, producer_group, topic, key, tag, headers, content_type, body, body_digest,
    deliver_after_s, digest, context, policy, immunity_s, traceparent, reissued_from)
), first as (
  insert into half (transaction_id, position, producer_group, topic, key, tag, headers, content_type, body,
    body_digest, deliver_after_s, born_at, first_check_at, digest, context, policy, traceparent, reissued_from)
  select a.transaction_id, 0, a.producer_group, a.topic, a.key, a.tag, a.headers, a.content_type, a.body,
    a.body_digest, a.deliver_after_s, $18::timestamptz,
    $18 + make_interval(secs => coalesce(a.immunity_s, g.immunity_s)),
    a.digest, a.context, a.policy, a.traceparent, a.reissued_from
  from asked a join producer_group g on g.name = a.producer_group and g.deleted_at is null
  where a.position = 0
  order by a.transaction_id
  on conflict do nothing
  returning transaction_id, first_check_at
), rest as (
  insert into half (transaction_id, position, producer_group, topic, key, tag, headers, content_type, body,
    body_digest, deliver_after_s, born_at, first_check_at, traceparent)
  select a.transaction_id, a.position, a.producer_group, a.topic, a.key, a.tag, a.headers, a.content_type, a.body,
    a.body_digest, a.deliver_after_s, $18::timestamptz, f.first_check_at, a.traceparent
  from asked a join first f using (transaction_id)
  where a.position > 0
), named as (
  insert into topic (name, first_seen_at)
  select name, $18::timestamptz from unnest($19::text[]) as t(name) order by name
  on conflict do nothing
)
select transaction_id, first_check_at from first
"""

# INSERT_HALVES for one half of one message whose topic is known, so that a lone caller does not pay for arrays.
INSERT_HALF = """
insert into half (transaction_id, position, producer_group, topic, key, tag, headers, content_type, body, body_digest,
  deliver_after_s, born_at, first_check_at, digest, context, policy, traceparent, reissued_from)
select $1::uuid, 0, g.name, $3::text, $4::text, $5::text, $6::jsonb, $7::text, $8::bytea, $9::bytea, $10::float8,
  $17::timestamptz, $17 + make_interval(secs => coalesce($14::int, g.immunity_s)), $11::bytea, $12::jsonb, $13::jsonb,
  $15::text, $16::uuid
from producer_group g where g.name = $2 and g.deleted_at is null
on conflict do nothing
returning transaction_id, first_check_at
"""

# Served by half's primary key, one probe in one partition for each id (LATERAL … OFFSET 0 keeps each lookup apart, so
# that each prunes its own day; `position < 1` as in RECORD_ENDS).
STORED_HALVES = """
select a.transaction_id, h.digest, h.born_at, h.first_check_at, h.producer_group,
  exists (select from producer_group g where g.name = a.producer_group and g.deleted_at is null) as registered
from unnest($1::uuid[], $2::text[]) as a(transaction_id, producer_group)
left join lateral (
  select digest, born_at, first_check_at, producer_group from half h
  where h.transaction_id = a.transaction_id and h.position < 1 offset 0
) h on true
"""

# Served by half's primary key in one partition.
HALF_ROWS = """
select transaction_id, position, producer_group, topic, key, tag, headers, content_type, body, body_digest,
  deliver_after_s, born_at, first_check_at, digest, context, policy, traceparent, reissued_from
from half where transaction_id = $1 order by position
"""


# Served by half's primary key in one partition.
MESSAGE_BODY = "select body from half where transaction_id = $1 and position = $2"


# Not frozen, as nothing else on the way of a request: a frozen dataclass takes four times as long to make.
@dataclass(slots=True)
class HalfMessage:
    """One message of a half as it is stored; `headers` is JSON text, `body` the producer's bytes."""

    topic: str
    key: str | None
    tag: str | None
    headers: str | None
    content_type: str
    body: bytes
    body_digest: bytes
    deliver_after_s: float | None


@dataclass(slots=True)
class Half:
    """A half to be stored. `policy` and `context` are JSON text; `digest` is SHA-256 of the whole request.

    `traceparent` is a context of app.trace_context, stored with each message; it is no part of the content.
    """

    transaction_id: UUID
    producer_group: str
    messages: Sequence[HalfMessage]
    digest: bytes
    context: str | None = None
    policy: str | None = None
    immunity_s: int | None = None
    traceparent: str | None = None
    reissued_from: UUID | None = None


@dataclass(slots=True)
class StoredHalf:
    """What the database holds of an id: None times and digest where it holds nothing."""

    digest: bytes | None
    born_at: datetime | None
    first_check_at: datetime | None
    producer_group: str | None
    registered: bool
    fresh: bool = False


async def insert_halves(
    connection: Connection, halves: Sequence[Half], topics: Sequence[str], now: datetime
) -> dict[UUID, datetime]:
    """Store halves (ids distinct and sorted) and name new topics; return id → first_check_at of those stored now.

    An id that does not come back was stored before, or its group is not registered: `stored_halves` tells which.
    """
    if len(halves) == 1 and len(halves[0].messages) == 1 and not topics:
        return await _insert_half(connection, halves[0], now)
    rows = [
        (
            half.transaction_id,
            position,
            half.producer_group,
            *_content(message),
            *((None, None, None, None, half.traceparent, None) if position else _first_only(half)),
        )
        for half in halves
        for position, message in enumerate(half.messages)
    ]
    stored = await connection.fetch(INSERT_HALVES, *map(list, zip(*rows, strict=True)), now, topics)
    return {transaction_id: first_check_at for transaction_id, first_check_at in stored}  # noqa: C416


async def _insert_half(connection: Connection, half: Half, now: datetime) -> dict[UUID, datetime]:
    message = half.messages[0]
    row = await connection.fetchrow(
        INSERT_HALF,
        half.transaction_id,
        half.producer_group,
        *_content(message),
        *_first_only(half),
        now,
    )
    return {} if row is None else {row[0]: row[1]}


def _content(message: HalfMessage) -> tuple[Any, ...]:
    return (
        message.topic,
        message.key,
        message.tag,
        message.headers,
        message.content_type,
        message.body,
        message.body_digest,
        message.deliver_after_s,
    )


def _first_only(half: Half) -> tuple[bytes, str | None, str | None, int | None, str | None, UUID | None]:
    return half.digest, half.context, half.policy, half.immunity_s, half.traceparent, half.reissued_from


async def stored_halves(connection: Connection, ids: Sequence[UUID], groups: Sequence[str]) -> dict[UUID, StoredHalf]:
    """Return what is stored of each id, and whether the group that asks is registered.

    A second statement on purpose: the winner of a race is not in the first one's snapshot.
    """
    rows = await connection.fetch(STORED_HALVES, ids, groups)
    return {row["transaction_id"]: StoredHalf(*row[1:]) for row in rows}


async def half_rows(connection: Connection, transaction_id: UUID) -> list["HalfRow"]:
    """Return the stored messages of a transaction by position; empty if there is none."""
    return [HalfRow(**row) for row in await connection.fetch(HALF_ROWS, transaction_id)]


async def message_body(connection: Connection, transaction_id: UUID, position: int) -> bytes | None:
    """Return a message's body as it came, or None if there is no such message."""
    body: bytes | None = await connection.fetchval(MESSAGE_BODY, transaction_id, position)
    return body


@dataclass(frozen=True, slots=True)
class HalfRow:
    """A row of `half`; the fields from `digest` on are set on position 0 only, but for `traceparent`."""

    transaction_id: UUID
    position: int
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: str | None
    content_type: str
    body: bytes
    body_digest: bytes
    deliver_after_s: float | None
    born_at: datetime
    first_check_at: datetime
    digest: bytes | None
    context: str | None
    policy: str | None
    traceparent: str | None
    reissued_from: UUID | None
