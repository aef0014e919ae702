"""Finds the receipts of ordered subscriptions that contradict the order of their key.

With `ordered: key` the relay sends the next message of a key after the receipt of the one before is committed. The
comparison runs in Postgres, and only receipts out of order leave it. A day without such a subscription costs nothing.
"""

from pyspark.sql import SparkSession

from spark.frames import CHANGE_SETTLES_S
from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import CLOCKS_DIFFER_S, rows_of, write_found

ANY_ORDERED = "select exists (select from subscription_version where ordered = 'key') as found"
# Each receipt is compared with the one of the next lower offset of its key. Three things show that its message was sent
# before that one was settled. Its first try is earlier by more than clocks differ. Or one settle recorded both: they
# have the same `settled_at`. Or it is earlier by less, and the receipts were also written in that order, which the
# numbers of their database transactions tell. Each alone may have another cause: two workers with clocks of their own,
# or a receipt that a person restored.
#
# Not judged, because the order does not hold for them: messages without a key, delayed ones, and dead letters that a
# person redelivered or dropped. Nor is what was first tried while the subscription was not ordered. `ordered` has the
# times in which it was. After a change of topics or filters (`matched`) workers send what is above the checkpoint and
# only the new ones take, also before messages of its key that were sent already.
#
# Consumers that claim may hold several messages of a key together, and settle them in any order. What one claim had
# has the same `first_at`. Which claim had the later attempts is not known, so only first attempts are judged. One that
# came again because its consumer had not begun is the same attempt in a later claim. Then the consumer that settled it
# held it (`duration_ms`, cut off to milliseconds) for less time than has passed since `first_at`.
AGAIN = "(r.first_at < r.settled_at - make_interval(secs => (r.duration_ms + 2) / 1000.0))"
OUT_OF_ORDER = f"""
with changed as (
  select *, lead(at) over (partition by subscription_id order by version_id) as until from (
    select subscription_id, version_id, at, ordered,
      lag(ordered) over (partition by subscription_id order by version_id) as before
    from subscription_version
  ) version
  where ordered is distinct from before
), ordered as materialized (
  select subscription_id,
    at + case when before is null then interval '0' else interval '{CHANGE_SETTLES_S} seconds' end as since,
    coalesce(until, 'infinity') - interval '{CLOCKS_DIFFER_S} seconds' as until
  from changed where ordered = 'key'
), matched as materialized (
  select subscription_id, at from (
    select *, lag(version_id) over earlier is not null
      and (topics, filters) is distinct from (lag(topics) over earlier, lag(filters) over earlier) as differs
    from subscription_version window earlier as (partition by subscription_id order by version_id)
  ) version
  where differs
), claimed as materialized (
  select subscription_id from subscription where destination ->> 'type' = 'pull'
)
select transaction_id::text, position, subscription_id, replay, "offset", before_offset,
  to_char(first_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as first_at,
  to_char(before_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as before_at
from (
  select r.transaction_id, r.position, r.subscription_id, r.replay, r."offset", r.first_at, r.settled_at,
    r.attempts, lag(r.attempts) over earlier as before_attempts, lag(r.first_at) over earlier as before_first_at,
    age(r.xmin) as age, lag(r."offset") over earlier as before_offset, lag(r.settled_at) over earlier as before_at,
    lag(age(r.xmin)) over earlier as before_age, {AGAIN} as again, lag({AGAIN}) over earlier as before_again
  from ordered s
  join {{receipt}} r on r.subscription_id = s.subscription_id and r.outcome = 'delivered'
    and r.first_at >= s.since and r.first_at < s.until
  join {{outbox}} o on o.transaction_id = r.transaction_id and o.position = r.position and o."offset" = r."offset"
  where o.key is not null and o.due_at is null
    and not exists (
      select from redelivery d where d.transaction_id = r.transaction_id and d.position = r.position
        and d.subscription_id = r.subscription_id and d.replay = r.replay
    )
  window earlier as (partition by r.subscription_id, r.replay, s.since, o.key order by r."offset")
) compared
where (
    first_at < before_at - interval '{CLOCKS_DIFFER_S} seconds' or settled_at = before_at
    or first_at < before_at and age > before_age
  ) and (
    subscription_id not in (select subscription_id from claimed)
    or attempts = 1 and before_attempts = 1 and first_at <> before_first_at and not again and not before_again
  ) and not exists (
    select from matched m where m.subscription_id = compared.subscription_id
      and compared.before_first_at > m.at - interval '{CLOCKS_DIFFER_S} seconds'
      and compared.first_at < m.at + interval '{CHANGE_SETTLES_S} seconds'
  )
"""  # noqa: S608 -- numbers of ours


def write_out_of_order(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the day's receipts that are out of order (schemas.OUT_OF_ORDER) to files in `directory`; return their
    number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    if not snapshot.rows(ANY_ORDERED)[0]["found"]:
        return 0
    return write_found(
        spark,
        snapshot,
        day,
        OUT_OF_ORDER,
        directory,
        rows_of,
        whole=True,
    )
