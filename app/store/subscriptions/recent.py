"""What a subscription's deliveries were like recently: how long its receiver took, and the errors that stand."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from app.database.connection import Connection
from app.store.subscriptions.dead_letters import kind_sql

RECEIPTS = 1000
FAILED_MOST = 10_000
ERRORS_MOST = 20
DIED_WITHIN = timedelta(hours=1)

# A backward range of receipt_by_offset in each day, newest days first in the merge.
TOOK = f"""
select count(*) as count, percentile_disc(0.5) within group (order by r.duration_ms) as p50_ms,
  percentile_disc(0.99) within group (order by r.duration_ms) as p99_ms, min(r.settled_at) as since
from (
  select duration_ms, settled_at, outcome from receipt where subscription_id = $1 and replay = 0
  order by "offset" desc limit {RECEIPTS}
) r where r.outcome = 'delivered'
"""  # noqa: S608 -- constants of these modules

# Backward ranges of delivery_retry_tried and of dead_letter_of, FAILED_MOST rows of each at most.
ERRORS = f"""
with texts as (
  select error, sum(retrying)::bigint as retrying, sum(dead)::bigint as dead from (
    select t.last_error as error, 1 as retrying, 0 as dead from (
      select last_error from delivery_retry where subscription_id = $1 and first_at is not null
      order by first_at desc limit {FAILED_MOST}
    ) t where t.last_error is not null
    union all
    select d.error, 0, 1 from (
      select error from dead_letter where subscription_id = $1 and died_at >= $2
      order by died_at desc limit {FAILED_MOST}
    ) d
  ) found group by error
)
select {kind_sql("error")} as kind, sum(retrying)::bigint as retrying, sum(dead)::bigint as dead
from texts group by 1 order by sum(retrying + dead) desc, 1 limit {ERRORS_MOST}
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Took:
    """How long the receiver took (ms), of the newest RECEIPTS receipts. None: there is none."""

    count: int
    p50_ms: int | None
    p99_ms: int | None
    since: datetime | None


@dataclass(frozen=True, slots=True)
class StandingError:
    """A kind of error, the messages in retry that last had it, and those that died of it within DIED_WITHIN."""

    kind: str
    retrying: int
    dead: int


async def how_long(connection: Connection, subscription_id: int) -> Took:
    """Return how long the receiver of a subscription took recently."""
    row = await connection.fetchrow(TOOK, subscription_id)
    assert row is not None
    return Took(**row)


async def standing_errors(connection: Connection, subscription_id: int, now: datetime) -> list[StandingError]:
    """Return the errors of a subscription, the most frequent first."""
    rows = await connection.fetch(ERRORS, subscription_id, now - DIED_WITHIN)
    return [StandingError(**row) for row in rows]
