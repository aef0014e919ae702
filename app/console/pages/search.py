"""The field at the top of each page: leads to what a text names, or lists it."""

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command, link
from app.console.visit import Visit
from app.ids import parse_id
from app.routers.search import SearchQuery, search
from app.schemas.search import SearchResult
from app.schemas.validation import checked

_COLUMNS = ("kind", "name", "by", "state", "producer_group", "topic", "born_at", "path")


async def find(visit: Visit) -> Response:
    """Lead to the only thing that the text names, or to the transactions of a key; else to the list of hits."""
    text = visit.asked.get("q", "").strip()
    if not text:
        return visit.redirect(link("transactions"))
    # An id of a transaction that is gone has a page that says so.
    if (parsed := parse_id(text)) is not None:
        transaction_id, position = parsed
        return visit.redirect(
            link("transactions", transaction_id) + ("" if position is None else f"#message-{position}")
        )
    found = await _search(visit, text)
    if found.hits and all(one.by == "key" for one in found.hits):
        return visit.redirect(link("transactions", key=text))
    if len(found.hits) == 1:
        return visit.redirect(found.hits[0].page)
    return visit.redirect(link("search", q=text))


async def show(visit: Visit) -> Response:
    """List what the text names."""
    text = visit.asked.get("q", "").strip()
    found = await _search(visit, text) if text else SearchResult(hits=[], more=False)
    if visit.wants_csv:
        lacks = "More is found of a kind than a search lists." if found.more else None
        return visit.csv_of("search", _COLUMNS, found.hits, lacks=lacks)
    return visit.page(
        "search.html",
        text=text,
        found=found,
        next_cursor=None,
        command_shown=command("search", text),
        now=visit.runtime.clock.now(),
    )


async def _search(visit: Visit, text: str) -> SearchResult:
    query = checked(SearchQuery, {"q": text, "limit": 50})
    return await search(visit.runtime, visit.caller, query)


PAGES = [
    Page("GET", "/console/find", find, ("GET", "/search")),
    Page("GET", "/console/search", show, ("GET", "/search")),
]
