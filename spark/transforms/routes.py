"""Match messages with subscriptions as the service's relay does.

A topic matches by its name, or by a prefix (a pattern with a trailing `*`); `halfnote.…` matches a prefix only if the
prefix itself begins with `halfnote.`. An empty list of tags, and an empty set of headers, match every message.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.frames import CHANGE_SETTLES_S, Frames
from spark.transforms.subscriptions import subscriptions

RESERVED = "halfnote."

_FILTERS = "tags array<string>, headers map<string, string>"


def routes(f: Frames) -> DataFrame:
    """Return the routes that were computed for the run, or else compute them."""
    return f.routes if f.routes is not None else routed(f.subscription_version, f.checkpoint)


def routed(versions: DataFrame, checkpoint: DataFrame) -> DataFrame:
    """Return one row a subscription, deleted ones too, by its history (the frame `subscription_version`).

    `tags` and `headers` (a map) null: any. `matches_since`: when they and `topics` last changed; `judged_from`:
    messages committed from then on can be judged by them. `lowest`: the checkpoint of its slowest shard; 0 if unknown.
    It has passed all messages up to there; a receipt of a later message does not show that, because the worker, or the
    consumer, may still hold earlier ones. `whole_layout`: whether its checkpoint has one row for each shard.
    `works_since`: it is active since then; null if it is paused, disabled or deleted. `ordered_since`: `ordered` has
    its value since then. `taker` is the hash of its number, never 0. `matches_until`, of a deleted one: no worker took
    a message for it that was committed later.
    """
    known = subscriptions(versions).join(_checkpoints(checkpoint), "subscription_id", "left")
    known = known.withColumn("works_since", F.expr("if(state = 'active' and deleted_at is null, state_since, null)"))
    wanted = F.from_json("filters", _FILTERS)
    return known.select(
        "subscription_id",
        "name",
        "topics",
        "started_after",
        "created_at",
        "deleted_at",
        "works_since",
        "ordered",
        "ordered_since",
        F.coalesce("whole_layout", F.lit(False)).alias("whole_layout"),
        F.when(F.size(wanted["tags"]) > 0, wanted["tags"]).alias("tags"),
        F.when(F.size(wanted["headers"]) > 0, wanted["headers"]).alias("headers"),
        "matches_since",
        (F.col("matches_since") + F.make_dt_interval(secs=F.lit(CHANGE_SETTLES_S))).alias("judged_from"),
        (F.col("deleted_at") + F.make_dt_interval(secs=F.lit(CHANGE_SETTLES_S))).alias("matches_until"),
        F.coalesce("lowest", F.lit(0)).cast("long").alias("lowest"),
    ).withColumn("taker", F.xxhash64("subscription_id"))


def _checkpoints(checkpoint: DataFrame) -> DataFrame:
    """A number of shards that has changed replaces all rows at once, so there is always one layout, complete."""
    whole = (F.count("*") == F.max("shards")) & (F.min("shards") == F.max("shards"))
    by_subscription = checkpoint.groupBy("subscription_id")
    return by_subscription.agg(F.min("offset").alias("lowest"), whole.alias("whole_layout"))


def takers(f: Frames, topics: DataFrame) -> DataFrame:
    """Return one row for each topic of `topics` (column topic, distinct) and subscription that takes it by topic.

    `place`: 0 for one of them, 1 for the next…; null columns, and place 0, for a topic without a subscription.
    """
    asked = routes(f)
    patterns = asked.select("subscription_id", F.explode("topics").alias("pattern")).distinct()
    taken = topics.join(F.broadcast(patterns), topic_matches("topic", "pattern")).select("topic", "subscription_id")
    return (
        topics.join(taken.distinct().join(F.broadcast(asked), "subscription_id"), "topic", "left")
        .drop("topics")
        .withColumn("place", F.expr("row_number() over (partition by topic order by subscription_id) - 1"))
    )


def tag_taken() -> Column:
    """Whether the filter `tags` takes the message's `tag`; never null."""
    return F.col("tags").isNull() | F.coalesce(F.array_contains("tags", F.col("tag")), F.lit(False))


def headers_taken(wanted: Column, sent: Column) -> Column:
    """Whether the message's headers (a JSON object, or null) have all the wanted names and values (a map)."""
    found = F.from_json(sent, "map<string, string>")
    missing = F.exists(
        F.map_entries(wanted),
        lambda pair: ~F.coalesce(F.try_element_at(found, pair["key"]) == pair["value"], F.lit(False)),
    )
    return F.coalesce(~missing, F.lit(True))


def before(at: Column, seconds: float) -> Column:
    """The time that is so many seconds before another."""
    return at - F.make_dt_interval(secs=F.lit(seconds))


def due_from() -> Column:
    """When a message may go out: after the commit and the producer's delay."""
    return F.coalesce("due_at", "committed_at")


def must_be_there(seen_at: Column, sla_s: float) -> Column:
    """Whether a subscription that takes the message must have got it by now, or have it in retry or dead; never null.

    False if it is deleted, began after the message, or has not passed it; also if its topics and filters changed since
    (within CHANGE_SETTLES_S), and before the SLA (seconds) is over. A message that is due later waits in retry as soon
    as it was passed. The rule delivery_late judges what it has not passed.
    """
    return F.coalesce(
        F.col("deleted_at").isNull()
        & (F.col("offset") > F.col("started_after"))
        & (F.col("offset") <= F.col("lowest"))
        & (F.col("committed_at") >= F.col("judged_from"))
        # Compute the bound once, not in each of the day's rows.
        & (F.col("committed_at") <= before(seen_at, sla_s)),
        F.lit(False),
    )


def is_reserved(name: str) -> Column:
    """Whether the topic, or the pattern, of the column `name` is reserved for Halfnote's own messages."""
    return F.startswith(F.col(name), F.lit(RESERVED))


def topic_matches(topic: str, pattern: str) -> Column:
    """Whether the pattern of one column matches the topic of another, as the service's topic patterns do."""
    beginning = F.expr(f"substring({pattern}, 1, length({pattern}) - 1)")
    by_beginning = (
        F.endswith(F.col(pattern), F.lit("*"))
        & F.startswith(F.col(topic), beginning)
        & (~is_reserved(topic) | is_reserved(pattern))
    )
    return (F.col(topic) == F.col(pattern)) | by_beginning
