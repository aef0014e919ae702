"""Read the findings of the nightly proof, and record that they were announced.

The proof writes one row per day, kind and subject.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from uuid import UUID

from app.database.connection import Connection
from app.database.windowed_read import ListWindow, count_windows, read_windows
from app.topic_patterns import reserved_sql

# As for lists of dead letters: a filter that few rows match reads this many rows at a time, and stops after this time.
WINDOW_ROWS = 2000
SCAN_S = 0.15
# A list is counted for this long; it costs as much as the page.
COUNT_S = 0.05
# How many findings one message about a day and kind names.
EXAMPLES = 10
# The most findings that one step announces: writing and committing them takes well under a second.
AT_ONCE = 10_000

PLACE = "f.day, f.kind, f.subject"
NEWEST_FIRST = "f.day desc, f.kind desc, f.subject desc"

# $1…$3: the upper place, exclusive; $4: only this day; $5: only this kind of that day. Served by a backward range scan
# of finding_subject. A null day drops out of the plan, because each statement is planned for its arguments (OWN_PLANS).
RANGE = f"""({PLACE}) < ($1::date, $2::text, $3::text)
  and ($4::date is null or f.day = $4 and ($5::text is null or f.kind = $5))"""

# The lowest place of the next window; no row if fewer rows than one window are left.
FLOOR = f"""
select {PLACE} from finding f where {RANGE} order by {NEWEST_FIRST} offset {WINDOW_ROWS - 1} limit 1
"""  # noqa: S608 -- constants of this module

SHOWN = """f.finding_id, f.day, f.kind, f.subject, f.transaction_id, f."position", s.name as subscription,
  f.producer_group, f.detail, f.first_run, f.first_seen_at, f.last_run, f.last_seen_at, f.resolved_run, f.resolved_at"""
# By primary key. A deleted subscription keeps its row, so its name can still be shown.
NAMED = """left join lateral (
  select s.name from subscription s where s.subscription_id = f.subscription_id offset 0
) s on true"""

# Down to the place $6…$8, inclusive. $9: resolved (true), open (false) or both (null).
PAGE = f"""
select {SHOWN} from finding f {NAMED}
where {RANGE} and ({PLACE}) >= ($6::date, $7::text, $8::text) and ($5 is null or f.kind = $5)
  and ($9::boolean is null or (f.resolved_at is not null) = $9)
order by {NEWEST_FIRST} limit $10
"""  # noqa: S608

COUNT = f"""
select count(*) from (
  select from finding f
  where {RANGE} and ({PLACE}) >= ($6::date, $7::text, $8::text) and ($5 is null or f.kind = $5)
    and ($9::boolean is null or (f.resolved_at is not null) = $9)
  order by {NEWEST_FIRST} limit $10
) m
"""  # noqa: S608

# A generic plan assumes that the range is small, so it would read and sort all of the range.
OWN_PLANS = "; ".join(
    f"set local {setting}"
    for setting in ("plan_cache_mode = force_custom_plan", "enable_seqscan = off", "enable_sort = off")
)

# By primary key.
ONE = f"select {SHOWN} from finding f {NAMED} where f.finding_id = $1"  # noqa: S608

# Served by finding_unannounced. It skips rows that another replica has locked, so each finding is announced once. A
# finding that becomes open again is in the index again. finding_open serves the count of open findings of a day and
# kind. Findings about Halfnote's own messages are marked but not announced: an announcement without a route would cause
# another finding, and so another announcement.
MARK_ANNOUNCED = f"""
with taken as materialized (
  select finding_id from finding where announced_at is null and resolved_at is null
  order by finding_id limit $2
  for update skip locked
), announced as (
  update finding f set announced_at = $1 from taken t where f.finding_id = t.finding_id
  returning f.finding_id, f.day, f.kind, f.subject, f.first_run, f.last_run, f.detail ->> 'topic' as topic
), numbered as (
  select *, row_number() over (partition by day, kind order by finding_id) as n from announced
  where topic is null or not {reserved_sql("topic")}
)
select t.day, t.kind, count(*) as new,
  (select count(*) from finding o where o.day = t.day and o.kind = t.kind and o.resolved_at is null) as open,
  min(t.first_run) as first_run, max(t.last_run) as last_run,
  array_agg(t.subject order by t.finding_id) filter (where t.n <= {EXAMPLES}) as examples
