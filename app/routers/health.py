"""`/livez`, `/readyz`, `/metrics`, `/version`: for probes, Prometheus and people."""

import platform
from importlib.metadata import version
from time import monotonic
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from app.access import Caller
from app.migrate import current
from app.readiness import Check, readiness
from app.routers.shared import CallerDep, RuntimeDep, Strict, problems
from app.rules import PEOPLE
from app.runtime import Runtime
from app.store.server import server_state

router = APIRouter(tags=["operation"])


class Live(Strict):
    """The process answers."""

    status: Literal["ok"]


class CheckShown(Strict):
    """One thing that was looked at."""

    name: str = Field(examples=["partitions"])
    ok: bool = Field(examples=[True])
    detail: str = Field(examples=["there until 2026-11-28"])


class Ready(Strict):
    """Whether this process can do its work, and what was looked at."""

    status: Literal["ready", "not_ready"]
    checks: list[CheckShown] = Field(
        description="database, migrations, partitions (today's and tomorrow's), clock, and each loop of this process"
    )
    warnings: list[CheckShown] = Field(
        description="what to look at although the service goes on: durability, days_held, check_urls, "
        "secrets_in_plain_text, secrets_unreadable, accept",
        examples=[[]],
    )


class Version(Strict):
    """What runs here."""

    version: str = Field(description="Halfnote's", examples=["0.1.0"])
    schema_revision: str | None = Field(description="the database's", examples=["0004"])
    python: str = Field(examples=["3.13.1"])
    postgres: str = Field(examples=["18.0"])


FOR_PEOPLE = "details are shown to an operator's or admin's key"
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Ready, "description": "not ready; `checks` says why"}}
EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus's text format",
        "content": {"text/plain": {"example": 'halfnote_verdicts_total{source="producer",verdict="commit"} 1030.0\n'}},
    }
}


@router.get("/livez", summary="Whether the process answers")
async def get_livez() -> Live:
    """Answer without touching the database: a restart would not mend that."""
    return Live(status="ok")


@router.get("/readyz", summary="Whether this process can do its work", responses=NOT_READY)
async def get_readyz(runtime: RuntimeDep, caller: CallerDep, response: Response) -> Ready:
    """Look at the database, the partitions, the clock and the loops: 200 if all are well, 503 with the same body if
    not. However many ask, the database is looked at about once a second. Where keys are asked for, details are for
    operators and admins: they name URLs and hosts."""
    found = await readiness(runtime)
    response.status_code = 200 if found.ready else 503
    return Ready(
        status="ready" if found.ready else "not_ready",
        checks=[_shown(check, caller) for check in found.checks],
        warnings=[_shown(check, caller) for check in found.warnings],
    )


@router.get("/metrics", summary="Metrics", response_class=PlainTextResponse, responses=EXPOSITION)
async def get_metrics(runtime: RuntimeDep) -> Response:
    """Return the metrics of this service's processes; docs/metrics.md explains each."""
    for name, beat in runtime.heartbeats.items():
        runtime.metrics.loop_age_s.labels(name).set(monotonic() - beat)
    return Response(runtime.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", summary="Versions", responses=problems())
async def get_version(runtime: RuntimeDep) -> Version:
    """Return what runs here; the database is asked about once a second, however many ask."""
    revision, postgres = await runtime.versions.ask(lambda: _versions(runtime))
    return Version(
        version=version("halfnote-server"),
        schema_revision=revision,
        python=platform.python_version(),
        postgres=postgres,
    )


async def _versions(runtime: Runtime) -> tuple[str | None, str]:
    """Return the schema's revision and the server's version."""
    async with runtime.database.connection() as connection:
        return await current(connection), (await server_state(connection)).version


def _shown(check: Check, caller: Caller) -> CheckShown:
    told = caller.known and (caller.role is None or caller.role in PEOPLE)
    return CheckShown(name=check.name, ok=check.ok, detail=check.detail if told else FOR_PEOPLE)
