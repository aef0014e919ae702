"""The list of topics and the subscriptions that take them."""

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.topics import TopicQuery, get_topics

_COLUMNS = ("topic", "first_seen_at", "declared_at", "subscriptions")


async def show_list(visit: Visit) -> Response:
    """Show a page of topics by name."""
    query = visit.list_query(TopicQuery)
    found = await get_topics(visit.runtime, visit.caller, query)
    if visit.wants_csv:
        return visit.csv_of("topics", _COLUMNS, found.items, subscriptions=lambda one: " ".join(one.subscriptions))
    return visit.page(
        "topics.html",
        rows=found.items,
        next_cursor=found.next_cursor,
        command_shown=command("topics", "list"),
        now=visit.runtime.clock.now(),
    )


PAGES = [Page("GET", "/console/topics", show_list, ("GET", "/topics"))]
