"""SQL that claims rows of delivery_retry: retries, delayed messages, and messages that wait for their key."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database.columns import Column, RowArrays, field_names
from app.database.connection import Connection
from app.store.relay.leases import Lease
from app.store.relay.log import HASH, NEWEST, WINDOW_BYTES, Outgoing

# The most rows of one key in a claim beside the first one; they are sent one after another. And the most of all keys of
# a stream.
RUN, RUNS = 128, 1000
# A claim that finds nothing for a stream passes all due rows of its subscription. So many of them make the claim slow.
MANY_DUE = 100

CLAIMANTS = RowArrays(
    Column("name", "text", "lease.name"),
    Column("epoch", "bigint", "lease.epoch"),
    Column("subscription_id", "int"),
    Column("replay", "int"),
    Column("shards", "int"),
    Column("shard", "int"),
    Column("room", "int"),
    Column("ordered", "bool"),
    Column("hold", "bool"),
    Column("reached", "bigint"),
)
# The parameters after those of the claimants.
_OWNER, _UNTIL, _NOW = (f"${CLAIMANTS.next + number}" for number in range(3))

# The source of each field of a claimed message: its row (c), the outbox (o) or its half (h).
MESSAGE = {
    "offset": 'c."offset"',
    "transaction_id": "c.transaction_id",
    "position": "c.position",
    "topic": "c.topic",
    "key": "c.key",
    "tag": "coalesce(c.tag, o.tag)",
    "due_at": "o.due_at",
    "committed_at": "coalesce(c.committed_at, o.committed_at)",
    "producer_group": "coalesce(c.producer_group, h.producer_group)",
    "headers": "coalesce(c.headers, h.headers)",
    "content_type": "coalesce(c.content_type, h.content_type)",
    "body": "coalesce(c.body, h.body)",
    "traceparent": "h.traceparent",
    "used": "c.attempts",
    "first_at": "c.first_at",
    "claim": "c.lease_epoch",
    # A row that an older version of Halfnote wrote has no `waiting_since`.
    "waiting_since": "coalesce(c.waiting_since, c.due_at)",
    "last_error": "c.last_error",
}

FREE = "({0}.leased_until is null or {0}.leased_until <= {1})"
# Upkeep owns the rows of a day that is not open, except rows with a copy of their message.
OPEN = """({0}.body is not null or exists (
    select from day y where y.low <= {0}.transaction_id and y.high > {0}.transaction_id and y.state = 'open'
  ))"""
# The bytes of a row's body, `own` if the row has a copy. They need no TOAST read.
BYTES = """coalesce({0}.own, (
    select octet_length(h.body) from half h
    where h.transaction_id = {0}.transaction_id and h.position = {0}.position offset 0
  ), 0)"""

# A dead letter of an earlier message of the row's key.
DEAD_BEFORE = """exists (
    select from dead_letter x
    where x.subscription_id = {0}.subscription_id and x.replay = {0}.replay and x.key = {0}.key
      and x."offset" < {0}."offset"
  )"""

# `waiting` finds the streams that have rows, one descent for each: most subscriptions have none, and are not looked up.
# `streams` locks the leases of those with a row that is due against a new claim until the commit, as a settle does; a
# lock without one would be a commit for nothing. So a former holder of a shard
# claims nothing, and a new one, which frees the claims of the former, finds all of them.
# 1. `due` locks the rows that are due, oldest first, one range of delivery_retry_due for each stream. SKIP LOCKED and
#    the epoch of the row ensure that two workers that both assume they hold a stream never get the same row. With
#    `ordered` a row with a key is claimable only if no lower offset of its key was sent before or is due
#    (delivery_retry_key), and if the stream has read the log up to its offset: before that, lower ones may be in the
#    log alone. With `hold` it is claimable only if no lower offset of its key is dead either (dead_letter_key). A
#    delayed message that is not due blocks no other.
# 2. `heads` are as many of them as their bodies have room in WINDOW_BYTES, at least one for each stream.
# 3. `run` adds the next rows of the same key, up to the first that is not claimable, if their bodies have room too.
#    They are sent one after another. A row that was sent before brings none: if it fails again, all would go back.
# 4. `claimed` updates by ctid, because a join would be planned as a scan of the whole table. The row lock keeps the
#    ctid valid. The condition is repeated, because `run` locks nothing.
# A stream that gets none of the rows that are due has one row without a message; it says whether they are MANY_DUE.
# The message comes from outbox and half by primary key, one partition each, or from the row's own copy.
CLAIM_RETRIES = f"""
with recursive waiting as (
  (select subscription_id, replay from delivery_retry order by subscription_id, replay limit 1)
  union all
  select n.* from waiting w, lateral (
    select d.subscription_id, d.replay from delivery_retry d
    where (d.subscription_id, d.replay) > (w.subscription_id, w.replay)
    order by d.subscription_id, d.replay limit 1
  ) n
), streams as materialized (
  select s.* from {CLAIMANTS.unnest("s", ordinality="n")}
  join lease l on l.name = s.name and l.owner = {_OWNER} and l.epoch = s.epoch
  where (s.subscription_id, s.replay) in (select subscription_id, replay from waiting) and exists (
    select from delivery_retry d
    where d.subscription_id = s.subscription_id and d.replay = s.replay and d.due_at <= {_NOW}
      and {FREE.format("d", _NOW)}
  )
  order by s.name for share of l
), due as materialized (
  select d.*, s.n, s.hold, s.reached, s.ordered and d.key is not null and d.first_at is null as runs
  from streams s, lateral (
    select d.ctid as at, d.first_at, d.subscription_id, d.replay, d.transaction_id, d.position, d.key, d."offset",
      d.due_at, octet_length(d.body) as own
    from delivery_retry d
    where d.subscription_id = s.subscription_id and d.replay = s.replay and d.due_at <= {_NOW}
      and {FREE.format("d", _NOW)}
      and (s.shards = 1 or {HASH.format("d")} % s.shards = s.shard)
      and {OPEN.format("d")}
      and (not s.ordered or d.key is null or d."offset" <= s.reached and not exists (
        select from delivery_retry b
        where b.subscription_id = d.subscription_id and b.replay = d.replay and b.key = d.key
          and b."offset" < d."offset" and (b.first_at is not null or b.due_at <= {_NOW})
      ))
      and not (s.hold and d.key is not null and {DEAD_BEFORE.format("d")})
    order by d.due_at, d."offset" limit s.room for update skip locked
  ) d
), sized as materialized (
  select d.*, {BYTES.format("d")} as bytes from due d
), heads as materialized (
  select d.*, sum(d.bytes) over (partition by d.n) as taken from (
    select d.*, sum(d.bytes) over (partition by d.n order by d.due_at, d."offset") - d.bytes as before from sized d
  ) d where d.before < {WINDOW_BYTES}
), run as materialized (
  select f.at from (
    select n.at, h.taken + sum(n.bytes) over (partition by h.n order by h.due_at, h."offset", n."offset") - n.bytes
      as before, row_number() over (partition by h.n order by h.due_at, h."offset", n."offset") as number
    from heads h, lateral (
      select n.at, n."offset", {BYTES.format("n")} as bytes,
        bool_and(n.claimable) over (order by n."offset") as unbroken from (
        select n.ctid as at, n.transaction_id, n.position, n."offset", octet_length(n.body) as own,
          n.due_at <= {_NOW} and {FREE.format("n", _NOW)} and {OPEN.format("n")}
            and not (h.hold and {DEAD_BEFORE.format("n")}) as claimable
        from delivery_retry n
        where n.subscription_id = h.subscription_id and n.replay = h.replay and n.key = h.key
          and n."offset" > h."offset" and n."offset" <= h.reached
          and (n.first_at is not null or n.due_at <= {_NOW})
        order by n."offset" limit {RUN}
      ) n
    ) n
    where h.runs and n.unbroken
  ) f where f.before < {WINDOW_BYTES} and f.number <= {RUNS}
), claimed as (
  update delivery_retry r set leased_until = {_UNTIL}, lease_epoch = r.lease_epoch + 1
  where r.ctid = any(array(select at from heads union all select at from run)) and {FREE.format("r", _NOW)}
  returning r.*
)
select {", ".join(MESSAGE[name] for name in field_names(Outgoing))}, s.n::int,
  c."offset" is null and coalesce((
    select true from delivery_retry d
    where d.subscription_id = s.subscription_id and d.replay = s.replay and d.due_at <= {_NOW}
      and {FREE.format("d", _NOW)}
    offset {MANY_DUE - 1} limit 1
  ), false)
