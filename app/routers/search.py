"""`GET /search`: what an id, a key or a part of a name belongs to."""

from dataclasses import replace
from typing import Annotated
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field

from app.errors import Invalid
from app.ids import message_id, parse_id
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.schemas.fields import Name, Strict
from app.schemas.search import HitKind, SearchHit, SearchResult
from app.store.coordinator.search import NamedPlace, find_named
from app.store.coordinator.transactions import HIGHEST, TransactionFilter, TransactionSummary, list_transactions

router = APIRouter(tags=["operation"])

# The paths of the API and the console that show a thing of this kind.
PATHS: dict[HitKind, tuple[str, str]] = {
    "transaction": ("/transactions/", "/console/transactions/"),
    "message": ("/messages/", "/console/transactions/"),
    "topic": ("/transactions?topic=", "/console/transactions?topic="),
    "producer_group": ("/producer-groups/", "/console/producer-groups/"),
    "subscription": ("/subscriptions/", "/console/subscriptions/"),
}


class SearchQuery(Strict):
    """The text to search for."""

    q: Name = Field(
        description="a transaction's id, a message's id, a key, or a part of the name of a topic, a producer group or "
        "a subscription",
        examples=["order-1030"],
    )
    limit: int = Field(10, ge=1, le=100, description="the most of each kind")


@router.get("/search", summary="Find what a text names", response_model_exclude_unset=True, responses=problems(Invalid))
async def search(runtime: RuntimeDep, caller: CallerDep, query: Annotated[SearchQuery, Query()]) -> SearchResult:
    """Return the transaction or message of an id, the transactions of a key, and names that contain the text.

    Keys are compared as a whole. Names are compared without regard to case.
    """
    text, limit = query.q, query.limit
    parsed = parse_id(text)
    async with runtime.request_pool.connection() as connection:
        of_id = [] if parsed is None else (await list_transactions(connection, _one(parsed[0]), 1))[0]
        of_key, next_key = await list_transactions(connection, TransactionFilter(key=text), limit)
        named = await find_named(connection, text, limit + 1)
    kept = [one for at, one in enumerate(named) if sum(other.kind == one.kind for other in named[:at]) < limit]
    hits = [
        *(_identified(one, parsed[1]) for one in of_id if parsed is not None and _has(one, parsed[1])),
        *(_transaction(one, "key") for one in of_key),
        *(_named(one) for one in kept),
    ]
    return SearchResult(hits=hits, more=next_key is not None or len(kept) < len(named))


def _one(transaction_id: UUID) -> TransactionFilter:
    above = HIGHEST if transaction_id == HIGHEST else UUID(int=transaction_id.int + 1)
    return replace(TransactionFilter(), low=transaction_id, high=above)


def _has(row: TransactionSummary, position: int | None) -> bool:
    return position is None or position < row.message_count


def _identified(row: TransactionSummary, position: int | None) -> SearchHit:
    found = _transaction(row, "id")
    if position is None:
        return found
    name = message_id(row.transaction_id, position)
    page = f"{found.page}#message-{position}"
    return found.model_copy(
        update={"kind": "message", "name": name, "path": f"{PATHS['message'][0]}{name}", "page": page}
    )


def _transaction(row: TransactionSummary, by: str) -> SearchHit:
    name = str(row.transaction_id)
    path, page = PATHS["transaction"]
    return SearchHit.model_validate(
        {
            "kind": "transaction",
            "name": name,
            "by": by,
            "path": path + name,
            "page": page + name,
            "transaction_id": row.transaction_id,
            "producer_group": row.producer_group,
            "topic": row.topic,
            "state": row.state,
            "born_at": row.born_at,
        }
    )


def _named(place: NamedPlace) -> SearchHit:
    name = quote(place.name, safe="")
    path, page = PATHS[place.kind]
    return SearchHit(kind=place.kind, name=place.name, by="name", path=path + name, page=page + name)
