"""The list of all rules by kind, and the functions that run them over a day."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.engine.kept_steps import kept
from spark.engine.parallel import ABREAST, at_once
from spark.engine.small_plans import as_they_are
from spark.frames import Frames, empty
from spark.schemas import BIG, FINDING, SAME_OFFSET
from spark.transforms import (
    absence,
    archive,
    certified,
    deliveries,
    identity,
    installations,
    ledgers,
    messages,
    offsets,
    transactions,
)
from spark.transforms.joined import FEW_SUSPECTS, MOST_BROADCAST, Joined
from spark.transforms.joined import deliveries as joined_deliveries
from spark.transforms.joined import messages as joined_messages
from spark.transforms.joined import transactions as joined_transactions
from spark.transforms.late import late as late_of
from spark.transforms.late import not_passed
from spark.transforms.outcomes import COUNTED
from spark.transforms.routes import routed, takers
from spark.transforms.screen.compared import Compared
from spark.transforms.screen.day_files import Searched
from spark.transforms.screen.search import can_search, search, searched_day
from spark.transforms.suspect_rows import OF_TRANSACTIONS, narrowed, nothing_of
from spark.transforms.suspects import named, screened

# Up to this many rows are joined in one partition; more rows, as of whole days, in several.
FEW = 100_000
# A day of fewer rows is joined whole, without a search for suspects, and its plans run without adaptive execution.
SMALL_DAY = 50_000

Needs: TypeAlias = Literal[
    "always",
    "altered",
    "differing",
    "wrong_receipt",
    "wrong_delivery",
    "differing_subscription",
    "never_due",
    "delivery_retry",
    "out_of_order",
    "without_evidence",
    "audit_broken",
    "replay_incomplete",
    "producer_ledger",
    "consumer_ledger",
    "archive",
    "certified",
    "absent",
    "across",
]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. `kind` names its findings and their page in docs/findings; without the frame `needs` it is skipped."""

    kind: str
    find: Callable[[Joined], DataFrame]
    needs: Needs = "always"

    @property
    def page(self) -> str:
        """The path, from the project's root, of the page that explains the finding and what to do."""
        return f"docs/findings/{self.kind}.md"

    def applies(self, f: Frames) -> bool:
        """Whether the frames have what the rule needs."""
        if self.needs == "archive":
            return f.archive_manifest is not None and f.found_manifest is not None
        return self.needs == "always" or getattr(f, self.needs) is not None

    def has_no_input(self, j: Joined) -> bool:
        """Whether what the rule reads is known to have no rows. Then it finds nothing, without a plan."""
        if self.kind == "delivery_late":
            return j.late is None
        if self.needs == "absent":
            return not j.whole.absent
        return self.needs in j.whole.nothing

    def looks_in_full(self, f: Frames) -> bool:
        """Whether a finding that the rule no longer finds is resolved; not for content whose archive cannot be read,
        and not if another installation that may have it was not read."""
        unread = f.archive_manifest is not None and f.archive is None
        unseen = f.across is not None and not f.across.complete and self.kind in installations.OF_ALL
        return self.applies(f) and not (unread and self.kind == "content_differs") and not unseen


RULES: tuple[Rule, ...] = (
    Rule("op_without_half", transactions.op_without_half),
    Rule("half_stuck", transactions.half_stuck),
    Rule("half_altered", identity.half_altered, "altered"),
    Rule("published_differs", identity.published_differs, "differing"),
    Rule("times_disagree", identity.times_disagree, "differing"),
    Rule("verdict_unproven", identity.verdict_unproven, "without_evidence"),
    Rule("committed_not_published", transactions.committed_not_published),
    Rule("published_without_commit", messages.published_without_commit),
    Rule("published_after_rollback", messages.published_after_rollback),
    Rule("offset_of_two_messages", offsets.offset_of_two_messages),
    Rule("message_with_two_offsets", messages.message_with_two_offsets),
    Rule("offsets_contradict_time", offsets.offsets_contradict_time),
    Rule("unrouted", messages.unrouted),
    Rule("undelivered", deliveries.undelivered),
    Rule("delivery_late", deliveries.delivery_late),
    Rule("retry_overdue", deliveries.retry_overdue, "delivery_retry"),
    Rule("retry_never_due", deliveries.retry_never_due, "never_due"),
    Rule("replay_incomplete", deliveries.replay_incomplete, "replay_incomplete"),
    Rule("checkpoint_differs", deliveries.checkpoint_differs),
    Rule("subscription_differs", identity.subscription_differs, "differing_subscription"),
    Rule("receipt_without_message", deliveries.receipt_without_message),
    Rule("receipt_not_matched", deliveries.receipt_not_matched),
    Rule("receipt_wrong", identity.receipt_wrong, "wrong_receipt"),
    Rule("delivery_wrong", identity.delivery_wrong, "wrong_delivery"),
    Rule("order_broken", identity.order_broken, "out_of_order"),
    Rule("content_differs", messages.content_differs),
    Rule("parked", transactions.parked),
    Rule("checks_beyond_max", transactions.checks_beyond_max),
    Rule("verdict_refused", transactions.verdict_refused),
    Rule("audit_broken", identity.audit_broken, "audit_broken"),
    Rule("fewer_than_usual", absence.fewer_than_usual, "absent"),
    Rule("archive_differs", archive.archive_differs, "archive"),
    Rule("certificate_differs", certified.certificate_differs, "certified"),
    Rule("in_two_installations", installations.in_two_installations, "across"),
    Rule("ledger_disagrees", ledgers.ledger_disagrees, "producer_ledger"),
    Rule("ledger_not_sent", ledgers.ledger_not_sent, "producer_ledger"),
    Rule("never_consumed", ledgers.never_consumed, "consumer_ledger"),
    Rule("answer_differs", ledgers.answer_differs, "consumer_ledger"),
    Rule("consumed_twice", ledgers.consumed_twice, "consumer_ledger"),
    Rule("consumed_not_sent", ledgers.consumed_not_sent, "consumer_ledger"),
)


