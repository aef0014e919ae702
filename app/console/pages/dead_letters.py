"""The list of dead letters."""

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.dead_letters import DeadLetterQuery, list_of_dead_letters

_COLUMNS = (
    "subscription",
    "message_id",
    "replay",
    "topic",
    "key",
    "offset",
    "attempts",
    "reason",
    "status",
    "error",
    "died_at",
)


async def show_list(visit: Visit) -> Response:
    """Show a page of dead letters, newest first."""
    query = visit.list_query(DeadLetterQuery)
    found = await list_of_dead_letters(visit.runtime, visit.caller, query)
    if visit.wants_csv:
        return visit.csv_of("dead-letters", _COLUMNS, found.items)
    asked = query.model_dump(exclude={"limit", "cursor", "reason"}, exclude_none=True)
    return visit.page(
        "dead_letters.html",
        query=query,
        rows=found.items,
        is_filtered=bool(asked or query.reason),
        next_cursor=found.next_cursor,
        command_shown=command("dead-letters", "list", because=query.reason, **asked),
        now=visit.runtime.clock.now(),
    )


PAGES = [Page("GET", "/console/dead-letters", show_list, ("GET", "/dead-letters"))]
