"""One check of a claimed transaction: its request and its result. Nothing here uses the database."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import structlog

from app.announcements import UndecidedTransaction
from app.checkback.check_requests import CheckReply, UrlResult, ask, body_fields
from app.coordinator.wire import CheckPolicy
from app.errors import SecretsUnreadable
from app.ids import message_id
from app.observability.trace_context import log_fields
from app.policy.check_schedule import (
    AskingPolicy,
    CheckAgain,
    CheckHistory,
    CheckResult,
    Decision,
    Unanswered,
    after_check,
    before_check,
    with_override,
)
from app.runtime.state import Runtime
from app.secrets.vault import GROUP_SECRETS
from app.store.checkback.claims import AskedGroup, AskedMessage, Claim
from app.verdicts import CheckBackState, CheckOutcome, OnExhausted

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.observability.tracing import Traced

log = structlog.get_logger(__name__)

_policy = msgspec.json.Decoder(CheckPolicy).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Check:
    """A claimed transaction with all that a check needs.

    `messages` is empty if its half is gone, `urls` if the group has no check URL.
    """

    claim: Claim
    group: AskedGroup | None
    messages: Sequence[AskedMessage]
    urls: Sequence[str]

    @property
    def policy(self) -> AskingPolicy:
        """The group's policy with the transaction's own values; the defaults if the group has no row."""
        group = self.group
        general = AskingPolicy()
        if group is not None:
            general = AskingPolicy(
                group.interval_s,
                group.max_checks,
                group.on_exhausted,
                group.unanswered_park_s,
            )
        own = self.messages[0].policy if self.messages else None
        if own is None:
            return general
        check = _policy(own)
        return with_override(
            general,
            interval_s=check.interval_s,
            max_checks=check.max_checks,
            on_exhausted=OnExhausted(check.on_exhausted) if check.on_exhausted else None,
        )

    @property
    def history(self) -> CheckHistory:
        """The earlier checks of the transaction."""
        claim = self.claim
        parked = claim.state is CheckBackState.PARKED
        return CheckHistory(claim.answered, claim.unanswered, claim.unanswered_since, parked)


@dataclass(frozen=True, slots=True)
class FinishedCheck:
    """A check and the decision on it. `decision` None: the half is gone. `result` None: no check was sent.

    `due_at`: since when it was due, of a check that no producer claimed; it is due again then if it is not parked.
    `trace` is the context of the check's requests. `duration_ms`: of a check that its producer claimed; otherwise the
    calls in `tried` have theirs.
    """

    check: Check
    at: datetime
    decision: Decision | None
    result: CheckResult | None = None
    tried: tuple[UrlResult, ...] = ()
    response: str | None = None
    trace: str | None = None
    duration_ms: int | None = None
    due_at: datetime | None = None


def in_doubt(finished: FinishedCheck) -> UndecidedTransaction:
    """Return the announcement's view of a transaction that policy rolls back or parks. Its half must exist."""
    claim, messages = finished.check.claim, finished.check.messages
    return UndecidedTransaction(
        claim.transaction_id,
        claim.producer_group,
        messages[0].topic,
        messages[0].key,
        len(messages),
        messages[0].born_at,
        # Without a result this check was not sent.
        checks=claim.number if finished.result is not None else claim.number - 1,
    )


def decided_by(finished: FinishedCheck, group: AskedGroup | None, now: datetime) -> FinishedCheck:
    """Return a check with the decision by `group`, its group as it is now, if the group has changed since the claim."""
    check = finished.check
    if _version(check.group) == _version(group):
        return finished
    check = replace(check, group=group)
    decision: Decision
    if finished.result is None:
        decision = before_check(check.policy, check.history) or CheckAgain(finished.due_at or now)
    else:
        decision = after_check(check.policy, check.history, finished.result, now)
    return replace(finished, check=check, decision=decision)


def _version(group: AskedGroup | None) -> datetime | None:
    return None if group is None else group.updated_at


