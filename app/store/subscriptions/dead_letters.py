"""Read dead letters: deliveries of one subscription that failed for good, until a person redelivers or drops them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

from app.database.connection import Connection
from app.database.windowed_read import ListWindow, count_windows, read_windows
from app.field_rules import ERROR_KIND_MAX
from app.topic_patterns import TopicPatterns, match_sql
from app.verdicts import SubscriptionState

# A list reads this many rows at a time, until its page is full or the time is over: one request with a filter that few
# rows match must not read a million dead letters.
WINDOW_ROWS = 2000
SCAN_S = 0.15
# A list is counted for this long; it costs as much as the page.
COUNT_S = 0.05
# Counting stops at this number.
COUNTED_MOST = 100_000

PLACE = 'd.died_at, d.transaction_id, d."position", d.subscription_id, d.replay'
NEWEST_FIRST = ", ".join(f"{column} desc" for column in PLACE.split(", "))

# $1: died at that time or later; $2…$6: the upper place; $7…$11: the lower place. Served by a backward range scan of
# dead_letter_died or, with a subscription ($17, and in both places), of dead_letter_of.
RANGE = {
    "all": f"d.died_at >= $1 and ({PLACE}) < ($2, $3::uuid, $4::smallint, $5::int, $6::int)",
    "subscription": "d.subscription_id = ${n} and d.died_at >= $1 and (d.subscription_id, d.died_at, d.transaction_id, "
    'd."position", d.replay) < ($5::int, $2, $3::uuid, $4::smallint, $6::int)',
}
ABOVE = f"({PLACE}) >= ($7, $8::uuid, $9::smallint, $10::int, $11::int)"
# Errors that differ only in addresses, ids and large numbers are one kind. A status such as 503 stays.
_VARYING = (
    r"[0-9]+(?:\.[0-9]+){3}(?::[0-9]+)?"
    r"|\y[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\y"
    r"|\y(?=[a-f]*[0-9])[0-9a-f]{4,}\y"
)
NO_ERROR = "none"


def kind_sql(error: str) -> str:
    """Return the SQL of the kind of an error text, which is null for a dead letter without one."""
    line = f"regexp_replace(coalesce({error}, '{NO_ERROR}'), '[[:cntrl:]]+', ' ', 'g')"
    return f"left(regexp_replace({line}, '{_VARYING}', '#', 'g'), {ERROR_KIND_MAX})"


# A null argument is no filter.
MEETS = f"""($12::text is null or d.topic = $12) and ($13::text is null or d.key = $13)
  and ($14::text is null or d.reason = $14) and ($15::text is null or {kind_sql("d.error")} = $15)"""

_OF_MESSAGE, _, _OF_ERROR = MEETS.partition("\n  and ")

# Upkeep removes the dead letters of a deleted subscription, so no statement here shows them. Rows of subscription are
# never removed. The few that are deleted are read once: EXISTS would read a subscription for each dead letter.
LIVE = "d.subscription_id not in (select s.subscription_id from subscription s where s.deleted_at is not null)"

# The lowest place of the next window; no row if fewer rows than one window are left.
FLOORS = {
    name: f"""
select {PLACE} from dead_letter d where {bounds.format(n=7)} order by {NEWEST_FIRST} offset {WINDOW_ROWS - 1} limit 1
"""  # noqa: S608 -- constants of this module
    for name, bounds in RANGE.items()
}

PAGES = {
    name: f"""
select {PLACE}, s.name as subscription, d."offset", d.topic, d.key, d.attempts, d.reason, d.status, d.error
from dead_letter d cross join lateral (
  select s.name from subscription s where s.subscription_id = d.subscription_id and s.deleted_at is null offset 0
) s
where {bounds.format(n=17)} and {ABOVE} and {MEETS}
order by {NEWEST_FIRST} limit $16
"""  # noqa: S608
    for name, bounds in RANGE.items()
}
# A kind is made once for each error text (OFFSET 0 keeps the condition out of the scan). Every dead letter of the range
# is read, as with each filter that few meet.
COUNTS_OF_KIND = {
    name: f"""
