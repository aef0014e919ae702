"""The client's exceptions; their texts say what to do. All are `HalfnoteError`s."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from halfnote.verdicts import Verdict


class HalfnoteError(Exception):
    """The base class of this client's exceptions."""


@dataclass(frozen=True)
class Problem:
    """A refusal by the service (RFC 9457): `type` is stable, `extra` holds its other members, `docs/errors.md` each."""

    status: int
    type: str
    detail: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def at(self) -> str | None:
        """The field of the request that was refused, such as `messages[0].topic`."""
        found = self.extra.get("field")
        return found if isinstance(found, str) else None

    def __str__(self) -> str:
        if self.type == "id-time-skew":
            return _skew(self)
        where = f" (field {self.at})" if self.at and self.at not in self.detail else ""
        return f"{self.status} {self.type}: {self.detail}{where}"


def _skew(problem: Problem) -> str:
    """Return a text about a difference between the two clocks, else the problem's own text."""
    skew_s = problem.extra.get("skew_s")
    if not isinstance(skew_s, (int, float)):
        return f"{problem.status} {problem.type}: {problem.detail}"
    return (
        f"this machine's clock ({problem.extra.get('id_time')}) is {abs(skew_s):.0f} s "
        f"{'ahead of' if skew_s > 0 else 'behind'} the coordinator's ({problem.extra.get('coordinator_time')}): "
        "correct the clock that is wrong"
    )


class Refused(HalfnoteError):
    """The service refused the request for good; `problem` has the reason. A repetition would be refused too.

    `field`: the field of the request that was refused, such as `messages[0].topic`, or None.
    `perhaps_done`: an earlier attempt may have been stored.
    """

    def __init__(self, what: str, problem: Problem, *, perhaps_done: bool = False) -> None:
        super().__init__(f"{what} was refused: {problem}")
        self.problem, self.perhaps_done = problem, perhaps_done
        self.field = problem.at


class Unconfirmed(HalfnoteError):
    """No usable answer came in time.

    `perhaps_done`: the request may have been stored. `after_s`: the pause that the last answer asked for, or 0.
    """

    def __init__(self, what: str, error: str, *, perhaps_done: bool, after_s: float = 0.0) -> None:
        super().__init__(f"{what} was not confirmed in time: {error}")
        self.perhaps_done, self.after_s = perhaps_done, after_s


def _own_id(cause: Refused | Unconfirmed) -> str:
    """Return why a request with an id of the caller's failed: its time says nothing about this machine's clock."""
    problem = cause.problem if isinstance(cause, Refused) else None
    skew_s = problem.extra.get("skew_s") if problem is not None and problem.type == "id-time-skew" else None
    if problem is None or not isinstance(skew_s, (int, float)):
        return str(cause)
    return (
        f"its id is too {'new' if skew_s > 0 else 'old'}: the time in it ({problem.extra.get('id_time')}) is "
        f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the coordinator's "
        f"({problem.extra.get('coordinator_time')}), more than HALFNOTE_ID_SKEW_S. Make a new id, or raise that setting"
    )


class ProducerClosed(HalfnoteError):
    """The producer was closed, or is closing, and begins nothing: nothing was posted, and no local work has run.

    `with producer:` or `async with producer:` opens it again. This is no HalfFailed: a later try fails, too.
    """

    def __init__(self) -> None:
        super().__init__(
            "the producer is closed and begins nothing: open it again (`with producer:`), or close it later"
        )


_ROLLED_BACK = (
    "its rollback is recorded, so its messages never go out. If no earlier run has committed the work, it needs a new "
    "id; else reissue the transaction"
)


class HalfFailed(HalfnoteError):
    """The half message was not confirmed, and the local work did not run: nothing has happened.

    The cause (`__cause__`) is Refused or Unconfirmed. If it may have been stored, a rollback was sent after it,
    unless the caller chose its id: then it may have been stored, and its local work have run, before this. `field`: of
    the request, if it was refused for one. `recorded`: ROLLBACK if an earlier run's rollback is recorded for an id that
    the caller chose, else None. Then there is no cause, and the messages can go out only with another id.
    """

    def __init__(
        self,
        transaction_id: UUID,
        cause: Refused | Unconfirmed | None,
        *,
        chosen: bool = False,
        recorded: Verdict | None = None,
    ) -> None:
        why = _ROLLED_BACK if cause is None else _own_id(cause) if chosen else cause
        super().__init__(f"transaction {transaction_id} did not begin, and its local work did not run: {why}")
        self.transaction_id, self.recorded = transaction_id, recorded
        self.field = getattr(cause, "field", None)
        self.__cause__ = cause


