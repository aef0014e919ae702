"""SQL that claims messages from the log for consumers, one row a claim, and settles them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from asyncpg import Record

from app.database.columns import Column, Parameters, RowArrays, insert, same
from app.database.connection import Connection
from app.store.relay.log import LOGGED, NEWEST, OF_ROUTE, WINDOW_BYTES, Outgoing, Reader, takes_sql
from app.store.subscriptions.subscriptions import COLUMNS, Subscription, subscription_of

# A consumer that holds messages longer does so in delivery_retry: a claim keeps the checkpoint back. The nightly proof
# knows those rows, and no claim.
CLAIM_LASTS = timedelta(seconds=30)
# A claim that waits longer than this for the cursor begins after the wait. A quarter of the shortest time of a claim.
WAIT_COUNTED_S = 0.25
# The most milliseconds of a receipt's duration; the nightly proof takes more for an error.
DURATION_MOST_MS = 3_600_000

# Whether delivery_retry has something of the subscription {0} to claim at the time {1}. Served by delivery_retry_due.
_STORED = """exists (
    select from (
      select 0 as replay union all
      select p.replay_id from replay p where p.subscription_id = {0} and p.state = 'running'
    ) r cross join lateral (
      select from delivery_retry d where d.subscription_id = {0} and d.replay = r.replay and d.due_at <= {1}
        and d.leased_until is null limit 1
    ) d
  )"""

# Whether anything can be claimed now. Served by delivery_retry_due, outbox_by_offset and the primary keys.
LOOK = f"""
select k.handle_key, {_STORED.format("$1", "$2")} as stored,
  exists (select from outbox o where o."offset" > k."offset") as logged
from pull_cursor k where k.subscription_id = $1
"""  # noqa: S608 -- constants

# A subscription whose messages consumers claim, with the version of its row. Served by subscription_name.
PULLED = f"""
select xmin::text as version, (
    select k.handle_key from pull_cursor k where k.subscription_id = subscription.subscription_id
  ) as handle_key, {COLUMNS}
