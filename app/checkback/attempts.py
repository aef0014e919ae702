"""The attempt of a check: what was asked, and what was answered."""

from dataclasses import replace

from app.checkback.check import FinishedCheck, outcome_of
from app.delivery import storable
from app.egress.urls import without_query
from app.policy.check_schedule import Answered, Unanswered
from app.store.checkback.results import SettledCheck
from app.store.coordinator.ops import AnsweredCheck

ERROR_MAX = 2000


def attempt_of(finished: FinishedCheck) -> SettledCheck:
    """Return the row of the check itself, without the decision on the transaction."""
    claim, result = finished.check.claim, finished.result
    row = SettledCheck(claim.transaction_id, claim.epoch, claim.number, finished.at)
    if result is None:
        return replace(row, unsent=True, due_at=finished.due_at)
    last = finished.tried[-1] if finished.tried else None
    errors = [f"{without_query(tried.url)}: {tried.error}" for tried in finished.tried[:-1]]
    if isinstance(result, Unanswered):
        errors = [result.error]
    return replace(
        row,
        outcome=outcome_of(result),
        verdict=result.verdict if isinstance(result, Answered) else None,
        url=without_query(last.url) if last else None,
        status=last.status if last else None,
        duration_ms=sum(tried.duration_ms for tried in finished.tried) if finished.tried else finished.duration_ms,
        error=clean("; ".join(errors)) or None,
        response=finished.response,
        answered=isinstance(result, Answered),
        unanswered=isinstance(result, Unanswered),
    )


def answered_check(finished: FinishedCheck) -> AnsweredCheck | None:
    """Return the answered check that leads to a verdict; None if policy decides before it asks again."""
    row = attempt_of(finished)
    if row.outcome is None:
        return None
    return AnsweredCheck(
        row.transaction_id,
        row.number,
        row.at,
        row.outcome,
        row.verdict,
        row.url,
        row.status,
        row.duration_ms,
        row.error,
        row.response,
    )


def clean(text: str) -> str:
    """Return a text as it can be stored."""
    return storable(text[:ERROR_MAX])
