"""`GET /workers`: which process delivers which subscriptions."""

from dataclasses import asdict

from fastapi import APIRouter

from app.routers.dependencies import CallerDep, RuntimeDep
from app.schemas.workers import Workers
from app.store.relay.workers import read_unheld, read_workers

router = APIRouter(tags=["operation"])


@router.get("/workers", summary="Show which process delivers which subscriptions")
async def get_workers(runtime: RuntimeDep, caller: CallerDep) -> Workers:
    """Return the processes that hold leases now, with their shards, and the shards that no worker holds."""
    now = runtime.clock.now()
    async with runtime.request_pool.connection() as connection:
        workers, unheld = await read_workers(connection, now), await read_unheld(connection, now)
    return Workers.model_validate(
        {"items": [asdict(one) for one in workers], "unheld": [asdict(one) for one in unheld]}
    )
