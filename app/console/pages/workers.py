"""The worker processes and what each holds."""

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.workers import get_workers

_COLUMNS = ("worker", "present_until", "subscription", "shard", "shards", "held_since", "held_until")


async def show_list(visit: Visit) -> Response:
    """Show the workers by name."""
    found = await get_workers(visit.runtime, visit.caller)
    if visit.wants_csv:
        rows = (
            (
                one.worker,
                one.present_until,
                held.subscription,
                held.shard,
                held.shards,
                held.held_since,
                held.held_until,
            )
            for one in found.items
            for held in one.shards
        )
        return visit.csv("workers", _COLUMNS, rows)
    return visit.page(
        "workers.html",
        found=found,
        next_cursor=None,
        is_live=True,
        command_shown=command("workers"),
        now=visit.runtime.clock.now(),
    )


PAGES = [Page("GET", "/console/workers", show_list, ("GET", "/workers"))]
