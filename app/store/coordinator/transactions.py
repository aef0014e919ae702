"""SQL that reads transactions: the state of one, and lists."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from app.database.connection import Connection
from app.database.windowed_read import ListWindow, count_windows, read_windows
from app.store.checkback.next_checks import NEXT_CHECK_AT
from app.verdicts import CHECK_BACK_STATE_OF, SOURCE_OF, VERDICT_OF, CheckBackState, Source, State, Verdict

# A list reads this many rows at a time, until its page is full or SCAN_S is over. A filter that matches few rows must
# not read a whole day in one request.
WINDOW_ROWS = 5000
SCAN_S = 0.15
# A list is counted for this long; it costs as much as the page.
COUNT_S = 0.05

LOWEST = UUID(int=0)
HIGHEST = UUID(int=(1 << 128) - 1)

# The op decides before the check_back row: a check_back row that lost a race is stale, an op never is. Primary keys
# only, one partition each. RECORD_ENDS says why the condition is `position < 1`.
TRANSACTION_STATE = """
select h.producer_group, o.verdict, c.state, h.first_check_at
from half h
left join op o on o.transaction_id = h.transaction_id
left join check_back c on c.transaction_id = h.transaction_id
where h.transaction_id = $1 and h.position < 1
"""

# The source of a list's ids within [$1, $2). `id`: half's primary key; the range prunes partitions. `key`: half_key,
# which is in id order within a key; a transaction with several messages of the key counts once. `doubt`: check_back's
# primary key; the table is small. `ids`: the ids that a request names.
SOURCES = {
    "id": "select transaction_id from half where transaction_id >= $1 and transaction_id < $2 and position < 1",
    "key": (
        "select distinct transaction_id from half where key = {key} and transaction_id >= $1 and transaction_id < $2"
    ),
    "doubt": "select transaction_id from check_back where transaction_id >= $1 and transaction_id < $2",
    "ids": (
        "select distinct transaction_id from unnest({key}::uuid[]) transaction_id "
        "where transaction_id >= $1 and transaction_id < $2"
    ),
}

# The lowest id of the next window; no row if the window holds all remaining ids.
FLOORS = {
    name: f"{source.format(key='$3')} order by transaction_id desc offset {WINDOW_ROWS - 1} limit 1"
    for name, source in SOURCES.items()
}
# The highest id of the next window: one probe of the same index.
NEXT = {name: f"{source.format(key='$3')} order by transaction_id desc limit 1" for name, source in SOURCES.items()}
# The same in lists that begin with the oldest.
CEILINGS = {
    name: f"{source.format(key='$3')} order by transaction_id offset {WINDOW_ROWS - 1} limit 1"
    for name, source in SOURCES.items()
}
NEXT_OLDEST = {name: f"{source.format(key='$3')} order by transaction_id limit 1" for name, source in SOURCES.items()}

# The rows of a window that match a filter. Each lookup is a LATERAL … OFFSET 0, so it is a probe of a primary key in
# one partition and never a join that reads a whole partition. A null filter does not filter. For `state` the op decides
# before check_back.
_MATCHING = """
from ({source}) s
cross join lateral (
  select * from half h where h.transaction_id = s.transaction_id and h.position < 1 offset 0
) h
left join lateral (
  select verdict, source, decided_at from op o where o.transaction_id = s.transaction_id offset 0
) o on true
left join lateral (
  select state, next_check_at, parked_reason from check_back c where c.transaction_id = s.transaction_id offset 0
) c on true
where ($3::text is null or h.producer_group = $3)
  and ($4::text is null or exists (
    select from half t where t.transaction_id = s.transaction_id and t.topic = $4 offset 0
  ))
  and ($5::text is null or $5 = case
    when o.verdict = 1 then 'committed' when o.verdict = 2 then 'rolled_back'
    when c.state = 1 then 'in_doubt' when c.state = 2 then 'parked' else 'half' end)
  and ($6::timestamptz is null or h.born_at >= $6)
  and ($7::timestamptz is null or h.born_at < $7)
  and ($9::smallint is null or o.source = $9)
  and ($10::boolean is null or $10 = exists (
    select from attempt a where a.transaction_id = s.transaction_id and a.kind = 'refused' offset 0
  ))
  and ($11::boolean is null or $11 = exists (
    select from reissue r where r.transaction_id = s.transaction_id offset 0
  ))
