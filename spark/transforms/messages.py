"""Rules about messages: the outbox has the committed messages and no others, and content stays the same."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.transforms.finding import findings, message_id
from spark.transforms.joined import MESSAGE, Joined
from spark.transforms.routes import is_reserved


def published_without_commit(j: Joined) -> DataFrame:
    """A message is in the outbox, and its transaction has no verdict, or has halves but none of this message.

    The rule op_without_half covers a verdict without any half.
    """
    found = j.messages.where("offset is not null and (verdict is null or of_half and not has_half)")
    return findings(found, j.day, "published_without_commit", message_id(), "offset", "topic", "has_half")


def published_after_rollback(j: Joined) -> DataFrame:
    """A message is in the outbox although its transaction was rolled back."""
    found = j.messages.where("offset is not null and verdict = 2")
    return findings(found, j.day, "published_after_rollback", message_id(), "offset", "topic", "source", "decided_at")


def message_with_two_offsets(j: Joined) -> DataFrame:
    """A message is in the outbox at more than one offset."""
    found = j.messages.where("size(offsets) > 1")
    return findings(found, j.day, "message_with_two_offsets", message_id(), "offsets", "topic")


def content_differs(j: Joined) -> DataFrame:
    """The digests of a message in half, receipts (a replay's too) and archive differ."""
    digests = [
        j.frames.half.select(*MESSAGE, F.lit("half").alias("source"), F.col("body_digest").alias("digest")),
        j.frames.receipt.select(*MESSAGE, F.concat(F.lit("receipt:"), "subscription_id").alias("source"), "digest"),
    ]
    if j.frames.archive is not None:
        digests.append(
            j.frames.archive.select(*MESSAGE, F.lit("archive").alias("source"), F.col("body_digest").alias("digest"))
        )
    every = digests[0]
    for more in digests[1:]:
        every = every.unionByName(more)
    every = every.where("digest is not null")
    # Sums of fixed width group a million messages in a tenth of the time that sets of texts take. Most have one digest.
    hashed = F.xxhash64("digest")
    bounds = every.groupBy(MESSAGE).agg(F.min(hashed).alias("least"), F.max(hashed).alias("greatest"))
    differing = j.broadcast(bounds.where("least <> greatest").select(*MESSAGE))
    source = F.struct("source", F.lower(F.hex("digest")).alias("digest"))
    by_message = every.join(differing, MESSAGE, "left_semi").groupBy(MESSAGE)
    found = by_message.agg(F.array_sort(F.collect_set(source)).alias("digests"))
    return findings(found, j.day, "content_differs", message_id(), "digests")


def unrouted(j: Joined) -> DataFrame:
    """Topics with messages that no subscription ever matched, Halfnote's own left out.

    A subscription matched a message if it takes it, had begun and was not deleted at that time, and had its present
    topics and filters by then or has not reached the message yet. A message with any delivery row was matched by the
    topics and filters of that time. A subscription that filters by headers counts if the half is gone.
    """
    took = "(committed_at >= matches_since or offset > lowest)"
    began = f"offset > started_after and (deleted_at is null or committed_at < deleted_at) and {took}"
    matched = j.deliveries.where(f"traced or received or coalesce(matched, offset is not null) and {began}")
    untaken = j.messages.where("offset is not null").join(matched.select(*MESSAGE), MESSAGE, "left_anti")
    found = (
        untaken.where(~is_reserved("topic"))
        .groupBy("topic")
        .agg(
            F.count("*").alias("messages"),
            F.min_by(message_id(), "offset").alias("first"),
            F.min("offset").alias("offset"),
        )
    )
    if j.untaken is not None:
        by_topic = found.unionByName(j.untaken).groupBy("topic")
        found = by_topic.agg(F.sum("messages").alias("messages"), F.min_by("first", "offset").alias("first"))
    return findings(found, j.day, "unrouted", "topic", "messages", "first")
