"""Rules about the ledgers of producers and consumers, where they are given."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.finding import delivery_id, findings, message_id
from spark.transforms.joined import DELIVERY, MESSAGE, Joined
from spark.transforms.routes import is_reserved

_ID = 36
# A producer's database may round times, and a time of the ledger may be one of seconds.
MOST_MICROS = 1_000_000
# A rollback whose end was answered, so it must be recorded. Commits are judged by ledger_not_sent.
KEPT_ROLLBACK = "ledger = 'rollback' and end_decided_at is not null"
_MESSAGE_ID = r"^[0-9a-f-]{36}-[0-9]{1,4}$"


def of_day(f: Frames) -> Frames:
    """Return the frames with the ledgers' rows of the day's transactions; other rows belong to other days.

    The consumers' ledger gets the columns transaction_id and position. For a complete producers' ledger, the groups
    that it covers are determined.
    """
    low, high = _beginning(f.day), _beginning(f.day + timedelta(days=1))
    producers, consumers = f.producer_ledger, f.consumer_ledger
    of_the_day = (F.col("transaction_id") >= low) & (F.col("transaction_id") < high)
    if producers is not None:
        ids = F.lower("transaction_id").alias("transaction_id")
        said = ("end_decided_at", "end_reason")
        producers = producers.select(ids, F.lower("verdict").alias("verdict"), *said).where(of_the_day)
    if consumers is not None:
        known = consumers.withColumn("message_id", F.lower("message_id")).where(
            F.rlike("message_id", F.lit(_MESSAGE_ID))
        )
        consumers = known.withColumns(
            {
                "transaction_id": F.substring("message_id", 1, _ID),
                "position": F.expr(f"cast(substring(message_id, {_ID + 2}) as smallint)"),
            }
        ).where(of_the_day)
    groups = _spoken_of(f, producers) if f.producer_ledger_complete and producers is not None else frozenset()
    return replace(f, producer_ledger=producers, consumer_ledger=consumers, ledger_groups=groups)


def committed_of(f: Frames) -> DataFrame:
    """Return the transactions (`transaction_id`) that a complete ledger must have if they are committed."""
    return f.half.where(F.col("producer_group").isin(*sorted(f.ledger_groups))).select("transaction_id").distinct()


def _spoken_of(f: Frames, ledger: DataFrame) -> frozenset[str]:
    """Return the groups that have any transaction of the day in the ledger."""
    groups = f.half.join(ledger, "transaction_id", "left_semi").select("producer_group").distinct()
    return frozenset(row.producer_group for row in groups.collect())


def covered(subscription: DataFrame, ledger: DataFrame) -> DataFrame:
    """Return the subscriptions (`subscription_id`, `name`) that a consumer ledger covers.

    These are the ones that it names, or all if it names none.
    """
    named = ledger.select(F.col("subscription").alias("name")).where("name is not null").distinct()
    names = named.agg(F.collect_set("name").alias("names"))
    speaks = F.expr("size(names) = 0 or array_contains(names, name)")
    return subscription.crossJoin(F.broadcast(names)).where(speaks).select("subscription_id", "name")


def ledger_disagrees(j: Joined) -> DataFrame:
    """The producer's ledger and the op differ, or a complete ledger lacks the transaction.

    They differ in the verdict; in the time or the reason, where the ledger has what was said and answered at its end;
    or a rollback whose end was answered is not there. A reason is compared only with that of a producer's own verdict,
    because a check, policy or person gives another one.

    A missing row counts only for groups with any row of the day, and only when the SLA is over since the commit:
    a ledger is read before the tables. A reissue is made by a person, so no producer has it.
    """
    recorded = F.expr("case verdict when 1 then 'commit' when 2 then 'rollback' end")
    late = F.col("decided_at") + F.make_dt_interval(secs=F.lit(j.sla_s)) <= j.seen_at
    own = F.expr("verdict = 1 and not (source = 3 and decided_at = born_at)")
    unsaid = F.col("producer_group").isin(*sorted(j.whole.ledger_groups)) & own & late
    ops = j.transactions.where("verdict is not null").select(
        "transaction_id",
        "producer_group",
        recorded.alias("recorded"),
        "source",
        "decided_at",
        "reason",
        unsaid.alias("unsaid"),
    )
    said = _producers(j).withColumnRenamed("verdict", "ledger").distinct()
    differs = {
        "verdict": f"ledger <> recorded or ledger is null and unsaid or recorded is null and {KEPT_ROLLBACK}",
        "decided_at": f"abs(unix_micros(end_decided_at) - unix_micros(decided_at)) >= {MOST_MICROS}",
        "reason": "source = 0 and end_reason <> coalesce(reason, '')",
    }
    which = F.concat_ws(", ", *(F.when(F.expr(when), name) for name, when in differs.items()))
    found = said.join(ops, "transaction_id", "full").withColumn("differs", which).where("differs <> ''")
    detail = ("differs", "ledger", "recorded", "source", "decided_at", "end_decided_at")
    return findings(found, j.day, "ledger_disagrees", "transaction_id", *detail)


def ledger_not_sent(j: Joined) -> DataFrame:
    """The producer committed it, and it has no half here, or no verdict although the SLA is over since its birth."""
    said = _producers(j).where("verdict = 'commit'").select("transaction_id").distinct()
    known = j.transactions.select("transaction_id", "producer_group", "positions", "verdict", "born_at")
    late = F.col("born_at") + F.make_dt_interval(secs=F.lit(j.sla_s)) <= j.seen_at
    found = said.join(known, "transaction_id", "left").where(
        F.col("positions").isNull() | (F.col("verdict").isNull() & late)
    )
    half = F.col("positions").isNotNull().alias("half")
    return findings(found, j.day, "ledger_not_sent", "transaction_id", half, "born_at")


def never_consumed(j: Joined) -> DataFrame:
    """A subscription that the consumers' ledger covers received a message, and the ledger lacks it.

    Halfnote's own messages are left out.
    """
    ledger = _consumers(j)
    received = (
        j.deliveries.where("delivered and offset is not null")
        .where(~is_reserved("topic"))
        .join(F.broadcast(covered(j.whole.subscription, _whole_ledger(j))), ["subscription_id", "name"])
    )
    seen = ledger.select(*MESSAGE, F.col("subscription").alias("seen_by")).distinct()
    same = [received[name] == seen[name] for name in MESSAGE]
    same.append(F.col("seen_by").isNull() | (F.col("seen_by") == F.col("name")))
    missing = received.join(seen, same, "left_anti")
    found = missing.groupBy(*MESSAGE).agg(F.array_sort(F.collect_set("name")).alias("subscriptions"))
    return findings(found, j.day, "never_consumed", message_id(), "subscriptions")


def answer_differs(j: Joined) -> DataFrame:
    """A receipt has another HTTP status than the consumer answered with, by a ledger that has these."""
    names = F.broadcast(j.whole.subscription.select("subscription_id", "name"))
    answered = F.expr("outcome = 'delivered' and status is not null")
    received = j.frames.receipt.where(answered).join(names, "subscription_id")
    said = _consumers(j).where("size(answered) > 0").select(*MESSAGE, F.col("subscription").alias("of"), "answered")
    same = [received[name] == said[name] for name in MESSAGE]
    same.append(F.col("of").isNull() | (F.col("of") == F.col("name")))
    both = received.join(said, same).select(
        received["transaction_id"], received["position"], "subscription_id", "name", "status", "answered"
    )
    by_status = both.groupBy(*DELIVERY, "name", "status")
    every = by_status.agg(F.array_sort(F.array_distinct(F.flatten(F.collect_list("answered")))).alias("answered"))
    others = every.where(~F.array_contains("answered", F.col("status")))
    found = others.groupBy(*DELIVERY, "name", "answered").agg(F.array_sort(F.collect_set("status")).alias("statuses"))
    return findings(found, j.day, "answer_differs", delivery_id(), "name", "statuses", "answered")


def consumed_twice(j: Joined) -> DataFrame:
    """A consumer's ledger counts a message more than once."""
    times = _consumers(j).groupBy(*MESSAGE, "subscription").agg(F.sum("times_seen").alias("times_seen"))
    seen = F.array_sort(F.collect_list(F.struct("subscription", "times_seen"))).alias("seen")
    found = times.where("times_seen > 1").groupBy(*MESSAGE).agg(seen)
    return findings(found, j.day, "consumed_twice", message_id(), "seen")


