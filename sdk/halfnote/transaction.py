"""The transaction of a producer, and its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from uuid import UUID

from halfnote.outgoing import Outgoing
from halfnote.times import instant
from halfnote.verdicts import Verdict

End: TypeAlias = Literal["recorded", "left_to_check", "conflict", "refused", "posted"]


@dataclass
class Transaction:
    """A half message that Halfnote has stored: local work may begin. `context` comes back in every check.

    A barrier sets `settle` when the transaction enters it; `settle` returns, or awaits, the outcome of the local
    database transaction. `enters`: the block enters the barrier by itself. `entering`: `enter` was called, perhaps
    without `await`. `entered`: the barrier's row was written, in a database transaction that may be rolled back since.
    `chosen`: the caller chose the id, so another run may have the same one. `repeated`: the half of a chosen id was
    stored already, so the local work may have run before. `recorded`: the verdict that a repeated one had already, None
    if it had none or the service is older than that answer.
    """

    transaction_id: UUID
    group: str
    messages: Sequence[Outgoing]
    context: Any = None
    born_at: str | None = None
    first_check_at: str | None = None
    chosen: bool = False
    repeated: bool = False
    recorded: Verdict | None = None
    enters: bool = False
    entering: bool = field(default=False, repr=False)
    entered: bool = field(default=False, repr=False)
    settle: "Callable[[], Any] | None" = field(default=None, repr=False)

    @property
    def message_ids(self) -> list[str]:
        """The messages' ids, in order."""
        return [f"{self.transaction_id}-{position}" for position in range(len(self.messages))]

    @property
    def immunity_s(self) -> float:
        """The time after its birth without checks; unlimited if the answer did not have it."""
        try:
            times = instant(self.first_check_at or ""), instant(self.born_at or "")
            return (times[0] - times[1]).total_seconds()
        except (ValueError, TypeError):
            return float("inf")


@dataclass(frozen=True)
class TransactionResult:
    """The result of a transaction.

    `end`: `recorded`; `left_to_check`: not recorded, or not yet, so Halfnote sends a check (the end is also repeated
    in the background); `conflict`: Halfnote has the opposite verdict already; `refused`: Halfnote does not know
    the transaction (any more), or knows it as another group's, so no check comes; `posted`: it is being posted in the
    background, because the producer does not wait (`wait_for_end=False`). `error`: the exception of the local work,
    else the failure of the end.
    """

    transaction_id: UUID
    message_ids: list[str]
    local_verdict: Verdict
    end: End
    error: Exception | None = None


@dataclass(frozen=True)
class PlainResult:
    """Plain messages that are committed and on disk; `offsets` are their places in the log."""

    transaction_id: UUID
    message_ids: list[str]
    offsets: list[int]
    replayed: bool

    @classmethod
    def of(cls, transaction_id: UUID, content: Mapping[str, Any]) -> "PlainResult":
        """Return the result that an answer has."""
        sent = content.get("messages", [])
        ids, offsets = [message["message_id"] for message in sent], [message["offset"] for message in sent]
        return cls(transaction_id, ids, offsets, bool(content.get("replayed")))


@dataclass(frozen=True)
class Registration:
    """A registered producer group. `secret` signs checks: shown once, if the group is new and none was given.

    It is also None if the answer that had it was lost and the request was repeated. The log then names the request that
    makes another one.
    """

    created: bool
    secret: str | None
    group: dict[str, Any]
