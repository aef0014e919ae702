"""Operational messages: what a person must know, written as messages in the database transaction of their cause.

Each is a half, its op and its outbox row of the built-in producer group `halfnote`, so it is read, delivered, replayed
and proved like any other; it never waits for a verdict, because its op comes with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import msgspec

from app.database import Connection
from app.ids import uuid7

# The producer group of operational messages. No row of `producer_group` has this name, so nobody posts as it, and
# nobody is asked about it.
GROUP = "halfnote"

# How often each cause may be announced on each topic, in seconds. What comes in between is counted, and the newest of
# it is announced with that count when the time is over (`announce_held_back`).
ANNOUNCE_EVERY_S = 60.0

# Held-back causes that one call announces at most.
AT_ONCE = 500

# Locks the rate-limit rows, in order, so that two that announce the same causes never wait for each other in turn, and
# counts what is announced before it is known whether it may be. An inserted row has no xmax. Primary key; `day` is
# small. What has no open day today is held back rather than that its cause should fail for it. Whoever freezes before
# the commit is thrown out of its locks after 5 s.
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

# A small table, read whole: a row for each producer group and subscription that ever had anything announced. Rows that
# somebody is at work on are skipped, never waited for.
DUE = """
select topic, cause, held_back, key, body, set_config('idle_in_transaction_session_timeout', '5s', true)
from announced
where held_back > 0 and (at <= $1 or at >= $2)
  and exists (select from day d where d.low <= $3::uuid and d.high > $3 and d.state = 'open')
order by topic, cause limit $4
for update skip locked
"""

# One statement, as RECORD_ENDS is: the offset lock (7001) is taken last, only after every other row is in (the counts
# force that), because whoever holds it must wait for nobody; `committed_at` is read after it. Ids are new, so nothing
# conflicts but a topic that another one names for the first time.
WRITE = """
with asked as materialized (
  select * from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bytea[])
  with ordinality as a(transaction_id, topic, cause, key, body, digest, n)
), told as (
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
  select pg_advisory_xact_lock(7001), clock_timestamp() as at
  from (select (select count(*) from told) + (select count(*) from halves) + (select count(*) from named)
    + (select count(*) from decided) as rows) written
  where written.rows > 0
), sent as (
  insert into outbox (transaction_id, position, "offset", topic, key, committed_at)
  select transaction_id, 0, nextval('outbox_offset'), topic, key, at
  from (select a.*, l.at from locked l, asked a order by a.n) o
  returning 1
)
select count(*) from sent
"""

# A small table, read whole.
FORGET = "delete from announced where held_back = 0 and at < $1"


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a person must know. `cause` is what the rate limit counts by, on each topic: a producer group's name, a
    subscription's; `body` what JSON can say, without `held_back`, which is added when it is written; `stands_for` how
    many of the kind happened, this one among them."""

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
    """Write those that their rate limit lets through; return how many, so 0 tells that nothing was published.

    Needs the caller's database transaction, in which the causes were written. Call it once, after everything else, and
    commit right after: from here on the transaction may hold the offset lock. It must not hold that lock already (an
    End with a commit in it takes it), nor be a transaction that announces twice. `now` is the database's time.

    Several of one topic and cause are one message: the first of them, which counts the others in `held_back`, beside
    those that were held back before. When the caller has committed, it wakes the relay (`wake_ups.published`).
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


async def announce_held_back(connection: Connection, now: datetime) -> int:
    """Announce the causes that were held back and whose time is over: the newest of each, with the count of the others.

    Needs a database transaction, to be committed right after; returns how many were written, oldest first.
    """
    every = timedelta(seconds=ANNOUNCE_EVERY_S)
    rows = await connection.fetch(DUE, now - every, now + every, uuid7(now), AT_ONCE)
    held = [
        _Written(row["topic"], row["cause"], row["key"], msgspec.json.decode(row["body"]), row["held_back"] - 1)
        for row in rows
    ]
    return await _write(connection, sorted(held, key=_happened), now)


async def forget(connection: Connection, before: datetime) -> None:
    """Delete the rate limits of causes that had nothing to announce since `before`."""
    await connection.execute(FORGET, before)


def _limited(at: datetime, now: datetime) -> bool:
    """Tell whether the last announcement is too near; one far in the future was dated before a clock was set back."""
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