"""
# One page of a window, and how many match in a window.
PAGE = """
select h.transaction_id, h.producer_group, h.topic, h.key, h.born_at,
  (select count(*) from half m where m.transaction_id = h.transaction_id) as message_count,
  o.verdict, o.source, o.decided_at, c.state as check_back,
  {next_check_at} as next_check_at,
  c.parked_reason
{matching}
order by s.transaction_id {direction}
limit $8
"""
# Without an order the planner could read a partition from its start.
COUNT = "select count(*) from (select {matching} order by s.transaction_id desc limit $8) m"

# A generic plan assumes a small range, reads all of it and sorts it. So each list gets a plan of its own.
OWN_PLANS = "set local plan_cache_mode = force_custom_plan"

_MATCHING_OF = {name: _MATCHING.format(source=source.format(key="$12")) for name, source in SOURCES.items()}
PAGES, OLDEST_PAGES = (
    {
        name: PAGE.format(matching=matching, direction=direction, next_check_at=NEXT_CHECK_AT)
        for name, matching in _MATCHING_OF.items()
    }
    for direction in ("desc", "asc")
)
COUNTS = {name: COUNT.format(matching=matching) for name, matching in _MATCHING_OF.items()}


@dataclass(frozen=True, slots=True)
class TransactionState:
    """The producer group of a transaction, its state, and the time of its first check."""

    producer_group: str
    state: State
    first_check_at: datetime


@dataclass(frozen=True, slots=True)
class TransactionFilter:
    """The filters of a list; None does not filter. Ids are in [low, high), birth times in [born_after, born_before).

    A filter has a `key` or `ids`, or neither.
    """

    low: UUID = LOWEST
    high: UUID = HIGHEST
    producer_group: str | None = None
    topic: str | None = None
    key: str | None = None
    state: State | None = None
    born_after: datetime | None = None
    born_before: datetime | None = None
    decided_by: Source | None = None
    has_refused_end: bool | None = None
    is_reissued: bool | None = None
    ids: tuple[UUID, ...] | None = None

    def beyond(self, cursor: UUID, *, oldest_first: bool) -> "TransactionFilter":
        """Return the filter of the page that a cursor begins."""
        if oldest_first:
            return replace(self, low=max(self.low, cursor))
        return replace(self, high=min(self.high, cursor))

    @property
    def source(self) -> str:
        """The key of SOURCES for this filter."""
        if self.ids is not None:
            return "ids"
        if self.key is not None:
            return "key"
        return "doubt" if self.state in (State.IN_DOUBT, State.PARKED) else "id"


@dataclass(frozen=True, slots=True)
class TransactionSummary:
    """A transaction in a list. `topic` and `key` are its first message's; the verdict is None if it is undecided."""

    transaction_id: UUID
    producer_group: str
    topic: str
    key: str | None
    born_at: datetime
    message_count: int
    verdict: Verdict | None
    source: Source | None
    decided_at: datetime | None
    check_back: CheckBackState | None
    next_check_at: datetime | None
    parked_reason: str | None

    @property
    def state(self) -> State:
        """The state of the transaction."""
        return state_of(self.verdict, self.check_back)


def state_of(verdict: Verdict | None, check_back: CheckBackState | None) -> State:
    """Return the state of a transaction with this op and this check_back row; None: it has no such row."""
    if verdict is not None:
        return State.COMMITTED if verdict == Verdict.COMMIT else State.ROLLED_BACK
    if check_back is None:
        return State.HALF
    return State.PARKED if check_back == CheckBackState.PARKED else State.IN_DOUBT


async def transaction_state(connection: Connection, transaction_id: UUID) -> TransactionState | None:
    """Return the state of a transaction, or None if there is no such half."""
    row = await connection.fetchrow(TRANSACTION_STATE, transaction_id)
    if row is None:
        return None
    state = state_of(VERDICT_OF[row["verdict"]], CHECK_BACK_STATE_OF[row["state"]])
    return TransactionState(row["producer_group"], state, row["first_check_at"])


async def list_transactions(
    connection: Connection, wanted: TransactionFilter, limit: int, *, oldest_first: bool = False, scan_s: float = SCAN_S
) -> tuple[list[TransactionSummary], UUID | None]:
    """Return up to `limit` transactions, newest first, and the `high` of the next page (None: there is none).

    With `oldest_first` it is the `low` of the next page. The scan stops after `scan_s` seconds, so a short or empty
    page may still have a next page.
    """

    async def read_window(place: UUID, at_most: int) -> ListWindow[TransactionSummary, UUID]:
        if oldest_first:
            window, end = await _window_above(connection, replace(wanted, low=place))
        else:
            window, end = await _window_below(connection, replace(wanted, high=place))
        return ListWindow(await read_page(connection, window, at_most, oldest_first=oldest_first), end)

    async with connection.transaction(readonly=True):
        await connection.execute(OWN_PLANS)
        found = await read_windows(read_window, wanted.low if oldest_first else wanted.high, limit, scan_s)
        if len(found.rows) > limit:
            last = found.rows[limit - 1].transaction_id
            return found.rows[:limit], _after(last) if oldest_first else last
        if found.below is None:
            return found.rows, None
        if oldest_first:
            return found.rows, await _next_oldest_page(connection, replace(wanted, low=found.below))
        return found.rows, await _next_page(connection, replace(wanted, high=found.below))


