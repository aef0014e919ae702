"""`GET` and `PUT /accept`: the switch that makes all replicas accept or refuse new halves."""

from datetime import datetime
from typing import Literal

from fastapi import APIRouter
from pydantic import Field

from app.errors import Invalid, MalformedJson, WrongContentType
from app.operations.audit import audit_entry
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.runtime.state import Runtime
from app.schemas.fields import Strict
from app.store.admin import switches
from app.store.admin.audit import record

router = APIRouter(tags=["operation"])

Accept = Literal["all", "ends"]


class AcceptWanted(Strict):
    """The new position of the switch."""

    accept: Accept = Field(
        description="`ends` refuses new halves with 503 `draining`, while ends, checks and deliveries go on",
        examples=["ends"],
    )


class AcceptShown(Strict):
    """The position of the switch that all replicas follow, and what the answering replica accepts."""

    accept: Accept = Field(description="the position of the switch", examples=["ends"])
    changed_at: datetime | None = Field(
        description="when the switch last changed; null: never", examples=["2026-11-21T08:00:00Z"]
    )
    here: Accept = Field(
        description="what this replica accepts; HALFNOTE_ACCEPT or a shutdown can also make it refuse new halves",
        examples=["ends"],
    )


@router.get("/accept", summary="Show whether new halves are accepted", responses=problems())
async def get_accept(runtime: RuntimeDep) -> AcceptShown:
    """Return the position of the switch and what this replica accepts."""
    async with runtime.request_pool.connection() as connection:
        switch = await switches.read(connection, switches.ACCEPT)
    return _shown(switch, runtime)


@router.put(
    "/accept", summary="Refuse or accept new halves", responses=problems(Invalid, MalformedJson, WrongContentType)
)
async def put_accept(runtime: RuntimeDep, caller: CallerDep, wanted: AcceptWanted) -> AcceptShown:
    """Set the switch. The other replicas follow within about a second. The switch survives restarts."""
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        switch = await switches.read(connection, switches.ACCEPT)
        if _position(switch) != wanted.accept and await switches.turn(connection, switches.ACCEPT, wanted.accept, now):
            await record(connection, audit_entry(caller, "accept.put", None, accept=wanted.accept), now)
        switch = await switches.read(connection, switches.ACCEPT)
    runtime.follow_switch(wanted.accept)
    return _shown(switch, runtime)


def _position(switch: switches.Switch | None) -> Accept:
    return "ends" if switch is not None and switch.value == "ends" else "all"


def _shown(switch: switches.Switch | None, runtime: Runtime) -> AcceptShown:
    return AcceptShown(
        accept=_position(switch),
        changed_at=switch.changed_at if switch else None,
        here="ends" if runtime.refusing_halves else "all",
    )
