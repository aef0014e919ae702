"""`/livez`, `/readyz`, `/metrics` and `/version`, for probes, Prometheus and people."""

import platform
from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from app.admission.route_roles import READERS
from app.migrate import current
from app.permissions import Caller
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.runtime.health_checks import HealthCheck
from app.runtime.readiness import readiness
from app.runtime.state import Runtime
from app.schemas.fields import Strict
from app.store.admin.server_state import server_state

router = APIRouter(tags=["operation"])


class Live(Strict):
    """The process answers."""

    status: Literal["ok"]


class CheckShown(Strict):
    """The result of one check."""

    name: str = Field(examples=["partitions"])
    ok: bool = Field(examples=[True])
    detail: str = Field(examples=["there until 2026-11-28"])


class Ready(Strict):
    """Whether this process is ready, and the result of each check."""

    status: Literal["ready", "not_ready"]
    checks: list[CheckShown] = Field(
        description="database, migrations, partitions (today's and tomorrow's), clock, and each loop of this process "
        "and of the worker process beside it"
    )
    warnings: list[CheckShown] = Field(
        description="problems that do not stop the service: durability, days_held, check_urls, "
        "secrets_unreadable, accept",
        examples=[[]],
    )


class Version(Strict):
    """The versions in use."""

    version: str = Field(description="Halfnote's", examples=["0.1.0"])
    schema_revision: str | None = Field(description="the database's", examples=["0004"])
    python: str = Field(examples=["3.13.1"])
    postgres: str = Field(examples=["18.0"])


FOR_PEOPLE = "details are shown to the keys of people"
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Ready, "description": "not ready; `checks` says why"}}
EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus's text format",
        "content": {"text/plain": {"example": 'halfnote_verdicts_total{source="producer",verdict="commit"} 1030.0\n'}},
    }
}


# Some load balancers and monitors ask by HEAD.
@router.head("/livez", include_in_schema=False)
@router.get("/livez", summary="Whether the process answers")
async def get_livez() -> Live:
    """Answer without using the database, because a restart would not repair the database."""
    return Live(status="ok")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Whether this process is ready", responses=NOT_READY)
async def get_readyz(runtime: RuntimeDep, caller: CallerDep, response: Response) -> Ready:
    """Check the database, the partitions, the clock and the loops: 200 if all pass, else 503 with the same body.

    All callers together cause about one look at the database per second. With auth on, only operators, viewers and
    admins see the details, because details name URLs and hosts.
    """
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
    runtime.show_loop_ages()
    found = await runtime.expositions.get(runtime.metrics.exposition_beside)
    return Response(found, media_type=CONTENT_TYPE_LATEST)


@router.get("/version", summary="Versions", responses=problems())
async def get_version(runtime: RuntimeDep) -> Version:
    """Return the versions in use. All callers together cause about one query per second."""
    revision, postgres = await runtime.versions.get(lambda: _versions(runtime))
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


def _shown(check: HealthCheck, caller: Caller) -> CheckShown:
    detailed = caller.known and (caller.role is None or caller.role in READERS)
    return CheckShown(name=check.name, ok=check.ok, detail=check.detail if detailed else FOR_PEOPLE)
