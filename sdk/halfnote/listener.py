"""What a producer implements: its local work, and the answer to Halfnote's check-back."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeVar
from uuid import UUID

from halfnote.transaction import Transaction
from halfnote.verdicts import Verdict

A = TypeVar("A", contravariant=True)


@dataclass(frozen=True)
class CheckedMessage:
    """A message of a transaction that is asked about; `body` only if the half asked for it (`check.include_body`)."""

    message_id: str
    topic: str
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None


@dataclass(frozen=True)
class CheckedTransaction:
    """A transaction that Halfnote asks about: its answered check number `check` of at most `max_checks`.

    `age_s`: how long ago the half was stored, by the coordinator's clock and this machine's. `barrier`: the half's
    block enters the barrier by itself, so a missing row in the barrier proves that nothing was committed. `within_s`:
    how long the answer may wait for an open database transaction, if Halfnote asks about many at once.
    """

    transaction_id: UUID
    group: str
    check: int
    max_checks: int
    born_at: datetime
    age_s: float
    context: Any
    messages: list[CheckedMessage]
    barrier: bool = False
    within_s: float | None = None


class CheckListener(Protocol):
    """Answers checks. A barrier is a listener whose answers are always correct.

    Without a barrier, answer UNKNOWN and never ROLLBACK while the order is not found and the transaction is young: its
    database transaction may still be open. ROLLBACK is correct only when no database transaction that old can be open.
    """

    def check_local(self, transaction: CheckedTransaction) -> Verdict | Awaitable[Verdict]:
        """Return the outcome of the local database transaction."""


class TransactionListener(CheckListener, Protocol[A]):
    """A listener whose local work is run by `send`."""

    def execute_local(self, transaction: Transaction, arg: A, /) -> Verdict | Awaitable[Verdict]:
        """Do the local work. An exception leads to a rollback (with a barrier: to the database's outcome)."""