select least(coalesce(sum(d.n), 0), $16)::bigint from (
  select d.reason, d.error, count(*) as n from dead_letter d
  where {bounds.format(n=17)} and {ABOVE} and {_OF_MESSAGE} and {LIVE} group by d.reason, d.error offset 0
) d where {_OF_ERROR}
"""  # noqa: S608
    for name, bounds in RANGE.items()
}
# A subscriber's key reads only dead letters of topics in its scope ($18).
SCOPED_PAGE = PAGES["subscription"].replace(
    f"and {MEETS}",
    f"""and {MEETS}
  and {match_sql("d.topic", "$18::text[]")}""",
)
COUNTS = {
    name: f"""
select count(*) from (
  select from dead_letter d where {bounds.format(n=17)} and {ABOVE} and {MEETS}
    and {LIVE}
  limit $16
) found
"""  # noqa: S608
    for name, bounds in RANGE.items()
}

SCOPED_COUNT = COUNTS["subscription"].replace(
    f"and {MEETS}",
    f"""and {MEETS}
    and {match_sql("d.topic", "$18::text[]")}""",
)

# Rows that one answer with groups reads at most, the newest; in windows of so many, until the time is over.
GROUPED_MOST = 100_000
GROUPED_ROWS = 10_000
GROUPED_S = 0.15

# The lowest place of the next window of groups; no row if fewer rows than one window are left.
GROUP_FLOORS = {
    name: floor.replace(f"offset {WINDOW_ROWS - 1}", f"offset {GROUPED_ROWS - 1}") for name, floor in FLOORS.items()
}

# One pass over a window counts by error text, and the kind is made once for each text. Texts and subscriptions are
# joined to the groups and not to the rows, in memory (GROUP_PLANS). `looked_at`: all rows read, those included that the
# filter leaves out.
GROUPS = {
    name: f"""
with texts as (
  select r.subscription_id, r.reason, r.error, count(*) as looked_at, count(*) filter (where r.meets) as n,
    max(r.status) filter (where r.meets) as status, min(r.died_at) filter (where r.meets) as first_at,
    max(r.died_at) filter (where r.meets) as last_at
  from (
    select d.subscription_id, d.reason, d.error, d.status, d.died_at, {_OF_MESSAGE} as meets
    from dead_letter d where {bounds.format(n=17)} and {ABOVE} order by {NEWEST_FIRST} limit $16
  ) r group by r.subscription_id, r.reason, r.error
), named as materialized (
  select e.error, {kind_sql("e.error")} as kind
  from (select distinct coalesce(d.error, '{NO_ERROR}') as error from texts d where d.n > 0) e
), kinds as (
  select d.subscription_id, d.reason, k.kind, (array_agg(d.error order by d.last_at desc))[1] as error,
    max(d.status) as status, sum(d.n)::bigint as n, min(d.first_at) as first_at, max(d.last_at) as last_at
  from texts d join named k on k.error = coalesce(d.error, '{NO_ERROR}')
  where d.n > 0 and ($14::text is null or d.reason = $14) and ($15::text is null or k.kind = $15) group by 1, 2, 3
)
select l.looked_at, g.* from (select coalesce(sum(looked_at), 0)::bigint as looked_at from texts) l left join (
  select s.name as subscription, k.reason, k.kind, k.error, k.status, k.n, k.first_at, k.last_at
  from kinds k join subscription s on s.subscription_id = k.subscription_id and s.deleted_at is null
) g on true
"""  # noqa: S608
    for name, bounds in RANGE.items()
}
SCOPED_GROUPS = GROUPS["subscription"].replace(
    f"{_OF_MESSAGE} as meets", f"""{_OF_MESSAGE} and {match_sql("d.topic", "$18::text[]")} as meets"""
)

# A generic plan assumes that the range is small, so it would read and sort all of it; and a plan that assumes a large
# batch would read the whole table. So each statement is planned for its arguments, with index probes only and, over a
# range, in the order of the index.
PROBES = "; ".join(
    f"set local {setting}"
    for setting in (
        "plan_cache_mode = force_custom_plan",
        *(f"enable_{node} = off" for node in ("seqscan", "hashjoin", "mergejoin")),
    )
)
OWN_PLANS = f"{PROBES}; set local enable_sort = off"
GROUP_PLANS = f"{OWN_PLANS}; set local enable_hashjoin = on"

# Primary keys. The message comes from the tables of its day, unless the dead letter has its own copy.
ONE = """
select d.died_at, d.transaction_id, d.position, d.subscription_id, d.replay, d."offset", d.topic, d.key, d.attempts,
  d.first_at, d.reason, d.status, d.error, d.response, coalesce(d.producer_group, h.producer_group) as producer_group,
  coalesce(d.tag, h.tag) as tag, coalesce(d.headers, h.headers) as headers,
  coalesce(d.content_type, h.content_type) as content_type, coalesce(d.body, h.body) as body,
  coalesce(d.committed_at, o.committed_at) as committed_at
