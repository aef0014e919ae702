"""The joins that the rules read: one row for each transaction, each message, and each delivery.

They are exact, and made for the few rows that a search for suspects leaves; they also work on a whole day, but slowly.
"""

from dataclasses import dataclass
from datetime import date
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.day_counts import DayCounts
from spark.transforms.routes import due_from, headers_taken, routes, tag_taken, takers

COMMIT, ROLLBACK = 1, 2
IN_DOUBT, PARKED = 1, 2
MESSAGE = ["transaction_id", "position"]
DELIVERY = [*MESSAGE, "subscription_id"]

POLICY = "interval_s double, max_checks double"

# The rows of this many transactions are joined in one partition: they are almost never more than 100,000.
FEW_SUSPECTS = 10_000
# This many hashes, or ids of messages, fit into the memory of each executor: about 50 MB of hashes.
MOST_BROADCAST = 1_000_000


@dataclass(frozen=True)
class Joined:
    """The input of the rules. `whole`: the day; `frames`: its suspect rows, and the joins of these.

    `disorder`: the places of the whole log that are out of order; `doubled`: the messages at offsets that occur more
    than once; see spark/transforms/offsets.py for both. `late`: the subscriptions with late deliveries, None if there
    are none; see spark/transforms/late.py. `sla_s`: the seconds that a delivery may take. `suspects`: the number of
    suspect transactions. `outcomes`: of the whole day, if the search for suspects counted them; see
    spark/transforms/outcomes.py. `counts`: of the whole day, if the search was in files. `refused` (REFUSED) and
    `untaken` (UNTAKEN): of the transactions that are not suspect, if the search was in files and there are any.
    `last_offset`: the day's, if the search was in files and there is any.
    """

    whole: Frames
    frames: Frames
    sla_s: float
    transactions: DataFrame
    messages: DataFrame
    deliveries: DataFrame
    disorder: DataFrame
    doubled: DataFrame
    late: DataFrame | None
    suspects: int
    outcomes: DataFrame | None = None
    counts: DayCounts | None = None
    refused: DataFrame | None = None
    untaken: DataFrame | None = None
    last_offset: int | None = None

    @property
    def day(self) -> date:
        """The day that is reconciled."""
        return self.whole.day

    @property
    def seen_at(self) -> Column:
        """The time of the snapshot."""
        return F.lit(self.whole.seen_at)

    def broadcast(self, faults: DataFrame) -> DataFrame:
        """Return a frame of faulty messages, to be sent to all executors if the suspects are in several partitions.

        Spark has no estimate of how few faults there are, and would move all rows of the suspects to them.
        """
        return F.broadcast(faults) if FEW_SUSPECTS < self.suspects <= MOST_BROADCAST else faults


def transactions(f: Frames) -> DataFrame:
    """Return one row for each transaction that has a row in any table.

    From its half (null without one): `producer_group`, `born_at`, `first_check_at`, `positions`. `verdict`, `source`,
    `decided_at`, `reason`: from its op, the first of them; `verdicts`: how many it has. `published`: positions in the
    outbox, null if there are none. From check_back: `state`, `answered`, `unanswered_since`, `next_check_at`,
    `parked_at`, `parked_reason`. `answers`: checks answered `unknown`, by the attempts on record, without those that
    came after it was parked. Its policy, from itself, its group or the defaults: `interval_s`, `max_checks`,
    `unanswered_park_s`.
    """
    parts = [_halves(f), _ops(f), _published(f), _check_backs(f), _answers(f)]
    joined = reduce(lambda left, right: left.join(right, "transaction_id", "full"), parts)
    groups = f.producer_group.select(
        F.col("name").alias("producer_group"),
        *(F.col(name).alias(f"group_{name}") for name in ("interval_s", "max_checks", "unanswered_park_s")),
    )
    own = F.from_json("policy", POLICY)
    return (
        joined.join(F.broadcast(groups), "producer_group", "left")
        .withColumn("interval_s", F.coalesce(own["interval_s"], "group_interval_s", _rule(f, "interval_s")))
        .withColumn("max_checks", F.coalesce(own["max_checks"], "group_max_checks", _rule(f, "max_checks")))
        .withColumn("unanswered_park_s", F.coalesce("group_unanswered_park_s", _rule(f, "unanswered_park_s")))
        .drop("policy", "group_interval_s", "group_max_checks", "group_unanswered_park_s")
    )


def messages(f: Frames) -> DataFrame:
    """Return one row for each message in half or outbox.

    `producer_group`, `headers`, `body_digest`: from its half. `offset` (the lowest), `offsets` (all of them, sorted),
    `topic`, `tag`, `due_at`, `committed_at`: from the outbox. `verdict`: its transaction's. `has_half`: whether
    there is a half of it, `of_half`: of any message of its transaction.
    """
    halves = f.half.groupBy(MESSAGE).agg(
        *(F.min(name).alias(name) for name in ("producer_group", "headers", "body_digest")),
    )
    of_half = f.half.select("transaction_id").distinct().withColumn("of_half", F.lit(True))
    outbox = f.outbox.groupBy(MESSAGE).agg(
        F.min("offset").alias("offset"),
        F.array_sort(F.collect_set("offset")).alias("offsets"),
        *(F.min_by(name, "offset").alias(name) for name in ("topic", "tag", "due_at", "committed_at")),
    )
    # A message with a half needs no look for another one of its transaction.
    outbox = outbox.join(of_half, "transaction_id", "left")
    return (
        halves.withColumn("has_half", F.lit(True))
        .join(outbox, MESSAGE, "full")
        .join(_ops(f), "transaction_id", "left")
        .withColumn("has_half", F.coalesce("has_half", F.lit(False)))
        .withColumn("of_half", F.col("has_half") | F.coalesce("of_half", F.lit(False)))
    )


