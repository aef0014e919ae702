"""SQL of half messages. A half is written once, never updated, and read by id."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Struct

from app.database.columns import NUMBER, Column, RowArrays, insert, same
from app.database.connection import Connection
from app.database.standby_wait import CONFIRMED
from app.verdicts import VERDICT_OF, Verdict

# One row for each message of a half. The first message's row also has the columns of the whole half.
HALVES = RowArrays(
    Column("transaction_id", "uuid"),
    Column("position", "smallint", NUMBER),
    Column("producer_group", "text"),
    Column("topic", "text", "messages.topic"),
    Column("key", "text", "messages.key"),
    Column("tag", "text", "messages.tag"),
    Column("headers", "jsonb", "messages.headers"),
    Column("content_type", "text", "messages.content_type"),
    Column("body", "bytea", "messages.body"),
    Column("body_digest", "bytea", "messages.body_digest"),
    Column("deliver_after_s", "float8", "messages.deliver_after_s"),
    Column("digest", "bytea", first_only=True),
    Column("context", "jsonb", first_only=True),
    Column("policy", "jsonb", first_only=True),
    Column("immunity_s", "int", first_only=True),
    Column("traceparent", "text"),
    Column("reissued_from", "uuid", first_only=True),
    each="messages",
)
ON_REPEAT = "on conflict do nothing"
# The parameters of INSERT_HALVES after the arrays: the time, and the names of new topics.
_NOW, _TOPICS = f"${HALVES.next}::timestamptz", f"${HALVES.next + 1}::text[]"

_MESSAGE = ("topic", "key", "tag", "headers", "content_type", "body", "body_digest", "deliver_after_s")
_HALF = ("digest", "context", "policy", "traceparent", "reissued_from")
_FIRST = same("transaction_id", "position", "producer_group", *_MESSAGE, *_HALF, of="a") | {
    "born_at": _NOW,
    "first_check_at": f"{_NOW} + make_interval(secs => coalesce(a.immunity_s, g.immunity_s))",
}
_OTHER = same("transaction_id", "position", "producer_group", *_MESSAGE, "traceparent", of="a") | {
    "born_at": _NOW,
    "first_check_at": "f.first_check_at",
}


# `first` stores position 0. `rest` stores the other positions of ids that `first` returned; otherwise a repeat with
# more messages would mix two requests in one transaction. ON CONFLICT waits for a concurrent insert of the same id and
# then does nothing, so one request wins. Ids are sorted, so two flushes never deadlock. The join with producer_group
# (small, by primary key) makes a new group valid on every replica at once, and gives the check immunity.
#
# Without the clause the server neither looks for each id before it inserts the row, nor confirms the row in a record of
# its own, which is a fifth of the statement's time. A repeat then fails the statement, and nothing of it is stored.
def _insert_halves(asked: str, rows: str, rest: str, on_repeat: str = "") -> str:
    group = "join producer_group g on g.name = a.producer_group and g.deleted_at is null"
    return f"""
with {asked}first as (
  {insert("half", _FIRST, f"from {rows} {group}")}
  where a.position = 0
  order by a.transaction_id
  {on_repeat}
  returning transaction_id, first_check_at
), {rest}named as (
  insert into topic (name, first_seen_at)
  select name, {_NOW} from unnest({_TOPICS}) as t(name) order by name
  on conflict do nothing
)
select transaction_id, first_check_at from first
"""  # noqa: S608 -- constants


_SEVERAL = (
    f"""asked as materialized (
  select * from {HALVES.unnest("a")}
), """,  # noqa: S608 -- a constant
    "asked a",
    f"""rest as (
  {insert("half", _OTHER, "from asked a join first f using (transaction_id) where a.position > 0")}
), """,
)
# For halves with one message each, which almost all are: the arrays are read once.
_SINGLE = ("", HALVES.unnest("a"), "")
INSERT_HALVES = _insert_halves(*_SEVERAL, ON_REPEAT)
INSERT_NEW_HALVES = _insert_halves(*_SEVERAL)
INSERT_SINGLE_HALVES = _insert_halves(*_SINGLE, ON_REPEAT)
INSERT_NEW_SINGLE_HALVES = _insert_halves(*_SINGLE)


# INSERT_HALVES for one half with one message whose topic is known, because one caller is faster without arrays. Its
# parameters are in the order of `_insert_half`: generated arguments take twice the time.
def _insert_one_half(on_repeat: str = "") -> str:
    return f"""
insert into half (transaction_id, position, producer_group, topic, key, tag, headers, content_type, body, body_digest,
  deliver_after_s, born_at, first_check_at, digest, context, policy, traceparent, reissued_from)
select $1::uuid, 0, g.name, $3::text, $4::text, $5::text, $6::jsonb, $7::text, $8::bytea, $9::bytea, $10::float8,
  $17::timestamptz, $17 + make_interval(secs => coalesce($14::int, g.immunity_s)), $11::bytea, $12::jsonb, $13::jsonb,
  $15::text, $16::uuid
