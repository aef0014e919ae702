"""SQL that reads the attempts of a transaction in pages: checks, failed deliveries and refused ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from app.database.connection import Connection
from app.verdicts import SOURCE_OF, VERDICT_OF, AttemptKind, CheckOutcome, Source, Verdict

# The largest attempt_id, which is a bigint.
HIGHEST_ID = 2**63 - 1

# Served by the primary keys of attempt, in one partition, and of postponement. The limit bounds what is read.
_PAGE = """
select * from attempt where transaction_id = $1 and kind not in ('swept', 'parked') and attempt_id < $2
order by attempt_id desc limit $3"""
_SHOWN = """
select a.attempt_id, a.kind, a.at, a.number, a.outcome, a.position, s.name as subscription, a.verdict, a.source,
  a.destination, a.status, a.duration_ms, a.error, a.response, a.replay, p.last_at, p.times
from ({rows}) a
left join subscription s on s.subscription_id = a.subscription_id
left join postponement p on p.transaction_id = $1 and p.position = a.position and p.subscription_id = a.subscription_id
  and p.replay = coalesce(a.replay, 0) and p.number = a.number and p.outcome = a.outcome and p.first_at = a.at
order by a.attempt_id desc
"""
EARLIER_ATTEMPTS = _SHOWN.format(rows=_PAGE)

# The limit does not apply to kinds that happen once.
LATEST_ATTEMPTS = _SHOWN.format(
    rows=f"(select * from attempt where transaction_id = $1 and kind in ('swept', 'parked')) union all ({_PAGE})"  # noqa: S608
)


# The primary key of attempt, in the partition of each transaction.
LAST_CHECKS = """
select c.transaction_id, a.at, a.outcome from unnest($1::uuid[]) as c(transaction_id)
cross join lateral (
  select t.at, t.outcome from attempt t where t.transaction_id = c.transaction_id and t.kind = 'check'
  order by t.attempt_id desc limit 1
) a
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A row of `attempt`: a check, a failed delivery, a refused end, a sweep or a parking.

    `outcome` is a CheckOutcome for a check and a DeliveryOutcome for a delivery; otherwise it repeats the kind.
    `times`, `last_at`: how many postponements this row is for, and when the last one was.
    """

    attempt_id: int
    kind: AttemptKind
    at: datetime
    number: int | None
    outcome: str
    position: int | None
    subscription: str | None
    verdict: Verdict | None
    source: Source | None
    destination: str | None
    status: int | None
    duration_ms: int | None
    error: str | None
    response: str | None
    replay: int | None
    last_at: datetime | None
    times: int | None


async def latest_attempts(connection: Connection, transaction_id: UUID, limit: int) -> tuple[list[Attempt], int | None]:
    """Return the latest attempts, the sweep and parkings, latest first, and the id below which earlier ones are.

    The id is None if all are returned.
    """
    return _page(await connection.fetch(LATEST_ATTEMPTS, transaction_id, HIGHEST_ID, limit + 1), limit)


async def earlier_attempts(
    connection: Connection, transaction_id: UUID, below: int, limit: int
) -> tuple[list[Attempt], int | None]:
    """Return the attempts with ids below `below`, latest first, and the id below which earlier ones are."""
    return _page(await connection.fetch(EARLIER_ATTEMPTS, transaction_id, below, limit + 1), limit)


async def last_checks(
    connection: Connection, transaction_ids: Sequence[UUID]
) -> dict[UUID, tuple[datetime, CheckOutcome]]:
    """Return when each transaction was last asked about, and the outcome; transactions without a check are left out."""
    rows = await connection.fetch(LAST_CHECKS, list(transaction_ids))
    return {row["transaction_id"]: (row["at"], CheckOutcome(row["outcome"])) for row in rows}


def verdict_of(row: Any) -> dict[str, Any]:
    """Return the fields `verdict` and `source` of a row as values."""
    return {"verdict": VERDICT_OF[row["verdict"]], "source": SOURCE_OF[row["source"]]}


def _page(rows: list[Any], limit: int) -> tuple[list[Attempt], int | None]:
    found = [Attempt(**{**row, **verdict_of(row), "kind": AttemptKind(row["kind"])}) for row in rows]
    paged = [one.attempt_id for one in found if one.kind not in (AttemptKind.SWEPT, AttemptKind.PARKED)]
    if len(paged) <= limit:
        return found, None
    # The statement reads one more than the page, to learn whether there are more.
    return [one for one in found if one.attempt_id != paged[limit]], paged[limit - 1]
