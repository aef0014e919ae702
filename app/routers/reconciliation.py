"""What the nightly proof found: how it stands, day by day, and each finding. Only the proof itself writes these."""

import re
from datetime import date
from typing import Annotated, Literal
from urllib.parse import quote, unquote

import msgspec
from fastapi import APIRouter, Path, Query
from fastapi.responses import PlainTextResponse
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from app.errors import DayNotReconciled, FindingUnknown, Invalid, NotFound
from app.finding_kinds import MEANINGS, Kind, docs_of
from app.ids import message_id
from app.reconciliation_shapes import (
    DAY,
    DayPage,
    DayShown,
    FindingPage,
    FindingShown,
    ReconciledDayShown,
    ReconciliationShown,
    RunPage,
    RunShown,
)
from app.routers.shared import RuntimeDep, Strict, problems
from app.store.findings import HIGHEST, Filter, Finding, Place, list_findings, one_finding
from app.store.reconciliation import (
    FIRST_RUN,
    ReconciledDay,
    Run,
    list_days,
    list_runs,
    one_day,
    open_findings,
    runs_of,
    standing,
)
from app.timeline import known

router = APIRouter(tags=["nightly proof"])

PAGE_MAX = 1000
RUNS_OF_A_DAY = 50
# Days that a refusal names.
NAMED_DAYS = 10
BIGINT_MAX = (1 << 63) - 1

# Its day as a number, its kind, and its subject percent-encoded.
_CURSOR = r"([0-9]{1,7})\.([a-z_]{1,64})\.([!-~]*)"
_cursor = re.compile(_CURSOR).fullmatch
_iso_day = re.compile(r"\d{4}-\d\d-\d\d", re.A).fullmatch


def _is_cursor(value: str) -> str:
    if _cursor(value) is None:
        raise ValueError("send the `next_cursor` of the page before")
    return value


def _is_day(value: object) -> object:
    # pydantic also takes numbers and times.
    if not isinstance(value, str) or not _iso_day(value):
        raise ValueError(f"a day is RFC 3339's full-date, as {DAY}")
    return value


Day = Annotated[date, BeforeValidator(_is_day)]
Cursor = Annotated[str, AfterValidator(_is_cursor), WithJsonSchema({"type": "string", "pattern": f"^{_CURSOR}$"})]


class ReconciliationQuery(Strict):
    """Which page of the runs, and which of the days."""

    runs_before: int | None = Field(None, ge=1, le=BIGINT_MAX, description="`next_cursor` of the runs' page before")
    days_before: Day | None = Field(None, description="`next_cursor` of the days' page before")
    limit: int = Field(30, ge=1, le=PAGE_MAX, description="runs, and days, on a page")


class FindingQuery(Strict):
    """Filters of a list; those given must all be met."""

    day: Day | None = Field(None, description="of this day", examples=[DAY])
    kind: Kind | None = Field(None, description="of this kind", examples=["parked"])
    state: Literal["open", "resolved"] | None = Field(
        None, description="`open`: the last run that looked at the day found it; `resolved`: not any more"
    )
    cursor: Cursor | None = Field(None, description="`next_cursor` of the page before")
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="findings on a page")


@router.get(
    "/reconciliation",
    summary="How the nightly proof stands",
    response_model_exclude_unset=True,
    responses=problems(Invalid),
)
async def get_reconciliation(
    runtime: RuntimeDep, query: Annotated[ReconciliationQuery, Query()]
) -> ReconciliationShown:
    """Return what the last run came to and what is open, with pages of the runs and of the days, newest first.

    `verdict` is of the days that the last run looked at; `open` is of all days. A run looks at the days that have
    changed, or that have findings; what is final and was proved stays so.
    """
    async with runtime.database.transaction() as connection:
        newest, _ = await list_runs(connection, FIRST_RUN, 1)
        runs, before_run = await list_runs(connection, query.runs_before or FIRST_RUN, query.limit)
        days, before_day = await list_days(connection, query.days_before or date.max, query.limit)
        stands, found = await standing(connection), await open_findings(connection)
    run = _run(newest[0]) if newest else None
    return ReconciliationShown(
        verdict=None if run is None else run.state,
        run=run,
        proved_at=stands.proved_at,
        open=found,
        provisional=stands.provisional,
        final=stands.final,
        runs=RunPage(items=[_run(one) for one in runs], next_cursor=before_run),
        days=DayPage(items=[_day(one) for one in days], next_cursor=before_day),
    )


@router.get(
    "/reconciliation/{day}",
    summary="What the nightly proof says of a day",
    response_model_exclude_unset=True,
    responses=problems(DayNotReconciled, Invalid),
)
async def get_reconciled_day(
    runtime: RuntimeDep, day: Annotated[Day, Path(description="the day, in UTC", examples=[DAY])]
) -> ReconciledDayShown:
    """Return a day's state, counts, findings by kind and figures, and the runs that looked at it."""
    async with runtime.database.connection() as connection:
        row = await one_day(connection, day)
        if row is None:
            newest, _ = await list_days(connection, date.max, NAMED_DAYS)
            raise _not_reconciled(day, [one.day for one in newest])
        runs = await runs_of(connection, day, RUNS_OF_A_DAY)
    return ReconciledDayShown(
        **_day_fields(row), figures=msgspec.json.decode(row.figures), runs=[_run(one) for one in runs]
    )