async def ask_producer(runtime: Runtime, check: Check) -> FinishedCheck:
    """Send the check of one transaction. Never raises: a failure is an unanswered check."""
    at = runtime.clock.now()
    if not check.messages:
        return FinishedCheck(check, at, None)
    policy, history = check.policy, check.history
    decided = before_check(policy, history)
    if decided is not None:
        return FinishedCheck(check, at, decided)
    asked, trace = await _traced(runtime, check, policy, at)
    decision = after_check(policy, history, asked.result, runtime.clock.now())
    return FinishedCheck(check, at, decision, asked.result, asked.tried, asked.response, trace)


async def _traced(runtime: Runtime, check: Check, policy: AskingPolicy, at: datetime) -> tuple[CheckReply, str | None]:
    """Send the check, with a span if the half's trace is recorded; return its result and its trace context."""
    trace, claim = check.messages[0].traceparent, check.claim
    traced = None
    if runtime.tracing is not None:
        about = {"transaction_id": str(claim.transaction_id), "producer_group": claim.producer_group}
        traced = runtime.tracing.check(trace, {**about, "check": claim.number})
    if traced is None:
        return await _asked(runtime, check, policy, at, trace), trace
    asked = None
    try:
        asked = await _asked(runtime, check, policy, at, traced.context)
    finally:
        _end(traced, asked)
    return asked, traced.context


def outcome_of(result: CheckResult) -> CheckOutcome:
    """Return the outcome of a check's result."""
    if isinstance(result, Unanswered):
        return CheckOutcome.UNANSWERED
    return CheckOutcome.UNKNOWN if result.verdict is None else CheckOutcome(result.verdict.word)


def _end(traced: "Traced", asked: CheckReply | None) -> None:
    """End a check's span; `asked` None: it was canceled."""
    if asked is None:
        traced.end(error="canceled")
        return
    last = asked.tried[-1] if asked.tried else None
    result = asked.result
    attributes = {
        "halfnote.outcome": outcome_of(result).value,
        "halfnote.urls_tried": len(asked.tried),
        "server.address": urlsplit(last.url).hostname if last is not None else None,
        "http.response.status_code": last.status if last is not None else None,
    }
    traced.end(attributes, result.error if isinstance(result, Unanswered) else None)


async def _asked(runtime: Runtime, check: Check, policy: AskingPolicy, at: datetime, trace: str | None) -> CheckReply:
    claim, group = check.claim, check.group
    if group is None or group.deleted_at is not None:
        return CheckReply(Unanswered("the producer group is not registered any more"), (), None)
    try:
        return await ask(
            runtime.checks_http,
            check.urls,
            runtime.vault.secrets(GROUP_SECRETS, group.name, msgspec.json.decode(group.secrets)),
            f"chk_{claim.transaction_id}-{claim.number}",
            body_of(check, policy),
            timeout_s=group.check_timeout_s,
            now=at,
            trace=trace,
        )
    except SecretsUnreadable as error:
        return CheckReply(Unanswered(error.detail), (), None)
    except Exception as error:
        log.error("defect", transaction_id=str(claim.transaction_id), exc_info=error, **log_fields(trace))
        return CheckReply(
            Unanswered(f"Halfnote could not send the check ({type(error).__name__}); its log has the details"), (), None
        )


def body_of(check: Check, policy: AskingPolicy) -> bytes:
    """Return the JSON body of a transaction's check."""
    return _encode(fields_of(check, policy))


def fields_of(check: Check, policy: AskingPolicy) -> dict[str, object]:
    """Return what a check tells its producer: `type`, then the fields of the transaction, then its messages."""
    claim, first = check.claim, check.messages[0]
    return {
        "type": "halfnote.check",
        "transaction_id": claim.transaction_id,
        "producer_group": claim.producer_group,
        "check": claim.number,
        "max_checks": policy.max_checks,
        "born_at": first.born_at,
        "context": msgspec.Raw(first.context.encode()) if first.context is not None else None,
        "messages": [_message(message) for message in check.messages],
    }


def _message(message: AskedMessage) -> dict[str, object]:
    shown: dict[str, object] = {
        "message_id": message_id(message.transaction_id, message.position),
        "topic": message.topic,
        "key": message.key,
        "tag": message.tag,
        "headers": msgspec.Raw(message.headers.encode()) if message.headers is not None else {},
    }
    if message.body is not None:
        shown |= body_fields(message.body, message.content_type)
    return shown
