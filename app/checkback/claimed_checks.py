"""Checks that producers claim and answer, instead of being called: take the claims of a request, settle its answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from app.checkback.check import Check, FinishedCheck, fields_of
from app.checkback.registrations import ask_unanswered
from app.checkback.settle import settle_batch
from app.database.connection import Connection
from app.policy.check_schedule import Answered, LeaveParked, Park, after_check, before_check
from app.runtime.state import Runtime
from app.store.admin.audit import Act, record
from app.store.checkback import claimed_checks as store
from app.store.checkback.claimed_checks import TakenClaim
from app.store.checkback.claims import AskedGroup, AskedMessage, Claim, asked_groups, asked_messages, message_bytes
from app.store.checkback.rounds import begin_round
from app.store.coordinator.ops import Recorded
from app.verdicts import Checks, State, Verdict

# The bytes of bodies, contexts and headers in one answer to a claim; the rest stays due.
CLAIM_BYTES = 4 * 1024 * 1024
# Transactions whose messages are read at once, so that bodies never fill the memory.
READ_AT_ONCE = 10
# A group that claimed nothing for this long has started when it claims again. Longer than a claim may wait.
STARTED_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """A producer's answer to a check; `verdict` None: `unknown`.

    `epoch`: of the claim that it answers; None: of whatever claim is out.
    """

    transaction_id: UUID
    verdict: Verdict | None
    reason: str | None
    epoch: int | None

    def answers(self, taken: TakenClaim) -> bool:
        """Return whether it answers a claim."""
        same = self.transaction_id == taken.claim.transaction_id
        return same and self.epoch in (None, taken.answered_epoch)


@dataclass(frozen=True, slots=True)
class ClaimedChecks:
    """The checks that are out to one claim until `answer_by`, ready for JSON: what each asks, with its `handle`.

    `claims`: their leases.
    """

    answer_by: datetime
    checks: list[dict[str, object]]
    claims: list[Claim]


@dataclass(frozen=True, slots=True)
class SettledAnswer:
    """What an answer came to. `recorded`: the verdict, if there was one to record; `state`: after an `unknown`."""

    recorded: Recorded | None
    state: State


async def read_group(connection: Connection, name: str) -> AskedGroup | None:
    """Return a group that is registered, or None."""
    group = (await asked_groups(connection, [name])).get(name)
    return group if group is not None and group.deleted_at is None else None


async def note_claimer(connection: Connection, group: AskedGroup, now: datetime, *, started: bool) -> None:
    """Write that a producer of the group claims. If it has started, checks that were not answered are due at once.

    `connection` must be in no database transaction.
    """
    known = group.claimed_at
    if started or known is None or (now - known).total_seconds() > STARTED_AFTER_S:
        await begin_round(connection, group.name, now)
        await ask_unanswered(connection, group.name, now)
    if known is None or (now - known).total_seconds() > store.NOTED_EVERY_S:
        await store.note_claim(connection, group.name, now)


async def take_claims(
    runtime: Runtime, name: str, limit: int, invisible_s: float, act_of: Callable[[int], Act] | None = None
) -> ClaimedChecks | None:
    """Lease due checks of a group to a producer; None if the group has no claims.

    A check that policy decides before it is asked is settled here, and left out. `act_of`: the audit of a person's
    claim of so many checks, written with the leases.
    """
    now = runtime.clock.now()
    # What is leased is used: if a failover loses it, checks are asked again.
    async with runtime.request_pool.transaction(confirmed=False) as connection:
        group = await read_group(connection, name)
        if group is None or group.checks is not Checks.CLAIM:
            return None
        claims = await store.claim_checks(connection, name, limit, invisible_s, now)
        checks, rest = await _with_messages(connection, group, claims)
        if rest:
            await store.give_back(connection, rest, now)
        decided, out = [], []
        for check in checks:
            decision = before_check(check.policy, check.history) if check.messages else None
            if decision is not None or not check.messages:
                decided.append(FinishedCheck(check, now, decision))
            else:
                out.append(check)
        if out and act_of is not None:
            await record(connection, act_of(len(out)), now)
    if decided:
        await settle_batch(runtime, decided, runtime.request_pool)
    asked = [{**fields_of(one, one.policy), "handle": handle_of(one.claim), **_trace(one)} for one in out]
    return ClaimedChecks(now + timedelta(seconds=invisible_s), asked, [one.claim for one in out])


async def give_back_unsent(runtime: Runtime, claimed: ClaimedChecks) -> None:
    """Make checks due at once whose answer no client gets, as if they had not been asked."""
    async with runtime.request_pool.connection() as connection:
        await store.give_back(connection, claimed.claims, runtime.clock.now())
    runtime.waiting_claims.may_be_due()


async def settle_answers(
    runtime: Runtime,
    group: str,
    answers: Sequence[ClaimAnswer],
    act_of: Callable[[ClaimAnswer], Act] | None = None,
) -> dict[int, SettledAnswer]:
    """Settle answers to claims that are out; return what they came to by their places. The others are left out.

    Of several answers to one claim the first counts. `act_of`: the audit of a person's answer, written first. Raises
    the errors of the End lane and the database; then some of the checks may be asked again.
    """
    now = runtime.clock.now()
    # What is leased is used: if a failover loses it, checks are asked again.
    async with runtime.request_pool.transaction(confirmed=False) as connection:
        epochs = [(one.transaction_id, one.epoch) for one in answers]
        taken = _by_place(answers, await store.take_answered(connection, group, epochs, now))
        for place in taken:
            if act_of is not None:
                await record(connection, act_of(answers[place]), now)
        known = await asked_groups(connection, [group])
        messages = await asked_messages(connection, [answers[place].transaction_id for place in taken], bodies=False)
    finished = [
        _answered(one, known.get(group), messages.get(one.claim.transaction_id, ()), answers[place], now)
        for place, one in taken.items()
    ]
    if not finished:
        return {}
    done = await settle_batch(runtime, finished, runtime.request_pool)
    # With the decisions that were recorded; a check whose lease was lost has its own.
    decided = {one.check.claim.transaction_id: one for one in [*finished, *done.checks]}
    keys = {place: answers[place].transaction_id for place in taken}
    return {place: _outcome(decided[key], done.recorded.get(key)) for place, key in keys.items()}


def handle_of(claim: Claim) -> str:
    """Return the handle of a claimed check: its number and the epoch of its lease."""
    return f"{claim.number}-{claim.epoch}"


def epoch_of(handle: str) -> int:
    """Return the epoch of a handle. Raises ValueError if it has not the form of one."""
    number, _, epoch = handle.partition("-")
    if not (number.isascii() and number.isdigit() and epoch.isascii() and epoch.isdigit() and len(epoch) <= 18):
        raise ValueError("this is no handle of a claimed check")
    return int(epoch)


async def _with_messages(
    connection: Connection, group: AskedGroup, claims: Sequence[Claim]
) -> tuple[list[Check], list[Claim]]:
    """Read the messages of claims until they fill an answer; return the checks, and the claims that are left over."""
    checks: list[Check] = []
    size = 0
    for first in range(0, len(claims), READ_AT_ONCE):
        some = claims[first : first + READ_AT_ONCE]
        messages = await asked_messages(connection, [one.transaction_id for one in some])
        for place, one in enumerate(some):
            found = messages.get(one.transaction_id, ())
            size += sum(map(message_bytes, found))
            if size > CLAIM_BYTES and checks:
                return checks, list(claims[first + place :])
            checks.append(Check(one, group, found, ()))
    return checks, []


def _by_place(answers: Sequence[ClaimAnswer], taken: Sequence[TakenClaim]) -> dict[int, TakenClaim]:
    """Return each claim that was taken, by the place of the first answer to it, in the order of the answers."""
    left = {one.claim.transaction_id: one for one in taken}
    found = {}
    for place, answer in enumerate(answers):
        claim = left.get(answer.transaction_id)
        if claim is not None and answer.answers(claim):
            found[place] = left.pop(answer.transaction_id)
    return found


def _trace(check: Check) -> dict[str, Any]:
    trace = check.messages[0].traceparent
    return {} if trace is None else {"traceparent": trace.split(" ")[0]}


def _answered(
    taken: TakenClaim, group: AskedGroup | None, messages: Sequence[AskedMessage], answer: ClaimAnswer, now: datetime
) -> FinishedCheck:
    check = Check(taken.claim, group, messages, ())
    assert taken.claimed_at is not None
    result = Answered(answer.verdict, answer.reason)
    # Without its half there is nothing to decide: `settle_batch` removes the row.
    decision = after_check(check.policy, check.history, result, now) if messages else None
    took_ms = max(0, int((now - taken.claimed_at).total_seconds() * 1000))
    trace = messages[0].traceparent if messages else None
    return FinishedCheck(check, taken.claimed_at, decision, result, trace=trace, duration_ms=took_ms)


def _outcome(finished: FinishedCheck, recorded: Recorded | None) -> SettledAnswer:
    if recorded is not None and recorded.verdict is not None:
        return SettledAnswer(recorded, State.COMMITTED if recorded.verdict == Verdict.COMMIT else State.ROLLED_BACK)
    parked = isinstance(finished.decision, Park | LeaveParked)
    return SettledAnswer(recorded, State.PARKED if parked else State.IN_DOUBT)