from subscription where name = $1 and deleted_at is null
"""  # noqa: S608 -- constants

# Whether the row of the subscription {0} still has the version {1}: it was not changed, paused or deleted.
UNCHANGED = "exists (select from subscription u where u.subscription_id = {0} and u.xmin::text = {1})"

# Served by the primary key.
IS_UNCHANGED = f"select {UNCHANGED.format('$1', '$2')}"

# What a claim from the log is asked for, and its reader. `version`: that of the subscription's row.
OF_CLAIM = (
    Column("version", "text", given=True),
    Column("room", "int", given=True),
    Column("span", "int", given=True),
    Column("held_until", "timestamptz", given=True),
    Column("sweep_at", "timestamptz", given=True),
    Column("now", "timestamptz", given=True),
)


class ClaimStatement:
    """A claim from the log, with and without a condition on headers; `given`: what else it is asked for."""

    def __init__(self, sql_of: Callable[[Parameters], str], *given: Column) -> None:
        def of(route: Sequence[Column]) -> tuple[Parameters, str]:
            parameters = Parameters(*OF_CLAIM, *given, Column("subscription_id", "int"), *route)
            return parameters, sql_of(parameters)

        self.plain = of([column for column in OF_ROUTE if column.name != "headers"])
        self.by_headers = of(OF_ROUTE)

    def of(self, reader: Reader) -> tuple[Parameters, str]:
        """Return the parameters and the statement for a reader."""
        return self.plain if reader.route.headers is None else self.by_headers


def log_read(claimer: Parameters, span: str, judged: str, only_if: str = "true", *, further: bool = False) -> str:
    """Return the parts of a claim that read the log.

    `span`: how many entries. `judged`: the part of this name, with the entries of `matched`, and for each `waits`:
    whether it cannot be handed out yet. `only_if`: a condition of the claim. `further`: it follows a read that had
    nothing to hand out.

    It reads nothing if the subscription was changed since it was read: what was committed after a change of topics or
    filters is in this snapshot only with the change, and is never passed over by the former ones.

    `matched` reads at most `span` entries in log order. It stops at the entry that fills the room, as if none waits; a
    further read does not. There `unfit` is the first entry that can be handed out and for which there is no room; to
    look for it costs a claim a tenth of its time. `bodies` is bounded by it, and by the bytes of bodies that can be
    handed out. `reach` is the offset that the cursor moves to, and whether there may be more: before the first entry
    that does not fit, or else the end of what was read, which only then is looked up. `more` is null if the claim must
    not read. `waited` is how long the statement took until it had read the log, above all its wait for the lock on the
    cursor, by the database's own clock; 0 below WAIT_COUNTED_S.
    """
    entries = f"""from outbox o where o."offset" > k."offset" order by o."offset" limit {span}"""
    most, room = claimer["span" if further else "room"], claimer["room"]
    unfit = f""", unfit as materialized (
  select "offset" from judged where not waits order by "offset" offset {room} limit 1
)"""  # noqa: S608 -- constants
    return f"""cursor as materialized (
  select k."offset" from pull_cursor k
  where k.subscription_id = {claimer["subscription_id"]}
    and {UNCHANGED.format(claimer["subscription_id"], claimer["version"])} and {only_if}
  for update
), matched as materialized (
  select n.* from cursor k cross join lateral (
    select s.* from (
      select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.due_at, o.committed_at
      {entries}
    ) s where {takes_sql(claimer)} order by s."offset" limit {most}
  ) n
), {judged}{unfit if further else ""}, bodies as materialized (
  select j.*, h.producer_group, h.headers, h.content_type, h.body, h.traceparent,
    sum(h.size) over (order by j."offset" rows unbounded preceding) - h.size as before
  from judged j, lateral (
    select producer_group, headers, content_type, body, traceparent,
      case when j.waits then 0 else octet_length(body) end as size
    from half h where h.transaction_id = j.transaction_id and h.position = j.position offset 0
  ) h
  {f'where j."offset" < coalesce((select "offset" from unfit), {NEWEST})' if further else ""}
), reach as materialized (
  select coalesce(c."offset", case when m.count >= {most} then m.last else s.last end) as "offset",
    case when exists (select from cursor)
      then c."offset" is not null or m.count >= {most} or s.count >= {claimer["span"]} end as more,
    case when clock_timestamp() - statement_timestamp() >= interval '{WAIT_COUNTED_S} s'
      then clock_timestamp() - statement_timestamp() else interval '0' end as waited
  from (select count(*), max("offset") as last from matched) m
  cross join (
    select {'least(min("offset"), (select "offset" from unfit))' if further else 'min("offset")'} - 1 as "offset"
    from bodies where before >= {WINDOW_BYTES} and not waits
  ) c
  cross join lateral (
    select count(*), max(n."offset") as last
    from cursor k cross join lateral (select o."offset" {entries}) n where m.count < {most}
  ) s
)"""  # noqa: S608 -- constants


# The columns of a claim's row, from `taken`.
MADE = {
    "lowest": 'min("offset")',
    "size": "count(*)",
    "transaction_ids": 'array_agg(transaction_id order by "offset")',
    "positions": 'array_agg(position order by "offset")',
}


def claimed(claimer: Parameters, made: Mapping[str, str]) -> str:
    """Return the last parts of a claim from the log: the row of the claim, the cursor's move, and the messages.

    The times of the claim begin after `waited`, so that no long wait for the cursor shortens them.
    """
    waited = "(select r.waited from reach r)"
    row = {
        "subscription_id": claimer["subscription_id"],
        "claimed_at": f"{claimer['now']} + {waited}",
        "held_until": f"{claimer['held_until']} + {waited}",
        "sweep_at": f"{claimer['sweep_at']} + {waited}",
        **made,
    }
    return f"""made as (
  {insert("pull_claim", row, "from taken having count(*) > 0")}
  returning claim_id
), moved as (
  update pull_cursor k set "offset" = r."offset" from reach r
  where k.subscription_id = {claimer["subscription_id"]} and k."offset" < r."offset"
)
select {", ".join(f't."{name}"' for name in LOGGED)}, m.claim_id, null::boolean as more,
  null::timestamptz as claimed_at, null::bigint as put_off
