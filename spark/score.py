"""The score of a day: how complete, agreed, timely and orderly it is, each from 0 to 100. Pure functions."""

from collections.abc import Mapping
from math import floor
from types import MappingProxyType

PARTS = ("complete", "agreed", "timely", "orderly")
# Each kind lowers one part. complete: something is missing; agreed: two records differ; timely: something is late or
# waits for a person; orderly: something is there twice, or in another order than its times.
PART_OF: Mapping[str, str] = MappingProxyType(
    {
        "op_without_half": "complete",
        "half_stuck": "timely",
        "half_altered": "agreed",
        "published_differs": "agreed",
        "times_disagree": "orderly",
        "verdict_unproven": "agreed",
        "committed_not_published": "complete",
        "published_without_commit": "agreed",
        "published_after_rollback": "agreed",
        "offset_of_two_messages": "orderly",
        "message_with_two_offsets": "orderly",
        "offsets_contradict_time": "orderly",
        "unrouted": "complete",
        "undelivered": "complete",
        "delivery_late": "timely",
        "retry_overdue": "timely",
        "retry_never_due": "timely",
        "replay_incomplete": "complete",
        "checkpoint_differs": "complete",
        "subscription_differs": "agreed",
        "receipt_without_message": "complete",
        "receipt_not_matched": "agreed",
        "receipt_wrong": "agreed",
        "delivery_wrong": "agreed",
        "order_broken": "orderly",
        "content_differs": "agreed",
        "parked": "timely",
        "checks_beyond_max": "timely",
        "verdict_refused": "agreed",
        "audit_broken": "agreed",
        "fewer_than_usual": "complete",
        "archive_differs": "agreed",
        "certificate_differs": "agreed",
        "in_two_installations": "orderly",
        "ledger_disagrees": "agreed",
        "ledger_not_sent": "complete",
        "never_consumed": "complete",
        "answer_differs": "agreed",
        "consumed_twice": "orderly",
        "consumed_not_sent": "agreed",
    }
)


def score(rows: int, affected: Mapping[str, int]) -> dict[str, float | None]:
    """Return the score of a day with so many messages and receipts, by part; None for a day without anything.

    `affected`: by kind of finding, how many messages or deliveries its findings are about. What is missing is added to
    the rows of the part `complete`. A score is rounded down, so only a part without findings has 100.
    """
    sums = {part: sum(count for kind, count in affected.items() if PART_OF[kind] == part) for part in PARTS}
    return {part: _share(rows, rows + count if part == "complete" else rows, count) for part, count in sums.items()}


def _share(rows: int, of: int, affected: int) -> float | None:
    if not affected:
        return 100.0 if rows else None
    whole = max(of, affected)
    return floor(10_000 * (whole - affected) / whole) / 100
