"""A planted fault: what is changed, and what must be found of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Evidence = Literal["tables", "ledgers", "certificate"]
Found = tuple[str, str]

# The subjects of findings that are not about one delivery, as templates.
_OF_TRANSACTIONS = [
    "op_without_half",
    "half_stuck",
    "half_altered",
    "committed_not_published",
    "parked",
    "checks_beyond_max",
    "ledger_disagrees",
    "ledger_not_sent",
    "verdict_unproven",
]
_OF_DELIVERIES = [
    "undelivered",
    "receipt_without_message",
    "receipt_not_matched",
    "receipt_wrong",
    "order_broken",
    "delivery_wrong",
    "answer_differs",
]
_OF_OFFSETS = ("offset_of_two_messages", "offsets_contradict_time")
_OF_SUBSCRIPTIONS = ["delivery_late", "retry_overdue", "retry_never_due", "checkpoint_differs", "subscription_differs"]


@dataclass(frozen=True)
class Fault:
    """One fault. `of`: the sort of victim (tests/spark/planted/day.py). `sql` has the victim's columns as parameters.

    `finds`: the findings of the rules over tables, each a kind, or `kind=subject` with the victim's columns in braces.
    `ledgers`: those of the rules over ledgers, beside them. `by`: the least evidence that shows the fault; if that is
    not the tables, `why` says so.
    """

    name: str
    of: str
    sql: str
    finds: Sequence[str] = ()
    ledgers: Sequence[str] = ()
    by: Evidence = "tables"
    why: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    def found(self, victim: Mapping[str, Any], kinds: Sequence[str] | None = None) -> set[Found]:
        """Return the kinds and subjects of its findings."""
        return {_named(one, victim) for one in (self.finds if kinds is None else kinds)}


def _named(said: str, victim: Mapping[str, Any]) -> Found:
    kind, _, subject = said.partition("=")
    if not subject:
        subject = "{id}-{position}"
        if kind in _OF_TRANSACTIONS:
            subject = "{id}"
        elif kind in _OF_DELIVERIES:
            subject = "{id}-{position}:{subscription}"
        elif kind == "unrouted":
            # Each line has a topic of its name.
            subject = "{name}"
        elif kind in _OF_OFFSETS:
            subject = "{offset}"
        elif kind in _OF_SUBSCRIPTIONS:
            subject = "{name}"
    return kind, subject.format_map(victim)