from streams s
left join claimed c on c.subscription_id = s.subscription_id and c.replay = s.replay
  and (s.shards = 1 or {HASH.format("c")} % s.shards = s.shard)
left join lateral (
  select * from outbox o where o.transaction_id = c.transaction_id and o.position = c.position and c.body is null
  offset 0
) o on true left join lateral (
  select * from half h where h.transaction_id = c.transaction_id and h.position = c.position and c.body is null
  offset 0
) h on true
order by c."offset"
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class Claimant:
    """A stream with room for `room` retries, under its lease.

    `ordered`: in the order of keys. `hold`: a dead letter blocks its key. `reached`: with `ordered`, the offset after
    which no message of a key is claimed.
    """

    lease: Lease
    subscription_id: int
    replay: int
    shards: int
    shard: int
    room: int
    ordered: bool
    hold: bool
    reached: int = NEWEST


@dataclass(frozen=True, slots=True)
class FoundRetries:
    """What a claimant got: messages in offset order.

    `passed`: rows are due, and none of them could be claimed. `passed_many`: they are MANY_DUE or more.
    """

    messages: list[Outgoing]
    passed: bool = False
    passed_many: bool = False


async def claim_retries(
    connection: Connection, owner: str, claimants: Sequence[Claimant], until: datetime, now: datetime
) -> list[FoundRetries]:
    """Claim due retries until `until` for each claimant.

    A claimant may get more than its room, because the first row of a key brings the next ones, and less, because the
    bodies have at most WINDOW_BYTES, not counting the last; and none if the owner lost its lease.
    """
    rows = await connection.fetch(CLAIM_RETRIES, *CLAIMANTS.arrays(claimants), owner, until, now)
    found: list[list[Outgoing]] = [[] for _ in claimants]
    passed: dict[int, bool] = {}
    for *message, n, many in rows:
        if message[0] is None:
            passed[n] = many
        else:
            found[n - 1].append(Outgoing(*message))
    return [FoundRetries(messages, n in passed, passed.get(n, False)) for n, messages in enumerate(found, 1)]


def is_full(claimant: Claimant, claimed: Sequence[Outgoing]) -> bool:
    """Return whether a claim used all its room, so that more may be due. In the order of keys a key uses one place."""
    keys = [message.key for message in claimed]
    places = len(set(keys) - {None}) + keys.count(None) if claimant.ordered else len(keys)
    return places >= claimant.room or sum(len(message.body) for message in claimed) >= WINDOW_BYTES