from producer_group g where g.name = $2 and g.deleted_at is null
{on_repeat}
returning transaction_id, first_check_at
"""  # noqa: S608 -- a constant


INSERT_HALF = _insert_one_half(ON_REPEAT)
INSERT_NEW_HALF = _insert_one_half()

# Served by the primary keys of half and op, one probe each in one partition for each id. LATERAL … OFFSET 0 separates
# the lookups, so each one prunes to its own day. RECORD_ENDS says why the condition is `position < 1`.
STORED_HALVES = f"""
with {CONFIRMED}
select a.transaction_id, h.digest, h.born_at, h.first_check_at, h.producer_group,
  exists (select from producer_group g where g.name = a.producer_group and g.deleted_at is null) as registered,
  o.verdict
from confirmed cross join unnest($1::uuid[], $2::text[]) as a(transaction_id, producer_group)
left join lateral (
  select digest, born_at, first_check_at, producer_group from half h
  where h.transaction_id = a.transaction_id and h.position < 1 offset 0
) h on true
left join lateral (
  select verdict from op o where o.transaction_id = a.transaction_id offset 0
) o on true
"""  # noqa: S608 -- a constant

# Served by half's primary key in one partition.
HALF_ROWS = """
select transaction_id, position, producer_group, topic, key, tag, headers, content_type, body, body_digest,
  deliver_after_s, born_at, first_check_at, digest, context, policy, traceparent, reissued_from
from half where transaction_id = $1 order by position
"""


# Served by half's primary key in one partition.
MESSAGE_BODY = "select body from half where transaction_id = $1 and position = $2"


# Structs, like all objects of a request: a dataclass takes two to four times as long to create.
class HalfMessage(Struct, gc=False):
    """A message of a half, as stored. `headers` is JSON text, `body` the producer's bytes."""

    topic: str
    key: str | None
    tag: str | None
    headers: str | None
    content_type: str
    body: bytes
    body_digest: bytes
    deliver_after_s: float | None


class Half(Struct, gc=False):
    """A half to store. `policy` and `context` are JSON text; `digest` is the SHA-256 of the whole request.

    `traceparent` is a context of app.observability.trace_context. It is stored with each message and is not part of the
    content.
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


class StoredHalf(Struct, gc=False):
    """The stored half of an id. The digest, times and group are None if there is none.

    `registered`: whether the request's producer group is registered. `fresh`: whether this request stored the half.
    `verdict`: the recorded one; None while the transaction is undecided, as each fresh one is.
    """

    digest: bytes | None
    born_at: datetime | None
    first_check_at: datetime | None
    producer_group: str | None
    registered: bool
    fresh: bool = False
    verdict: Verdict | None = None


async def insert_halves(
    connection: Connection, halves: Sequence[Half], topics: Sequence[str], now: datetime, *, are_new: bool = False
) -> list[datetime | None]:
    """Store halves (ids distinct and sorted) and new topics; return the `first_check_at` of each, in order.

    None: the half was stored before, or its group is not registered. `stored_halves` returns which. With `are_new` the
    halves are stored faster, but one that was stored before raises asyncpg.UniqueViolationError, and none is stored.
    """
    if len(halves) == 1 and len(halves[0].messages) == 1 and not topics:
        return await _insert_half(connection, halves[0], now, are_new)
    return await insert_batch(connection, halves, topics, now, are_new=are_new)


async def insert_batch(
    connection: Connection, halves: Sequence[Half], topics: Sequence[str], now: datetime, *, are_new: bool = False
) -> list[datetime | None]:
    """Store halves as `insert_halves` does, always by the statement for batches."""
    if all(len(half.messages) == 1 for half in halves):
        statement = INSERT_NEW_SINGLE_HALVES if are_new else INSERT_SINGLE_HALVES
    else:
        statement = INSERT_NEW_HALVES if are_new else INSERT_HALVES
    rows = await connection.fetch(statement, *HALVES.arrays(halves), now, topics)
    # By number: a UUID is hashed and compared in Python.
    stored = {transaction_id.int: first_check_at for transaction_id, first_check_at in rows}
    return [stored.get(half.transaction_id.int) for half in halves]


async def _insert_half(connection: Connection, half: Half, now: datetime, are_new: bool) -> list[datetime | None]:
    message = half.messages[0]
    row = await connection.fetchrow(
        INSERT_NEW_HALF if are_new else INSERT_HALF,
        half.transaction_id,
        half.producer_group,
        *_content(message),
        *_first_only(half),
        now,
    )
    return [None if row is None else row[1]]


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
    """Return the stored half of each id, its verdict, and whether the id's group is registered.

    Run it after `insert_halves`, as a second statement: the winner of a race is not in the snapshot of the first.
    """
    rows = await connection.fetch(STORED_HALVES, ids, groups)
    return {
        key: StoredHalf(digest, born_at, first_check_at, group, registered, verdict=VERDICT_OF[verdict])
        for key, digest, born_at, first_check_at, group, registered, verdict in rows
    }


async def half_rows(connection: Connection, transaction_id: UUID) -> list["HalfRow"]:
    """Return the stored messages of a transaction by position; empty if there is no such transaction."""
    return [HalfRow(**row) for row in await connection.fetch(HALF_ROWS, transaction_id)]


async def message_body(connection: Connection, transaction_id: UUID, position: int) -> bytes | None:
    """Return a message's body as the producer sent it, or None if there is no such message."""
    body: bytes | None = await connection.fetchval(MESSAGE_BODY, transaction_id, position)
    return body


@dataclass(frozen=True, slots=True)
class HalfRow:
    """A row of `half`. From `digest` on, only `traceparent` is set on positions other than 0."""

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
