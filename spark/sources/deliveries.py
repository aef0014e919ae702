"""Finds the retries, dead letters and drops of a day that the service cannot have written.

Each of them explains why a message has no receipt, so an invented one would hide a loss. The comparison runs in
Postgres, by the primary keys of the tables, and only wrong rows leave it.
"""

from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot
from spark.sources.received import FAILED, USED_BEFORE
from spark.sources.scan import CLOCKS_DIFFER_S, rows_of, write_found

# A failed try has a row of `attempt`, written in one statement with the retry or the dead letter; a redelivery counts
# from 0 again. A day that was closed has attempts without rows, and deliveries without receipts. What was never tried
# is due at the producer's time, or at once; a redelivery is due when a person asked for it. A dead letter that was
# never tried has a reason that permits it: its day was closed, or its subscription had a limit; or the replay in which
# a person redelivered it was canceled, and it is dead again for the reason of before.
WRONG = f"""
with waiting as (
  select 'retry' as what, subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
    due_at, null::timestamptz as died_at, null as reason
  from delivery_retry where transaction_id >= '{{low}}' and transaction_id < '{{high}}'
  union all
  select 'dead letter', subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
    null, died_at, reason
  from dead_letter where transaction_id >= '{{low}}' and transaction_id < '{{high}}'
), limits as (
  select subscription_id, count(expire_after_s) > 0 as expires, count(max_backlog) > 0 as backlog
  from subscription_version group by 1
)
select transaction_id, position, subscription_id, replay, "offset", what, differs from (
  select w.transaction_id::text, w.position, w.subscription_id, w.replay, w."offset", w.what, concat_ws(', ',
    case when o.transaction_id is null then 'message' end,
    case when w."offset" <> o."offset" and not exists (
      select from {{outbox}} other where other.transaction_id = w.transaction_id and other.position = w.position
        and other."offset" = w."offset"
    ) then 'offset' end,
    case when w.topic <> o.topic then 'topic' end,
    case when w.key is distinct from o.key and o.transaction_id is not null then 'key' end,
    case when w.attempts < 0 then 'attempts'
      when (coalesce(w.died_at, seen.at) < '{{closes}}' or w.first_at is null or w.first_at >= '{{since}}')
      and w.attempts <> coalesce(failed.times, 0)
      and w.attempts + {USED_BEFORE.format("w")} <> coalesce(failed.times, 0) then 'attempts' end,
    case when w.first_at > seen.at + skew.most or w.attempts > 0 and w.first_at is null then 'first_at' end,
    case when w.attempts = 0 and w.first_at is null and again.redelivered is null and (
      o.due_at > seen.at + skew.most and w.due_at <> o.due_at
      or coalesce(o.due_at, o.committed_at) <= seen.at and w.due_at > seen.at + skew.most
    ) then 'due_at' end,
    case when w.died_at > seen.at + skew.most or w.died_at < greatest(w.first_at, o.committed_at) - skew.most
      then 'died_at' end,
    case when w.reason = 'day_left' then
        case when again.redelivered is null and (w.died_at < '{{closes}}' or w.died_at >= '{{since}}') then 'reason' end
      when w.reason = 'expired' then case when l.expires is not true then 'reason' end
      when w.reason = 'backlog' then case when l.backlog is not true then 'reason' end
      when w.what = 'dead letter' and w.attempts = 0 and again.redelivered is null then 'reason' end,
    case when w.what = 'retry' and again.redelivered is null and exists (
      select from {{receipt}} r where r.transaction_id = w.transaction_id and r.position = w.position
        and r.subscription_id = w.subscription_id and r.replay = w.replay
    ) then 'received' end,
    case when s.subscription_id is null then 'subscription' end,
    case when w.replay <> 0 and p.replay_id is null and s.deleted_at is null then 'replay' end
  ) as differs
  from (values (interval '{CLOCKS_DIFFER_S} seconds')) skew (most)
  cross join (values ('{{seen}}'::timestamptz)) seen (at)
  cross join waiting w
  left join {{outbox}} o on o.transaction_id = w.transaction_id and o.position = w.position
    and o.transaction_id >= '{{low}}' and o.transaction_id < '{{high}}'
  left join ({FAILED}) failed on failed.transaction_id = w.transaction_id and failed.position = w.position
    and failed.subscription_id = w.subscription_id and failed.replay = w.replay
  left join lateral (
    select true as redelivered from redelivery d where d.transaction_id = w.transaction_id and d.position = w.position
      and d.subscription_id = w.subscription_id and d.replay = w.replay and d.what = 'redelivered' limit 1
  ) again on true
  left join subscription s on s.subscription_id = w.subscription_id
  left join replay p on p.replay_id = w.replay
  left join limits l on l.subscription_id = w.subscription_id
) compared
where differs <> ''
union all
select d.transaction_id::text, d.position, d.subscription_id, d.replay, d."offset", 'drop', 'receipt'
from redelivery d
where d.what = 'dropped' and (d.at < '{{closes}}' or d.at >= '{{since}}')
  and d.transaction_id >= '{{low}}' and d.transaction_id < '{{high}}' and not exists (
    select from {{receipt}} r where r.transaction_id = d.transaction_id and r.position = d.position
      and r.subscription_id = d.subscription_id and r.replay = d.replay
  )
"""  # noqa: S608 -- texts of ours


def write_wrong_deliveries(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the day's wrong deliveries (schemas.WRONG_DELIVERY) to files in `directory`; return their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(
        spark,
        snapshot,
        day,
        WRONG,
        directory,
        rows_of,
        whole=True,
    )
