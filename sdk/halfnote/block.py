"""Posts the end when a `transaction()` block closes, for both producers, with or without a bound session."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from halfnote.conversation import Conversation, reason_of
from halfnote.exchange import Exchange, carried_on
from halfnote.transaction import Transaction, TransactionResult
from halfnote.verdicts import Verdict

log = logging.getLogger("halfnote")

# `none`: none was begun. `doubtful`: its commit was tried and failed, so it may have succeeded. `undone`: it is still
# open, but the block's savepoint was rolled back.
DatabaseState: TypeAlias = Literal["none", "open", "committed", "rolled_back", "undone", "doubtful"]


class Binding(Protocol):
    """Watches one database transaction: the one that is open, else the next that commits."""

    @property
    def state(self) -> DatabaseState:
        """The state of the database transaction."""

    @property
    def hides_rollbacks(self) -> bool:
        """Whether a commit that returned may have stored nothing: MySQL rolls back at a deadlock and continues."""

    def when_over(self, notify: Callable[[DatabaseState], Any]) -> None:
        """Call `notify` once, at the end of the database transaction that is open now; await the task it returns."""

    def release(self) -> None:
        """Stop watching, unless a caller still waits for the end."""


@dataclass
class OpenTransaction(Transaction):
    """The transaction of a block; `result` is there when the block has closed.

    `connection`: the connection or session whose database transaction a block of `begin` has begun.
    """

    result: TransactionResult | None = None
    connection: Any = field(default=None, repr=False)
    rolled_back: str | None = field(default=None, repr=False)

    def rollback(self, reason: str) -> None:
        """Drop the messages when the block closes, without an exception. Call it before the commit of a bound session.

        A plain block writes it into its barrier at its end: if the process dies before, a check answers commit. With an
        id of the caller's, a block that has not entered its barrier does not drop what another run has committed.
        """
        self.rolled_back = reason


class Block:
    """One block. `follow` runs an exchange in the background, or after a close now, perhaps in a task to be awaited."""

    def __init__(
        self, conversation: Conversation, follow: Callable[[Exchange[Any]], Any], binding: Binding | None
    ) -> None:
        self._conversation, self._run, self._binding = conversation, follow, binding
        self.transaction: OpenTransaction | None = None

    def opening(self, half: Exchange[Transaction]) -> Exchange[OpenTransaction]:
        """Post the half."""
        posted = yield from half
        self.transaction = OpenTransaction(**vars(posted))
        return self.transaction

    def closing(self, error: BaseException | None) -> Exchange[None]:
        """Post the end; `error` is what leaves the block.

        Raises NotEntered or NotCommitted after a block without an error whose code did not use the producer's barrier.
        """
        transaction = self.transaction
        assert transaction is not None
        if self._binding is not None:
            transaction.result = yield from self._bound(transaction, self._binding, error)
            self._binding.release()
        elif error is None:
            yield from carried_on(partial(self._ended, transaction))
        elif isinstance(error, Exception):
            transaction.result = yield from carried_on(partial(self._failed, transaction, error))
        else:
            # A cancellation or an exit does not show what the database did meanwhile.
            transaction.result = _left(transaction)

    def _ended(self, transaction: OpenTransaction) -> Exchange[None]:
        if transaction.rolled_back is not None:
            transaction.result = yield from self._conversation.dropped(transaction, transaction.rolled_back)
            return
        transaction.result, wrong = yield from self._conversation.verified(transaction)
        if wrong is not None:
            raise wrong

    def _failed(self, transaction: OpenTransaction, error: Exception) -> Exchange[TransactionResult]:
        if transaction.rolled_back is not None and not transaction.repeated:
            return (yield from self._conversation.dropped(transaction, transaction.rolled_back, error))
        return (yield from self._conversation.failed(transaction, error))

    def _bound(
        self, transaction: OpenTransaction, binding: Binding, error: BaseException | None
    ) -> Exchange[TransactionResult]:
        state = binding.state
        if error is not None and not isinstance(error, Exception):
            # The block is being cancelled: do not wait.
            self._follow(transaction, binding, state)
            return _left(transaction)
        contested = transaction.chosen and self._conversation.barrier is not None
        if error is None and state != "committed" and transaction.rolled_back is not None:
            reason = transaction.rolled_back
            if contested and state != "open":
                return (yield from carried_on(partial(self._doubtful, transaction, reason, None)))
            # Written into the database transaction, if it is open. But if that is rolled back, another run of a chosen
            # id could come after it.
            if not contested:
                return (yield from self._conversation.end(transaction, Verdict.ROLLBACK, reason=reason))
        if state == "open":
            self._follow(transaction, binding, state)
            why = "its block closed while the bound database transaction is still open and may be rolled back"
            return (yield from self._conversation.leave_to_check(transaction, why))
        if state == "none" and error is None:
            why = "no database transaction was committed in its block"
            return (yield from self._conversation.leave_to_check(transaction, why))
        return (yield from carried_on(partial(self._over, transaction, state, error)))

    def _follow(self, transaction: OpenTransaction, binding: Binding, state: DatabaseState) -> None:
        """Post the end in the background, now or when the database transaction is over."""

        def notify(outcome: DatabaseState) -> Any:
            return self._run(self._over(transaction, outcome, None))

        if state == "open":
            binding.when_over(notify)
        elif state != "none":
            notify(state)

    def _over(
        self, transaction: OpenTransaction, state: DatabaseState, error: Exception | None
    ) -> Exchange[TransactionResult]:
        """Post the outcome of an ended database transaction; a later exception in the block does not change it."""
        if state == "committed" and transaction.rolled_back is not None:
            return (yield from self._conversation.dropped(transaction, transaction.rolled_back, error))
        if state == "committed":
            return (yield from self._committed(transaction, error))
        if state == "doubtful":
            reason = "the database's commit failed" + ("" if error is None else f": {reason_of(error)}")
            return (yield from self._doubtful(transaction, reason, error))
        reason = "the database transaction was rolled back" if error is None else reason_of(error)
        if (
            transaction.repeated
            or (transaction.chosen and self._conversation.barrier is not None)
            or (state == "rolled_back" and transaction.settle is not None)
        ):
            # This one was rolled back at its end. That of another run of a chosen id may have been committed, or must
            # be refused from now on, or the code may have committed before it raised.
            return (yield from self._doubtful(transaction, reason, error))
        return (yield from self._conversation.end(transaction, Verdict.ROLLBACK, reason=reason, error=error))

    def _committed(self, transaction: OpenTransaction, error: Exception | None) -> Exchange[TransactionResult]:
        """Post the barrier's outcome after a commit that returned but may have stored nothing."""
        if self._binding is None or not self._binding.hides_rollbacks or transaction.settle is None:
            return (yield from self._conversation.end(transaction, Verdict.COMMIT, error=error))
        verdict = yield from self._conversation.settled(transaction)
        if verdict is Verdict.COMMIT:
            return (yield from self._conversation.end(transaction, verdict, error=error))
        why = "the database had rolled back before the commit, and the code hid the error"
        if verdict is Verdict.UNKNOWN:
            return (yield from self._conversation.leave_to_check(transaction, "the barrier could not be read", error))
        log.error("transaction %s: %s", transaction.transaction_id, why)
        return (yield from self._conversation.end(transaction, verdict, reason=why, error=error))

    def _doubtful(
        self, transaction: OpenTransaction, reason: str, error: Exception | None
    ) -> Exchange[TransactionResult]:
        otherwise = self._conversation.barrier if transaction.chosen else None
        verdict = yield from self._conversation.settled(transaction, otherwise)
        if verdict is Verdict.UNKNOWN:
            return (yield from self._conversation.leave_to_check(transaction, reason, error))
        dropped = None if transaction.repeated or transaction.settle is None else transaction.rolled_back
        if verdict is Verdict.COMMIT and dropped is not None:
            # The code has committed by itself, before the block could write that its messages are dropped.
            return (yield from self._conversation.dropped(transaction, dropped, error))
        return (yield from self._conversation.end(transaction, verdict, reason=reason, error=error))


def _left(transaction: Transaction) -> TransactionResult:
    return TransactionResult(transaction.transaction_id, transaction.message_ids, Verdict.UNKNOWN, "left_to_check")
