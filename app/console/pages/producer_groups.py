"""The list of producer groups, and one with its check URLs and its undecided transactions."""

from functools import partial

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.producer_groups import ProducerGroupQuery, get_group, list_groups
from app.routers.transactions import TransactionQuery, list_of_transactions
from app.verdicts import State

_UNDECIDED = 10
_COLUMNS = (
    "name",
    "check_urls",
    "checks",
    "claimed_at",
    "held_until",
    "in_doubt",
    "parked",
    "last_error",
    "immunity_s",
    "interval_s",
    "max_checks",
    "on_exhausted",
    "updated_at",
)


async def show_list(visit: Visit) -> Response:
    """Show a page of producer groups."""
    query = visit.list_query(ProducerGroupQuery, standing=True, count=True)
    read = partial(list_groups, visit.runtime, visit.caller)
    if visit.wants_csv:
        return await visit.csv_of_list(
            "producer-groups",
            _COLUMNS,
            query,
            read,
            check_urls=lambda one: " ".join(one.check_urls),
            in_doubt=lambda one: one.standing.in_doubt,
            parked=lambda one: one.standing.parked,
            last_error=lambda one: next((url.last_error for url in one.urls if url.last_error), None),
        )
    found = await read(query)
    return visit.page(
        "producer_groups.html",
        rows=found.items,
        next_cursor=found.next_cursor,
        is_live=True,
        sort=query.sort,
        total=found.total,
        command_shown=command("groups", "list", sort=None if query.sort == "name" else query.sort),
        now=visit.runtime.clock.now(),
    )


async def show_one(visit: Visit) -> Response:
    """Show a producer group."""
    name = visit.path["name"]
    shown = await get_group(name, visit.runtime, visit.caller)
    if visit.wants_csv:
        return visit.csv_of("producer-group", ("url", "last_ok", "last_error", "last_error_at"), shown.urls)
    undecided = {
        state: await list_of_transactions(
            visit.runtime, visit.caller, TransactionQuery(producer_group=name, state=state, limit=_UNDECIDED)
        )
        for state in (State.PARKED, State.IN_DOUBT)
    }
    return visit.page(
        "producer_group.html",
        shown=shown,
        undecided=undecided,
        is_live=True,
        command_shown=command("groups", "get", name),
        now=visit.runtime.clock.now(),
    )


PAGES = [
    Page("GET", "/console/producer-groups", show_list, ("GET", "/producer-groups")),
    Page("GET", "/console/producer-groups/{name}", show_one, ("GET", "/producer-groups/{name}")),
]
