"""Finds replays that are over although messages of them have no receipt, and replays that still run.

The comparison runs in Postgres, and one row for each replay leaves it. A day without such a replay costs nothing.
"""

from pyspark.sql import SparkSession

from spark.frames import CHANGE_SETTLES_S
from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import receipts_since, rows_of, write_found

ANY_DONE = "select exists (select from replay where state = 'done') as found"
# The condition that patterns (text[]) take a topic, as the relay does: see spark/transforms/routes.py.
TAKES = """exists (
    select from unnest({patterns}) t (pattern) where t.pattern = {topic}
      or right(t.pattern, 1) = '*' and {topic} ^@ left(t.pattern, -1)
        and (not {topic} ^@ 'halfnote.' or left(t.pattern, -1) ^@ 'halfnote.')
  )"""


def any_of(filters: str, name: str, value: str) -> str:
    """Return the condition that a list of filters is empty or has a value."""
    wanted = f"{filters} -> '{name}'"
    return f"(coalesce({wanted}, 'null') in ('null', '[]') or coalesce(({wanted}) ? {value}, false))"


def _headers(filters: str) -> str:
    wanted = f"{filters} -> 'headers'"
    return f"(coalesce({wanted}, 'null') in ('null', '{{{{}}}}') or coalesce(h.headers @> ({wanted}), false))"


def _no_row(table: str, condition: str = "true") -> str:
    return f"""not exists (
    select from {table} x where x.transaction_id = o.transaction_id and x.position = o.position
      and x.subscription_id = r.subscription_id and x.replay = r.replay_id and {condition}
  )"""


# A replay is over when each of its messages has a receipt or is dead. A person may drop a dead letter, or redeliver it:
# then the replay runs again until there is a receipt, so only a drop is a trace. A redelivery while the day was closed,
# which leaves no receipt, is of an older replay, and those are not judged. A replay takes what the subscription takes,
# and of that what its own filters do. It is not judged if the subscription took something else at any time of it, or if
# the day was closed then; nor if a person canceled it, which cleared retries of it: such a replay is `done` after a
# redelivery of one of its dead letters. A redelivery may lower its end. Outbox is read by outbox_by_offset, redelivery
# by redelivery_transaction, the others by their primary keys.
INCOMPLETE = f"""
with version as (
  select *, coalesce(lead(at) over (partition by subscription_id order by at, version_id), 'infinity') as until
  from subscription_version
), over as (
  select r.*, s.name, v.topics, v.filters as own
  from replay r
  join subscription s on s.subscription_id = r.subscription_id and s.deleted_at is null
  join version v on v.subscription_id = r.subscription_id and v.at <= r.created_at and v.until > r.created_at
  where r.state = 'done' and r.cancelled_at is null and r.created_at >= '{{receipts_since}}'::timestamptz
  and not exists (
    select from version c
    where c.subscription_id = r.subscription_id and c.at <= r.ended_at
      and c.until > r.created_at - interval '{CHANGE_SETTLES_S} seconds'
      and (c.topics, c.filters) is distinct from (v.topics, v.filters)
  )
)
select r.subscription_id, r.replay_id, r.name, count(*) as messages,
  (array_agg(o.transaction_id || '-' || o.position order by o."offset"))[1] as first, min(o."offset") as "offset"
from over r
join {{outbox}} o on o."offset" > r.after and o."offset" <= r.until
left join {{half}} h on h.transaction_id = o.transaction_id and h.position = o.position
where {TAKES.format(patterns="r.topics", topic="o.topic")}
  and {any_of("r.own", "tags", "o.tag")} and {_headers("r.own")}
  and {any_of("r.filters", "topics", "o.topic")} and {any_of("r.filters", "keys", "o.key")}
  and {any_of("r.filters", "tags", "o.tag")} and {_headers("r.filters")}
  and {_no_row("{receipt}")} and {_no_row("delivery_retry")}
  and {_no_row("dead_letter")} and {_no_row("redelivery", "x.what = 'dropped'")}
group by r.subscription_id, r.replay_id, r.name
"""  # noqa: S608 -- constants

# Usually none runs. Served by replay_running and outbox_by_offset.
RUNNING = """
select s.subscription_id, p.replay_id, s.name
from replay p join subscription s on s.subscription_id = p.subscription_id and s.deleted_at is null
where p.state = 'running' and p."offset" < p.until
  and exists (select from {outbox} o where o."offset" > p."offset" and o."offset" <= p.until)
"""


def write_incomplete(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the replays that lack receipts of the day's messages (schemas.REPLAY_INCOMPLETE) to files in `directory`;
    return their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    since = receipts_since(day)
    if since is None or not snapshot.rows(ANY_DONE)[0]["found"]:
        return 0
    return write_found(
        spark,
        snapshot,
        day,
        INCOMPLETE,
        directory,
        rows_of,
        whole=True,
    )


def write_running(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the replays that still have to read messages of the day (schemas.REPLAYING) to files in `directory`; return
    their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(
        spark,
        snapshot,
        day,
        RUNNING,
        directory,
        rows_of,
        whole=True,
    )
