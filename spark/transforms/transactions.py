"""Rules about transactions: half, op and check-back agree."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.transforms.finding import NAMED, findings
from spark.transforms.joined import IN_DOUBT, PARKED, Joined

# The hourly pass over every undecided day finds what the others missed; the pass itself may take as long again.
LONGEST_SWEEP_S = 7200
# No policy has a longer interval or immunity. A group's is today's, and may have been longer when a check was planned.
LONGEST_POLICY_S = 86_400
STUCK = ("transaction_id", "born_at", "first_check_at", "swept", "answered", "next_check_at", "unanswered_since")


def op_without_half(j: Joined) -> DataFrame:
    """A transaction with a verdict has no half or lacks part of it, or it has a second verdict.

    Messages are numbered from 0, so a gap shows a missing one. The rule published_without_commit covers one that is in
    the outbox.
    """
    known = "array_union(positions, coalesce(published, array()))"
    missing = F.expr(f"array_except(sequence(cast(0 as smallint), element_at(positions, -1)), {known})")
    found = j.transactions.where("verdict is not null").withColumns(
        {"missing": F.when(F.size(missing) > 0, missing), "verdicts": F.expr("if(verdicts > 1, verdicts, null)")}
    )
    found = found.where("positions is null or missing is not null or verdicts is not null")
    detail = ("verdict", "source", "decided_at", "missing", "verdicts")
    return findings(found, j.day, "op_without_half", "transaction_id", *detail)


def half_stuck(j: Joined) -> DataFrame:
    """A half has no verdict and is not parked, and its checks are not sent as policy says, or for too long.

    A half without an op is swept into check_back once its first check is due; the slowest pass goes over every
    undecided day each hour (LONGEST_SWEEP_S). So without a row there, it is stuck as soon as that time is over.

    A row in check_back always has the time of its next check. It is stuck if that time is over by more than
    `longest_hold_s`, for which `Retry-After` holds a group, `longest_backoff_s`, which is longer than any lease, and a
    pass; or if no answer came for `unanswered_park_s`, and the check after that, which parks it, never came.

    It is stuck too if its next or first check is planned for later than any policy says.
    """
    undecided = F.col("positions").isNotNull() & F.col("verdict").isNull() & ~F.col("state").eqNullSafe(PARKED)
    swept = F.col("state").isNotNull()
    sweep = F.lit(LONGEST_SWEEP_S)
    postponed = F.lit(j.frames.rules["longest_hold_s"] + j.frames.rules["longest_backoff_s"]) + sweep
    parked_by = _after("unanswered_since", F.col("unanswered_park_s") + F.col("interval_s") + postponed)
    # The earlier of both; least() ignores nulls.
    overdue = F.least(_after("next_check_at", postponed), parked_by)
    over = F.when(swept, overdue).otherwise(_after("first_check_at", sweep))
    longest = F.lit(LONGEST_POLICY_S) + sweep
    too_far = F.when(swept, F.col("next_check_at") > _later(j.seen_at, longest)).otherwise(
        F.col("first_check_at") > _after("born_at", longest)
    )
    found = j.transactions.where(undecided & ((over < j.seen_at) | too_far)).withColumn("swept", swept)
    return findings(found, j.day, "half_stuck", *STUCK)


def committed_not_published(j: Joined) -> DataFrame:
    """A transaction is committed and some of its messages, or all, are not in the outbox."""
    missing = F.array_except("positions", F.coalesce("published", F.array().cast("array<smallint>")))
    found = j.transactions.where("verdict = 1 and positions is not null").withColumn("missing", missing)
    return findings(found.where("size(missing) > 0"), j.day, "committed_not_published", "transaction_id", "missing")


def parked(j: Joined) -> DataFrame:
    """A transaction waits for a person's decision. If it has a verdict, its row waits only for upkeep."""
    found = j.transactions.where((F.col("state") == PARKED) & F.col("verdict").isNull())
    reason = F.col("parked_reason").alias("reason")
    return findings(found, j.day, "parked", "transaction_id", "parked_at", reason)


def checks_beyond_max(j: Joined) -> DataFrame:
    """A producer answered more checks than its policy's `max_checks`, and policy did not decide it.

    Counted by check_back while it is in doubt, and by the attempts on record once it is decided. Checks that a person
    asks for a parked one do not count. A group's `max_checks` is today's: if it was lowered since, older transactions
    may have more.
    """
    in_doubt = F.when(F.col("state") == IN_DOUBT, F.col("answered"))
    found = j.transactions.withColumn("answered", F.greatest(in_doubt, F.col("answers")))
    found = found.where(F.col("answered") > F.col("max_checks"))
    # A policy of a damaged half may have a number that is no int.
    most = F.col("max_checks").try_cast("int").alias("max_checks")
    return findings(found, j.day, "checks_beyond_max", "transaction_id", "answered", most)


def verdict_refused(j: Joined) -> DataFrame:
    """A caller tried to end transactions of a group against the verdict that stands."""
    group = F.coalesce("producer_group", F.lit("unknown")).alias("producer_group")
    groups = j.transactions.select("transaction_id", group)
    refused = j.frames.attempt.where("kind = 'refused'").join(groups, "transaction_id")
    # Cut to the first few before they come together: a group may have tried a million.
    each = refused.select("producer_group", "transaction_id").distinct()
    place = F.expr("row_number() over (partition by producer_group order by transaction_id)")
    named = each.withColumn("place", place).where(F.col("place") <= NAMED).groupBy("producer_group")
    few = named.agg(F.array_sort(F.collect_list("transaction_id")).alias("transactions"))
    found = refused.groupBy("producer_group").agg(F.count("*").alias("refused")).join(few, "producer_group")
    if j.refused is not None:
        every = F.array_sort(F.flatten(F.collect_list("transactions")))
        by_group = found.unionByName(j.refused).groupBy("producer_group")
        found = by_group.agg(F.sum("refused").alias("refused"), F.slice(every, 1, NAMED).alias("transactions"))
    return findings(found, j.day, "verdict_refused", "producer_group", "refused", "transactions")


def _after(since: str, seconds: Column) -> Column:
    return _later(F.col(since), seconds)


def _later(at: Column, seconds: Column) -> Column:
    return at + F.make_dt_interval(secs=seconds.cast("decimal(18, 6)"))
