"""The list of dead letters, and how many there are of each error."""

from functools import partial

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command, number
from app.console.visit import Visit
from app.routers.dead_letters import DeadLetterQuery, GroupQuery, dead_letter_groups, list_of_dead_letters
from app.schemas.dead_letters import DeadLetterGroupPage

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


_GROUP_COLUMNS = ("subscription", "reason", "error", "newest", "status", "count", "first_at", "last_at")


async def show_groups(visit: Visit) -> Response:
    """Show dead letters by subscription, reason and error, the largest group first."""
    query = visit.list_query(GroupQuery)
    found = await dead_letter_groups(visit.runtime, visit.caller, query)
    if visit.wants_csv:
        return visit.csv_of("dead-letter-groups", _GROUP_COLUMNS, found.items, lacks=_lacks(found))
    asked = query.model_dump(
        exclude={"limit", "reason"} | ({"sort"} if query.sort == "count" else set()), exclude_none=True
    )
    return visit.page(
        "dead_letter_groups.html",
        query=query,
        found=found,
        is_live=True,
        command_shown=command("dead-letters", "groups", because=query.reason, **asked),
        now=visit.runtime.clock.now(),
    )


def _lacks(found: DeadLetterGroupPage) -> str | None:
    """Return what a file of these groups does not have."""
    left_out = found.groups - len(found.items)
    lacks = [f"{number(left_out)} groups are left out."] if left_out > 0 else []
    if not found.complete:
        lacks.append(f"Only the newest {number(found.looked_at)} dead letters were counted.")
    return " ".join(lacks) or None


async def show_list(visit: Visit) -> Response:
    """Show a page of dead letters, newest first."""
    query = visit.list_query(DeadLetterQuery, count="cursor" not in visit.asked)
    read = partial(list_of_dead_letters, visit.runtime, visit.caller)
    if visit.wants_csv:
        return await visit.csv_of_list("dead-letters", _COLUMNS, query, read)
    found = await read(query)
    asked = query.model_dump(exclude={"limit", "cursor", "count", "reason"}, exclude_none=True)
    return visit.page(
        "dead_letters.html",
        query=query,
        rows=found.items,
        total=found.total,
        is_filtered=bool(asked or query.reason),
        next_cursor=found.next_cursor,
        is_live=True,
        command_shown=command("dead-letters", "list", because=query.reason, **asked),
        now=visit.runtime.clock.now(),
    )


PAGES = [
    Page("GET", "/console/dead-letters", show_list, ("GET", "/dead-letters")),
    Page("GET", "/console/dead-letters/groups", show_groups, ("GET", "/dead-letters/groups")),
]
