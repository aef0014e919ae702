"""What a producer posts after a plain block that ended normally, from what its barrier says."""

from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from halfnote.errors import NotCommitted, NotEntered
from halfnote.exchange import Raised, Returned
from halfnote.transaction import Transaction
from halfnote.verdicts import Verdict


class Outcomes(Protocol):
    """The producer's barrier: each function returns a Verdict, or awaits it."""

    def settle(self, transaction_id: UUID) -> Any:
        """Return the outcome of local work that is over, and refuse later local work."""

    def drop(self, transaction_id: UUID) -> Any:
        """Let checks answer rollback for local work whose messages are dropped. Returns nothing."""

    def read(self, transaction_id: UUID) -> Any:
        """Return the outcome that the row shows."""


@dataclass(frozen=True)
class Judged:
    """The verdict to post, and its reason; `wrong`: what the block's code did wrong. UNKNOWN: leave it to a check."""

    verdict: Verdict
    reason: str | None = None
    wrong: NotEntered | NotCommitted | None = None


def judged(transaction: Transaction, came: Returned | Raised) -> Judged:
    """Judge a block that ended normally, by what reading its barrier brought."""
    if isinstance(came, Returned) and came.value is Verdict.COMMIT:
        return Judged(Verdict.COMMIT)
    if transaction.settle is None:
        # The block ended normally, and without a row no check could find out that it was committed.
        return Judged(Verdict.COMMIT, wrong=NotEntered(transaction.transaction_id, entering=transaction.entering))
    if isinstance(came, Raised):
        return Judged(Verdict.UNKNOWN, f"the barrier could not be read: {type(came.error).__name__}: {came.error}")
    wrong = NotCommitted(transaction.transaction_id, still_open=came.value is Verdict.UNKNOWN)
    return Judged(came.value, str(wrong), wrong)