def consumed_not_sent(j: Joined) -> DataFrame:
    """A consumer's ledger has a message that is not in the outbox, or that its subscription has no row of.

    A message that the subscription takes and has not reached yet may be on its way.
    """
    seen = _consumers(j).where("times_seen > 0")
    sent = j.messages.where("offset is not null").select(*MESSAGE, F.lit(None).cast("string").alias("by"))
    may_be = F.expr("tried or coalesce(matched, offset is not null) and offset > lowest")
    to = j.deliveries.where(may_be).where("offset is not null").select(*MESSAGE, F.col("name").alias("by"))
    same = [seen[name] == F.col(f"known.{name}") for name in MESSAGE]
    known = sent.unionByName(to).alias("known")
    unknown = seen.join(known, [*same, seen["subscription"].eqNullSafe(F.col("known.by"))], "left_anti")
    by = F.array_sort(F.collect_set("subscription")).alias("subscriptions")
    return findings(unknown.groupBy(*MESSAGE).agg(by), j.day, "consumed_not_sent", message_id(), "subscriptions")


def _beginning(day: date) -> str:
    """Return the lower bound of a day's ids, above all ids of earlier days: ids are UUIDv7, in lower case."""
    milliseconds = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1000)
    digits = f"{milliseconds:012x}"
    return f"{digits[:8]}-{digits[8:]}"


def _producers(j: Joined) -> DataFrame:
    assert j.frames.producer_ledger is not None
    return j.frames.producer_ledger


def _consumers(j: Joined) -> DataFrame:
    assert j.frames.consumer_ledger is not None
    return j.frames.consumer_ledger


def _whole_ledger(j: Joined) -> DataFrame:
    assert j.whole.consumer_ledger is not None
    return j.whole.consumer_ledger
