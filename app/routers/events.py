"""`GET /events`: the state of the service as server-sent events, so that a screen is live without asking again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from app.admission.route_roles import RULES
from app.database.errors import problem_of
from app.errors import Overloaded
from app.permissions import Caller
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.stats import read_stats
from app.runtime.state import Runtime
from app.runtime.state_feed import StateEvent
from app.schemas.stats import Stats
from app.server.request_pipeline import PipelineRequest

router = APIRouter(tags=["operation"])

LASTS_S = 3600
# Proxies cut connections without traffic, many after 60 s.
HEARTBEAT_S = 15.0
RETRY_MS = 3000
HEADERS = {
    "cache-control": "no-store",
    # nginx would collect the events.
    "x-accel-buffering": "no",
}
# What changes although nothing happened: it is sent with an event and makes none.
_RATES = {"halves", "commits", "rollbacks", "deliveries", "failed_attempts", "checks"}
_UNANNOUNCED = {
    "at": True,
    "disk": True,
    "activity": {"__all__": {"covered_s": True, **{name: {"per_s"} for name in _RATES}}},
}


@router.get(
    "/events",
    summary="Follow the state of the service",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "server-sent events: `stats` with what `GET /stats` answers, or `unavailable` and a problem",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        **problems(Overloaded),
    },
)
async def get_events(
    request: Request,
    runtime: RuntimeDep,
    caller: CallerDep,
    for_s: Annotated[
        int, Query(ge=0, le=LASTS_S, description="end after so many seconds; 0: send the present state and end")
    ] = LASTS_S,
    after: Annotated[
        str | None, Query(max_length=100, description="the id of the last event seen: only another state is sent")
    ] = None,
    last_event_id: Annotated[
        str | None, Header(max_length=100, description="the same, as browsers send it when they connect again")
    ] = None,
) -> Response:
    """Send the state of the service as server-sent events: now, and whenever it changes.

    An event `stats` has the answer of `GET /stats` as its data. Its id stands for the state, in every process: send it
    as `Last-Event-ID` or `after` to get nothing until the state is another one. If the database cannot be read, the
    event is `unavailable` with the problem. The service looks every 5 seconds, or less often where a look takes longer,
    once for all streams of a process. It looks sooner, after a pause of 0.5 to 10 seconds, for a client that names
    another state than the process found last: that state may be newer. A comment comes every 15 seconds. A stream ends
    when its key does, and after `for_s` seconds; then connect again.
    """
    off, holder = runtime.authenticator.off, lambda: runtime.authenticator.holder(caller.digest)
    return stream_of(request, runtime, caller, last_event_id or after, for_s, lambda: still_may(caller, off, holder))


def stream_of(
    request: Request,
    runtime: Runtime,
    caller: Caller,
    seen: str | None,
    for_s: float,
    is_allowed: Callable[[], bool],
) -> Response:
    """Return an open stream. `is_allowed` is asked before each event. Raises Overloaded."""
    runtime.state_feed.refuse_past_limit()
    admitted: PipelineRequest = request.scope["admitted"]
    admitted.begin_stream()
    events = _events(runtime, seen, for_s, is_allowed)
    return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)


def still_may(caller: Caller, is_off: bool, holder_now: Callable[[], Caller | None]) -> bool:
    """Return whether the caller's key, or the person's session, is still valid for this route."""
    if caller.role is None:
        return is_off
    holder = holder_now()
    return holder is not None and holder.role in RULES["GET", "/events"]


async def _events(
    runtime: Runtime, seen: str | None, for_s: float, is_allowed: Callable[[], bool]
) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    until = loop.time() + for_s
    with runtime.state_feed.stream(lambda: _look(runtime)):
        first_look = runtime.state_feed.look_for(seen)
        yield f"retry: {RETRY_MS}\n\n"
        while True:
            within_s = min(HEARTBEAT_S, max(0.0, until - loop.time()))
            found = await runtime.state_feed.newer(seen, within_s, HEARTBEAT_S, first_look)
            if runtime.state_feed.closed or not is_allowed():
                return
            if found is None:
                yield ": nothing new\n\n"
            else:
                seen = found.id
                yield f"event: {found.name}\nid: {found.id}\ndata: {found.data}\n\n"
            if loop.time() >= until:
                return


async def _look(runtime: Runtime) -> StateEvent:
    try:
        stats = await read_stats(runtime)
    except Exception as error:
        problem = problem_of(error)
        return StateEvent("unavailable", f"unavailable-{problem.slug}", problem.body().decode())
    return StateEvent("stats", _id_of(stats), stats.model_dump_json(), stats)


def _id_of(stats: Stats) -> str:
    return sha256(stats.model_dump_json(exclude=_UNANNOUNCED).encode()).hexdigest()[:16]  # type: ignore[arg-type]