from made m cross join taken t
union all
select {", ".join(["null"] * len(LOGGED))}, null, r.more, {claimer["now"]} + r.waited, (select count(*) from later)
from reach r
order by "offset" nulls last
"""  # noqa: S608 -- constants


# Delayed messages that are not due are not handed out.
def _judged(claimer: Parameters) -> str:
    return f"""judged as not materialized (
  select m.*, coalesce(m.due_at > {claimer["now"]}, false) as waits from matched m
)"""  # noqa: S608 -- constants


# One statement, so one snapshot, and the lock on the cursor lasts as long as the statement and its commit. A claim that
# waited for the lock reads the newest cursor and its own, older snapshot of the log: it finds less, and skips nothing,
# because offsets become visible in order (see RECORD_ENDS).
# What waits goes to delivery_retry (`later`), where the next claims find it.
def _claim_new(claimer: Parameters, only_if: str = "true", *, further: bool = False) -> str:
    return f"""
with {log_read(claimer, claimer["span"], _judged(claimer), only_if, further=further)}, taken as materialized (
  select b.* from bodies b, reach r where b."offset" <= r."offset" and not b.waits
), later as (
  insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts, due_at,
    waiting_since)
  select {claimer["subscription_id"]}, b.transaction_id, b.position, b."offset", b.topic, b.key, 0, b.due_at, b.due_at
  from bodies b, reach r where b."offset" <= r."offset" and b.waits
  on conflict do nothing
  returning 1
), {claimed(claimer, MADE)}"""  # noqa: S608 -- constants


CLAIM_NEW = ClaimStatement(_claim_new)
CLAIM_FURTHER = ClaimStatement(partial(_claim_new, further=True))

# The same in one statement for a consumer that goes on: it claims nothing if something else comes first. Nothing is
# locked then.
CLAIM_NEXT = ClaimStatement(
    lambda claimer: _claim_new(claimer, f"not {_STORED.format(claimer['subscription_id'], claimer['now'])}")
)

# $1 is the subscription, $2 the time, $3 the version of the subscription's row, or null: any. `place` is the number of
# a message in its claim, from 1.
SETTLED = RowArrays(
    Column("claim_id", "bigint", "epoch"),
    Column("place", "smallint"),
    Column("transaction_id", "uuid"),
    Column("position", "smallint"),
    Column("offset", "bigint"),
    Column("digest", "bytea"),
    Column("at", "timestamptz"),
    first=4,
)

# What of a request is held: `locked` locks the claims in their order, so two requests never deadlock, and reads them
# after other requests have changed them. A claim is over at its time, even if no worker has found it yet. Upkeep owns
# the messages of a day that is not open; `days` are the open ones between the first and the last message. A database
# that went back gives the number of a lost claim to another one, so the time of the claim, to the microsecond, must be
# that of the handle as well.
_HELD = f"""
with asked as materialized (
  select * from {SETTLED.unnest("a", ordinality="n")}
), locked as materialized (
  select c.claim_id, c.size, c.settled, c.claimed_at from pull_claim c
  where c.subscription_id = $1 and c.claim_id = any(array(select distinct claim_id from asked)) and c.held_until > $2
    and ($3::text is null or {UNCHANGED.format("$1", "$3")})
  order by c.claim_id for update
), days as materialized (
  select d.low, d.high from day d where d.state = 'open'
    and d.high > (select transaction_id from asked order by transaction_id limit 1)
    and d.low <= (select transaction_id from asked order by transaction_id desc limit 1)
), held as materialized (
  select a.*, l.claimed_at from asked a join locked l on l.claim_id = a.claim_id
  where a.at = l.claimed_at and a.place <= l.size and a.place <> all(l.settled)
    and exists (select from days d where d.low <= a.transaction_id and d.high > a.transaction_id)
), done as materialized (
  select h.claim_id, array_agg(h.place) as places, count(*) + cardinality(l.settled) >= l.size as whole
  from held h join locked l on l.claim_id = h.claim_id group by h.claim_id, l.settled, l.size
), gone as (
  delete from pull_claim c
  where c.subscription_id = $1 and c.claim_id = any(array(select claim_id from done where whole))
), kept as (
  update pull_claim c set settled = c.settled || d.places from done d
  where c.subscription_id = $1 and c.claim_id = d.claim_id
    and c.claim_id = any(array(select claim_id from done where not whole))
)"""  # noqa: S608 -- constants

_RECEIPT = same("transaction_id", "position", "offset", "digest", of="h") | {
    "subscription_id": "$1",
    "replay": "0",
    "outcome": "'delivered'",
    "attempts": "1",
    "first_at": "h.claimed_at",
    "duration_ms": f"least({DURATION_MOST_MS}, 1000 * greatest(0, extract(epoch from $2 - h.claimed_at)))::int",
    "settled_at": "greatest($2::timestamptz, h.claimed_at)",
}

# Acknowledge: each message that is held gets its receipt. Primary keys. What is held has none, so the fast statement
# fails if it finds one. To look for each before it is written takes a fifth of the time.
ACKNOWLEDGE = f"""{_HELD}, received as (
  {insert("receipt", _RECEIPT, "from held h")}
)
select n::int from held
"""  # noqa: S608 -- constants

# The same where a message may have a receipt, which is kept.
ACKNOWLEDGE_ANY = f"""{_HELD}, received as (
  {insert("receipt", _RECEIPT, "from held h")} on conflict do nothing
)
select n::int from held
"""  # noqa: S608 -- constants

# Take messages out of their claims, for what is settled in the same database transaction. Primary keys.
TAKE_BACK = f"""{_HELD}
select h.n::int, o.topic, o.key, o.due_at, o.committed_at, h.claimed_at
from held h join lateral (
  select * from outbox o where o.transaction_id = h.transaction_id and o.position = h.position offset 0
) o on true
"""  # noqa: S608 -- constants


# Primary key.
PACED_UNTIL = "select paced_until from pull_cursor where subscription_id = $1 for update"
PACE = "update pull_cursor set paced_until = $2 where subscription_id = $1"


@dataclass(frozen=True, slots=True)
class ClaimLook:
    """Whether delivery_retry (`stored`) or the log has something to claim. `handle_key` signs handles."""

    handle_key: UUID
    stored: bool
    logged: bool


@dataclass(slots=True)
class PulledSubscription:
    """A subscription whose messages consumers claim, as it was when its row had this version.

    `goes_on`: the last claim of this process left something in the log.
    """

    subscription: Subscription
    version: str
    handle_key: UUID
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class NewClaim:
    """The messages of a claim from the log, in the order of offsets; `claim_id` is None if there are none.

    `claimed_at`: when the claim had the cursor. `more`: the log goes on after what was read. `refused`: nothing was
    read, because the subscription was changed since it was read itself, or because something else comes first.
    `put_off`: how many messages of the log went to delivery_retry.
    """

    claim_id: int | None
    claimed_at: datetime
    messages: list[Outgoing]
    more: bool
    refused: bool
    put_off: int


@dataclass(slots=True)
class HeldMessage:
    """A message that a consumer holds, as its handle says. `epoch` is the number of its claim, `place` that in it.

    It is not changed after it is created; a frozen class takes several times as long to make.
    """

    subscription_id: int
    replay: int
    epoch: int
    place: int
    attempt: int
    transaction_id: UUID
    position: int
    offset: int
    at: datetime
    digest: bytes


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What the log has about a message that was taken out of its claim."""

    topic: str
    key: str | None
    due_at: datetime | None
    committed_at: datetime
    claimed_at: datetime


