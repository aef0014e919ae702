"""Checks that a producer claims and answers by requests of its own, so that it needs no URL."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn
from uuid import UUID

import msgspec
import structlog
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import TypeAdapter, ValidationError

from app.admission.route_roles import RULES
from app.checkback.claimed_checks import (
    ClaimAnswer,
    SettledAnswer,
    epoch_of,
    give_back_unsent,
    note_claimer,
    read_group,
    settle_answers,
    take_claims,
)
from app.coordinator.lane_call import Begun, JsonAnswer
from app.coordinator.wire import EndRequest, UnknownAnswer
from app.errors import CheckLapsed, ChecksNotClaimed, GroupUnknown, Invalid, Problem
from app.observability.trace_context import current
from app.operations.audit import audit_entry
from app.permissions import Caller, Role
from app.routers.batches import AT_ONCE, Item, begun_item, outcomes_of
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.end import end_act, end_answer, end_begun, refusal, unknown_transaction
from app.runtime.state import Runtime
from app.schemas.claimed_checks import AnswerOutcomes, AnswersRequest, CheckVerdict, Claimed, ClaimRequest
from app.schemas.fields import NamePath
from app.store.admin.audit import Act
from app.store.coordinator.ops import End
from app.store.coordinator.transactions import transaction_state
from app.verdicts import Checks, Source, Verdict

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/producer-groups", tags=["producer groups"])

_VERDICTS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK, "unknown": None}
_encode = msgspec.json.Encoder().encode
_answer = TypeAdapter(CheckVerdict).validate_python


@router.post(
    "/{name}/checks/claim",
    summary="Claim checks of a producer group",
    response_model=Claimed,
    responses=problems(Invalid, GroupUnknown, ChecksNotClaimed),
)
async def claim_checks(
    name: NamePath, wanted: ClaimRequest, runtime: RuntimeDep, caller: CallerDep, request: Request
) -> Response:
    """Return transactions whose outcome Halfnote asks for, each out to this claim alone for `invisible_s`.

    For producers that have no URL to call. Answer each by `POST /producer-groups/{name}/checks/answers`, or by
    `POST /end` with `from_check`. A check that is not answered in time is asked again after 2 s, 4 s and so on, as an
    unanswered call is; it does not count toward `max_checks`.

    With `wait_s` the request waits until a check is due. The first claim of a group, and the first after a minute
    without one, makes its unanswered checks due at once. If the client closes its connection before the answer is sent,
    its checks are due at once, and count as not asked.
    """
    caller.must_have_group(name)
    loop = asyncio.get_running_loop()
    until = loop.time() + wanted.wait_s
    await _note_claimer(runtime, name, started=wanted.started)
    while True:
        act_of = partial(_claim_act, caller, name) if caller.role is Role.ADMIN else None
        claimed = await take_claims(runtime, name, wanted.max, wanted.invisible_s, act_of)
        if claimed is None:
            raise await _not_claimed(runtime, name)
        left_s = until - loop.time()
        if claimed.checks or left_s <= 0 or not await runtime.waiting_claims.wait(name, wanted.max, left_s):
            break
        if await request.is_disconnected():
            break
        # The key may have ended, or have another scope, since the request came.
        caller = runtime.authenticator.still_valid(caller, RULES["POST", "/producer-groups/{name}/checks/claim"])
        caller.must_have_group(name)
    # What the client does not get would wait until its time is over, and count as not answered.
    if claimed.checks and await request.is_disconnected():
        try:
            await give_back_unsent(runtime, claimed)
        except Exception as error:
            log.warning("checks_not_given_back", producer_group=name, checks=len(claimed.checks), error=repr(error))
            raise
    content = {"answer_by": claimed.answer_by, "checks": claimed.checks}
    return Response(_encode(content), media_type="application/json")


@router.post(
    "/{name}/checks/answers",
    summary="Answer claimed checks of a producer group",
    response_model=AnswerOutcomes,
    responses=problems(Invalid),
)
async def answer_checks(name: NamePath, wanted: AnswersRequest, runtime: RuntimeDep, caller: CallerDep) -> Response:
    """Answer up to 500 checks, each with `commit`, `rollback` or `unknown`; the answer has an outcome for each.

    `commit` and `rollback` decide the transaction, as `POST /end` with `from_check` does, also after the claim is over:
    a verdict is final. `unknown` counts toward `max_checks`; if its claim is over, it is refused with `check-lapsed`
    and changes nothing.
    """
    caller.must_have_group(name)
    runtime.load_limits.take_more(caller, len(wanted.answers) - 1)
    answers = [_read(one) for one in wanted.answers]
    outcomes = await _outcomes(runtime, caller, name, answers)
    return Response(b'{"outcomes":[%b]}' % b",".join(outcomes), media_type="application/json")


def _read(answer: Any) -> ClaimAnswer | Problem:
    try:
        read = _answer(answer)
        epoch = None if read.handle is None else epoch_of(read.handle)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(answer)"
        return Invalid(f"`{field}`: {first['msg'].removeprefix('Value error, ')}.", field=field)
    return ClaimAnswer(read.transaction_id, _VERDICTS[read.verdict], read.reason, epoch)


async def _outcomes(
    runtime: Runtime, caller: Caller, group: str, answers: Sequence[ClaimAnswer | Problem]
) -> list[bytes]:
    """Settle the answers to claims that are out; take the others as Ends. Return an outcome for each."""
    act_of = partial(_act, caller, group) if caller.role is Role.ADMIN else None
    read = [one for one in answers if isinstance(one, ClaimAnswer)]
    settled = await settle_answers(runtime, group, read, act_of)
    found = (settled.get(place) for place in range(len(read)))
    limit = asyncio.Semaphore(AT_ONCE)
    items: list[Item] = []
    for one in answers:
        if isinstance(one, Problem):
            items.append(one)
        elif (outcome := next(found)) is not None:
            items.append(begun_item(limit, _settled, runtime, group, one, outcome))
        else:
            items.append(begun_item(limit, _as_end, runtime, caller, group, one))
    return await outcomes_of(items, runtime.metrics.http, "/producer-groups/{name}/checks/answers")


async def _settled(runtime: Runtime, group: str, answer: ClaimAnswer, settled: SettledAnswer) -> JsonAnswer:
    """Return the answer of an answer that was settled under its claim. Raises Problem."""
    recorded, transaction_id = settled.recorded, answer.transaction_id
    if answer.verdict is None:
        return 202, _encode(UnknownAnswer(transaction_id, "unknown", settled.state.value))
    if recorded is None or recorded.verdict != answer.verdict:
        end = End(transaction_id, group, answer.verdict, Source.CHECK)
        raise (
            await unknown_transaction(runtime, transaction_id)
            if recorded is None
            else await refusal(runtime, end, recorded)
        )
    return 200, _encode(end_answer(transaction_id, recorded))


def _as_end(runtime: Runtime, caller: Caller, group: str, answer: ClaimAnswer) -> Begun:
    """Take an answer whose claim is not out as an End. An `unknown` of a claim that is over is refused."""
    if answer.verdict is None and answer.epoch is not None:
        return _lapsed(runtime, group, answer.transaction_id)
    return end_begun(runtime, caller, _end(group, answer), current.get())


async def _lapsed(runtime: Runtime, group: str, transaction_id: UUID) -> NoReturn:
    async with runtime.request_pool.connection() as connection:
        found = await transaction_state(connection, transaction_id)
    if found is None or found.producer_group != group:
        # The same answer for both: the key may not learn whether another group's transaction exists.
        raise await unknown_transaction(runtime, transaction_id)
    raise CheckLapsed("The time of this claim is over, or it was answered. Claim the check again.")


def _end(group: str, answer: ClaimAnswer) -> EndRequest:
    word: Any = "unknown" if answer.verdict is None else answer.verdict.word
    return EndRequest(answer.transaction_id, group, word, from_check=True, reason=answer.reason)


def _claim_act(caller: Caller, group: str, checks: int) -> Act:
    return audit_entry(caller, "producer_group.claim_checks", group, checks=checks)


def _act(caller: Caller, group: str, answer: ClaimAnswer) -> Act:
    return end_act(caller, _end(group, answer))


async def _note_claimer(runtime: Runtime, name: str, *, started: bool) -> None:
    async with runtime.request_pool.connection() as connection:
        group = await read_group(connection, name)
        if group is not None and group.checks is Checks.CLAIM:
            await note_claimer(connection, group, runtime.clock.now(), started=started)


async def _not_claimed(runtime: Runtime, name: str) -> Problem:
    async with runtime.request_pool.connection() as connection:
        group = await read_group(connection, name)
    if group is None:
        return GroupUnknown(f"There is no producer group `{name}`. PUT /producer-groups/<name> registers one.")
    return ChecksNotClaimed(
        f"The producer group `{name}` has `checks: call`. Give it `checks: claim`, and its producers may claim."
    )
