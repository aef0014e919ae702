"""Rules about deliveries: every subscription that should get a message got it, and no other."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.transforms.finding import delivery_id, findings
from spark.transforms.joined import Joined
from spark.transforms.routes import must_be_there


def undelivered(j: Joined) -> DataFrame:
    """A subscription should have received a message by now, and no row shows it."""
    found = j.deliveries.where(F.col("matched") & ~F.col("traced") & must_be_there(j.seen_at, j.sla_s))
    return findings(found, j.day, "undelivered", delivery_id(), "name", "topic", "offset", "committed_at", "due_at")


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
