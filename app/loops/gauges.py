"""Publishes what only the database knows: who is in doubt or parked, what fails or is dead, what holds old days, what
the nightly proof found."""

from datetime import datetime, timedelta
from math import inf

from app.database.connection import Connection
from app.observability.metric_groups import ProofMetrics
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.secrets.status import missing_keys
from app.store.admin.figures import undecided_by_state
from app.store.admin.gauges import oldest_due, open_breakers, retries_of
from app.store.proof.runs import FIRST_RUN, list_runs, open_findings, standing
from app.store.retention import days
from app.store.subscriptions.dead_letters import dead_letters_of
from app.verdicts import CheckBackState, ReconciledDayState, RunState

EVERY_S = 5.0
# Open findings are counted after each run, and this often, because upkeep resolves those of removed days.
COUNT_FINDINGS_EVERY = timedelta(minutes=1)


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Set the gauges."""
    async with runtime.database.connection() as connection:
        undecided = await undecided_by_state(connection)
        due = await oldest_due(connection, now)
        held = await days.held_days(connection)
        retries = await retries_of(connection)
        dead = await dead_letters_of(connection)
        breakers = await open_breakers(connection)
        missing = await missing_keys(connection, runtime.vault)
        await _show_proof(runtime.metrics.proof, connection, now)
    metrics = runtime.metrics
    metrics.checkback.in_doubt.set(undecided[CheckBackState.IN_DOUBT].count)
    metrics.checkback.parked.set(undecided[CheckBackState.PARKED].count)
    metrics.checkback.oldest_in_doubt_s.set(_waited(now, undecided[CheckBackState.IN_DOUBT].born_at))
    metrics.process.oldest_due_s.labels("check").set(_waited(now, due.check_at))
    metrics.process.oldest_due_s.labels("delivery").set(_waited(now, due.delivery_at))
    metrics.retention.show_held({(day.day.isoformat(), cause) for day in held for cause in day.held})
    metrics.relay.count_from_zero(retries)
    metrics.retention.count_from_zero(retries)
    metrics.relay.show_retries({name: (_waited(now, one.oldest_at), one.waiting) for name, one in retries.items()})
    metrics.relay.show_dead_letters(dead)
    metrics.relay.show_breakers(breakers)
    metrics.process.secrets_unreadable.set(sum(missing.values()))
    return StepResult(done=1)


async def _show_proof(proof: ProofMetrics, connection: Connection, now: datetime) -> None:
    """Set the metrics of the nightly proof."""
    stands = await standing(connection)
    newest, _ = await list_runs(connection, FIRST_RUN, 1)
    proof.proved_age_s.set(_age(now, stands.proved_at))
    proof.age_s.set(_age(now, newest[0].ended_at if newest else None))
    proof.days.labels(ReconciledDayState.PROVISIONAL).set(stands.provisional)
    proof.days.labels(ReconciledDayState.FINAL).set(stands.final)
    if not newest or (newest[0].run_id == proof.shown_run and abs(now - proof.shown_at) < COUNT_FINDINGS_EVERY):
        return
    [run] = newest
    proof.run_s.set((run.ended_at - run.started_at).total_seconds())
    for state in RunState:
        proof.state.labels(state).set(run.state is state)
    proof.show_findings(await open_findings(connection))
    proof.shown_run, proof.shown_at = run.run_id, now


def _waited(now: datetime, since: datetime | None) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())


def _age(now: datetime, at: datetime | None) -> float:
    return inf if at is None else max(0.0, (now - at).total_seconds())
