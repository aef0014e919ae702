"""`GET /subscriptions/{name}/recent`: how long the receiver took, and which errors stand."""

from dataclasses import asdict

from fastapi import APIRouter

from app.errors import SubscriptionUnknown
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.subscription_lookup import known
from app.schemas.fields import NamePath
from app.schemas.recent_deliveries import RecentDeliveries, StandingErrorShown, TookShown
from app.store.subscriptions.recent import how_long, standing_errors

router = APIRouter(prefix="/subscriptions", tags=["subscriptions"])


@router.get("/{name}/recent", summary="Show what recent deliveries were like", responses=problems(SubscriptionUnknown))
async def get_recent(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> RecentDeliveries:
    """Show how long the receiver took, by the median and the 99th percentile, and the errors of what is not delivered.

    Errors that differ only in addresses, ids and large numbers are one kind. Replays are left out of the times.
    """
    caller.must_have_subscription(name)
    async with runtime.request_pool.connection() as connection:
        subscription_id = (await known(connection, name)).subscription_id
        took = await how_long(connection, subscription_id)
        errors = await standing_errors(connection, subscription_id, runtime.clock.now())
    return RecentDeliveries(
        took=TookShown(**asdict(took)),
        errors=[StandingErrorShown(error=one.kind, retrying=one.retrying, dead=one.dead) for one in errors],
    )
