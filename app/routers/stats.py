"""`GET /stats` and `GET /stats/series`: the state of the service in one answer, and its figures over time."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.database.connection import Connection
from app.errors import Invalid
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.runtime.disk_space import free_bytes
from app.runtime.standing import open_now
from app.runtime.state import Runtime
from app.schemas.series import Metric, PointShown, SeriesQuery, SeriesShown
from app.schemas.stats import Stats, UndecidedShown, WindowShown
from app.store.admin import minutes
from app.store.admin.figures import Undecided
from app.store.admin.minutes import ActivityWindow, first_minute, windows
from app.store.proof.runs import FIRST_RUN, list_runs, open_findings, standing
from app.store.relay.workers import read_unheld, read_workers
from app.store.retention.days import held_days

router = APIRouter(tags=["operation"])

WINDOWS_S = (900, 86_400)
MINUTE = timedelta(minutes=1)
# 24 hours by the minute.
POINTS_MAX = 1500


@router.get("/stats", summary="Show the state of the service")
async def get_stats(runtime: RuntimeDep, caller: CallerDep) -> Stats:
    """Return what stands open, with the oldest of each, and what was done in the last 15 minutes and 24 hours.

    The time to answer is bounded, whatever the database holds: large counts are rough, and what was done is read from
    figures by the minute. Every process writes its figures every 10 seconds; those of a process that is killed in
    between are left out.
    """
    return await read_stats(runtime)


async def read_stats(runtime: Runtime) -> Stats:
    """Return the answer of `GET /stats`."""
    now = runtime.clock.now()
    async with runtime.request_pool.transaction(confirmed=False) as connection:
        found = await open_now(connection, now)
        activity = await _activity(connection, now)
        held = await held_days(connection)
        workers, unheld = await read_workers(connection, now), await read_unheld(connection, now)
        proof = await _proof(connection)
    disk_bytes = runtime.settings.database_disk_bytes
    free = await asyncio.to_thread(free_bytes, disk_bytes, runtime.embedded_home, found.database_bytes)
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


@router.get("/stats/series", summary="Show a figure over time", responses=problems(Invalid))
async def get_series(runtime: RuntimeDep, caller: CallerDep, query: Annotated[SeriesQuery, Query()]) -> SeriesShown:
    """Return a figure over time, from rows that are written once a minute and kept 30 days.

    The range begins at a whole minute. It has at most 1,500 points. The step that has not ended yet holds less.
    """
    [found] = await several_series(runtime, [query.metric], query.since, query.until, query.step)
    return found


async def several_series(
    runtime: Runtime, metrics: Sequence[Metric], since: datetime | None, until: datetime | None, step_s: int
) -> list[SeriesShown]:
    """Return several figures over the same steps. Raises Invalid."""
    now, step = runtime.clock.now(), timedelta(seconds=step_s)
    end = min(until or now, now)
    begin = (since or end - timedelta(days=1)).replace(second=0, microsecond=0)
    points = -(-max(end - begin, timedelta(0)) // step)
    if points > POINTS_MAX:
        raise Invalid(
            f"This range has {points:,} steps, and a series has at most {POINTS_MAX:,}. Send a longer `step`.",
            field="step",
        )
    async with runtime.request_pool.connection() as connection:
        found = await minutes.series(connection, begin, end, step)
        first = await first_minute(connection)
    steps = [begin + number * step for number in range(points)]
    return [
        SeriesShown(
            metric=metric,
            of_step="sum" if metric in minutes.DONE else "max",
            step_s=step_s,
            points=[PointShown(at=at, value=_value(found.get(at), metric, at + step, first)) for at in steps],
        )
        for metric in metrics
    ]


def _value(
    figures: Mapping[str, float | None] | None, metric: Metric, end: datetime, first: datetime | None
) -> float | None:
    if figures is not None:
        return figures[metric]
    # A process that did nothing writes nothing.
    return 0 if metric in minutes.DONE and first is not None and end > first else None


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
