"""`GET /stats`: the state of the service in one answer."""

import asyncio
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from fastapi import APIRouter

from app.database.connection import Connection
from app.routers.dependencies import CallerDep, RuntimeDep
from app.runtime.disk_space import free_bytes
from app.runtime.standing import open_now
from app.schemas.stats import Stats, UndecidedShown, WindowShown
from app.store.admin.figures import Undecided
from app.store.admin.minutes import ActivityWindow, first_minute, windows
from app.store.proof.runs import FIRST_RUN, list_runs, open_findings, standing
from app.store.relay.workers import read_unheld, read_workers
from app.store.retention.days import held_days

router = APIRouter(tags=["operation"])

WINDOWS_S = (900, 86_400)
MINUTE = timedelta(minutes=1)


@router.get("/stats", summary="Show the state of the service")
async def get_stats(runtime: RuntimeDep, caller: CallerDep) -> Stats:
    """Return what stands open, with the oldest of each, and what was done in the last 15 minutes and 24 hours.

    The time to answer is bounded, whatever the database holds: large counts are rough, and what was done is read from
    figures by the minute. Every process writes its figures every 10 seconds; those of a process that is killed in
    between are left out.
    """
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        found = await open_now(connection, now)
        activity = await _activity(connection, now)
        held = await held_days(connection)
        workers, unheld = await read_workers(connection, now), await read_unheld(connection, now)
        proof = await _proof(connection)
    free = await asyncio.to_thread(free_bytes, runtime.settings, found.database_bytes)
    return Stats.model_validate(
        {
            "at": now,
            "in_doubt": _undecided(found.in_doubt),
            "parked": _undecided(found.parked),
            "dead_letters": asdict(found.dead_letters),
            "breakers": asdict(found.breakers),
            "subscriptions": asdict(found.subscriptions),
            "lag": None if found.lag is None else asdict(found.lag),
            "activity": activity,
            "held_days": [{"day": one.day, "causes": one.held} for one in held],
            "disk": {"database_bytes": found.database_bytes, "free_bytes": free},
            "workers": {
                "present": sum(one.present_until is not None for one in workers),
                "unheld_shards": len(unheld),
            },
            "proof": proof,
        }
    )


async def _activity(connection: Connection, now: datetime) -> list[WindowShown]:
    first = await first_minute(connection)
    found = await windows(connection, [now - timedelta(seconds=one) for one in WINDOWS_S], now)
    return [_window(one, first, now) for one in found]


def _window(window: ActivityWindow, first: datetime | None, now: datetime) -> WindowShown:
    begin = window.after.replace(second=0, microsecond=0) + MINUTE
    covered_s = max(0.0, (now - max(begin, first or now)).total_seconds())
    # In the first second no rate is known.
    over_s = max(covered_s, 1.0)
    done = {name: {"count": count, "per_s": count / over_s} for name, count in asdict(window.activity).items()}
    window_s = round((now - window.after).total_seconds())
    return WindowShown.model_validate({"window_s": window_s, "covered_s": covered_s, **done})


async def _proof(connection: Connection) -> dict[str, Any] | None:
    newest, _ = await list_runs(connection, FIRST_RUN, 1)
    if not newest:
        return None
    [run] = newest
    return {
        "run_id": run.run_id,
        "state": run.state,
        "ended_at": run.ended_at,
        "open_findings": sum((await open_findings(connection)).values()),
        "proved_at": (await standing(connection)).proved_at,
    }


def _undecided(found: Undecided) -> UndecidedShown:
    return UndecidedShown(
        count=found.count, exact=found.exact, oldest=found.transaction_id, oldest_born_at=found.born_at
    )