async def look(connection: Connection, subscription_id: int, now: datetime) -> ClaimLook | None:
    """Return whether there is something to claim; None if the subscription is of another type, or is gone."""
    row = await connection.fetchrow(LOOK, subscription_id, now)
    return None if row is None else ClaimLook(**row)


async def is_unchanged(connection: Connection, pulled: PulledSubscription) -> bool:
    """Return whether the row of the subscription is as it was read."""
    unchanged: bool = await connection.fetchval(IS_UNCHANGED, pulled.subscription.subscription_id, pulled.version)
    return unchanged


async def pulled(connection: Connection, name: str) -> PulledSubscription | Subscription | None:
    """Return a subscription by name, without its cursor if it is of another type, or None."""
    row = await connection.fetchrow(PULLED, name)
    if row is None:
        return None
    fields = dict(row)
    version, handle_key = fields.pop("version"), fields.pop("handle_key")
    found = subscription_of(fields)
    return found if handle_key is None else PulledSubscription(found, version, handle_key)


async def paced_until(connection: Connection, subscription_id: int) -> datetime | None:
    """Lock the cursor; return when the next message may be claimed. Needs a database transaction."""
    until: datetime | None = await connection.fetchval(PACED_UNTIL, subscription_id)
    return until


async def pace(connection: Connection, subscription_id: int, until: datetime) -> None:
    """Note when the next message may be claimed."""
    await connection.execute(PACE, subscription_id, until)