async def count_transactions(
    connection: Connection, wanted: TransactionFilter, most: int, *, scan_s: float = COUNT_S
) -> tuple[int, bool]:
    """Return how many transactions match, up to `most`, and whether these are all.

    No window is begun after `scan_s` seconds.
    """

    async def count_window(place: UUID, at_most: int) -> tuple[int, UUID | None]:
        window, end = await _window_below(connection, replace(wanted, high=place))
        return await connection.fetchval(COUNTS[wanted.source], *_arguments(window, at_most)), end

    async with connection.transaction(readonly=True):
        await connection.execute(OWN_PLANS)
        return await count_windows(count_window, wanted.high, most, scan_s)


async def _window_below(connection: Connection, wanted: TransactionFilter) -> tuple[TransactionFilter, UUID | None]:
    """Return the window of WINDOW_ROWS below `high`, and where the next one begins (None: no id is left)."""
    floor = await window_floor(connection, wanted)
    return (wanted, None) if floor is None else (replace(wanted, low=floor), floor)


async def _window_above(connection: Connection, wanted: TransactionFilter) -> tuple[TransactionFilter, UUID | None]:
    """Return the window of WINDOW_ROWS from `low` on, and where the next one begins (None: no id is left)."""
    ceiling = await connection.fetchval(CEILINGS[wanted.source], wanted.low, wanted.high, *_key(wanted))
    return (wanted, None) if ceiling is None else (replace(wanted, high=_after(ceiling)), _after(ceiling))


def _after(transaction_id: UUID) -> UUID:
    return UUID(int=transaction_id.int + 1)


async def _next_page(connection: Connection, rest: TransactionFilter) -> UUID | None:
    """Return the `high` of the page that continues below `rest.high`; None if no id is below.

    The scan may have stopped at another group's transaction, so the answer must not contain its id.
    """
    below: UUID | None = await connection.fetchval(NEXT[rest.source], rest.low, rest.high, *_key(rest))
    return None if below is None else between(below, rest.high)


async def _next_oldest_page(connection: Connection, rest: TransactionFilter) -> UUID | None:
    """Return the `low` of the page that continues at `rest.low`; None if no id is there or above."""
    above: UUID | None = await connection.fetchval(NEXT_OLDEST[rest.source], rest.low, rest.high, *_key(rest))
    return None if above is None else between(UUID(int=rest.low.int - 1), above)


def between(below: UUID, above: UUID) -> UUID:
    """Return the id with the most trailing zero bits that is above `below` and not above `above`.

    It is a boundary between both ids that reveals neither.
    """
    kept = (below.int ^ above.int).bit_length() - 1
    return UUID(int=above.int >> kept << kept)


async def window_floor(connection: Connection, wanted: TransactionFilter) -> UUID | None:
    """Return the lowest id of the first WINDOW_ROWS below `wanted.high`; None if there are fewer."""
    floor: UUID | None = await connection.fetchval(FLOORS[wanted.source], wanted.low, wanted.high, *_key(wanted))
    return floor


async def read_page(
    connection: Connection, wanted: TransactionFilter, limit: int, *, oldest_first: bool = False
) -> list[TransactionSummary]:
    """Return the first `limit` transactions of a window, newest first or oldest first."""
    pages = OLDEST_PAGES if oldest_first else PAGES
    return [_summary(row) for row in await connection.fetch(pages[wanted.source], *_arguments(wanted, limit))]


def _arguments(wanted: TransactionFilter, limit: int) -> tuple[object, ...]:
    return (
        wanted.low,
        wanted.high,
        wanted.producer_group,
        wanted.topic,
        wanted.state,
        wanted.born_after,
        wanted.born_before,
        limit,
        wanted.decided_by,
        wanted.has_refused_end,
        wanted.is_reissued,
        *_key(wanted),
    )


def _key(wanted: TransactionFilter) -> tuple[object, ...]:
    """Return what the statements of `source` need beside the range of ids."""
    if wanted.ids is not None:
        return (wanted.ids,)
    return () if wanted.key is None else (wanted.key,)


def _summary(row: Any) -> TransactionSummary:
    words = {"verdict": VERDICT_OF[row["verdict"]], "source": SOURCE_OF[row["source"]]}
    return TransactionSummary(**{**row, **words, "check_back": CHECK_BACK_STATE_OF[row["check_back"]]})
