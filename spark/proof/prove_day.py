"""Proves each day that a run read: findings, figures, and counts of what is still open."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any
from uuid import UUID

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from spark import schemas
from spark.day_selection import state_after
from spark.engine.filesystem import FAILURES
from spark.engine.progress import Progress
from spark.engine.small_plans import as_they_are
from spark.errors import RunFailedError
from spark.frames import Frames, empty, staged
from spark.proof import store_results
from spark.proof.store_results import DayResult
from spark.score import score
from spark.sources.failures import root_cause
from spark.transforms.absence import absent, frame_of
from spark.transforms.deliveries import differing_checkpoints
from spark.transforms.figures import figures_and_volumes, figures_of_counts, no_figures
from spark.transforms.identity import broken_audit, differing_subscriptions, verdicts_without_evidence
from spark.transforms.installations import judged_here
from spark.transforms.joined import Joined
from spark.transforms.rules import RULES, findings_of, is_small, joined
from spark.transforms.screen.day_files import Searched
from spark.transforms.volumes import GROUP, SUBSCRIPTION, TOPIC
from spark.transforms.waiting import waiting
from spark.usual import Expected, Volumes

NO_VOLUMES: Volumes = {TOPIC: {}, GROUP: {}, SUBSCRIPTION: {}}

# How many messages or deliveries a finding is about. Another kind's `messages` are a list.
ABOUT = "greatest(1, coalesce(try_cast(get_json_object(detail, '$.messages') as bigint), 1))"


@dataclass(frozen=True)
class ReadDay:
    """A day as it was read, and its signature at that moment. `searched`: what a search has found while it was read;
    `joined`: the joins of what it found, if they are computed already."""

    frames: Frames
    signature: Mapping[str, Any]
    searched: Searched | None = None
    joined: Joined | None = None


@dataclass(frozen=True)
class ProvedDay:
    """A run's result for a day, and all its findings, staged."""

    result: DayResult
    findings: DataFrame


def prove(
    spark: SparkSession,
    read: ReadDay,
    staging_dir: str,
    progress: Progress,
    *,
    sla_s: float,
    margin_s: float,
    expected: Expected | None = None,
) -> ProvedDay:
    """Apply the rules to a day. `expected`: what is usual; None: unknown. Raises RunFailedError if Spark cannot."""
    f, nothing = read.frames, is_empty(read.frames)
    try:
        with as_they_are(spark, if_=is_small(f)):
            with progress.stage("join", f.day):
                j = None if nothing else _joined(read, sla_s, Path(staging_dir))
            with progress.stage("figures", f.day):
                drawn, volumes = _figures(spark, f, j)
                f = replace(f, absent=None if expected is None else absent(f, volumes, expected))
            with progress.stage("rules", f.day) as stage:
                kept, found, affected = _findings(f, j, sla_s, staging_dir)
                stage.rows = sum(found.values())
            with progress.stage("waiting", f.day) as stage:
                stage.rows = 0 if j is None else waiting(j.whole, j.last_offset).count() + _running(j.whole)
    except FAILURES as error:
        raise RunFailedError(f"The day {f.day} cannot be proved: {root_cause(str(error))}") from error
    outcomes = {name: sum(counts) for name, counts in drawn["outcomes"].items()}
    undecided = outcomes["undecided"] + outcomes["parked"]
    unsettled = stage.rows + found.get("undelivered", 0)
    return ProvedDay(
        DayResult(
            day=f.day,
            state=state_after(f.day, f.seen_at, margin_s, undecided=undecided, unsettled=unsettled),
            counts=dict(f.rows) | outcomes | {"undecided": undecided, "unsettled": unsettled},
            found=found,
            signature=read.signature,
            figures=drawn,
            looked_for={
                rule.kind
                for rule in RULES
                if rule.looks_in_full(f) and found.get(rule.kind, 0) <= store_results.MOST_FINDINGS
            },
            volumes=volumes,
            score=score(f.rows.get("half", 0) + f.rows.get("receipt", 0), affected),
        ),
        kept,
    )


