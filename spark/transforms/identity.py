"""Rules about what the read compared: content, times, verdicts, receipts and their order are as the service writes."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.finding import delivery_id, findings, message_id
from spark.transforms.joined import DELIVERY, MESSAGE, Joined


def half_altered(j: Joined) -> DataFrame:
    """The digest of a transaction's stored half messages is not the one that was stored when they were posted, a body
    is not that of its digest, or the record of a reissue says something else."""
    found = j.whole.altered
    assert found is not None
    return findings(
        found, j.day, "half_altered", "transaction_id", F.col("digest").alias("stored"), "computed", "differs"
    )


def published_differs(j: Joined) -> DataFrame:
    """A message in the outbox has another topic, key, tag or due time than its half."""
    found = j.whole.differing
    assert found is not None
    # A message with two offsets can differ twice.
    by_message = found.where("differs <> ''").groupBy(*MESSAGE, "producer_group")
    first = by_message.agg(F.min("offset").alias("offset"), F.min_by("differs", "offset").alias("differs"))
    return findings(first, j.day, "published_differs", message_id(), "offset", "differs")


def times_disagree(j: Joined) -> DataFrame:
    """A transaction was decided before it was born, or a message was published before that; or a time is to come."""
    found = j.whole.differing
    assert found is not None
    by_message = found.where("times <> ''").groupBy(*MESSAGE, "producer_group")
    first = by_message.agg(F.min("offset").alias("offset"), F.min("times").alias("times"))
    return findings(first, j.day, "times_disagree", message_id(), "offset", "times")


def verdict_unproven(j: Joined) -> DataFrame:
    """A verdict lacks the evidence of its source, or evidence has no such verdict: see spark/sources/verdicts.py."""
    return verdicts_without_evidence(j.whole)


def verdicts_without_evidence(f: Frames) -> DataFrame:
    """Return the findings of `verdict_unproven`: on a day without rows, acts on transactions that are gone."""
    found = f.without_evidence
    assert found is not None
    columns = ("verdict", "source", "answers", "differs")
    by_transaction = found.groupBy("transaction_id", "producer_group")
    first = by_transaction.agg(F.min(F.struct("differs", "verdict", "source", "answers")).alias("first"))
    return findings(
        first.select("transaction_id", "producer_group", "first.*"),
        f.day,
        "verdict_unproven",
        "transaction_id",
        *columns,
    )


def audit_broken(j: Joined) -> DataFrame:
    """A row of the audit was changed, removed or inserted: see spark/sources/audit_chain.py."""
    return broken_audit(j.whole)


def broken_audit(f: Frames) -> DataFrame:
    """Return the findings of `audit_broken`, which are found on a day without rows too."""
    found = f.audit_broken
    assert found is not None
    return findings(found, f.day, "audit_broken", "subject", "audit_id", "place", "before_place", "differs")


def receipt_wrong(j: Joined) -> DataFrame:
    """A receipt says what the relay never writes: see spark/sources/received.py."""
    found = j.whole.wrong_receipt
    assert found is not None
    columns = ("offset", "differs")
    return findings(_first_replay(found, *columns), j.day, "receipt_wrong", delivery_id(), "replay", *columns)


def delivery_wrong(j: Joined) -> DataFrame:
    """A retry, a dead letter or a drop says what the service never writes: see spark/sources/deliveries.py."""
    found = j.whole.wrong_delivery
    assert found is not None
    columns = ("offset", "what", "differs")
    return findings(_first_replay(found, *columns), j.day, "delivery_wrong", delivery_id(), "replay", *columns)


def subscription_differs(j: Joined) -> DataFrame:
    """A subscription's row is not as its last version says, or one of both is gone, or a change is not in the audit."""
    return differing_subscriptions(j.whole)


def differing_subscriptions(f: Frames) -> DataFrame:
    """Return the findings of `subscription_differs`, which are found on a day without rows too."""
    found = f.differing_subscription
    assert found is not None
    # The name of a deleted one may be used again.
    place = F.struct("subscription_id", "differs")
    by_name = found.where("differs <> ''").groupBy("name").agg(F.max(place).alias("last"))
    return findings(by_name.select("name", "last.*"), f.day, "subscription_differs", "name", "differs")


def order_broken(j: Joined) -> DataFrame:
    """A message of an ordered subscription was sent before the one before it in its key was settled."""
    found = j.whole.out_of_order
    assert found is not None
    columns = ("offset", "first_at", "before_offset", "before_at")
    return findings(_first_replay(found, *columns), j.day, "order_broken", delivery_id(), "replay", *columns)


def _first_replay(found: DataFrame, *columns: str) -> DataFrame:
    """The same delivery can be wrong live and in replays, which is one finding."""
    by_delivery = found.groupBy(DELIVERY)
    return by_delivery.agg(F.min("replay").alias("replay"), *(F.min_by(one, "replay").alias(one) for one in columns))
