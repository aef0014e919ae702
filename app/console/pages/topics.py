"""The list of topics and the subscriptions that take them."""

from functools import partial
from typing import Any

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.topics import TopicQuery, get_topics

_COLUMNS = ("topic", "messages", "per_s", "last_at", "unrouted", "first_seen_at", "declared_at", "subscriptions")


async def show_list(visit: Visit) -> Response:
    """Show a page of topics."""
    query = visit.list_query(TopicQuery, traffic=True, count=True)
    read = partial(get_topics, visit.runtime, visit.caller)
    if visit.wants_csv:
        traffic: dict[str, Any] = {
            name: partial(lambda one, name: getattr(one.traffic, name), name=name)
            for name in ("messages", "per_s", "last_at", "unrouted")
        }
        takers: dict[str, Any] = {"subscriptions": lambda one: " ".join(one.subscriptions)}
        return await visit.csv_of_list("topics", _COLUMNS, query, read, **takers, **traffic)
    found = await read(query)
    return visit.page(
        "topics.html",
        rows=found.items,
        next_cursor=found.next_cursor,
        is_live=True,
        sort=query.sort,
        total=found.total,
        command_shown=command("topics", "list", sort=None if query.sort == "name" else query.sort),
        now=visit.runtime.clock.now(),
    )


PAGES = [Page("GET", "/console/topics", show_list, ("GET", "/topics"))]
