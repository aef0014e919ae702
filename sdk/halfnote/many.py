"""Many transactions in one request: what a producer posts, and the outcome of each. No input or output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID

from halfnote.batching import TRANSACTIONS_MOST
from halfnote.conversation import Conversation, end_of, is_unknown, late, note_chosen
from halfnote.errors import HalfFailed, PlainFailed, Refused, Unconfirmed
from halfnote.exchange import Answer, Dropped, Exchange, Later, Outcome, Wait, asked_each, pauses
from halfnote.ids import new_id
from halfnote.outgoing import Outgoing, as_list
from halfnote.transaction import PlainResult, Transaction, TransactionResult
from halfnote.verdicts import Verdict

LATE = "its answer came after a check may have been sent"


@dataclass(frozen=True)
class Half:
    """A half message to post, or plain messages to send, with what else their request can have.

    `transaction_id`: an id of your own, so that a second run sends nothing twice. `context` and `check` are of halves.
    """

    messages: Outgoing | Sequence[Outgoing]
    transaction_id: UUID | None = None
    context: Any = None
    check: Mapping[str, Any] | None = None


ToPost: TypeAlias = Outgoing | Sequence[Outgoing] | Half


@dataclass(frozen=True)
class Many:
    """The part of a producer that posts many transactions in one request."""

    conversation: Conversation

    def halves(self, halves: Sequence[ToPost]) -> Exchange[list[Transaction | HalfFailed]]:
        """Post halves; return each transaction, or why it did not begin. Raises ValueError or TypeError.

        A half whose answer came too late is withdrawn, as is one that may have been stored without an answer, unless
        the caller chose its id. A chosen id whose rollback is recorded did not begin.
        """
        talk, listed = self.conversation, _listed(halves)
        ids = [one.transaction_id or new_id() for one in listed]
        contents = [
            talk.half_content(transaction_id, as_list(one.messages), {"context": one.context, "check": one.check})
            for transaction_id, one in zip(ids, listed, strict=True)
        ]
        began = talk.clock()
        try:
            outcomes = yield from self._asked("the half messages", "/halves", "halves", contents, talk.half_within_s)
        except Dropped:
            # Their local work did not begin.
            new = [ids[n] for n, one in enumerate(listed) if one.transaction_id is None]
            if new:
                yield Later(self._withdraw(new, under_way=True), len(new))
            raise
        now = talk.clock()
        found: list[Transaction | HalfFailed] = []
        withdrawn: list[UUID] = []
        for transaction_id, one, outcome in zip(ids, listed, outcomes, strict=True):
            begun = self._begun(transaction_id, one, outcome, began, now)
            if isinstance(begun, HalfFailed) and one.transaction_id is None and _perhaps_done(begun):
                withdrawn.append(transaction_id)
            found.append(begun)
        if withdrawn:
            yield Later(self._withdraw(withdrawn), len(withdrawn))
        return found

    def ends(self, ends: Sequence[tuple[Transaction, Verdict]]) -> Exchange[list[TransactionResult]]:
        """Post ends once; what fails is repeated in the background, and after that left to check-back.

        Without `wait_for_end` the first attempt is in the background too. Raises ValueError.
        """
        talk, listed = self.conversation, _bounded(ends)
        if not talk.wait_for_end and (yield Later(self._ended(listed), len(listed), has_fallback=True)):
            return [_result(transaction, verdict, "posted", None) for transaction, verdict in listed]
        try:
            outcomes = yield from self._ended(listed, attempts=1)
        except Dropped:
            known = [(transaction, verdict) for transaction, verdict in listed if verdict is not Verdict.UNKNOWN]
            if known:
                yield Later(self._ended(known), len(known))
            raise
        results = []
        again, after_s = [], 0.0
        for (transaction, verdict), outcome in zip(listed, outcomes, strict=True):
            end, fault = end_of(transaction, outcome)
            results.append(_result(transaction, verdict, end, fault))
            if isinstance(fault, Unconfirmed) and verdict is not Verdict.UNKNOWN:
                again.append((transaction, verdict))
                after_s = max(after_s, fault.after_s)
        if again:
            yield Later(self._ended(again, after_s=after_s), len(again))
        return results

    def plain(self, sent: Sequence[ToPost]) -> Exchange[list[PlainResult | PlainFailed]]:
        """Post plain messages of many transactions; return the result of each. Raises ValueError or TypeError."""
        talk, listed = self.conversation, _listed(sent)
        for one in listed:
            if one.context is not None or one.check is not None:
                raise ValueError("plain messages have no `context` and no `check`: no check asks about them")
        ids = [one.transaction_id or new_id() for one in listed]
        contents = [
            talk.half_content(transaction_id, as_list(one.messages), {})
            for transaction_id, one in zip(ids, listed, strict=True)
        ]
        outcomes = yield from self._asked("the messages", "/messages", "transactions", contents, talk.half_within_s)
        return [_plain_result(*found) for found in zip(listed, ids, outcomes, strict=True)]

    def _begun(
        self, transaction_id: UUID, half: Half, outcome: Outcome, began: float, now: float
    ) -> Transaction | HalfFailed:
        if not isinstance(outcome, Answer):
            return HalfFailed(transaction_id, outcome, chosen=half.transaction_id is not None)
        posted = self.conversation.begun(transaction_id, as_list(half.messages), outcome)
        posted.context = half.context
        if half.transaction_id is not None:
            note_chosen(posted, outcome)
            if posted.recorded is Verdict.ROLLBACK:
                return HalfFailed(transaction_id, None, chosen=True, recorded=posted.recorded)
        elif late(posted, outcome, began, now):
            return HalfFailed(transaction_id, Unconfirmed("the half message", LATE, perhaps_done=True))
        return posted

    def _ended(
        self,
        ends: Sequence[tuple[Transaction, Verdict]],
        *,
        attempts: int | None = None,
        after_s: float | None = None,
    ) -> Exchange[list[Outcome]]:
        talk = self.conversation
        contents = [talk.end_content(transaction.transaction_id, verdict) for transaction, verdict in ends]
        limits = {"attempts": attempts, "after_s": after_s}
        return (yield from self._asked("the ends", "/ends", "ends", contents, talk.end_within_s, **limits))

    def _withdraw(self, transaction_ids: Sequence[UUID], *, under_way: bool = False) -> Exchange[None]:
        """Post rollbacks of halves that may have been stored; 404 says that one was not.

        `under_way`: they may still arrive, so a 404 is asked again for as long as their request may last.
        """
        talk, ids = self.conversation, list(transaction_ids)
        waits = pauses(talk.attempt_s, talk.clock)
        while True:
            contents = [talk.withdrawal(transaction_id) for transaction_id in ids]
            outcomes = yield from self._asked("withdrawals", "/ends", "ends", contents, talk.end_within_s)
            ids = [one for one, outcome in zip(ids, outcomes, strict=True) if under_way and is_unknown(outcome)]
            wait_s = next(waits, None) if ids else None
            if wait_s is None:
                return
            yield Wait(wait_s)

    def _asked(
        self,
        what: str,
        path: str,
        field: str,
        contents: Sequence[Mapping[str, Any]],
        within_s: float,
        **limits: Any,
    ) -> Exchange[list[Outcome]]:
        talk = self.conversation
        return (
            yield from asked_each(
                what,
                lambda wanted: talk.post(path, {field: [contents[n] for n in wanted]}),
                len(contents),
                within_s=within_s,
                clock=talk.clock,
                refused_within_s=None if path == "/ends" else talk.refused_within_s,
                **limits,
            )
        )


def _listed(given: Sequence[ToPost]) -> list[Half]:
    return [one if isinstance(one, Half) else Half(one) for one in _bounded(given)]


def _bounded(given: Sequence[Any]) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"a list of transactions is expected, not {type(given).__name__}")
    if not 1 <= len(given) <= TRANSACTIONS_MOST:
        raise ValueError(f"a request has 1 to {TRANSACTIONS_MOST} transactions, not {len(given)}")
    return list(given)


def _perhaps_done(failed: HalfFailed) -> bool:
    cause = failed.__cause__
    return isinstance(cause, (Refused, Unconfirmed)) and cause.perhaps_done


def _result(transaction: Transaction, verdict: Verdict, end: Any, fault: Exception | None) -> TransactionResult:
    return TransactionResult(transaction.transaction_id, transaction.message_ids, verdict, end, fault)


def _plain_result(sent: Half, transaction_id: UUID, outcome: Outcome) -> PlainResult | PlainFailed:
    if not isinstance(outcome, Answer):
        return PlainFailed(transaction_id, outcome, chosen=sent.transaction_id is not None)
    return PlainResult.of(transaction_id, outcome.content)
