"""Publishes what only the database knows: who is in doubt or parked, what fails or is dead, what holds old days, what
the nightly proof found."""

from datetime import datetime
from math import inf

from app.database import Connection
from app.loops.runner import Turned
from app.runtime import Runtime
from app.secrets_state import secrets_state
from app.store import days
from app.store.dead_letters import dead_letters_of
from app.store.gauges import oldest_due, retries_of, undecided
from app.store.reconciliation import FIRST_RUN, RUN_STATES, list_runs, open_findings, standing
from app.telemetry import Metrics

EVERY_S = 5.0


async def step(runtime: Runtime, now: datetime) -> Turned:
    """Set the gauges."""
    async with runtime.database.connection() as connection:
        found = await undecided(connection)
        due = await oldest_due(connection, now)
        held = await days.held_days(connection)
        retries = await retries_of(connection)
        dead = await dead_letters_of(connection)
        secrets = await secrets_state(connection, runtime.vault)
        await _show_proof(runtime.metrics, connection, now)
    metrics = runtime.metrics
    metrics.in_doubt.set(found.in_doubt)
    metrics.parked.set(found.parked)
    metrics.oldest_in_doubt_s.set(_waited(now, found.oldest_born_at))
    metrics.oldest_due_s.labels("check").set(_waited(now, due.check_at))
    metrics.oldest_due_s.labels("delivery").set(_waited(now, due.delivery_at))
    metrics.show_held({(day.day.isoformat(), cause) for day in held for cause in day.held})
    metrics.count_from_zero(retries)
    metrics.show_retries({name: (_waited(now, one.oldest_at), one.waiting) for name, one in retries.items()})
    metrics.show_dead_letters(dead)
    metrics.secrets_plain.set(secrets.plain)
    metrics.secrets_unreadable.set(sum(secrets.lacking.values()))
    return Turned(done=1)


async def _show_proof(metrics: Metrics, connection: Connection, now: datetime) -> None:
    """Set what tells of the nightly proof; what is open is counted once a run, because only runs change it."""
    stands = await standing(connection)
    newest, _ = await list_runs(connection, FIRST_RUN, 1)
    metrics.reconciliation_proved_age_s.set(_age(now, stands.proved_at))
    metrics.reconciliation_age_s.set(_age(now, newest[0].ended_at if newest else None))
    metrics.reconciliation_days.labels("provisional").set(stands.provisional)
    metrics.reconciliation_days.labels("final").set(stands.final)
    if not newest or newest[0].run_id == metrics.shown_run:
        return
    [run] = newest
    metrics.reconciliation_run_s.set((run.ended_at - run.started_at).total_seconds())
    for state in RUN_STATES:
        metrics.reconciliation_state.labels(state).set(run.state == state)
    metrics.show_findings(await open_findings(connection))
    metrics.shown_run = run.run_id


def _waited(now: datetime, since: datetime | None) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())


def _age(now: datetime, at: datetime | None) -> float:
    return inf if at is None else max(0.0, (now - at).total_seconds())
