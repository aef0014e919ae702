"""Rules about deliveries: every subscription that should get a message got it, and no other."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.finding import delivery_id, findings, message_id
from spark.transforms.joined import DELIVERY, Joined
from spark.transforms.routes import before, must_be_there, routes


def undelivered(j: Joined) -> DataFrame:
    """A subscription should have received a message by now, and no row shows it."""
    found = j.deliveries.where(F.col("matched") & ~F.col("traced") & must_be_there(j.seen_at, j.sla_s))
    return findings(found, j.day, "undelivered", delivery_id(), "name", "topic", "offset", "committed_at", "due_at")


def delivery_late(j: Joined) -> DataFrame:
    """A subscription works and has not passed messages that it takes, although the SLA is over: one finding for each
    name."""
    lag = (F.unix_micros(j.seen_at) - F.unix_micros("due_from")) / F.lit(1e6)
    assert j.late is not None
    found = j.late.withColumn("lag_s", F.round(lag, 3))
    return findings(found, j.day, "delivery_late", "name", "messages", "first", "offset", "due_from", "lag_s")


def retry_overdue(j: Joined) -> DataFrame:
    """A subscription works, and its retries were due longer ago than the SLA: one finding for each name.

    A message of an ordered subscription waits for earlier ones of its key. Only the next one of a key is judged, and
    from the time since when nothing keeps it back: see spark/sources/retries.py. If these were not looked for, those
    with an attempt are judged.
    """
    on_time = before(j.seen_at, j.sla_s)
    asked = routes(j.whole).select("subscription_id", "name", "ordered", "ordered_since", "works_since")
    retries = j.whole.delivery_retry.join(F.broadcast(asked), "subscription_id")
    kept_back = F.col("attempts") == 0
    if j.whole.ready_retry is not None:
        delivery = [*DELIVERY, "replay"]
        retries = retries.join(j.whole.ready_retry.select(*delivery, "ready_at"), delivery, "left")
        retries = retries.withColumn("due_at", F.coalesce("ready_at", "due_at"))
        kept_back = F.col("ready_at").isNull()
    freed = F.expr("if(ordered = 'none' and key is not null, ordered_since, null)")
    retries = retries.withColumn("due_at", F.greatest("due_at", freed))
    waits = F.expr("ordered = 'key' and key is not null") & kept_back
    overdue = (F.col("due_at") <= on_time) & (F.col("works_since") <= on_time) & ~waits
    place = F.struct("due_at", "offset")
    found = (
        retries.where(overdue)
        .groupBy("name")
        .agg(
            F.min_by("subscription_id", place).alias("subscription_id"),
            F.count("*").alias("retries"),
            F.min_by(message_id(), place).alias("first"),
            F.min("due_at").alias("due_at"),
        )
    )
    return findings(found, j.day, "retry_overdue", "name", "retries", "first", "due_at")


def retry_never_due(j: Joined) -> DataFrame:
    """Retries are due later than their subscription's schedule permits: see spark/sources/retries.py."""
    found = j.whole.never_due
    assert found is not None
    return findings(found, j.day, "retry_never_due", "name", "retries", "last", "due_at")


def replay_incomplete(j: Joined) -> DataFrame:
    """A replay is over, and messages of it have no receipt: see spark/sources/replays.py."""
    found = j.whole.replay_incomplete
    assert found is not None
    subject = F.concat_ws(":", "name", "replay_id")
    return findings(found, j.day, "replay_incomplete", subject, "messages", "first", "offset")


def checkpoint_differs(j: Joined) -> DataFrame:
    """A subscription's checkpoint has not one row for each of its shards, so no worker delivers what is missing; or it
    is at an offset that the log does not have, or behind its receipts (see spark/sources/subscriptions.py)."""
    return differing_checkpoints(j.whole, j.sla_s)


def differing_checkpoints(f: Frames, sla_s: float) -> DataFrame:
    """Return the findings of `checkpoint_differs`, which are found on a day without rows too."""
    known, on_time = routes(f), before(F.lit(f.seen_at), sla_s)
    found = known.where(F.col("deleted_at").isNull() & ~F.col("whole_layout") & (F.col("created_at") <= on_time))
    if f.differing_subscription is not None:
        impossible = f.differing_subscription.where("checkpoint <> ''").select("subscription_id")
        found = found.unionByName(known.join(impossible, "subscription_id", "left_semi"))
    return findings(found.dropDuplicates(["name"]), f.day, "checkpoint_differs", "name", "lowest")


def receipt_without_message(j: Joined) -> DataFrame:
    """A message that is not in the outbox has a receipt, of a live delivery or of a replay."""
    found = j.deliveries.where("received and offset is null")
    return findings(found, j.day, "receipt_without_message", delivery_id(), "name")


def receipt_not_matched(j: Joined) -> DataFrame:
    """A subscription got a message that its topics, tags and headers do not take, that was before its beginning or
    after it was deleted (and a minute more), or the subscription is unknown.

    Replays are left out: they begin before the subscription and have their own filters. So are messages committed, or
    first sent, before the subscription had its present topics and filters (and a minute more, in which workers load
    them): a delayed, retried or redelivered message follows the filters of its time.
    """
    judged = "judged_from is null or committed_at >= judged_from and live >= judged_from"
    found = j.deliveries.where(
        f"live is not null and offset is not null and ({judged})"
        " and (name is null or not matched or offset <= started_after or committed_at > matches_until)"
    )
    return findings(found, j.day, "receipt_not_matched", delivery_id(), "name", "topic", "offset", "committed_at")
