"""`GET` and `PUT /accept`: whether new halves are taken, for all replicas at once."""

from datetime import datetime
from typing import Literal

from fastapi import APIRouter
from pydantic import Field

from app.acts import act
from app.errors import Invalid, MalformedJson, WrongContentType
from app.routers.shared import CallerDep, RuntimeDep, Strict, problems
from app.store import switches
from app.store.audit import record

router = APIRouter(tags=["operation"])

Accept = Literal["all", "ends"]


class AcceptWanted(Strict):
    """What is to be taken from now on."""

    accept: Accept = Field(
        description="`ends` refuses new halves with 503 `draining`, while ends, checks and deliveries go on",
        examples=["ends"],
    )


class AcceptShown(Strict):
    """What is taken: by the switch that all replicas follow, and by the replica that answers."""

    accept: Accept = Field(description="where the switch stands", examples=["ends"])
    changed_at: datetime | None = Field(
        description="when it was turned; null: never", examples=["2026-11-21T08:00:00Z"]
    )
    here: Accept = Field(
        description="what this replica takes: it may also be told by HALFNOTE_ACCEPT, or be stopping", examples=["ends"]
    )


@router.get("/accept", summary="Whether new halves are taken", responses=problems())
async def get_accept(runtime: RuntimeDep) -> AcceptShown:
    """Return where the switch stands and what this replica takes."""
    async with runtime.database.connection() as connection:
        switch = await switches.read(connection, switches.ACCEPT)
    return AcceptShown(
        accept="ends" if switch and switch.value == "ends" else "all",
        changed_at=switch.changed_at if switch else None,
        here="ends" if runtime.refusing_halves else "all",
    )


@router.put(
    "/accept", summary="Refuse or take new halves", responses=problems(Invalid, MalformedJson, WrongContentType)
)
async def put_accept(runtime: RuntimeDep, caller: CallerDep, wanted: AcceptWanted) -> AcceptShown:
    """Turn the switch. The other replicas follow within about a second; it stays across restarts."""
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        await switches.turn(connection, switches.ACCEPT, wanted.accept, now)
        await record(connection, act(caller, "accept.put", None, accept=wanted.accept), now)
    runtime.follow_switch(wanted.accept)
    return AcceptShown(accept=wanted.accept, changed_at=now, here="ends" if runtime.refusing_halves else "all")