class PlainFailed(HalfnoteError):
    """Plain messages were not acknowledged. If the cause is Unconfirmed, repeating with `transaction_id` is safe."""

    def __init__(self, transaction_id: UUID, cause: Refused | Unconfirmed, *, chosen: bool = False) -> None:
        why = _own_id(cause) if chosen else cause
        super().__init__(f"messages {transaction_id} were not acknowledged: {why}")
        self.transaction_id = transaction_id
        self.field = getattr(cause, "field", None)
        self.__cause__ = cause


class VerdictConflict(HalfnoteError):
    """The transaction already has the opposite verdict; `recorded` has verdict, source and decided_at.

    If the local database committed and the rollback is recorded, `POST /transactions/{id}/reissue` sends the messages
    after all.
    """

    def __init__(self, transaction_id: UUID, problem: Problem) -> None:
        super().__init__(f"transaction {transaction_id}: {problem.detail}")
        self.transaction_id = transaction_id
        self.recorded: Mapping[str, Any] = problem.extra.get("recorded") or {}


class ListenerError(HalfnoteError):
    """A listener broke its contract, for example returned something other than a Verdict."""


class StillRunning(HalfnoteError):
    """Another database transaction has the message's row in the inbox: it is worked on, and comes again later."""

    def __init__(self, message_id: str) -> None:
        super().__init__(f"message {message_id} is worked on by another database transaction, which is still open")
        self.message_id = message_id


class NotEntered(HalfnoteError):
    """A block of a producer with a barrier ended without `barrier.enter`; use `producer.begin`, which enters by itself.

    The block ended without an exception, so `commit` was posted. A crash before that could have lost the message.
    """

    def __init__(self, transaction_id: UUID, *, entering: bool = False) -> None:
        found = "called `barrier.enter` without `await`" if entering else "did not call `barrier.enter`"
        super().__init__(
            f"the block of transaction {transaction_id} {found}, so a crash before its end could lose the message: "
            "use `producer.begin`, which enters by itself"
        )
        self.transaction_id = transaction_id


class NotCommitted(HalfnoteError):
    """A block of a producer with a barrier ended, and its database transaction was not committed.

    A `rollback` was posted; if the database transaction is still open, the transaction was left to check-back. `begun`:
    the block is one of `begin`, and its code rolled the database transaction back.
    """

    def __init__(self, transaction_id: UUID, *, still_open: bool, begun: bool = False) -> None:
        found = "is still open" if still_open else "was rolled back" if begun else "was not committed"
        advice = (
            "to drop the messages call `tx.rollback(reason)`, and begin a new block for other work"
            if begun
            else "commit it inside the block, or use `producer.begin`, which commits by itself"
        )
        super().__init__(
            f"the block of transaction {transaction_id} ended, but its database transaction {found}: {advice}"
        )
        self.transaction_id = transaction_id


class BarrierRefused(HalfnoteError):
    """The transaction is already decided in this database: roll the local database transaction back.

    `recorded`: COMMIT if the local work of this id has run before and was committed, so that nothing is left to do;
    ROLLBACK if a check came first and was answered with rollback, an earlier run failed, or it dropped its messages:
    then the messages can go out only with another id. None if the barrier does not say now: repeat the work later.

    With an id of the caller's whose rollback Halfnote has recorded, it comes before the block.
    """

    def __init__(self, transaction_id: UUID, recorded: Verdict | None = None) -> None:
        found = {
            Verdict.COMMIT: "its local work has run before and was committed, so nothing is left to do",
            Verdict.ROLLBACK: "a check that came first answered rollback, or an earlier run failed, so the work needs "
            "a new id",
        }.get(recorded or Verdict.UNKNOWN, "a check came first, or its local work has run before")
        super().__init__(f"transaction {transaction_id} is decided already: {found}")
        self.transaction_id = transaction_id
        self.recorded = recorded
