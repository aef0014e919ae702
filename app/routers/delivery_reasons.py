"""`GET /transactions/{id}/delivery`: why each subscription has got its messages, or has not."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from app.errors import DayGone, Invalid, TransactionUnknown
from app.operations.delivery_reasons.explain import WhyPlace, explain
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.end import unknown_transaction
from app.routers.transactions import TransactionId
from app.schemas.delivery_reasons import MessageWhy, TransactionWhy, WhyCursor, place_of_why, why_cursor
from app.schemas.fields import Name, Strict
from app.store.coordinator.history import read_owner

router = APIRouter(prefix="/transactions", tags=["transactions"])


class WhyQuery(Strict):
    """Selects what is explained."""

    position: int | None = Field(None, ge=0, le=99, description="only the message at this position, from 0")
    subscription: Name | None = Field(None, description="only this subscription", examples=["mailer"])
    cursor: WhyCursor | None = Field(None, description="`deliveries_cursor` of the answer before")


@router.get(
    "/{transaction_id:uuid}/delivery",
    summary="Explain why messages were delivered, or were not",
    responses=problems(Invalid, TransactionUnknown, DayGone),
)
async def get_delivery(
    runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId, query: Annotated[WhyQuery, Query()]
) -> TransactionWhy:
    """Return a reason and a sentence for each message and each subscription, from one snapshot.

    A deleted subscription is listed if it has got the message. Replays are not explained. An answer explains at most
    1,000 deliveries; if `deliveries_cursor` is not null, the same request with it as `cursor` explains the next ones.
    """
    async with runtime.request_pool.connection() as connection:
        owner = await read_owner(connection, transaction_id)
        # The scope is judged first, as in `get_transaction`.
        in_scope = owner is not None and caller.groups.takes(owner.producer_group)
        found = (
            await explain(
                connection,
                transaction_id,
                runtime.clock.now(),
                position=query.position,
                subscription=query.subscription,
                start=WhyPlace() if query.cursor is None else WhyPlace(*place_of_why(query.cursor)),
            )
            if in_scope
            else None
        )
    if found is None:
        raise await unknown_transaction(runtime, transaction_id)
    return TransactionWhy(
        transaction_id=found.transaction_id,
        producer_group=found.producer_group,
        state=found.state,
        messages=[MessageWhy.model_validate(message, from_attributes=True) for message in found.messages],
        deliveries_cursor=why_cursor(found.more),
    )
