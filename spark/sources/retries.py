"""Finds retries that are due later than the relay plans them: they hide a message that is never sent.

The comparison runs in Postgres, and one row for each subscription leaves it.
"""

from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import CLOCKS_DIFFER_S, rows_of, write_found

# A consumer that claims may hold a message, or give it back, for this long.
CLAIMED_AT_MOST = "12 hours"
# By jitter, a pause may be longer than the schedule has it; and `Retry-After` may postpone a message this long after
# its first try.
JITTER, POSTPONED_AT_MOST = 0.1, "72 hours"
# A row without a try is due when its producer said, or at once. The schedule is the longest pause that the subscription
# ever had, because its retries keep the due times that they got. Served by the primary keys of delivery_retry's
# partners; delivery_retry itself is small.
NEVER_DUE = f"""
with schedule as (
  select subscription_id, make_interval(secs => max(pause) * (1 + {JITTER})) as longest
  from subscription_version, unnest(retry) pause group by 1
)
select subscription_id, name, count(*) as retries,
  (array_agg(transaction_id || '-' || position order by due_at desc, "offset"))[1] as last,
  to_char(max(due_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as due_at
from (
  select s.subscription_id, s.name, r.transaction_id, r.position, r."offset", r.due_at, greatest(
    o.due_at, '{{seen}}', case when r.first_at is not null then greatest(
      '{{seen}}' + c.longest, least(r.first_at, '{{seen}}') + interval '{POSTPONED_AT_MOST}',
      case when s.destination ->> 'type' = 'pull' then '{{seen}}' + interval '{CLAIMED_AT_MOST}' end
    ) end
  ) as latest
  from delivery_retry r
  join subscription s on s.subscription_id = r.subscription_id and s.deleted_at is null
  join {{outbox}} o on o.transaction_id = r.transaction_id and o.position = r.position
  left join schedule c on c.subscription_id = r.subscription_id
  where r.transaction_id >= '{{low}}' and r.transaction_id < '{{high}}'
) planned
where due_at > latest + interval '{CLOCKS_DIFFER_S} seconds'
group by subscription_id, name
""".replace("'{seen}'", "'{seen}'::timestamptz")  # noqa: S608 -- numbers of ours


def write_never_due(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the subscriptions with such retries of the day (schemas.NEVER_DUE) to files in `directory`; return their
    number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(
        spark,
        snapshot,
        day,
        NEVER_DUE,
        directory,
        rows_of,
        whole=True,
    )
