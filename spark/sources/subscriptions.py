"""Finds the subscriptions that are not as their history says, or whose checkpoint is impossible.

A trigger writes a version with each change, so the last version and the row are equal. The comparison runs in Postgres.
"""

from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import write_found

# What a version has of its subscription.
COMPARED = (
    *("name", "topics", "filters", "state", "ordered", "on_dead", "shards", "max_in_flight", "rate_per_s", "timeout_s"),
    *("retry", "expire_after_s", "max_backlog", "started_after", "deleted_at"),
)
_DIFFERS = ", ".join(f"case when s.{name} is distinct from v.{name} then '{name}' end" for name in COMPARED)
# The beginning of a subscription never changes, and a deletion has the time at which it happens. No message has a
# higher offset than the sequence gave out, or than the log has, if its rows were copied from elsewhere.
DIFFERING = f"""
with last as (
  select distinct on (subscription_id) * from subscription_version order by subscription_id, at desc, version_id desc
), begun as (
  select subscription_id, min(started_after) as started_after from subscription_version group by 1
), log as (
  select greatest((select last_value from outbox_offset), (select max("offset") from outbox)) as ends
), impossible as (
  select c.subscription_id from checkpoint c, log
  where c."offset" not between 0 and log.ends or c.shard not between 0 and c.shards - 1 group by 1
)
select subscription_id, name, differs, checkpoint from (
  select coalesce(s.subscription_id, v.subscription_id) as subscription_id, coalesce(s.name, v.name) as name,
    case when s.subscription_id is null then 'subscription' when v.subscription_id is null then 'subscription_version'
      else concat_ws(', ', {_DIFFERS},
        case when b.started_after <> v.started_after then 'started_after of an earlier version' end,
        case when v.deleted_at < v.at - interval '1 hour' then 'deleted_at before its version' end
      ) end as differs,
    case when i.subscription_id is not null and s.deleted_at is null then 'offset or shard' else '' end as checkpoint
  from subscription s
  full join last v on v.subscription_id = s.subscription_id
  left join begun b on b.subscription_id = v.subscription_id
  left join impossible i on i.subscription_id = s.subscription_id
) compared
where differs <> '' or checkpoint <> ''
"""  # noqa: S608 -- names of ours


def write_differing_subscriptions(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write such subscriptions (schemas.DIFFERING_SUBSCRIPTION) to files in `directory`; return their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(
        spark,
        snapshot,
        day,
        DIFFERING,
        directory,
        lambda batches: [row for one in batches for row in one.to_pylist()],
        whole=True,
    )