def _joined(read: ReadDay, sla_s: float, place: Path) -> Joined:
    if read.joined is not None:
        # What the read found besides came after the joins.
        return replace(read.joined, whole=read.frames)
    return joined(read.frames, sla_s, place, read.searched)


def _running(f: Frames) -> int:
    """Return how many replays still have to read messages of the day."""
    return 0 if f.replaying is None else f.replaying.count()


def _figures(spark: SparkSession, f: Frames, j: Joined | None) -> tuple[dict[str, Any], Volumes]:
    if j is None:
        return no_figures(), NO_VOLUMES
    if j.counts is None:
        return figures_and_volumes(f, j.outcomes)
    with as_they_are(spark, if_=True):
        return figures_of_counts(f, j.counts)


def _findings(
    f: Frames, j: Joined | None, sla_s: float, staging_dir: str
) -> tuple[DataFrame, dict[str, int], dict[str, int]]:
    """Return a day's findings, staged, and for each kind how many there are and how many messages they are about.

    `j` None: the day has no rows.
    """
    cached = _of_no_rows(f, sla_s) if j is None else findings_of(replace(j, whole=replace(j.whole, absent=f.absent)))
    if cached is None:
        return empty(f.op.sparkSession, schemas.FINDING), {}, {}
    kept = staged(judged_here(cached, f), f"{staging_dir}/findings", schemas.FINDING)
    cached.unpersist()
    rows = kept.groupBy("kind").agg(F.count("*").alias("count"), F.sum(F.expr(ABOUT)).alias("about")).collect()
    return kept, {row["kind"]: row["count"] for row in rows}, {row["kind"]: row["about"] for row in rows}


def _of_no_rows(f: Frames, sla_s: float) -> DataFrame | None:
    """Return the findings of a day without rows, or None: what is absent, and what the audit, subscriptions and
    checkpoints show."""
    found = [frame_of(f)] if f.absent else []
    if f.rows.get("subscription_version", 1) and not (of_them := differing_checkpoints(f, sla_s)).isEmpty():
        found.append(of_them)
    if f.audit_broken is not None and not f.audit_broken.isEmpty():
        found.append(broken_audit(f))
    if f.differing_subscription is not None and not f.differing_subscription.isEmpty():
        found.append(differing_subscriptions(f))
    if f.without_evidence is not None and not f.without_evidence.isEmpty():
        found.append(verdicts_without_evidence(f))
    return reduce(DataFrame.unionByName, found) if found else None


def is_empty(f: Frames) -> bool:
    """Return whether the day has no rows that a rule could examine."""
    beside = (f.producer_ledger, f.consumer_ledger, f.archive_manifest, f.certified)
    of_day = [f.rows.get(name, 1) for name in (*schemas.BIG, *schemas.OF_DAY)]
    return not any(of_day) and all(part is None for part in beside)


def first_findings(days: Iterable[ProvedDay], at_most: int) -> Iterator[tuple[Any, ...]]:
    """Return the findings in the order of FINDING's columns, up to a limit for each kind and day."""
    for day in days:
        if not day.result.found:
            continue
        kept = day.findings
        if any(count > at_most for count in day.result.found.values()):
            place = F.row_number().over(Window.partitionBy("kind").orderBy("subject"))
            kept = kept.withColumn("place", place).where(F.col("place") <= at_most)
        for row in kept.select(*schemas.FINDING.names).toLocalIterator():
            yield _checked(row)


def _checked(row: Row) -> tuple[Any, ...]:
    """Clear ids that are not transaction ids, which a ledger may contain; such a text appears only in the subject."""
    values = row.asDict()
    try:
        values["transaction_id"] = None if row["transaction_id"] is None else str(UUID(row["transaction_id"]))
    except ValueError:
        values["transaction_id"] = None
    return tuple(values.values())