from dead_letter d
left join lateral (
  select * from half h where h.transaction_id = d.transaction_id and h.position = d.position and d.body is null offset 0
) h on true
left join lateral (
  select * from outbox o
  where o.transaction_id = d.transaction_id and o.position = d.position and d.body is null offset 0
) o on true
where d.subscription_id = $1 and d.replay = $2 and d.transaction_id = $3 and d.position = $4
"""

# Served by subscription_name, which leaves out deleted subscriptions.
SUBSCRIPTIONS = "select subscription_id, name, state from subscription where name = any($1) and deleted_at is null"

# There are few subscriptions. Each is counted in dead_letter_of, up to a limit.
PER_SUBSCRIPTION = f"""
select s.name, (
  select count(*) from (
    select from dead_letter d where d.subscription_id = s.subscription_id limit {COUNTED_MOST}
  ) dead
) as dead_letters
from subscription s where s.deleted_at is null
"""  # noqa: S608


LOWEST_ID = UUID(int=0)


@dataclass(frozen=True, slots=True, order=True)
class DeadLetterCursor:
    """A dead letter's place in a list; lists go from the highest place to the lowest."""

    died_at: datetime
    transaction_id: UUID = LOWEST_ID
    position: int = 0
    subscription_id: int = 0
    replay: int = 0

    @property
    def columns(self) -> tuple[datetime, UUID, int, int, int]:
        """The columns of the place, in the order of the statements' arguments."""
        return self.died_at, self.transaction_id, self.position, self.subscription_id, self.replay


LOWEST = DeadLetterCursor(datetime(1, 1, 1, tzinfo=UTC))
HIGHEST = DeadLetterCursor(datetime(9999, 12, 31, tzinfo=UTC))


@dataclass(frozen=True, slots=True)
class DeadLetterSearch:
    """Which dead letters a list holds: died at `died_after` or later, and below the place `below`. None: no filter.

    `kind`: only errors of this kind (`kind_sql`). `topics`: only topics that these patterns match. It needs a
    subscription and applies to pages and groups only.
    """

    subscription_id: int | None = None
    topic: str | None = None
    key: str | None = None
    reason: str | None = None
    kind: str | None = None
    died_after: datetime = LOWEST.died_at
    below: DeadLetterCursor = HIGHEST
    topics: TopicPatterns | None = None

    @property
    def source(self) -> str:
        """Which index serves the search."""
        return "all" if self.subscription_id is None else "subscription"

    @property
    def own(self) -> tuple[int, ...]:
        """The further arguments that the statements of `source` need."""
        return () if self.subscription_id is None else (self.subscription_id,)

    def range_to(self, *floor: DeadLetterCursor) -> tuple[object, ...]:
        """Return the time and the places that limit the statements' range."""
        places = (self.below, *floor)
        if self.subscription_id is not None:
            places = tuple(replace(place, subscription_id=self.subscription_id) for place in places)
        return self.died_after, *(column for place in places for column in place.columns)


@dataclass(frozen=True, slots=True)
class DeadLetterSummary:
    """A dead letter in a list."""

    place: DeadLetterCursor
    subscription: str
    offset: int
    topic: str
    key: str | None
    attempts: int
    reason: str
    status: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class DeadLetterGroup:
    """Dead letters of one subscription, reason and kind of error; `error` and `status` are of the newest of them."""

    subscription: str
    reason: str
    kind: str
    error: str | None
    status: int | None
    count: int
    first_at: datetime
    last_at: datetime


