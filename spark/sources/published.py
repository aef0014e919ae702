"""Finds the messages of a day that differ from their half messages, or whose times contradict each other.

The End copies the columns, so they are equal: topic, key and tag, and the due time is the commit and the delay. The
messages of a transaction are born, checked and committed at the same time. The comparison runs in Postgres, by the
primary keys of the tables, and only messages that differ leave it.
"""

from collections.abc import Sequence

from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import CLOCKS_DIFFER_S, rows_of, write_found

# In hours, because a day of the session's time zone may have another number of them.
LONGEST_IMMUNITY_H = 24
# An id is compared with the clock before its half waits for the commit, from which it has its birth.
FLUSHED_WITHIN_S = 60
# The range is given for all tables, because the planner does not carry it over. They are read in the order of their
# primary keys or hashed; no other row of the day is read. `seen` has the snapshot's time. The times of the verdict are
# told once, with the first message. `id_time` is the time of the half's id. The service stores the
# largest difference that it ever permitted to a new id; until it has, the difference is not judged.
DIFFERING = f"""
select transaction_id, position, producer_group, "offset", differs, times from (
  select h.transaction_id::text, h.position, h.producer_group, o."offset", case when o.transaction_id is not null then
    concat_ws(', ',
      case when o.topic <> h.topic then 'topic' end,
      case when o.key is distinct from h.key then 'key' end,
      case when o.tag is distinct from h.tag then 'tag' end,
      case when o.due_at is distinct from o.committed_at + make_interval(secs => h.deliver_after_s) then 'due_at' end,
      case when h.position > 0 and (
        select bool_and(first.committed_at <> o.committed_at) from {{outbox}} first
        where first.transaction_id = h.transaction_id and first.position = 0
      ) then 'committed_at' end
    ) else '' end as differs,
    concat_ws(', ',
      case when h.born_at > late.at then 'born_at in the future' end,
      case when h.position = 0 and abs(date_part('epoch', h.born_at - {{id_time}})) > skew.of_ids_s
        then 'born_at far from the time of the id' end,
      case when h.position = 0 and h.first_check_at
        not between h.born_at and h.born_at + interval '{LONGEST_IMMUNITY_H} hours'
        then 'first_check_at beyond every policy' end,
      case when h.position > 0 and (
        select (first.born_at, first.first_check_at) <> (h.born_at, h.first_check_at) from {{half}} first
        where first.transaction_id = h.transaction_id and first.position = 0
      ) then 'born_at or first_check_at of one message' end,
      case when h.position = 0 and p.decided_at > late.at then 'decided_at in the future' end,
      case when o.committed_at > late.at then 'committed_at in the future' end,
      case when h.position = 0 and p.decided_at < h.born_at - skew.most then 'decided_at before born_at' end,
      case when o.committed_at < coalesce(p.decided_at, h.born_at) - skew.most
        then 'committed_at before ' || case when p.transaction_id is null then 'born_at' else 'decided_at' end end
    ) as times
  from (
    select interval '{CLOCKS_DIFFER_S} seconds' as most,
      max(value) + {CLOCKS_DIFFER_S} + {FLUSHED_WITHIN_S} as of_ids_s
    from shared_rule where name = 'longest_id_skew_s'
  ) skew
  cross join lateral (select '{{seen}}'::timestamptz + skew.most as at) late
  cross join {{half}} h
  left join {{op}} p on p.transaction_id = h.transaction_id
    and p.transaction_id >= '{{low}}' and p.transaction_id < '{{high}}' and p.transaction_id {{among}}
  left join {{outbox}} o on o.transaction_id = h.transaction_id and o.position = h.position
    and o.transaction_id >= '{{low}}' and o.transaction_id < '{{high}}' and o.transaction_id {{among}}
  where h.transaction_id >= '{{low}}' and h.transaction_id < '{{high}}' and h.transaction_id {{among}}
) compared
where differs <> '' or times <> ''
"""  # noqa: S608 -- a number of ours


def write_differing(
    spark: SparkSession, snapshot: Snapshot, day: Day, directory: str, among: Sequence[str] | None = None
) -> int:
    """Write the day's differing messages (schemas.DIFFERING) to files in `directory`; return their number.

    `among`: the ids, sorted, of transactions that have all of them; None: any may. Without any, there is no directory.
    Raises copy.FAILURES.
    """
    return write_found(spark, snapshot, day, DIFFERING, directory, rows_of, among=among)