from numbered t group by t.day, t.kind order by min(t.finding_id)
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class FindingCursor:
    """A finding's place in a list; lists go from the highest place to the lowest."""

    day: date
    kind: str
    subject: str


LOWEST = FindingCursor(date.min, "", "")
# No finding has this day.
HIGHEST = FindingCursor(date.max, "", "")


@dataclass(frozen=True, slots=True)
class FindingFilter:
    """Which findings a list holds, and the place below which it starts. None: no filter."""

    day: date | None = None
    kind: str | None = None
    resolved: bool | None = None
    below: FindingCursor = HIGHEST

    @property
    def range(self) -> tuple[object, ...]:
        """The arguments $1…$5 of the statements, which select the range."""
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
    def place(self) -> FindingCursor:
        """Its place in lists."""
        return FindingCursor(self.day, self.kind, self.subject)


@dataclass(frozen=True, slots=True)
class AnnouncedFindings:
    """Findings of one day and kind that are announced together: `new` of the `open` ones."""

    day: date
    kind: str
    new: int
    open: int
    first_run: int
    last_run: int
    examples: Sequence[str]


async def list_findings(
    connection: Connection, wanted: FindingFilter, limit: int, *, scan_s: float = SCAN_S
) -> tuple[list[Finding], FindingCursor | None]:
    """Return up to `limit` findings, newest day first, and the place below which the next page lies (None: no next).

    A page may be short, or empty, and still have a next one: it ends when `scan_s` is over.
    """

    async def read_window(below: FindingCursor, at_most: int) -> ListWindow[Finding, FindingCursor]:
        window = replace(wanted, below=below)
        floor = await window_floor(connection, window)
        return ListWindow(await read_page(connection, window, floor or LOWEST, at_most), floor)

    async with connection.transaction(readonly=True):
        await connection.execute(OWN_PLANS)
        found = await read_windows(read_window, wanted.below, limit, scan_s)
    if len(found.rows) > limit:
        return found.rows[:limit], found.rows[limit - 1].place
    return found.rows, found.below


async def count_findings(
    connection: Connection, wanted: FindingFilter, most: int, *, scan_s: float = COUNT_S
) -> tuple[int, bool]:
    """Return how many findings match, up to `most`, and whether these are all.

    No window is begun after `scan_s` seconds.
    """

    async def count_window(below: FindingCursor, at_most: int) -> tuple[int, FindingCursor | None]:
        window = replace(wanted, below=below)
        floor = await window_floor(connection, window)
        return await connection.fetchval(COUNT, *_bounds(window, floor or LOWEST), wanted.resolved, at_most), floor

    async with connection.transaction(readonly=True):
        await connection.execute(OWN_PLANS)
        return await count_windows(count_window, wanted.below, most, scan_s)


async def window_floor(connection: Connection, wanted: FindingFilter) -> FindingCursor | None:
    """Return the lowest place of the next WINDOW_ROWS below `wanted.below`; None if there are fewer."""
    row = await connection.fetchrow(FLOOR, *wanted.range)
    return FindingCursor(**row) if row else None


async def read_page(connection: Connection, wanted: FindingFilter, floor: FindingCursor, limit: int) -> list[Finding]:
    """Return the first `limit` findings from `wanted.below` down to `floor`, inclusive."""
    rows = await connection.fetch(PAGE, *_bounds(wanted, floor), wanted.resolved, limit)
    return [Finding(**row) for row in rows]


def _bounds(wanted: FindingFilter, floor: FindingCursor) -> tuple[object, ...]:
    return (*wanted.range, floor.day, floor.kind, floor.subject)


async def one_finding(connection: Connection, finding_id: int) -> Finding | None:
    """Return a finding, or None if it does not exist."""
    row = await connection.fetchrow(ONE, finding_id)
    return Finding(**row) if row else None


async def take_unannounced(connection: Connection, now: datetime, *, at_once: int = AT_ONCE) -> list[AnnouncedFindings]:
    """Mark up to `at_once` open findings that were not announced yet as announced; return them by day and kind.

    Needs the database transaction in which they are announced.
    """
    return [AnnouncedFindings(**row) for row in await connection.fetch(MARK_ANNOUNCED, now, at_once)]
