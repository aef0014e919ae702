"""Finds the messages of a day's outbox that differ from their half messages.

The End copies the columns, so they are equal: topic, key and tag, and the due time is the commit and the delay. The
comparison runs in Postgres, by the primary keys of both tables, and only messages that differ leave it.
"""

from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import write_found

# The range is given for both tables, because the planner does not carry it over. Both are read in the order of their
# primary keys or hashed; no other row of the day is read.
DIFFERING = """
select transaction_id, position, producer_group, "offset", differs from (
  select o.transaction_id::text, o.position, h.producer_group, o."offset", concat_ws(', ',
    case when o.topic <> h.topic then 'topic' end,
    case when o.key is distinct from h.key then 'key' end,
    case when o.tag is distinct from h.tag then 'tag' end,
    case when o.due_at is distinct from o.committed_at + make_interval(secs => h.deliver_after_s) then 'due_at' end
  ) as differs
  from {half} h join {outbox} o on o.transaction_id = h.transaction_id and o.position = h.position
  where h.transaction_id >= '{low}' and h.transaction_id < '{high}'
    and o.transaction_id >= '{low}' and o.transaction_id < '{high}'
) compared
where differs <> ''
"""


def write_differing(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the day's differing messages (schemas.DIFFERING) to files in `directory`; return their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(
        spark, snapshot, day, DIFFERING, directory, lambda batches: [row for one in batches for row in one.to_pylist()]
    )
