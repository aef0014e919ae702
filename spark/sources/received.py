"""Finds the receipts of a day that the relay cannot have written.

The comparison runs in Postgres, by the primary keys of the tables, and only wrong receipts leave it.
"""

from collections.abc import Sequence

from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import CLOCKS_DIFFER_S, rows_of, write_found

# A redelivery is on record for so long, and an hour more.
KEPT_DAYS = 44
LONGEST_MS = 3_600_000
# The failed tries of each delivery. Served by attempt's primary key.
FAILED = """select transaction_id, position, subscription_id, coalesce(replay, 0) as replay, count(*) as times
    from {attempt} where transaction_id >= '{low}' and transaction_id < '{high}' and transaction_id {among}
      and kind = 'delivery' and outcome in ('failed', 'refused') group by 1, 2, 3, 4"""
# The tries of a delivery before a person redelivered it. Served by redelivery_transaction.
USED_BEFORE = """coalesce((
          select sum(again.attempts) from redelivery again where again.transaction_id = {0}.transaction_id
            and again.position = {0}.position and again.subscription_id = {0}.subscription_id
            and again.replay = {0}.replay and again.what = 'redelivered'
        ), 0)"""

# A receipt has its message's offset; if the message is in the outbox more than once, one of them. A person may drop a
# dead letter before the message is due, so only a delivery's `first_at` is judged. The forced removal of a day makes
# dead letters of messages that are not due; if the day is opened again, a redelivery sends such a message at once.
# Older versions wrote receipts that were settled before `first_at`, by the length of a turn; of those from before
# `evidence_since`, a minute is none. Upkeep makes dead letters of what a closed day still holds, and removes those that
# were delivered at that moment a little later. It also removes the replays of deleted subscriptions, whose receipts are
# not compared with them. A redelivery may lower the end of a replay, so only the beginning is compared. The range is
# given in subqueries too, because the planner may hash the table that they name, once for each range.
#
# Each failed try has a row of `attempt`, written with the retry or the dead letter. A redelivery counts from 0 again.
# An attempt of a day that is closed has no row. A drop writes the receipt and the row of `redelivery` in one statement;
# the latter is kept for 45 days. An answer is awaited for 60 seconds at most. A webhook's answer has a status, and a
# broker's has none. A receipt's destination was that of today if the audit has no change of the subscription since.
WRONG = f"""
select transaction_id, position, subscription_id, replay, "offset", differs from (
  select r.transaction_id::text, r.position, r.subscription_id, r.replay, r."offset", concat_ws(', ',
    case when r.outcome not in ('delivered', 'dropped') or r.outcome = 'dropped'
      and r.settled_at > '{{seen}}'::timestamptz - interval '{KEPT_DAYS} days' and not exists (
        select from redelivery again where again.transaction_id = r.transaction_id and again.position = r.position
          and again.subscription_id = r.subscription_id and again.replay = r.replay and again.what = 'dropped'
      ) then 'outcome' end,
    case when r.outcome = 'delivered' and (r.status not between 200 and 299 or r.status is null
      and s.destination ->> 'type' = 'webhook' and r.first_at > (
        select greatest(min(at) filter (where place is not null), max(at) filter (where what = 'subscription.put'
          and target = s.name)) + interval '1 minute' from audit
      )) then 'status' end,
    case when r.outcome = 'delivered' and r.attempts < 1 or r.attempts < 0 then 'attempts'
      when (r.settled_at < '{{closes}}' or r.first_at >= '{{since}}')
        and r.attempts - (r.outcome <> 'dropped')::int <> coalesce(failed.times, 0)
        and r.attempts - (r.outcome <> 'dropped')::int + {USED_BEFORE.format("r")} <> coalesce(failed.times, 0)
      then 'attempts' end,
    case when r.duration_ms not between 0 and {LONGEST_MS} then 'duration_ms' end,
    case when r.outcome = 'delivered' and r.digest is null then 'digest' end,
    case when r."offset" <> o."offset" and not exists (
      select from {{outbox}} other where other.transaction_id = r.transaction_id and other.position = r.position
        and other."offset" = r."offset" and other.transaction_id >= '{{low}}' and other.transaction_id < '{{high}}'
    ) then 'offset' end,
    case when r.outcome = 'delivered' and r."offset" = o."offset" and (r.first_at < o.committed_at + skew.most or
      r.replay = 0 and r.first_at < o.due_at + skew.most and not exists (
        select from redelivery again where again.transaction_id = r.transaction_id and again.position = r.position
          and again.subscription_id = r.subscription_id and again.replay = 0 and again.what = 'redelivered'
      )) then 'first_at' end,
    case when greatest(r.first_at, r.settled_at) > '{{seen}}'::timestamptz - skew.most
      or r.settled_at < r.first_at - case when r.first_at >= (
        select max(at) from evidence_since where name = 'verdict'
      ) then interval '0' else interval '1 minute' end then 'settled_at' end,
    case when d.transaction_id is not null then 'dead' end,
    case when r.replay <> 0 and s.subscription_id is not null and (p.replay_id is null or r."offset" <= p.after
      or r.first_at < p.created_at + skew.most) then 'replay' end
  ) as differs
  from (values (interval '-{CLOCKS_DIFFER_S} seconds')) skew (most)
  cross join {{receipt}} r
  left join {{outbox}} o on o.transaction_id = r.transaction_id and o.position = r.position
    and o.transaction_id >= '{{low}}' and o.transaction_id < '{{high}}' and o.transaction_id {{among}}
  left join ({FAILED}) failed on failed.transaction_id = r.transaction_id and failed.position = r.position
    and failed.subscription_id = r.subscription_id and failed.replay = r.replay
  left join dead_letter d on d.transaction_id = r.transaction_id and d.position = r.position
    and d.subscription_id = r.subscription_id and d.replay = r.replay and d.reason <> 'day_left'
    and d.transaction_id >= '{{low}}' and d.transaction_id < '{{high}}'
  left join replay p on p.replay_id = r.replay
  left join subscription s on s.subscription_id = r.subscription_id and s.deleted_at is null
  where r.transaction_id >= '{{low}}' and r.transaction_id < '{{high}}' and r.transaction_id {{among}}
) compared
where differs <> ''
"""  # noqa: S608 -- a number of ours


# Those of whose receipts a status is expected, see above.
WEBHOOKS = "select subscription_id from subscription where deleted_at is null and destination ->> 'type' = 'webhook'"


def webhooks(snapshot: Snapshot) -> frozenset[int]:
    """Return the subscriptions, not deleted, that are webhooks."""
    return frozenset(row["subscription_id"] for row in snapshot.rows(WEBHOOKS))


def write_wrong_receipts(
    spark: SparkSession, snapshot: Snapshot, day: Day, directory: str, among: Sequence[str] | None = None
) -> int:
    """Write the day's wrong receipts (schemas.WRONG_RECEIPT) to files in `directory`; return their number.

    `among`: the ids, sorted, of transactions that have all of them; None: any may. Without any, there is no directory.
    Raises copy.FAILURES.
    """
    return write_found(spark, snapshot, day, WRONG, directory, rows_of, among=among)
