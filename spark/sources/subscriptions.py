"""Finds the subscriptions that are not as their history says, or whose checkpoint is impossible; and changes of a
subscription that the audit lacks, or that only the audit has.

A trigger writes a version with each change, so the last version and the row are equal. The service writes the audit row
of a person's change in the same database transaction. The comparison runs in Postgres.
"""

from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot
from spark.sources.replays import TAKES, any_of
from spark.sources.scan import reported_once, rows_of, write_found

# What a version has of its subscription.
COMPARED = (
    *("name", "topics", "filters", "state", "ordered", "on_dead", "shards", "max_in_flight", "rate_per_s", "timeout_s"),
    *("retry", "expire_after_s", "max_backlog", "started_after", "deleted_at"),
)
# The checkpoint of a shard is stored this long after its receipts at the latest, also if its worker was replaced.
MOVES_WITHIN = "1 hour"
# As the relay divides messages among shards; a test compares both.
SHARD = "(hashtextextended(coalesce(o.key, o.transaction_id::text || '-' || o.position::text), 0) & 2147483647)"
# Surely so long: a day is kept for an hour at least, and while a message of it waits.
ATTEMPTS_KEPT_DAYS = 2
_DIFFERS = ", ".join(f"case when s.{name} is distinct from v.{name} then '{name}' end" for name in COMPARED)
# A version and its audit row were written by one database transaction. If rows were copied since, as by a restore, they
# have the same time: before the first pair of which Postgres still knows it.
_SAME_CHANGE = """a.target = v.name and (a.xmin = v.written_by
      or (v.at < kept.since) is not false and a.at between v.at - interval '1 minute' and v.at + interval '1 minute')"""
_TOLD = "f.detail ->> 'differs' ~ '(change without audit|audit without change)'"
# The audit is compared from its first row on that is kept and chained. What a version changes says which audit row it
# has. A destination's 410 disables an active subscription: no person did that, and it leaves an attempt, which is kept
# with the message's day, and the whole table is read for it. A redelivered message of a day that is closed leaves none.
# Each change is reported once, as breaks of the audit's chain are, because nothing can take it back.
_UNAUDITED = f"""
with since as (
  select greatest(
    (select min(at) from audit where place is not null),
    (select max(at) filter (where name = 'verdict') from evidence_since),
    (select max(at) filter (where name = 'audit') from evidence_since) + interval '1 hour'
  ) as at
), version as (
  select v.*, v.xmin as written_by, case
      when lag(v.version_id) over earlier is null then 'put'
      when v.deleted_at is distinct from lag(v.deleted_at) over earlier then 'delete'
      when v.state = lag(v.state) over earlier then 'put'
      when v.state = 'paused' then 'pause'
      when v.state = 'active' then 'resume'
      when lag(v.state) over earlier <> 'active' then 'disable'
      when v.at > '{{seen}}'::timestamptz - interval '{ATTEMPTS_KEPT_DAYS} days' then 'gone'
    end as act
  from subscription_version v window earlier as (partition by v.subscription_id order by v.version_id)
), kept as (
  select min(v.at) as since from version v join audit a on a.xmin = v.written_by and a.target = v.name
)
select v.subscription_id, v.name, 'change without audit: '
  || string_agg(distinct replace(v.act, 'gone', 'disable'), ', ') as differs
from version v, since, kept
where v.at >= since.at and v.act is not null and case v.act when 'gone' then not exists (
    select from attempt g where g.kind = 'delivery' and g.outcome = 'gone' and g.subscription_id = v.subscription_id
      and g.at between v.at - interval '1 hour' and v.at + interval '1 minute'
  ) and not exists (
    select from redelivery g join day d on d.low <= g.transaction_id and d.high > g.transaction_id
    where g.subscription_id = v.subscription_id and g.what = 'redelivered' and g.at <= v.at + interval '1 minute'
      and d.state <> 'open'
  ) else not exists (
    select from audit a where a.what = 'subscription.' || v.act and {_SAME_CHANGE}
      and (a.detail -> 'asked' -> 'topics' is null or a.detail -> 'asked' -> 'topics' = to_jsonb(v.topics))
  ) end and {reported_once("subscription_differs", "v.name", "v.at", _TOLD)}
group by 1, 2
union all
select 0, a.target, 'audit without change: ' || string_agg(distinct split_part(a.what, '.', 2), ', ')
from audit a, since, kept
where a.at >= since.at and (a.what in ('subscription.pause', 'subscription.resume', 'subscription.delete')
    or a.what = 'subscription.put' and a.detail -> 'new' = 'true')
  and not exists (
    select from version v where {_SAME_CHANGE} and case a.what
      when 'subscription.pause' then v.state = 'paused'
      when 'subscription.resume' then v.state = 'active'
      when 'subscription.delete' then v.deleted_at is not null
      else true end
  ) and {reported_once("subscription_differs", "a.target", "a.at", _TOLD)}
group by 2
"""  # noqa: S608 -- texts of ours
# A worker moves the checkpoint of a shard with the receipts, or seconds later: so the first message after it that the
# shard takes has no receipt, or a new one. After a change of the subscription, its workers begin at the checkpoint and
# leave out what has a receipt, so it may be behind for a moment. A day that is not open may hold the checkpoint back.
# Served by outbox_by_offset, receipt_by_offset and primary keys. Without a receipt above the checkpoint none is read,
# because the log after it may be long, if a consumer does not claim.
_BEHIND = f"""
select c.subscription_id
from checkpoint c
join subscription s on s.subscription_id = c.subscription_id and s.shards = c.shards and s.state = 'active'
  and s.deleted_at is null
cross join lateral (
  select max(r."offset") as newest from receipt r
  where r.subscription_id = c.subscription_id and r.replay = 0 and r."offset" > c."offset"
) received
cross join lateral (
  select o.transaction_id, o.position, o."offset" from outbox o
  where o."offset" > greatest(c."offset", s.started_after) and o."offset" <= received.newest
    and {TAKES.format(patterns="s.topics", topic="o.topic")}
    and {any_of("s.filters", "tags", "o.tag")}
    and (coalesce(s.filters -> 'headers', 'null') in ('null', '{{{{}}}}') or exists (
      select from half h where h.transaction_id = o.transaction_id and h.position = o.position
        and h.headers @> (s.filters -> 'headers') offset 0
    ))
    and (c.shards = 1 or mod({SHARD}, c.shards) = c.shard)
  order by o."offset" limit 1
) o
where exists (
    select from day d where d.low <= o.transaction_id and d.high > o.transaction_id and d.state = 'open'
  ) and exists (
    select from receipt r where r.transaction_id = o.transaction_id and r.position = o.position
      and r.subscription_id = c.subscription_id and r.replay = 0 and r."offset" = o."offset"
      and r.settled_at < '{{seen}}'::timestamptz - interval '{MOVES_WITHIN}' offset 0
  ) and not exists (
    select from subscription_version v where v.subscription_id = c.subscription_id
      and v.at > '{{seen}}'::timestamptz - interval '{MOVES_WITHIN}'
  )
"""  # noqa: S608 -- texts of ours
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
  where c."offset" not between 0 and log.ends or c.shard not between 0 and c.shards - 1
  union
  ({_BEHIND})
)
select subscription_id, name, coalesce(string_agg(nullif(differs, ''), ', '), '') as differs,
  string_agg(checkpoint, '') as checkpoint
from (
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
union all
select u.subscription_id, u.name, u.differs, '' from ({_UNAUDITED}) u
) found
group by subscription_id, name
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
        rows_of,
        whole=True,
    )
