"""The checks behind `GET /readyz`, which decide whether this process is ready, and the warnings, which do not."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from time import monotonic

import asyncpg
from sqlalchemy.exc import SQLAlchemyError

from app.database.connection import Connection
from app.database.timelines import StaleServer
from app.migrate import current, head, serves
from app.runtime.health_checks import DatabaseFound, HealthCheck, Readiness
from app.runtime.loop_lateness import is_late
from app.runtime.state import Runtime
from app.runtime.worker_state import SILENT_AFTER_S, WorkerState, read, worker_state_file
from app.secrets.status import missing_keys, missing_keys_fault
from app.store.admin.server_state import ServerState, check_urls_down, server_state
from app.store.retention import days
from app.verdicts import DayState

# A probe that waits longer counts as unanswered.
ANSWER_WITHIN_S = 3.0
NAMED_AT_MOST = 20

UNREACHABLE = (asyncpg.PostgresError, asyncpg.InterfaceError, SQLAlchemyError, OSError, TimeoutError)


async def readiness(runtime: Runtime) -> Readiness:
    """Check this process and the database. Takes at most about ANSWER_WITHIN_S. Never raises for the database.

    The call needs no key, so all callers together share one look at the database per second. A draining process answers
    at once with the last result.
    """
    if runtime.stopping:
        checks, warnings = runtime.found.found or ([], [])
    else:
        checks, warnings = await runtime.found.get(lambda: _look(runtime))
    return Readiness([*checks, *_of_process(runtime)], [*warnings, *_of_switches(runtime), *_of_certificate(runtime)])


async def _look(runtime: Runtime) -> DatabaseFound:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S), runtime.database.connection() as connection:
            return await _of_database(runtime, connection)
    except StaleServer as error:
        return [HealthCheck("database", False, str(error))], []
    except UNREACHABLE as error:
        return [HealthCheck("database", False, f"it does not answer: {_first_line(error)}")], []


async def _of_database(runtime: Runtime, connection: Connection) -> DatabaseFound:
    state = await server_state(connection)
    revision = await current(connection)
    served = await serves(connection, revision)
    checks = [_database(state), _migrations(revision, served)]
    if not served:
        return checks, []
    checks.append(await _partitions(runtime, connection))
    warnings = [_durability(state), await _held(connection), await _check_urls(connection)]
    warnings.append(_secrets(await missing_keys(connection, runtime.vault)))
    return checks, [warning for warning in warnings if not warning.ok]


def _database(state: ServerState) -> HealthCheck:
    if state.in_recovery:
        return HealthCheck(
            "database", False, "it is in recovery (a standby, or a failover under way) and takes no writes"
        )
    if state.read_only:
        return HealthCheck("database", False, "default_transaction_read_only is on, so it takes no writes")
    return HealthCheck("database", True, f"Postgres {state.version} takes writes")


def _migrations(revision: str | None, served: bool) -> HealthCheck:
    if served:
        later = "" if revision == head() else f", later than this version's {head()}, which it still serves"
        return HealthCheck("migrations", True, f"at revision {revision}{later}")
    return HealthCheck(
        "migrations", False, f"at revision {revision or 'none'}, this version needs {head()}: run `halfnote migrate`"
    )


async def _partitions(runtime: Runtime, connection: Connection) -> HealthCheck:
    today = runtime.clock.now().date()
    known = {day.day for day in await days.days(connection) if day.state is DayState.OPEN}
    missing = [day.isoformat() for day in (today, today + timedelta(days=1)) if day not in known]
    if missing:
        return HealthCheck("partitions", False, f"none for {', '.join(missing)}: is upkeep (a worker) running?")
    return HealthCheck("partitions", True, f"there until {max(known).isoformat()}")


def _durability(state: ServerState) -> HealthCheck:
    off = [name for name, on in (("fsync", state.fsync), ("full_page_writes", state.full_page_writes)) if not on]
    return HealthCheck("durability", not off, f"{' and '.join(off)} off: a power cut can lose what was acknowledged")


async def _held(connection: Connection) -> HealthCheck:
    held = [f"{day.day.isoformat()} by {', '.join(day.held)}" for day in await days.held_days(connection)]
    return HealthCheck("days_held", not held, "past their retention, but held: " + "; ".join(held[:NAMED_AT_MOST]))


async def _check_urls(connection: Connection) -> HealthCheck:
    down = await check_urls_down(connection, NAMED_AT_MOST)
    return HealthCheck("check_urls", not down, "the last call failed: " + "; ".join(down))


def _secrets(missing: dict[str, int]) -> HealthCheck:
    fault = missing_keys_fault(missing)
    return HealthCheck("secrets_unreadable", fault is None, fault or "")


def _of_process(runtime: Runtime) -> Iterator[HealthCheck]:
    skew_s = runtime.clock.skew_s
    yield HealthCheck(
        "clock",
        abs(skew_s) <= runtime.settings.clock_skew_max_s,
        f"{abs(skew_s):.3f} s {'behind' if skew_s > 0 else 'ahead of'} the database's",
    )
    file = worker_state_file()
    worker = None if file is None else read(file)
    if file is not None and runtime.settings.role == "api":
        yield _of_worker(worker)
    # With a loop that both processes run, the one that turned longer ago counts.
    heartbeats, every_s = dict(runtime.heartbeats), dict(runtime.every_s)
    if worker is not None:
        every_s |= worker.every_s
        for name, beat in worker.heartbeats.items():
            heartbeats[name] = min(beat, heartbeats.get(name, beat))
    for name, beat in sorted(heartbeats.items()):
        age_s = monotonic() - beat
        late = is_late(age_s, every_s.get(name, 0.0))
        yield HealthCheck(
            f"loop:{name}", not late, f"last turn {age_s:.0f} s ago" + (": see its log lines" if late else "")
        )
    if runtime.stopping:
        yield HealthCheck("stopping", False, "this process is draining and will end")


def _of_worker(state: WorkerState | None) -> HealthCheck:
    """Return whether the worker process of this `halfnote serve` runs."""
    if state is None:
        return HealthCheck("worker", False, "its process is starting, or ended and is started again: see its log lines")
    age_s = monotonic() - state.written_at
    silent = age_s > SILENT_AFTER_S
    return HealthCheck("worker", not silent, f"last sign {age_s:.0f} s ago" + (": it hangs" if silent else ""))


def _of_switches(runtime: Runtime) -> Iterator[HealthCheck]:
    if runtime.refusing_halves and not runtime.stopping:
        yield HealthCheck("accept", False, "new halves are refused (HALFNOTE_ACCEPT, or PUT /accept)")


def _of_certificate(runtime: Runtime) -> Iterator[HealthCheck]:
    if runtime.certificate is not None:
        for warning in runtime.certificate.warnings(runtime.clock.now()):
            yield HealthCheck("tls_certificate", False, warning)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
