"""SQL that writes operational messages in the database transaction of their cause.

An operational message is a half, its op and its outbox row of the built-in producer group `halfnote`. So it is read,
delivered, replayed and proved like any other message. Its op is written with it, so it never waits for a verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import msgspec

from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection
from app.ids import uuid7

# The producer group of operational messages. No row of `producer_group` has this name, so no producer posts for it
# and no check is sent for it.
GROUP = "halfnote"

# The shortest time between two announcements of a cause on a topic, in seconds. Announcements in between are counted.
# `announce_withheld` writes the newest one with that count when the time is over.
ANNOUNCE_EVERY_S = 60.0

# The most causes that one call of `announce_withheld` announces.
AT_ONCE = 500

# Count announcements before the rate limit is checked. Rows are locked in order, so two announcers of the same causes
# never deadlock. An inserted row has no xmax. Served by the primary key; `day` is small. If today's day is not open,
# announcements are held back, so that their cause does not fail. A session that freezes before the commit loses its
# locks after 5 s.
COUNT = """
insert into announced as a (topic, cause, at, held_back, key, body)
select topic, cause, $6, count, key, body
from unnest($1::text[], $2::text[], $3::int[], $4::text[], $5::bytea[]) as n(topic, cause, count, key, body)
order by topic, cause
on conflict (topic, cause) do update
  set held_back = a.held_back + excluded.held_back, key = excluded.key, body = excluded.body
returning a.topic, a.cause, a.at, a.held_back, a.xmax = 0 as fresh,
  exists (select from day d where d.low <= $7::uuid and d.high > $7 and d.state = 'open') as writable,
  set_config('idle_in_transaction_session_timeout', '5s', true)
"""

# The whole table is read. It is small: a row for each topic and producer group or subscription. Locked rows are
# skipped.
DUE = """
select topic, cause, held_back, key, body, set_config('idle_in_transaction_session_timeout', '5s', true)
from announced
where held_back > 0 and (at <= $1 or at >= $2)
  and exists (select from day d where d.low <= $3::uuid and d.high > $3 and d.state = 'open')
order by topic, cause limit $4
for update skip locked
"""

# One statement, like RECORD_ENDS. The offset lock is taken last, only after every other row is in, because its holder
# must not wait for a lock; the counts force that order. `committed_at` is read after the lock is taken. Ids are new, so
# the only conflict is a topic that another session stores first.
WRITE = f"""
with asked as materialized (
  select * from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bytea[])
  with ordinality as a(transaction_id, topic, cause, key, body, digest, n)
), announced_now as (
  update announced a set at = $7, held_back = 0, key = null, body = null
  from asked q where a.topic = q.topic and a.cause = q.cause
  returning 1
), halves as (
  insert into half (transaction_id, position, producer_group, topic, key, content_type, body, body_digest, born_at,
    first_check_at, digest)
  select transaction_id, 0, $8, topic, key, 'application/json', body, digest, $7, $7, digest
  from asked order by transaction_id
  returning 1
), named as (
  insert into topic (name, first_seen_at) select distinct topic, $7::timestamptz from asked order by topic
  on conflict do nothing
  returning 1
), decided as (
  insert into op (transaction_id, verdict, source, reason, decided_at)
  select transaction_id, 1, 2, 'an operational message', $7 from asked order by transaction_id
  returning 1
), locked as materialized (
  select pg_advisory_xact_lock({AdvisoryLock.OFFSET}), clock_timestamp() as at
  from (select (select count(*) from announced_now) + (select count(*) from halves) + (select count(*) from named)
    + (select count(*) from decided) as rows) written
  where written.rows > 0
), sent as (
  insert into outbox (transaction_id, position, "offset", topic, key, committed_at)
  select transaction_id, 0, nextval('outbox_offset'), topic, key, at
  from (select a.*, l.at from locked l, asked a order by a.n) o
  returning 1
)
select count(*) from sent
"""  # noqa: S608 -- constants

# The whole table is read. It is small.
FORGET = "delete from announced where held_back = 0 and at < $1"


@dataclass(frozen=True, slots=True)
class Announcement:
    """An operational message. The rate limit counts by topic and `cause`: the name of a producer group or subscription.

    `body` is ready for JSON, without `held_back`: the write adds it. `stands_for` is how often the announced thing
    happened.
    """

    topic: str
    cause: str
    key: str | None
    body: Mapping[str, Any]
    stands_for: int = 1


@dataclass(frozen=True, slots=True)
class _Written:
    topic: str
    cause: str
    key: str | None
    body: Mapping[str, Any]
    held_back: int


async def announce(connection: Connection, announcements: Sequence[Announcement], now: datetime) -> int:
    """Write the announcements that the rate limit allows; return how many were written.

    Needs the caller's database transaction, in which the causes were written. Call it once, as the last statement, and
    commit at once: the database transaction may hold the offset lock from then on. It must not hold that lock before
    (an End with a commit takes it), and must not announce twice. `now` is the database's time.

    Several announcements of one topic and cause become one message, the first of them. Its `held_back` counts the
    others and those that were held back before. After the commit the caller wakes the relay (`wake_ups.published`).
    """
    if not announcements:
        return 0
    batches: dict[tuple[str, str], list[Announcement]] = {}
    for one in announcements:
        batches.setdefault((one.topic, one.cause), []).append(one)
    rows = await connection.fetch(
        COUNT,
        [topic for topic, _ in batches],
        [cause for _, cause in batches],
        [sum(one.stands_for for one in batch) for batch in batches.values()],
        [batch[-1].key for batch in batches.values()],
        [msgspec.json.encode(batch[-1].body) for batch in batches.values()],
        now,
        uuid7(now),
    )
    counted = {(row["topic"], row["cause"]): row for row in rows}
    passed = []
    for cause, batch in batches.items():
        row = counted[cause]
        if row["writable"] and (row["fresh"] or not _limited(row["at"], now)):
            passed.append(_Written(*cause, batch[0].key, batch[0].body, row["held_back"] - 1))
    return await _write(connection, passed, now)


async def announce_withheld(connection: Connection, now: datetime) -> int:
    """Write the announcements that were held back and are due: the newest of each cause, with a count of the others.

    The oldest is written first. Return how many were written. Needs a database transaction, which the caller commits at
    once.
    """
    every = timedelta(seconds=ANNOUNCE_EVERY_S)
    rows = await connection.fetch(DUE, now - every, now + every, uuid7(now), AT_ONCE)
    held = [
        _Written(row["topic"], row["cause"], row["key"], msgspec.json.decode(row["body"]), row["held_back"] - 1)
        for row in rows
    ]
    return await _write(connection, sorted(held, key=_happened), now)


async def forget(connection: Connection, before: datetime) -> None:
    """Delete the rate limits of causes without an announcement since `before`."""
    await connection.execute(FORGET, before)


def _limited(at: datetime, now: datetime) -> bool:
    """Return whether the last announcement is too recent. One far in the future is from before a clock step."""
    return abs((now - at).total_seconds()) < ANNOUNCE_EVERY_S


def _happened(held: _Written) -> datetime:
    return datetime.fromisoformat(held.body["at"])


async def _write(connection: Connection, written: Sequence[_Written], now: datetime) -> int:
    if not written:
        return 0
    bodies = [msgspec.json.encode({**one.body, "held_back": one.held_back}) for one in written]
    count: int = await connection.fetchval(
        WRITE,
        [uuid7(now) for _ in written],
        [one.topic for one in written],
        [one.cause for one in written],
        [one.key for one in written],
        bodies,
        [sha256(body).digest() for body in bodies],
        now,
        GROUP,
    )
    return count