def findings(f: Frames, *, sla_s: float, without: frozenset[str] = frozenset()) -> DataFrame:
    """Return what the rules find, except the kinds `without`, in the schema FINDING; the frame is computed already.

    `sla_s`: how many seconds a delivery may take.
    """
    return findings_of(joined(f, sla_s), without)


def findings_of(j: Joined, without: frozenset[str] = frozenset()) -> DataFrame:
    """Return what the rules find in the joins, as `findings` does."""
    # Over few rows, the planning of each step takes most of the time.
    parts = [partial(_found, j, without, RULES[first::ABREAST]) for first in range(ABREAST)]
    with as_they_are(j.whole.op.sparkSession, if_=j.suspects <= FEW_SUSPECTS):
        return reduce(DataFrame.unionByName, at_once(parts))


def found_in(j: Joined, without: frozenset[str] = frozenset(), rules: Sequence[Rule] = RULES) -> DataFrame:
    """Return what the rules find in the joins, except the kinds `without`."""
    asked = [rule for rule in rules if rule.kind not in without and rule.applies(j.whole)]
    # A plan takes as long for no rows as for a few.
    found = [rule.find(j) for rule in asked if not rule.has_no_input(j)]
    nothing = empty(j.whole.op.sparkSession, FINDING)
    return reduce(DataFrame.unionByName, found, nothing)


def _found(j: Joined, without: frozenset[str], rules: Sequence[Rule]) -> DataFrame:
    return _computed(found_in(j, without, rules))


def joined(f: Frames, sla_s: float, place: Path | None = None, searched: Searched | None = None) -> Joined:
    """Return the input of the rules: the joins over the suspect rows, each computed already.

    `place`: a directory on this machine for the files of a search; None: Spark searches. `searched`: what a search of
    the same frames found.
    """
    f = ledgers.of_day(f)
    spark = f.op.sparkSession
    if place is not None and (searched is not None or may_search(f)):
        return joined_by_search(f, sla_s, searched or search_day(f, sla_s, place))
    with as_they_are(spark, if_=is_small(f)):
        f = replace(f, routes=_few(routed(f.subscription_version, f.checkpoint)))
    if is_small(f):
        with as_they_are(spark, if_=True):
            disorder = _computed(offsets.disorder(offsets.breaks(f.outbox)))
            doubled = _computed(offsets.doubled(f, disorder))
            late = _late(f, sla_s)
            return _joins_of(f, _in_one_partition(f), disorder, doubled, late, sla_s, suspects=0)
    parts: list[Callable[[], Any]] = [
        lambda: _computed(screened(f, sla_s, _taking(f))),
        lambda: _computed(offsets.breaks(f.outbox)),
        lambda: _computed(named(f)),
        lambda: _late(f, sla_s),
    ]
    known, breaks, others, late = at_once(parts)
    odd = known.where("suspect is not null").select("suspect")
    with as_they_are(spark, if_=max(odd.count(), others.count()) <= FEW):
        suspect = _computed(odd.unionByName(others).distinct())
        count = suspect.count()
    with as_they_are(spark, if_=breaks.count() <= FEW):
        disorder = _computed(offsets.disorder(breaks))
    # Spark has no estimate of their number, and would shuffle all rows of the day.
    found = F.broadcast(suspect) if count <= MOST_BROADCAST else suspect
    beside: list[Callable[[], Any]] = [lambda: _narrowed(f, found, count), lambda: _doubled(f, disorder)]
    few, doubled = at_once(beside)
    with as_they_are(spark, if_=count <= FEW_SUSPECTS):
        whole = known.where("outcome is not null").groupBy(*COUNTED).agg(F.sum("count").alias("count"))
        return replace(
            _joins_of(f, few, disorder, doubled, late, sla_s, suspects=count),
            outcomes=_computed(whole),
        )


