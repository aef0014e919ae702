"""A transaction as its producer sees it, and what came of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from uuid import UUID

from halfnote.outgoing import Outgoing
from halfnote.times import instant
from halfnote.verdicts import Verdict

End: TypeAlias = Literal["recorded", "left_to_check", "conflict"]


@dataclass
class Transaction:
    """A half message that Halfnote has stored: local work may begin. `context` comes back in every check.

    `settle` is set by a barrier that this transaction has entered: it tells, or waits until it can tell, what became of
    the local database transaction. `repeated`: its half was stored when the caller, who chose its id, posted it, so its
    local work may have run before.
    """

    transaction_id: UUID
    group: str
    messages: Sequence[Outgoing]
    context: Any = None
    born_at: str | None = None
    first_check_at: str | None = None
    repeated: bool = False
    settle: "Callable[[], Any] | None" = field(default=None, repr=False)

    @property
    def message_ids(self) -> list[str]:
        """The messages' ids, in order."""
        return [f"{self.transaction_id}-{position}" for position in range(len(self.messages))]

    @property
    def immunity_s(self) -> float:
        """How long after its birth Halfnote does not ask about it; for ever, if the answer did not say."""
        try:
            times = instant(self.first_check_at or ""), instant(self.born_at or "")
            return (times[0] - times[1]).total_seconds()
        except (ValueError, TypeError):
            return float("inf")


@dataclass(frozen=True)
class TransactionResult:
    """What came of a transaction.

    `end`: `recorded`; `left_to_check`: it was not, or not yet, so Halfnote will ask (it is also repeated in the
    background); `conflict`: Halfnote has the opposite verdict already. `error`: what the local work raised, else what
    was wrong with the end.
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


@dataclass(frozen=True)
class Registration:
    """A producer group as it stands. `secret` signs checks: shown once, when the group is new and none was given."""

    created: bool
    secret: str | None
    group: dict[str, Any]