async def claim_new(
    connection: Connection,
    pulled: PulledSubscription,
    room: int,
    span: int,
    until: datetime,
    now: datetime,
    *,
    further: bool = False,
) -> NewClaim:
    """Claim up to `room` messages of the next `span` log entries until a time; refused if the subscription changed.

    As many entries as there is room for are read at most, also of those that wait; with `further` all of them.
    """
    reader = reader_of(pulled.subscription)
    parameters, sql = (CLAIM_FURTHER if further else CLAIM_NEW).of(reader)
    arguments = parameters.arguments(reader, **asked(pulled, room, span, until, now))
    return new_claim(await connection.fetch(sql, *arguments))


async def claim_next(
    connection: Connection, pulled: PulledSubscription, room: int, span: int, until: datetime, now: datetime
) -> NewClaim:
    """Claim as `claim_new`; refused also if rows of delivery_retry are due."""
    reader = reader_of(pulled.subscription)
    parameters, sql = CLAIM_NEXT.of(reader)
    arguments = parameters.arguments(reader, **asked(pulled, room, span, until, now))
    return new_claim(await connection.fetch(sql, *arguments))


def reader_of(subscription: Subscription) -> Reader:
    """Return the reader of a subscription's claims."""
    return Reader(subscription.subscription_id, 0, subscription.route, 1, 0, 0, NEWEST)


def asked(pulled: PulledSubscription, room: int, span: int, until: datetime, now: datetime) -> dict[str, Any]:
    """Return the values of OF_CLAIM."""
    sweep_at = min(until, now + CLAIM_LASTS)
    return {
        "version": pulled.version,
        "room": room,
        "span": span,
        "held_until": until,
        "sweep_at": sweep_at,
        "now": now,
    }


def new_claim(found: Sequence[Record]) -> NewClaim:
    """Return what a claim from the log returned."""
    *rows, last = found
    logged = len(LOGGED)
    return NewClaim(
        rows[0]["claim_id"] if rows else None,
        last["claimed_at"],
        [Outgoing(*row[:logged]) for row in rows],
        more=bool(last["more"]),
        refused=last["more"] is None,
        put_off=last["put_off"],
    )


async def acknowledge(
    connection: Connection,
    subscription_id: int,
    messages: Sequence[HeldMessage],
    now: datetime,
    version: str | None = None,
    *,
    any_receipts: bool = False,
) -> set[int]:
    """Settle messages of claims with a receipt each; return the indexes of those that were held.

    With `version`, none if the row of the subscription has another one. Raises asyncpg.UniqueViolationError if a
    message has a receipt already, unless `any_receipts`.
    """
    statement = ACKNOWLEDGE_ANY if any_receipts else ACKNOWLEDGE
    rows = await connection.fetch(statement, subscription_id, now, version, *SETTLED.arrays(messages))
    return {row["n"] - 1 for row in rows}


async def take_back(
    connection: Connection, subscription_id: int, messages: Sequence[HeldMessage], now: datetime
) -> dict[int, TakenBack]:
    """Take messages out of their claims; return those that were held, by index. Needs a database transaction."""
    rows = await connection.fetch(TAKE_BACK, subscription_id, now, None, *SETTLED.arrays(messages))
    return {row["n"] - 1: TakenBack(*row[1:]) for row in rows}