@router.get(
    "/findings",
    summary="List findings, newest day first",
    response_model_exclude_unset=True,
    responses=problems(Invalid),
)
async def list_of_findings(runtime: RuntimeDep, query: Annotated[FindingQuery, Query()]) -> FindingPage:
    """Return a page of findings: what does not agree, as the nightly proof found it.

    Answers in bounded time whatever is stored: where few meet the filter, a page may hold fewer than `limit`, or none,
    and still have a `next_cursor`. The list is over when `next_cursor` is null.
    """
    wanted = Filter(
        day=query.day,
        kind=query.kind,
        resolved=None if query.state is None else query.state == "resolved",
        below=HIGHEST if query.cursor is None else _place(query.cursor),
    )
    async with runtime.database.connection() as connection:
        rows, below = await list_findings(connection, wanted, query.limit)
    return FindingPage(items=[_finding(row) for row in rows], next_cursor=None if below is None else _cursor_of(below))


@router.get(
    "/findings/{finding_id}",
    summary="Show a finding",
    response_model_exclude_unset=True,
    responses=problems(FindingUnknown),
)
async def get_finding(
    runtime: RuntimeDep, finding_id: Annotated[int, Path(ge=1, le=BIGINT_MAX, description="the finding's id")]
) -> FindingShown:
    """Return a finding, open or resolved."""
    async with runtime.database.connection() as connection:
        row = await one_finding(connection, finding_id)
    if row is None:
        raise FindingUnknown(f"No finding has the id {finding_id}.")
    return _finding(row)


@router.get(
    "/findings/kinds/{kind}",
    response_class=PlainTextResponse,
    summary="What a kind of finding means",
    responses=problems(NotFound),
)
async def get_finding_kind(kind: str) -> str:
    """Return what a kind of finding means and where to begin, as text."""
    if kind not in MEANINGS:
        raise NotFound(f"No kind of finding is called `{kind}`; these are: {', '.join(Kind)}.")
    meaning = MEANINGS[Kind(kind)]
    return f"{kind}\n\n{meaning.means}\n\n{meaning.begin}\n\nMore: docs/findings/{kind}.md\n"


def _not_reconciled(day: date, newest: list[date]) -> DayNotReconciled:
    if not newest:
        return DayNotReconciled("No day has been reconciled yet. Run `halfnote reconcile`.", days=[])
    shown = ", ".join(map(str, newest))
    return DayNotReconciled(
        f"No run has looked at {day}. The newest days that one looked at: {shown}. `GET /reconciliation` has them all; "
        f"`halfnote reconcile --day {day}` looks at this one, if it is still in the database.",
        days=[str(one) for one in newest],
    )


def _place(cursor: str) -> Place:
    found = _cursor(cursor)
    assert found is not None  # the shape looked at it
    ordinal = min(max(int(found[1]), 1), date.max.toordinal())
    # What nobody was given may decode to anything; Postgres takes no NUL.
    return Place(date.fromordinal(ordinal), found[2], unquote(found[3]).replace("\x00", ""))


def _cursor_of(place: Place) -> str:
    return f"{place.day.toordinal()}.{place.kind}.{quote(place.subject, safe='')}"


def _run(run: Run) -> RunShown:
    return RunShown.model_validate(
        {
            "run_id": run.run_id,
            "state": run.state,
            "engine": run.engine,
            "source": run.source,
            "started_at": run.started_at,
            "ended_at": run.ended_at,
            "days": run.days,
            "open": run.open,
            "new": run.new,
            "resolved": run.resolved,
            "seconds": msgspec.json.decode(run.seconds),
            **known(seen_at=run.seen_at, error=run.error),
        }
    )


def _day_fields(day: ReconciledDay) -> dict[str, object]:
    return {
        "day": day.day,
        "state": day.state,
        "run_id": day.run_id,
        "reconciled_at": day.reconciled_at,
        "counts": msgspec.json.decode(day.counts),
        "found": msgspec.json.decode(day.found),
    }


def _day(day: ReconciledDay) -> DayShown:
    return DayShown.model_validate(_day_fields(day))


def _finding(row: Finding) -> FindingShown:
    message = (
        None if row.transaction_id is None or row.position is None else message_id(row.transaction_id, row.position)
    )
    return FindingShown(
        finding_id=row.finding_id,
        day=row.day,
        kind=row.kind,
        state="open" if row.resolved_at is None else "resolved",
        subject=row.subject,
        detail=msgspec.json.decode(row.detail),
        first_run=row.first_run,
        first_seen_at=row.first_seen_at,
        last_run=row.last_run,
        last_seen_at=row.last_seen_at,
        docs=docs_of(row.kind),
        **known(
            transaction_id=row.transaction_id,
            message_id=message,
            subscription=row.subscription,
            producer_group=row.producer_group,
            resolved_run=row.resolved_run,
            resolved_at=row.resolved_at,
            transaction=None if row.transaction_id is None else f"/transactions/{row.transaction_id}",
        ),
    )