def may_search(f: Frames) -> bool:
    """Return whether a search in the day's files is possible, and worth it."""
    return can_search(f) and not is_small(f)


def search_day(f: Frames, sla_s: float, place: Path, compared: Compared | None = None) -> Searched:
    """Search the files of a day. Raises RunFailedError. The parameters are those of `joined` and `search`."""
    return search(with_routes(f), sla_s, place, compared)


def with_routes(f: Frames) -> Frames:
    """Return the frames with their routes, which are computed once."""
    return f if f.routes is not None else replace(f, routes=routes_of(f.subscription_version, f.checkpoint))


def routes_of(versions: DataFrame, checkpoint: DataFrame) -> DataFrame:
    """Return the routes of a run, computed."""
    with as_they_are(versions.sparkSession, if_=True):
        return _few(routed(versions, checkpoint))


def joined_by_search(f: Frames, sla_s: float, searched: Searched) -> Joined:
    """Return what `joined` does of a day that was searched. The frames need nothing that comparisons find."""
    spark = f.op.sparkSession
    f = with_routes(f)
    found = searched_day(f, searched)
    few = found.few if found.suspects > FEW_SUSPECTS else _in_one_partition(found.few)
    late = _late(f, sla_s, found.last_offset)
    with as_they_are(spark, if_=found.suspects <= FEW_SUSPECTS):
        doubled = _doubled(f, found.disorder, any_=found.doubled)
        joins = _joins_of(f, few, found.disorder, doubled, late, sla_s, suspects=found.suspects)
        return replace(
            joins, counts=found.counts, refused=found.refused, untaken=found.untaken, last_offset=found.last_offset
        )


def is_small(f: Frames) -> bool:
    """Return whether the day is known to have few rows."""
    return sum(f.rows.get(name, SMALL_DAY) for name in BIG) < SMALL_DAY


def _taking(f: Frames) -> DataFrame:
    return _computed(takers(f, _computed(f.outbox.select("topic").distinct())))


def _narrowed(f: Frames, found: DataFrame, count: int) -> Frames:
    if not count:
        return nothing_of(f)
    return narrowed(f, found, _computed if count > FEW_SUSPECTS else _few)


def _late(f: Frames, sla_s: float, last_offset: int | None = None) -> DataFrame | None:
    """On most days every subscription has passed all messages, and nothing is compared."""
    ahead = not_passed(f, sla_s, last_offset)
    if ahead is None or (ahead := _computed(ahead)).isEmpty():
        return None
    return _computed(late_of(f, ahead))


def _doubled(f: Frames, disorder: DataFrame, *, any_: bool | None = None) -> DataFrame:
    """Usually there are none, and the whole outbox is not searched for them. `any_`: whether the day has any, if that
    is known."""
    if f.same_offset is None and (disorder.where("offset = before_offset").isEmpty() if any_ is None else not any_):
        return empty(f.outbox.sparkSession, SAME_OFFSET)
    return _computed(offsets.doubled(f, disorder))


def _joins_of(
    f: Frames,
    few: Frames,
    disorder: DataFrame,
    doubled: DataFrame,
    late: DataFrame | None,
    sla_s: float,
    *,
    suspects: int,
) -> Joined:
    messages, transactions = at_once(
        [lambda: _computed(joined_messages(few)), lambda: _computed(joined_transactions(few))]
    )
    return Joined(
        whole=f,
        frames=few,
        sla_s=sla_s,
        transactions=transactions,
        messages=messages,
        deliveries=_computed(joined_deliveries(few, messages)),
        disorder=disorder,
        doubled=doubled,
        late=late,
        suspects=suspects,
    )


def _in_one_partition(f: Frames) -> Frames:
    frames = {name: getattr(f, name) for name in OF_TRANSACTIONS}
    return replace(f, **{name: one.coalesce(1) for name, one in frames.items() if one is not None})


def _computed(frame: DataFrame) -> DataFrame:
    """Compute a frame and return its rows without its plan; few rows in one partition.

    A cached frame would keep its plan and the plans of its inputs; the rules' plans would grow with each step until
    Spark spends minutes and its memory on them. Joins within one partition need no shuffle, so a dozen rules over a few
    rows are one stage instead of a hundred.
    """
    if frame.sparkSession.conf.get("spark.sql.adaptive.enabled") == "false":
        return kept(frame.coalesce(1))
    made = kept(frame.hint("rebalance"))
    return made.coalesce(1) if made.count() <= FEW else made


def _few(frame: DataFrame) -> DataFrame:
    """Do the same as `_computed` for a frame that is known to have few rows."""
    return kept(frame).coalesce(1)