def deliveries(f: Frames, known: DataFrame | None = None) -> DataFrame:
    """Return one row for each message and subscription that match or that any row links.

    `known`: `messages(f)`, if it is computed already. `matched`: the subscription takes the message by topic, tag and
    headers; null if it filters by headers and the half is gone. `traced`: the live delivery was received, waits for a
    retry, is dead, or was dropped by a person; or a person redelivered it, which may have left no receipt. `live`: its
    live receipt's first_at; `received`: whether there is any receipt, also a replay's; `delivered`: whether a receipt
    has that outcome; `tried`: whether any row shows a delivery, live or not. Also the subscription's columns of
    `routes` (null for an unknown one), and the message's `offset`, `topic`, `due_at`, `committed_at`, `has_half`, null
    without an outbox row.
    """
    sent = (messages(f) if known is None else known).where("offset is not null")
    sent = sent.select(*MESSAGE, "offset", "topic", "tag", "headers", "due_at", "committed_at", "has_half")
    matched = _matched(f, sent).join(_traces(f), DELIVERY, "full")
    return (
        matched.join(sent.drop("tag", "headers"), MESSAGE, "left")
        .join(F.broadcast(routes(f).drop("topics", "tags", "taker")), "subscription_id", "left")
        .withColumn("matched", _settle_match())
        .withColumn("traced", F.coalesce("traced", F.lit(False)))
        .withColumn("received", F.coalesce("received", F.lit(False)))
        .withColumn("delivered", F.coalesce("delivered", F.lit(False)))
        .withColumn("tried", F.coalesce("tried", F.lit(False)))
        .withColumn("due_from", due_from())
        .drop("headers")
    )


def _halves(f: Frames) -> DataFrame:
    first = F.min_by(F.struct("producer_group", "born_at", "first_check_at", "policy"), "position").alias("first")
    positions = F.array_sort(F.collect_set("position")).alias("positions")
    return f.half.groupBy("transaction_id").agg(first, positions).select("transaction_id", "first.*", "positions")


def _ops(f: Frames) -> DataFrame:
    """Return each transaction's first verdict, which stands; a second one is a fault."""
    first = F.min(F.struct("decided_at", "verdict", "source", "reason")).alias("first")
    ops = f.op.groupBy("transaction_id").agg(first, F.count("*").alias("verdicts"))
    return ops.select("transaction_id", "first.verdict", "first.source", "first.decided_at", "first.reason", "verdicts")


def _published(f: Frames) -> DataFrame:
    published = F.array_sort(F.collect_set("position")).alias("published")
    return f.outbox.groupBy("transaction_id").agg(published)


def _check_backs(f: Frames) -> DataFrame:
    columns = ("state", "answered", "unanswered_since", "next_check_at", "parked_at", "parked_reason")
    return f.check_back.select("transaction_id", *columns)


def _answers(f: Frames) -> DataFrame:
    """Count distinct check numbers, because one check may have two rows; checks of a parked one do not count."""
    parked = f.attempt.where("kind = 'parked'").groupBy("transaction_id").agg(F.min("at").alias("parked_since"))
    asked = f.attempt.where("kind = 'check' and outcome = 'unknown'").select("transaction_id", "number", "at")
    return (
        asked.join(parked, "transaction_id", "left")
        .where(F.col("parked_since").isNull() | (F.col("at") < F.col("parked_since")))
        .groupBy("transaction_id")
        .agg(F.count_distinct("number").alias("answers"))
    )


def _rule(f: Frames, name: str) -> Column:
    return F.lit(float(f.rules[name]))


def _matched(f: Frames, sent: DataFrame) -> DataFrame:
    """Return the deliveries whose topic the subscription takes, with the result of the tag and header filters."""
    by_topic = takers(f, sent.select("topic").distinct()).where("subscription_id is not null")
    wanted = by_topic.select("topic", "subscription_id", "tags", F.col("headers").alias("wanted"))
    answer = F.when(~tag_taken(), F.lit(False)).when(
        F.col("wanted").isNull() | F.col("has_half"), headers_taken(F.col("wanted"), F.col("headers"))
    )
    return sent.join(wanted, "topic").select(*DELIVERY, answer.alias("matched"), F.lit(True).alias("by_topic"))


def _settle_match() -> Column:
    """Not matched if the topics do not take the message; null if the message is gone."""
    return F.when(F.col("by_topic"), F.col("matched")).when(F.col("offset").isNotNull(), F.lit(False))


def _traces(f: Frames) -> DataFrame:
    over = F.lit(f.receipts_since is None) | (F.col("what") == "dropped") | (F.col("at") < F.lit(f.receipts_since))
    live = F.col("replay") == 0
    others = [
        f.delivery_retry.select(*DELIVERY, live.alias("traced")),
        f.dead_letter.select(*DELIVERY, live.alias("traced")),
        f.redelivery.select(*DELIVERY, (live & over).alias("traced")),
    ]
    receipts = f.receipt.select(
        *DELIVERY,
        live.alias("traced"),
        F.when(live, F.col("first_at")).alias("live"),
        F.lit(True).alias("received"),
        (F.col("outcome") == "delivered").alias("delivered"),
    )
    every = reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), others, receipts)
    return every.groupBy(DELIVERY).agg(
        F.min("live").alias("live"),
        F.lit(True).alias("tried"),
        *(F.coalesce(F.bool_or(name), F.lit(False)).alias(name) for name in ("traced", "received", "delivered")),
    )
