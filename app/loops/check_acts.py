"""One check: what is asked about a claimed transaction, and what that came to. No database here."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import structlog

from app.announcing import InDoubt
from app.asking import Asked, UrlResult, ask, body_fields, check_body
from app.errors import SecretsUnreadable
from app.ids import message_id
from app.policy import (
    Answered,
    AskingPolicy,
    Brought,
    Counts,
    Decision,
    Unanswered,
    after_check,
    before_check,
    with_override,
)
from app.runtime import Runtime
from app.schemas import CheckPolicy
from app.sealing import GROUP_SECRETS
from app.store.check_claims import AskedGroup, AskedMessage, Claim
from app.trace_context import log_fields
from app.verdicts import CheckBackState

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.tracing import Traced

log = structlog.get_logger(__name__)

_policy = msgspec.json.Decoder(CheckPolicy).decode


@dataclass(frozen=True, slots=True)
class Check:
    """A claimed transaction with all that asking needs. No `messages`: its half is gone. `urls` is empty where
    nobody can be asked."""

    claim: Claim
    group: AskedGroup | None
    messages: Sequence[AskedMessage]
    urls: Sequence[str]

    @property
    def policy(self) -> AskingPolicy:
        """The group's policy, with the transaction's own in its place; a group without a row has the defaults."""
        group = self.group
        general = AskingPolicy()
        if group is not None:
            general = AskingPolicy(
                group.interval_s,
                group.max_checks,
                "park" if group.on_exhausted == "park" else "rollback",
                group.unanswered_park_s,
            )
        own = self.messages[0].policy if self.messages else None
        return with_override(general, _policy(own) if own is not None else None)

    @property
    def counts(self) -> Counts:
        """What is known from the checks before."""
        claim = self.claim
        parked = claim.state == CheckBackState.PARKED
        return Counts(claim.answered, claim.unanswered, claim.unanswered_since, parked)


@dataclass(frozen=True, slots=True)
class Finished:
    """What a check came to. `decision` None: the half is gone. `brought` None: nobody was asked.

    `trace`: the context that it was asked in.
    """

    check: Check
    at: datetime
    decision: Decision | None
    brought: Brought | None = None
    tried: tuple[UrlResult, ...] = ()
    response: str | None = None
    trace: str | None = None


def in_doubt(finished: Finished) -> InDoubt:
    """Return what is told of a transaction that policy gives up on; its half is there."""
    claim, messages = finished.check.claim, finished.check.messages
    return InDoubt(
        claim.transaction_id,
        claim.producer_group,
        messages[0].topic,
        messages[0].key,
        len(messages),
        messages[0].born_at,
        claim.number if finished.brought is not None else claim.number - 1,
    )


async def act(runtime: Runtime, check: Check) -> Finished:
    """Ask about one transaction. Never raises: what goes wrong is an unanswered check."""
    at = runtime.clock.now()
    if not check.messages:
        return Finished(check, at, None)
    policy, counts = check.policy, check.counts
    instead = before_check(policy, counts)
    if instead is not None:
        return Finished(check, at, instead)
    asked, trace = await _traced(runtime, check, policy, at)
    decision = after_check(policy, counts, asked.brought, runtime.clock.now())
    return Finished(check, at, decision, asked.brought, asked.tried, asked.response, trace)


async def _traced(runtime: Runtime, check: Check, policy: AskingPolicy, at: datetime) -> tuple[Asked, str | None]:
    """Ask, with a span if the half's trace is recorded; return what that came to and the context it was asked in."""
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


def _end(traced: "Traced", asked: Asked | None) -> None:
    """End a check's span; `asked` None: it was cut short."""
    if asked is None:
        traced.end(error="cut short")
        return
    last = asked.tried[-1] if asked.tried else None
    brought = asked.brought
    word = brought.verdict.word if isinstance(brought, Answered) and brought.verdict is not None else None
    said = {
        "halfnote.outcome": word or ("unknown" if isinstance(brought, Answered) else "unanswered"),
        "halfnote.urls_tried": len(asked.tried),
        "server.address": urlsplit(last.url).hostname if last is not None else None,
        "http.response.status_code": last.status if last is not None else None,
    }
    traced.end(said, brought.error if isinstance(brought, Unanswered) else None)


async def _asked(runtime: Runtime, check: Check, policy: AskingPolicy, at: datetime, trace: str | None) -> Asked:
    claim, group = check.claim, check.group
    if group is None or group.deleted_at is not None:
        return Asked(Unanswered("the producer group is not registered any more"), (), None)
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
        return Asked(Unanswered(error.detail), (), None)
    except Exception as error:
        log.error("defect", transaction_id=str(claim.transaction_id), exc_info=error, **log_fields(trace))
        return Asked(Unanswered(f"Halfnote could not ask: {type(error).__name__}"), (), None)


def body_of(check: Check, policy: AskingPolicy) -> bytes:
    """Return the JSON that asks about a transaction."""
    claim, first = check.claim, check.messages[0]
    fields = {
        "transaction_id": claim.transaction_id,
        "producer_group": claim.producer_group,
        "check": claim.number,
        "max_checks": policy.max_checks,
        "born_at": first.born_at,
        "context": msgspec.Raw(first.context.encode()) if first.context is not None else None,
    }
    return check_body(fields, [_message(message) for message in check.messages])


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
