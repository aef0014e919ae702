"""The exchanges of a producer with Halfnote and their order: the common core of both producers."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote
from uuid import UUID

from halfnote.barrier_mark import marked
from halfnote.errors import (
    BarrierRefused,
    HalfFailed,
    ListenerError,
    NotCommitted,
    NotEntered,
    PlainFailed,
    Refused,
    Unconfirmed,
    VerdictConflict,
)
from halfnote.exchange import (
    REFUSED_WITHIN_S,
    Answer,
    Call,
    Dropped,
    Exchange,
    Later,
    Outcome,
    Raised,
    Request,
    Returned,
    Wait,
    asked,
    carried_on,
    pauses,
)
from halfnote.ids import new_id
from halfnote.outcomes import Outcomes, judged
from halfnote.outgoing import Outgoing, as_list, encoded, serializable
from halfnote.times import instant
from halfnote.transaction import End, PlainResult, Registration, Transaction, TransactionResult
from halfnote.verdicts import Verdict

log = logging.getLogger("halfnote")

REASON_MAX = 1000
# The shortest `immunity_s` that Halfnote accepts.
LEAST_IMMUNITY_S = 1.0
# Refusals of an end after which no check of this producer comes.
NO_CHECK = ("transaction-unknown", "day-gone", "wrong-group")
# A group that is older was not registered by an attempt of now, whatever the difference of the clocks is.
YOUNG_S = 3600.0
SHOWN_ONCE = (
    "%s was registered, perhaps by a request whose answer was lost, and with it the secret that signs checks, which is "
    "shown once: if the group is new, make another secret by `POST %s/rotate-secret` or `halfnote groups rotate-secret "
    "%s`"
)
NOTHING_DONE = "the half message was not confirmed in time, so nothing was done"


@dataclass(frozen=True)
class Conversation:
    """One producer's part. Durations in seconds.

    `barrier`: what a block without a binding must have entered. `attempt_s` bounds one request; on threads, its
    connection and each wait for a part of it or of its answer. `half_within_s` bounds all attempts at a half,
    `end_within_s` all attempts at an end, which continue in the background after the first. `refused_within_s` bounds a
    half whose connects are all refused. `serialize` returns what JSON has in place of a value that it does not have.
    `traceparent` returns the W3C trace context of each request. Without `wait_for_end`, all attempts at an end are in
    the background.
    """

    group: str
    attempt_s: float = 5.0
    half_within_s: float = 15.0
    end_within_s: float = 60.0
    traceparent: Callable[[], str | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    barrier: Outcomes | None = None
    refused_within_s: float = REFUSED_WITHIN_S
    serialize: Callable[[Any], Any] = serializable
    wait_for_end: bool = True
    wall: Callable[[], float] = time.time

    def half(
        self,
        messages: Outgoing | Sequence[Outgoing],
        *,
        transaction_id: UUID | None = None,
        context: Any = None,
        check: Mapping[str, Any] | None = None,
        enters: bool = False,
    ) -> Exchange[Transaction]:
        """Post a half. Raises HalfFailed, after which nothing has happened; ValueError or TypeError for no JSON.

        Raises BarrierRefused, or without a barrier HalfFailed, if a rollback is recorded for an id of the caller's.
        `enters`: the block enters the barrier by itself, which is marked in the half for its checks.
        An answer after Halfnote may have sent a check (which a barrier answers with `rollback`) is too late: that half
        is withdrawn and posted again under another id, unless the caller chose the id.
        """
        listed = as_list(messages)
        options = {"context": marked(context) if enters else context, "check": dict(check) if check else None}
        posted = yield from self._timely_half(listed, options, transaction_id)
        posted.context, posted.enters = context, enters
        if posted.recorded is Verdict.ROLLBACK:
            yield from self._require_committed(posted)
        return posted

    def _require_committed(self, transaction: Transaction) -> Exchange[None]:
        """Raise unless the work of a transaction whose rollback is recorded was committed, so that nothing runs again.

        Its messages never go out, so local work must not begin. That another run has committed its work, and a person
        or a policy rolled it back, only the barrier knows; it then refuses the block. Its row also refuses a run that
        has posted its half before the rollback.
        """
        transaction_id = transaction.transaction_id
        if self.barrier is None:
            raise HalfFailed(transaction_id, None, chosen=True, recorded=Verdict.ROLLBACK)
        verdict = yield from self.settled(transaction, self.barrier)
        if verdict is not Verdict.COMMIT:
            raise BarrierRefused(transaction_id, verdict if verdict is Verdict.ROLLBACK else None)

    def _timely_half(
        self, listed: list[Outgoing], options: Mapping[str, Any], transaction_id: UUID | None
    ) -> Exchange[Transaction]:
        """Post a half; post it again under another id if its answer came too late."""
        if transaction_id is not None:
            chosen, answer = yield from self._half(transaction_id, listed, options, self.half_within_s, True)
            note_chosen(chosen, answer)
            return chosen
        began = self.clock()
        posted, answer = yield from self._half(new_id(), listed, options, self.half_within_s)
        now = self.clock()
        if not late(posted, answer, began, now):
            return posted
        took_s = now - began
        log.warning("transaction %s was answered after %.1f s: sent as another one", posted.transaction_id, took_s)
        yield Later(self._withdraw(posted.transaction_id))
        posted, _ = yield from self._half(new_id(), listed, options, self.half_within_s - took_s)
        return posted

    def _half(
        self,
        transaction_id: UUID,
        messages: list[Outgoing],
        options: Mapping[str, Any],
        within_s: float,
        chosen: bool = False,
    ) -> Exchange[tuple[Transaction, Answer]]:
        """Post one half; also return the answer."""
        request = self.post("/half", self.half_content(transaction_id, messages, options))
        try:
            answer = yield from self._asked("the half message", request, within_s)
        except Dropped:
            # The local work did not begin, and nothing else would end the half before a check.
            if not chosen:
                yield Later(self._withdraw(transaction_id, under_way=True))
            raise
        except (Refused, Unconfirmed) as cause:
            if cause.perhaps_done and not chosen:
                yield Later(self._withdraw(transaction_id))
            raise HalfFailed(transaction_id, cause, chosen=chosen) from cause
        return self.begun(transaction_id, messages, answer), answer

    def begun(self, transaction_id: UUID, messages: list[Outgoing], answer: Answer) -> Transaction:
        """Return the transaction of a half that was answered."""
        born_at, first_check_at = answer.content.get("born_at"), answer.content.get("first_check_at")
        return Transaction(transaction_id, self.group, messages, born_at=born_at, first_check_at=first_check_at)

    def send(
        self,
        messages: Outgoing | Sequence[Outgoing],
        arg: Any,
        execute_local: Callable[[Transaction, Any], Any],
        **half: Any,
    ) -> Exchange[TransactionResult]:
        """Post a half, run the local work, post the end. Raises HalfFailed or ListenerError."""
        transaction = yield from self.half(messages, **half)
        came = yield Call(lambda: execute_local(transaction, arg))
        return (yield from carried_on(partial(self._concluded, transaction, came)))

    def _concluded(self, transaction: Transaction, came: Returned | Raised) -> Exchange[TransactionResult]:
        """Post the end after a listener's local work."""
        if isinstance(came, Raised):
            return (yield from self.failed(transaction, came.error))
        if not isinstance(came.value, Verdict):
            raise ListenerError(
                f"execute_local returned {came.value!r}; it must return COMMIT, ROLLBACK or UNKNOWN. Transaction "
                f"{transaction.transaction_id} is left to check-back"
            )
        if came.value is Verdict.COMMIT:
            return (yield from self.committed(transaction))
        if came.value is Verdict.ROLLBACK and self._is_contested(transaction):
            return (yield from self._given_up(transaction, None, None))
        if came.value is Verdict.ROLLBACK and transaction.chosen:
            # It has entered, or there is no barrier. The row of what it rolled back is gone: refuse another run.
            yield from self.settled(transaction, self.barrier)
        return (yield from self.end(transaction, came.value))

    def committed(self, transaction: Transaction) -> Exchange[TransactionResult]:
        """Post the end after local work that ended normally. Raises NotEntered or NotCommitted with a barrier."""
        result, wrong = yield from self.verified(transaction)
        if wrong is not None:
            raise wrong
        return result

    def verified(
        self, transaction: Transaction
    ) -> Exchange[tuple[TransactionResult, NotEntered | NotCommitted | None]]:
        """Post the end after local work that ended normally; also return what its code did wrong.

        With a barrier, its row is read first, because the code may have forgotten `enter` or the commit.
        """
        barrier = self.barrier
        if barrier is None:
            return (yield from self.end(transaction, Verdict.COMMIT)), None
        read = barrier.read if transaction.settle is None else barrier.settle
        found = judged(transaction, (yield Call(partial(read, transaction.transaction_id), waits=True)))
        if found.verdict is Verdict.UNKNOWN:
            return (yield from self.leave_to_check(transaction, found.reason or "")), found.wrong
        return (yield from self.end(transaction, found.verdict, reason=found.reason)), found.wrong

    def failed(self, transaction: Transaction, error: Exception) -> Exchange[TransactionResult]:
        """Post the end after an exception in the local work: rollback, unless a barrier has another outcome.

        An exception may come from a commit whose answer was lost, or from work that has run before and was committed.
        A barrier that was entered has the outcome, also if it was entered by the id, which the transaction does not
        show.
        """
        if transaction.settle is None and (transaction.repeated or transaction.entering):
            return (yield from self.leave_to_check(transaction, reason_of(error), error))
        verdict = Verdict.ROLLBACK
        if transaction.settle is not None or self.barrier is not None:
            verdict = yield from self.settled(transaction, self.barrier)
        return (yield from self.end(transaction, verdict, reason=reason_of(error), error=error))

    def dropped(
        self, transaction: Transaction, reason: str, error: Exception | None = None
    ) -> Exchange[TransactionResult]:
        """Post the rollback of messages that the code drops although its database transaction may be committed.

        The barrier has it first, so that a check gives the same answer if the end is lost. A transaction of a chosen id
        that did not enter leaves the row of another run as it is: if that was committed, its messages go out.
        """
        if self._is_contested(transaction):
            return (yield from self._given_up(transaction, reason, error))
        if self.barrier is not None:
            came = yield Call(partial(self.barrier.drop, transaction.transaction_id), waits=True)
            if isinstance(came, Raised):
                unwritten = "transaction %s: the barrier could not note that its messages are dropped: %s"
                log.warning(unwritten, transaction.transaction_id, came.error)
        return (yield from self.end(transaction, Verdict.ROLLBACK, reason=reason, error=error))

    def _is_contested(self, transaction: Transaction) -> bool:
        """Return whether a row in the barrier, if there is one, is that of another run.

        A transaction that the barrier refused, or that failed to enter, has `settle` but no row.
        """
        has_barrier = transaction.settle is not None or self.barrier is not None
        return transaction.chosen and not transaction.entered and has_barrier

    def _given_up(
        self, transaction: Transaction, reason: str | None, error: Exception | None
    ) -> Exchange[TransactionResult]:
        """Post what the barrier says of a contested transaction whose code wants a rollback.

        Another run may have committed its work, or may be open. If neither is so, the barrier refuses it from now on.
        """
        verdict = yield from self.settled(transaction, self.barrier)
        if verdict is Verdict.ROLLBACK:
            return (yield from self.end(transaction, verdict, reason=reason, error=error))
        wish = "" if reason is None else f": {reason}"
        if verdict is Verdict.UNKNOWN:
            why = f"the barrier does not say whether another run of its id commits, so it is not rolled back{wish}"
            return (yield from self.leave_to_check(transaction, why, error))
        why = f"another run of its id was committed, so it is not rolled back{wish}"
        log.warning("transaction %s: %s", transaction.transaction_id, why)
        return (yield from self.end(transaction, verdict, reason=why, error=error))

    def settled(self, transaction: Transaction, otherwise: Outcomes | None = None) -> Exchange[Verdict]:
        """Ask the barrier for the outcome of the local transaction; UNKNOWN without a barrier or an answer now.

        `otherwise`: the barrier to ask if the transaction does not show which one it has entered.
        """
        settle = transaction.settle
        if settle is None and otherwise is not None:
            settle = partial(otherwise.settle, transaction.transaction_id)
        if settle is None:
            return Verdict.UNKNOWN
        came = yield Call(settle, waits=True)
        if isinstance(came, Raised):
            log.warning("the barrier of transaction %s could not be read: %s", transaction.transaction_id, came.error)
            return Verdict.UNKNOWN
        verdict: Verdict = came.value
        return verdict

    def end(
        self, transaction: Transaction, verdict: Verdict, *, reason: str | None = None, error: Exception | None = None
    ) -> Exchange[TransactionResult]:
        """Post an end once; if that fails, repeat it in the background, and after that leave it to check-back.

        Without `wait_for_end`, the first attempt is in the background too, unless too many ends are there already.
        """
        request = self.post("/end", self.end_content(transaction.transaction_id, verdict, reason))
        if (
            not self.wait_for_end
            and verdict is not Verdict.UNKNOWN
            and (yield Later(self._ended(transaction, request), has_fallback=True))
        ):
            return TransactionResult(transaction.transaction_id, transaction.message_ids, verdict, "posted", error)
        try:
            end, fault = yield from self._ended(transaction, request, attempts=1)
        except Dropped as dropped:
            dropped.is_over = True
            if verdict is not Verdict.UNKNOWN:
                yield Later(self._ended(transaction, request))
            raise
        if isinstance(fault, Unconfirmed) and verdict is not Verdict.UNKNOWN:
            yield Later(self._ended(transaction, request, after_s=fault.after_s))
        return TransactionResult(transaction.transaction_id, transaction.message_ids, verdict, end, error or fault)

    def leave_to_check(
        self, transaction: Transaction, why: str, error: Exception | None = None
    ) -> Exchange[TransactionResult]:
        """Post `unknown` and ask Halfnote to check at once, because the outcome is not known here."""
        log.warning("transaction %s is left to check-back: %s", transaction.transaction_id, why)
        result = yield from self.end(transaction, Verdict.UNKNOWN, reason=why, error=error)
        request = self.post(f"/transactions/{transaction.transaction_id}/check", None)
        try:
            yield from asked("a check", request, within_s=self.attempt_s, clock=self.clock, attempts=1)
        except Dropped as dropped:
            dropped.is_over = True
            raise
        except (Refused, Unconfirmed) as fault:
            # A failure only delays the check: Halfnote sends it in any case.
            log.info("transaction %s: %s", transaction.transaction_id, fault)
        return result

    def plain(
        self, messages: Outgoing | Sequence[Outgoing], *, transaction_id: UUID | None = None
    ) -> Exchange[PlainResult]:
        """Post plain messages, without a half and an end. Raises PlainFailed."""
        listed, chosen = as_list(messages), transaction_id is not None
        transaction_id = transaction_id or new_id()
        request = self.post("/messages", self.half_content(transaction_id, listed, {}))
        try:
            answer = yield from self._asked("the messages", request, self.half_within_s)
        except (Refused, Unconfirmed) as cause:
            raise PlainFailed(transaction_id, cause, chosen=chosen) from cause
        return PlainResult.of(transaction_id, answer.content)

    def register(
        self, check_urls: Sequence[str], policy: Mapping[str, Any], secret: str | None = None
    ) -> Exchange[Registration]:
        """PUT the producer group with its check-back settings. Raises Refused or Unconfirmed.

        If the answer with the secret of a new group may have been lost, the log says so: the secret is shown once.
        """
        content = {"check_urls": list(check_urls), **policy, **({"secret": secret} if secret is not None else {})}
        request = Request(
            "PUT", f"/producer-groups/{quote(self.group, safe='')}", self._encoded(content), self.attempt_s
        )
        what = f"the producer group `{self.group}`"
        answer = yield from self._asked(what, request, self.half_within_s)
        group = dict(answer.content)
        if answer.after_doubt and answer.status == 200 and secret is None and self._is_young(group):
            log.warning(SHOWN_ONCE, what, request.path, self.group)
        return Registration(answer.status == 201, group.pop("secret", None), group)

    def _is_young(self, group: Mapping[str, Any]) -> bool:
        """Return whether an attempt of now may have registered a group, as far as its age shows."""
        try:
            return self.wall() - instant(group["created_at"]).timestamp() < YOUNG_S
        except (LookupError, AttributeError, TypeError, ValueError):
            return True

    def _ended(
        self, transaction: Transaction, request: Request, *, attempts: int | None = None, after_s: float | None = None
    ) -> Exchange[tuple[End, Exception | None]]:
        """Post an end and return its outcome; failures are returned, not raised. `after_s` as of `asked`."""
        what, within_s = f"the end of transaction {transaction.transaction_id}", self.end_within_s
        try:
            answer = yield from asked(
                what, request, within_s=within_s, clock=self.clock, attempts=attempts, after_s=after_s
            )
        except (Refused, Unconfirmed) as fault:
            return end_of(transaction, fault)
        return end_of(transaction, answer)

    def _asked(self, what: str, request: Request, within_s: float) -> Exchange[Answer]:
        """Send a request whose caller waits for it: it fails soon where connects are refused."""
        limit = self.refused_within_s
        return (yield from asked(what, request, within_s=within_s, clock=self.clock, refused_within_s=limit))

    def _withdraw(self, transaction_id: UUID, *, under_way: bool = False) -> Exchange[None]:
        """Post a rollback of a half that may have been stored; 404 says that it was not.

        `under_way`: the half may still arrive, so a 404 is asked again for as long as its request may last.
        """
        request, waits = self.post("/end", self.withdrawal(transaction_id)), pauses(self.attempt_s, self.clock)
        while True:
            try:
                yield from asked("a withdrawal", request, within_s=self.end_within_s, clock=self.clock)
                return
            except (Refused, Unconfirmed) as fault:
                wait_s = next(waits, None) if under_way and is_unknown(fault) else None
                if wait_s is None:
                    log.info("transaction %s: %s", transaction_id, fault)
                    return
            yield Wait(wait_s)

    def half_content(
        self, transaction_id: UUID, messages: Sequence[Outgoing], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the content of a half or of plain messages; options that are None are left out."""
        shown = [message.as_json() for message in messages]
        given = {name: value for name, value in options.items() if value is not None}
        return {"producer_group": self.group, "transaction_id": str(transaction_id), "messages": shown, **given}

    def end_content(self, transaction_id: UUID, verdict: Verdict, reason: str | None = None) -> dict[str, Any]:
        """Return the content of an end."""
        content = {"transaction_id": str(transaction_id), "producer_group": self.group, "verdict": verdict.value}
        if reason:
            content["reason"] = reason[:REASON_MAX].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
        return content

    def withdrawal(self, transaction_id: UUID) -> dict[str, Any]:
        """Return the content of the end of a half whose local work did not begin."""
        return self.end_content(transaction_id, Verdict.ROLLBACK, NOTHING_DONE)

    def _encoded(self, content: Mapping[str, Any]) -> bytes:
        return encoded(content, self.serialize)

    def post(self, path: str, content: Mapping[str, Any] | None) -> Request:
        """Return a request. Raises ValueError or TypeError for what is no JSON."""
        # The trace context is a header and not content, because repeated work must have the same content.
        trace = self.traceparent()
        headers = {"traceparent": trace} if trace is not None else {}
        return Request("POST", path, b"" if content is None else self._encoded(content), self.attempt_s, headers)


def replayed(answer: Answer) -> bool:
    """Return whether a half was stored already."""
    return bool(answer.content.get("replayed"))


def note_chosen(posted: Transaction, answer: Answer) -> None:
    """Note that the caller chose the id, and what the answer to its half says about earlier runs."""
    posted.chosen, posted.repeated = True, replayed(answer)
    recorded = answer.content.get("verdict")
    posted.recorded = Verdict(recorded) if recorded in (Verdict.COMMIT, Verdict.ROLLBACK) else None


def is_unknown(outcome: Outcome) -> bool:
    """Return whether Halfnote does not have the transaction of an end."""
    return isinstance(outcome, Refused) and outcome.problem.type == "transaction-unknown"


def late(posted: Transaction, answer: Answer, began: float, now: float) -> bool:
    """Return whether a check may have been sent about a half whose first attempt began at `began`.

    A half that was not replayed was stored by the attempt that was answered.
    """
    if now - began < LEAST_IMMUNITY_S:
        return False
    return now - (began if replayed(answer) else answer.sent_at) >= posted.immunity_s


def end_of(transaction: Transaction, outcome: Outcome) -> tuple[End, Exception | None]:
    """Return the result of an end, and log what went wrong."""
    if isinstance(outcome, Answer):
        return ("left_to_check" if outcome.status == 202 else "recorded"), None
    if isinstance(outcome, Unconfirmed):
        log.warning("%s", outcome)
        return "left_to_check", outcome
    if outcome.problem.type != "verdict-conflict":
        log.error("%s", outcome)
        return ("refused" if outcome.problem.type in NO_CHECK else "left_to_check"), outcome
    conflict = VerdictConflict(transaction.transaction_id, outcome.problem)
    log.error("%s", conflict)
    return "conflict", conflict


def reason_of(error: BaseException) -> str:
    """Return an exception's class and text, as it is recorded with a rollback."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
