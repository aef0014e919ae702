"""Findings: what the nightly proof found, one row a day, kind and subject. The proof writes them; here they are read,
and it is written down that somebody was told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from time import monotonic
from uuid import UUID

from app.database import Connection

# As for lists of dead letters: a filter that hardly anything meets reads this much at a time, and no longer than that.
WINDOW_ROWS = 2000
SCAN_S = 0.5
# Findings that one message about a day and kind names.
EXAMPLES = 10
# Findings that one step announces at most: as many as are written, and committed, well within a second.
AT_ONCE = 10_000

PLACE = "f.day, f.kind, f.subject"
NEWEST_FIRST = "f.day desc, f.kind desc, f.subject desc"

# $1…$3: the place above; $4: this day alone, and $5: of it this kind. Served by finding_subject, an index range,
# backwards; a day that is null folds away, because each statement is planned for its own arguments (OWN_PLANS).
RANGE = f"""({PLACE}) < ($1::date, $2::text, $3::text)
  and ($4::date is null or f.day = $4 and ($5::text is null or f.kind = $5))"""

# The lowest place of the next window; none if the window takes in all that is left.
FLOOR = f"""
select {PLACE} from finding f where {RANGE} order by {NEWEST_FIRST} offset {WINDOW_ROWS - 1} limit 1
"""  # noqa: S608 -- constants of this module

SHOWN = """f.finding_id, f.day, f.kind, f.subject, f.transaction_id, f."position", s.name as subscription,
  f.producer_group, f.detail, f.first_run, f.first_seen_at, f.last_run, f.last_seen_at, f.resolved_run, f.resolved_at"""
# By primary key; a deleted subscription keeps its row, and so its name.
NAMED = """left join lateral (
  select s.name from subscription s where s.subscription_id = f.subscription_id offset 0
) s on true"""

# Down to the place $6…$8, itself included; $9: whether resolved, null for both.
PAGE = f"""
select {SHOWN} from finding f {NAMED}
where {RANGE} and ({PLACE}) >= ($6::date, $7::text, $8::text) and ($5 is null or f.kind = $5)
  and ($9::boolean is null or (f.resolved_at is not null) = $9)
order by {NEWEST_FIRST} limit $10
"""  # noqa: S608

# A plan made without knowing the range takes it for a small one, reads all of it and sorts.
OWN_PLANS = "; ".join(
    f"set local {setting}"
    for setting in ("plan_cache_mode = force_custom_plan", "enable_seqscan = off", "enable_sort = off")
)

# By primary key.
ONE = f"select {SHOWN} from finding f {NAMED} where f.finding_id = $1"  # noqa: S608

# Served by finding_unannounced. Rows that another replica is at are skipped, never waited for, so each is told once;
# those that become open again are in the index again. How many are open of a day and kind: finding_open. What is about
# Halfnote's own messages is marked and not told: a message that nobody gets would be told of by another one.
TELL = f"""
with taken as materialized (
  select finding_id from finding where announced_at is null and resolved_at is null
  order by finding_id limit $2
  for update skip locked
), told as (
  update finding f set announced_at = $1 from taken t where f.finding_id = t.finding_id
  returning f.finding_id, f.day, f.kind, f.subject, f.first_run, f.last_run, f.detail ->> 'topic' as topic
), numbered as (
  select *, row_number() over (partition by day, kind order by finding_id) as n from told
  where topic is null or not topic ^@ 'halfnote.'
)
select t.day, t.kind, count(*) as new,
  (select count(*) from finding o where o.day = t.day and o.kind = t.kind and o.resolved_at is null) as open,
  min(t.first_run) as first_run, max(t.last_run) as last_run,
  array_agg(t.subject order by t.finding_id) filter (where t.n <= {EXAMPLES}) as examples
from numbered t group by t.day, t.kind order by min(t.finding_id)
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finding stands in a list; lists go from the highest to the lowest."""

    day: date
    kind: str
    subject: str


LOWEST = Place(date.min, "", "")
# A day that no id can carry.
HIGHEST = Place(date.max, "", "")


@dataclass(frozen=True, slots=True)
class Filter:
    """What a list is to hold, below a place; None is no filter."""

    day: date | None = None
    kind: str | None = None
    resolved: bool | None = None
    below: Place = HIGHEST

    @property
    def range(self) -> tuple[object, ...]:
        """What the statements need to know of where to look."""
        return self.below.day, self.below.kind, self.below.subject, self.day, self.kind


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding; `detail` is JSON text. `resolved_at` None: it is open."""

    finding_id: int
    day: date
    kind: str
    subject: str
    transaction_id: UUID | None
    position: int | None
    subscription: str | None
    producer_group: str | None
    detail: str
    first_run: int
    first_seen_at: datetime
    last_run: int
    last_seen_at: datetime
    resolved_run: int | None
    resolved_at: datetime | None

    @property
    def place(self) -> Place:
        """Where it stands in lists."""
        return Place(self.day, self.kind, self.subject)


@dataclass(frozen=True, slots=True)
class Told:
    """Findings of one day and kind that are announced together: `new` of them, of `open` in all."""

    day: date
    kind: str
    new: int
    open: int
    first_run: int
    last_run: int
    examples: Sequence[str]


async def list_findings(
    connection: Connection, wanted: Filter, limit: int, *, scan_s: float = SCAN_S
) -> tuple[list[Finding], Place | None]:
    """Return up to `limit` findings, newest day first, and the place below which the next page lies (None: no next).

    A page may be short, or empty, and still have a next one: it ends when `scan_s` is over.
    """
    found: list[Finding] = []
    until = monotonic() + scan_s
    below: Place | None = wanted.below
    async with connection.transaction(readonly=True):
        await connection.execute(OWN_PLANS)
        # One more than wanted tells whether there is a next page.
        while below is not None and len(found) <= limit and (below == wanted.below or monotonic() < until):
            window = replace(wanted, below=below)
            below = await window_floor(connection, window)
            found += await read_page(connection, window, below or LOWEST, limit + 1 - len(found))
    if len(found) > limit:
        return found[:limit], found[limit - 1].place
    return found, below


async def window_floor(connection: Connection, wanted: Filter) -> Place | None:
    """Return the lowest place of the next WINDOW_ROWS below `wanted.below`; None if there are fewer."""
    row = await connection.fetchrow(FLOOR, *wanted.range)
    return Place(**row) if row else None


async def read_page(connection: Connection, wanted: Filter, floor: Place, limit: int) -> list[Finding]:
    """Return the first `limit` findings from `wanted.below` down to `floor`, itself included."""
    bounds = (*wanted.range, floor.day, floor.kind, floor.subject)
    return [Finding(**row) for row in await connection.fetch(PAGE, *bounds, wanted.resolved, limit)]


async def one_finding(connection: Connection, finding_id: int) -> Finding | None:
    """Return a finding, or None if there is no such."""
    row = await connection.fetchrow(ONE, finding_id)
    return Finding(**row) if row else None


async def tell_findings(connection: Connection, now: datetime, *, at_once: int = AT_ONCE) -> list[Told]:
    """Mark up to `at_once` open findings that nobody was told of as announced; return them by day and kind.

    Needs the database transaction in which they are announced.
    """
    return [Told(**row) for row in await connection.fetch(TELL, now, at_once)]
