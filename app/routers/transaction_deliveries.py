"""`GET /transactions/{id}/deliveries`: the deliveries of a transaction in pages."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from app.errors import DayGone, Invalid, TransactionUnknown
from app.ids import message_id
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.end import unknown_transaction
from app.routers.timeline import delivery_fields
from app.routers.transactions import TransactionId
from app.schemas.delivery_cursor import DeliveryCursor, cursor_of, place_of
from app.schemas.fields import Strict
from app.schemas.transactions import DeliveryOfMessage, DeliveryPage
from app.store.coordinator.deliveries import DELIVERIES_MAX, FIRST, DeliverySelection, read_deliveries
from app.store.coordinator.history import read_owner

router = APIRouter(prefix="/transactions", tags=["transactions"])


class DeliveriesQuery(Strict):
    """Selects a page of a transaction's deliveries."""

    cursor: DeliveryCursor | None = Field(None, description="`deliveries_cursor` or `next_cursor`")
    limit: int = Field(100, ge=1, le=DELIVERIES_MAX, description="deliveries on a page")


@router.get(
    "/{transaction_id:uuid}/deliveries",
    summary="List a transaction's deliveries",
    response_model_exclude_unset=True,
    responses=problems(Invalid, TransactionUnknown, DayGone),
)
async def list_of_deliveries(
    runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId, query: Annotated[DeliveriesQuery, Query()]
) -> DeliveryPage:
    """Return a page of the deliveries of all messages, by message, name of the subscription, and replay.

    They are as in the transaction's `messages`. The list ends when `next_cursor` is null.
    """
    after = FIRST if query.cursor is None else place_of(query.cursor)
    async with runtime.request_pool.connection() as connection:
        owner = await read_owner(connection, transaction_id)
        # The scope is judged first, as in `get_transaction`.
        in_scope = owner is not None and caller.groups.takes(owner.producer_group)
        selection = DeliverySelection(after, limit=query.limit)
        page = await read_deliveries(connection, transaction_id, selection) if in_scope else None
    if page is None:
        raise await unknown_transaction(runtime, transaction_id)
    found, more_after = page
    return DeliveryPage(
        items=[
            DeliveryOfMessage(message_id=message_id(transaction_id, one.position), **delivery_fields(one))
            for one in found
        ],
        next_cursor=cursor_of(more_after),
    )
