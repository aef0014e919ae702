"""Checks of groups that take many transactions in one call: which go together, and the call and its answers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from uuid import uuid4

import msgspec
import structlog

from app.checkback.body_memory import BodyMemory
from app.checkback.check import Check, FinishedCheck, ask_producer, fields_of
from app.checkback.check_requests import CheckReply, ask
from app.errors import SecretsUnreadable
from app.policy.check_schedule import Answered, Unanswered, after_check, before_check
from app.runtime.state import Runtime
from app.secrets.vault import GROUP_SECRETS
from app.store.checkback.claims import asked_messages, message_bytes

log = structlog.get_logger(__name__)

# Transactions of one call, and the bytes of their messages; a larger transaction goes alone.
BATCH_CHECKS_MAX = 100
BATCH_BYTES = 1024 * 1024

_encode = msgspec.json.Encoder().encode


def batches_of(checks: Sequence[Check]) -> Iterator[list[Check]]:
    """Yield what each call asks: one transaction, or up to BATCH_CHECKS_MAX of a group with `batch_checks`."""
    together: dict[str, list[Check]] = {}
    sizes: dict[str, int] = {}
    for check in checks:
        group = check.group
        if group is None or group.deleted_at is not None or not group.batch_checks:
            yield [check]
            continue
        size = sum(map(message_bytes, check.messages))
        batch = together.setdefault(group.name, [])
        if batch and (len(batch) >= BATCH_CHECKS_MAX or sizes[group.name] + size > BATCH_BYTES):
            yield batch
            together[group.name], sizes[group.name] = [check], size
        else:
            batch.append(check)
            sizes[group.name] = sizes.get(group.name, 0) + size
    yield from together.values()


async def ask_batch(runtime: Runtime, checks: Sequence[Check], memory: BodyMemory) -> list[FinishedCheck]:
    """Send what one call asks, with the bodies that it sends; they are released when the call has ended.

    Raises TimeoutError if `memory` has no room for them for too long, and the database's errors.
    """
    async with memory.held(checks[0].claim.producer_group, sum(map(_body_bytes, checks))):
        finished = await _asked_with(runtime, await _with_bodies(runtime, checks))
    # Settling needs no body.
    return [replace(one, check=check) for one, check in zip(finished, checks, strict=True)]


def _body_bytes(check: Check) -> int:
    return sum(message.body_bytes for message in check.messages)


async def _with_bodies(runtime: Runtime, checks: Sequence[Check]) -> Sequence[Check]:
    if not any(map(_body_bytes, checks)):
        return checks
    async with runtime.database.keyed() as connection:
        messages = await asked_messages(connection, [check.claim.transaction_id for check in checks])
    return [replace(check, messages=messages.get(check.claim.transaction_id, ())) for check in checks]


async def _asked_with(runtime: Runtime, checks: Sequence[Check]) -> list[FinishedCheck]:
    group = checks[0].group
    if group is not None and group.batch_checks and group.deleted_at is None:
        return await ask_about_many(runtime, checks)
    return [await ask_producer(runtime, checks[0])]


async def ask_about_many(runtime: Runtime, checks: Sequence[Check]) -> list[FinishedCheck]:
    """Send one check about transactions of one group. Never raises: a failure is an unanswered check of each."""
    at = runtime.clock.now()
    decided = {
        place: FinishedCheck(check, at, before_check(check.policy, check.history) if check.messages else None)
        for place, check in enumerate(checks)
    }
    asked = [check for place, check in enumerate(checks) if check.messages and decided[place].decision is None]
    reply = await _asked(runtime, asked) if asked else None
    return [
        decided[place]
        if reply is None or not check.messages or decided[place].decision is not None
        else _finished(runtime, check, reply, decided[place])
        for place, check in enumerate(checks)
    ]


async def _asked(runtime: Runtime, checks: Sequence[Check]) -> CheckReply:
    first = checks[0]
    group = first.group
    assert group is not None
    body = _encode(
        {
            "type": "halfnote.checks",
            "producer_group": group.name,
            "checks": [fields_of(check, check.policy) for check in checks],
        }
    )
    try:
        return await ask(
            runtime.checks_http,
            first.urls,
            runtime.vault.secrets(GROUP_SECRETS, group.name, msgspec.json.decode(group.secrets)),
            f"chks_{uuid4()}",
            body,
            timeout_s=group.check_timeout_s,
            now=runtime.clock.now(),
            many=len(checks),
        )
    except SecretsUnreadable as error:
        return CheckReply(Unanswered(error.detail), (), None)
    except Exception as error:
        log.error("defect", producer_group=group.name, checks=len(checks), exc_info=error)
        reason = f"Halfnote could not send the check ({type(error).__name__}); its log has the details"
        return CheckReply(Unanswered(reason), (), None)


def _finished(runtime: Runtime, check: Check, reply: CheckReply, sent: FinishedCheck) -> FinishedCheck:
    result = reply.result
    if reply.answers is not None:
        result = reply.answers.get(check.claim.transaction_id, result)
    return replace(
        sent,
        decision=after_check(check.policy, check.history, result, runtime.clock.now()),
        result=result,
        tried=reply.tried,
        # The answer is about all of them; the attempt has the verdict of its own.
        response=None if isinstance(result, Answered) else reply.response,
        trace=check.messages[0].traceparent,
    )