DeadLetterOrder = Literal["count", "last", "first", "subscription"]
_ORDERS: dict[DeadLetterOrder, Callable[[DeadLetterGroup], Any]] = {
    "count": lambda one: (-one.count, -one.last_at.timestamp(), one.subscription, one.reason, one.kind),
    "last": lambda one: (-one.last_at.timestamp(), one.subscription, one.reason, one.kind),
    "first": lambda one: (one.first_at, one.subscription, one.reason, one.kind),
    "subscription": lambda one: (one.subscription, -one.count, one.reason, one.kind),
}


@dataclass(frozen=True, slots=True)
class DeadLetterGroups:
    """The first groups, and how many there are. `looked_at`: the rows read, the newest. `complete`: they are all."""

    rows: list[DeadLetterGroup]
    count: int
    looked_at: int
    complete: bool


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter with its message; `headers` is JSON text. `committed_at` None: not on record."""

    place: DeadLetterCursor
    offset: int
    topic: str
    key: str | None
    attempts: int
    first_at: datetime | None
    reason: str
    status: int | None
    error: str | None
    response: str | None
    producer_group: str
    tag: str | None
    headers: str | None
    content_type: str
    body: bytes = field(repr=False)
    committed_at: datetime | None


@dataclass(frozen=True, slots=True)
class Named:
    """A subscription that a request names."""

    subscription_id: int
    name: str
    state: SubscriptionState


async def named(connection: Connection, names: Sequence[str]) -> dict[str, Named]:
    """Return the subscriptions of these names; those that are unknown or deleted are left out."""
    rows = await connection.fetch(SUBSCRIPTIONS, list(names))
    return {row["name"]: Named(**{**row, "state": SubscriptionState(row["state"])}) for row in rows}


async def list_dead_letters(
    connection: Connection, wanted: DeadLetterSearch, limit: int, *, scan_s: float = SCAN_S
) -> tuple[list[DeadLetterSummary], DeadLetterCursor | None]:
    """Return up to `limit` dead letters, newest first, and the place below which the next page lies (None: no next).

    A page may be short, or empty, and still have a next one: it ends when `scan_s` is over.
    """

    async def read_window(below: DeadLetterCursor, at_most: int) -> ListWindow[DeadLetterSummary, DeadLetterCursor]:
        window = replace(wanted, below=below)
        floor = await window_floor(connection, window)
        return ListWindow(await read_page(connection, window, floor or LOWEST, at_most), floor)

    async with connection.transaction(readonly=True):
        await connection.execute(OWN_PLANS)
        found = await read_windows(read_window, wanted.below, limit, scan_s)
    if len(found.rows) > limit:
        return found.rows[:limit], found.rows[limit - 1].place
    return found.rows, found.below


async def window_floor(connection: Connection, wanted: DeadLetterSearch) -> DeadLetterCursor | None:
    """Return the lowest place of the next WINDOW_ROWS below `wanted.below`; None if there are fewer."""
    row = await connection.fetchrow(FLOORS[wanted.source], *wanted.range_to(), *wanted.own)
    return DeadLetterCursor(*row) if row else None


async def read_page(
    connection: Connection, wanted: DeadLetterSearch, floor: DeadLetterCursor, limit: int
) -> list[DeadLetterSummary]:
    """Return the first `limit` dead letters from `wanted.below` down to `floor`, inclusive."""
    arguments = bounds(wanted, floor, limit)
    if wanted.topics is None:
        rows = await connection.fetch(PAGES[wanted.source], *arguments)
    else:
        rows = await connection.fetch(SCOPED_PAGE, *arguments, wanted.topics.patterns)
    return [DeadLetterSummary(DeadLetterCursor(*row[:5]), *row[5:]) for row in rows]


async def count_matching(
    connection: Connection, wanted: DeadLetterSearch, most: int, *, scan_s: float = COUNT_S
) -> tuple[int, bool]:
    """Return how many dead letters match a filter, up to `most`, and whether these are all.

    No window is begun after `scan_s` seconds.
    """

    async def count(below: DeadLetterCursor, at_most: int) -> tuple[int, DeadLetterCursor | None]:
        return await count_window(connection, replace(wanted, below=below), at_most)

    async with connection.transaction(readonly=True):
        await connection.execute(OWN_PLANS)
        return await count_windows(count, wanted.below, most, scan_s)


async def count_window(
    connection: Connection, wanted: DeadLetterSearch, at_most: int
) -> tuple[int, DeadLetterCursor | None]:
    """Return how many of the next WINDOW_ROWS match a filter, up to `at_most`, and their lowest place (None: the last).

    Needs a database transaction with OWN_PLANS.
    """
    floor = await window_floor(connection, wanted)
    arguments = bounds(wanted, floor or LOWEST, at_most)
    if wanted.topics is not None:
        return await connection.fetchval(SCOPED_COUNT, *arguments, wanted.topics.patterns), floor
    statements = COUNTS if wanted.kind is None else COUNTS_OF_KIND
    return await connection.fetchval(statements[wanted.source], *arguments), floor


async def group_dead_letters(
    connection: Connection,
    wanted: DeadLetterSearch,
    limit: int,
    order: DeadLetterOrder = "count",
    *,
    scan_s: float = GROUPED_S,
) -> DeadLetterGroups:
    """Return the first `limit` groups of the newest dead letters in the range that match a filter.

    GROUPED_MOST are read, or fewer if `scan_s` is over before.
    """

    async def read_window(below: DeadLetterCursor, _: int) -> ListWindow[_WindowGroups, DeadLetterCursor]:
        window = replace(wanted, below=below)
        row = await connection.fetchrow(GROUP_FLOORS[wanted.source], *window.range_to(), *window.own)
        floor = DeadLetterCursor(*row) if row else None
        return ListWindow([await _read_groups(connection, window, floor or LOWEST)], floor)

    async with connection.transaction(readonly=True):
        await connection.execute(GROUP_PLANS)
        found = await read_windows(read_window, wanted.below, -(-GROUPED_MOST // GROUPED_ROWS) - 1, scan_s)
    groups = _merged(group for window in found.rows for group in window.groups)
    groups.sort(key=_ORDERS[order])
    looked_at = sum(window.looked_at for window in found.rows)
    return DeadLetterGroups(groups[:limit], len(groups), looked_at, found.below is None)


@dataclass(frozen=True, slots=True)
class _WindowGroups:
    """The groups of one window, and the rows read."""

    looked_at: int
    groups: list[DeadLetterGroup]


async def _read_groups(connection: Connection, wanted: DeadLetterSearch, floor: DeadLetterCursor) -> _WindowGroups:
    arguments = bounds(wanted, floor, GROUPED_ROWS)
    if wanted.topics is None:
        rows = await connection.fetch(GROUPS[wanted.source], *arguments)
    else:
        rows = await connection.fetch(SCOPED_GROUPS, *arguments, wanted.topics.patterns)
    return _WindowGroups(
        rows[0]["looked_at"], [DeadLetterGroup(*row[1:]) for row in rows if row["subscription"] is not None]
    )


def _merged(groups: Iterable[DeadLetterGroup]) -> list[DeadLetterGroup]:
    """Return each group once. Of the windows that have it the first is the newest."""
    found: dict[tuple[str, str, str], DeadLetterGroup] = {}
    for one in groups:
        name = (one.subscription, one.reason, one.kind)
        newer = found.get(name)
        found[name] = (
            one
            if newer is None
            else replace(newer, count=newer.count + one.count, first_at=min(newer.first_at, one.first_at))
        )
    return list(found.values())


def bounds(wanted: DeadLetterSearch, floor: DeadLetterCursor, limit: int) -> tuple[object, ...]:
    """Return the arguments of a statement over the dead letters of a window that match a filter."""
    return *wanted.range_to(floor), wanted.topic, wanted.key, wanted.reason, wanted.kind, limit, *wanted.own


async def one_dead_letter(
    connection: Connection, subscription_id: int, replay: int, transaction_id: UUID, position: int
) -> DeadLetter | None:
    """Return a dead letter with its message, or None if it does not exist."""
    row = await connection.fetchrow(ONE, subscription_id, replay, transaction_id, position)
    return DeadLetter(DeadLetterCursor(*row[:5]), *row[5:]) if row else None


async def dead_letters_of(connection: Connection) -> dict[str, int]:
    """Return how many dead letters each subscription has, each counted up to COUNTED_MOST."""
    return {row["name"]: row["dead_letters"] for row in await connection.fetch(PER_SUBSCRIPTION)}
