"""What `GET /readyz` finds: checks that decide whether this process is ready, and warnings that do not."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import TypeAlias

import asyncpg
from sqlalchemy.exc import SQLAlchemyError

from app.clock import SKEW_NOT_READY_S
from app.database import Connection
from app.migrate import current, head, serves
from app.runtime import Runtime
from app.secrets_state import SecretsState, secrets_state
from app.store import days
from app.store.server import ServerState, check_urls_down, server_state

# A probe that waits longer is as good as unanswered.
ANSWER_WITHIN_S = 3.0
# A loop is late when its last turn is longer ago than this and three of its rests.
TURN_WITHIN_S = 60.0
NAMED_AT_MOST = 20

UNREACHABLE = (asyncpg.PostgresError, asyncpg.InterfaceError, SQLAlchemyError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `detail` says what was found and, if it is not ok, what to do."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """All that was found; only `checks` decide."""

    checks: list[Check]
    warnings: list[Check]

    @property
    def ready(self) -> bool:
        """Whether every check is ok."""
        return all(check.ok for check in self.checks)


DatabaseFound: TypeAlias = tuple[list[Check], list[Check]]


async def readiness(runtime: Runtime) -> Readiness:
    """Look at this process, and at the database unless somebody did a moment ago; never takes much longer than
    ANSWER_WITHIN_S and never raises for a database that does not answer.

    However many ask, who need no key, one connection looks at the database about once a second. A process that drains
    answers at once, by what was found last.
    """
    if runtime.stopping:
        checks, warnings = runtime.found.found or ([], [])
    else:
        checks, warnings = await runtime.found.ask(lambda: _look(runtime))
    return Readiness([*checks, *_of_process(runtime)], [*warnings, *_of_switches(runtime)])


async def _look(runtime: Runtime) -> DatabaseFound:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S), runtime.database.connection() as connection:
            return await _of_database(runtime, connection)
    except UNREACHABLE as error:
        return [Check("database", False, f"it does not answer: {_first_line(error)}")], []


async def _of_database(runtime: Runtime, connection: Connection) -> DatabaseFound:
    state = await server_state(connection)
    revision = await current(connection)
    served = await serves(connection, revision)
    checks = [_database(state), _migrations(revision, served)]
    if not served:
        return checks, []
    checks.append(await _partitions(runtime, connection))
    warnings = [_durability(state), await _held(connection), await _check_urls(connection)]
    warnings += _secrets(await secrets_state(connection, runtime.vault))
    return checks, [warning for warning in warnings if not warning.ok]


def _database(state: ServerState) -> Check:
    if state.in_recovery:
        return Check("database", False, "it is in recovery (a standby, or a failover under way) and takes no writes")
    if state.read_only:
        return Check("database", False, "default_transaction_read_only is on, so it takes no writes")
    return Check("database", True, f"Postgres {state.version} takes writes")


def _migrations(revision: str | None, served: bool) -> Check:
    if served:
        later = "" if revision == head() else f", later than this version's {head()}, which it still serves"
        return Check("migrations", True, f"at revision {revision}{later}")
    return Check(
        "migrations", False, f"at revision {revision or 'none'}, this version needs {head()}: run `halfnote migrate`"
    )


async def _partitions(runtime: Runtime, connection: Connection) -> Check:
    today = runtime.clock.now().date()
    known = {day.day for day in await days.days(connection) if day.state == "open"}
    missing = [day.isoformat() for day in (today, today + timedelta(days=1)) if day not in known]
    if missing:
        return Check("partitions", False, f"none for {', '.join(missing)}: is upkeep (a worker) running?")
    return Check("partitions", True, f"there until {max(known).isoformat()}")


def _durability(state: ServerState) -> Check:
    off = [name for name, on in (("fsync", state.fsync), ("full_page_writes", state.full_page_writes)) if not on]
    return Check("durability", not off, f"{' and '.join(off)} off: a power cut can lose what was acknowledged")


async def _held(connection: Connection) -> Check:
    held = [f"{day.day.isoformat()} by {', '.join(day.held)}" for day in await days.held_days(connection)]
    return Check("days_held", not held, "past their retention, but held: " + "; ".join(held[:NAMED_AT_MOST]))


async def _check_urls(connection: Connection) -> Check:
    down = await check_urls_down(connection, NAMED_AT_MOST)
    return Check("check_urls", not down, "the last call failed: " + "; ".join(down))


def _secrets(state: SecretsState) -> list[Check]:
    plain, lacking = state.plain_fault, state.lacking_fault
    return [
        Check("secrets_in_plain_text", plain is None, plain or ""),
        Check("secrets_unreadable", lacking is None, lacking or ""),
    ]


def _of_process(runtime: Runtime) -> Iterator[Check]:
    skew_s = runtime.clock.offset_s
    yield Check(
        "clock",
        abs(skew_s) <= SKEW_NOT_READY_S,
        f"{abs(skew_s):.3f} s {'behind' if skew_s > 0 else 'ahead of'} the database's",
    )
    for name, beat in sorted(runtime.heartbeats.items()):
        age_s = monotonic() - beat
        late = age_s > TURN_WITHIN_S + 3 * runtime.every_s.get(name, 0.0)
        yield Check(f"loop:{name}", not late, f"last turn {age_s:.0f} s ago" + (": see its log lines" if late else ""))
    if runtime.stopping:
        yield Check("stopping", False, "this process is draining and will end")


def _of_switches(runtime: Runtime) -> Iterator[Check]:
    if runtime.refusing_halves and not runtime.stopping:
        yield Check("accept", False, "new halves are refused (HALFNOTE_ACCEPT, or PUT /accept)")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
