"""The results of the nightly proof: its state, its days and its findings. Only the proof writes them."""

import re
from dataclasses import replace
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
from app.routers.dependencies import RuntimeDep, problems
from app.routers.timeline import known
from app.schemas.fields import COUNT, Strict
from app.schemas.reconciliation import (
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
from app.schemas.totals import COUNTED_MOST, TotalShown
from app.store.proof.findings import (
    Finding,
    FindingCursor,
    FindingFilter,
    count_findings,
    list_findings,
    one_finding,
)
from app.store.proof.runs import (
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

router = APIRouter(tags=["nightly proof"])

PAGE_MAX = 1000
RUNS_OF_A_DAY = 50
# The maximum number of days in a refusal.
NAMED_DAYS = 10
BIGINT_MAX = (1 << 63) - 1

# The day as a number, the kind, and the percent-encoded subject.
_CURSOR = r"([0-9]{1,7})\.([a-z_]{1,64})\.([!-~]*)"
_cursor = re.compile(_CURSOR).fullmatch
_iso_day = re.compile(r"\d{4}-\d\d-\d\d", re.A).fullmatch


def _is_cursor(value: str) -> str:
    if _cursor(value) is None:
        raise ValueError("send the `next_cursor` of the previous page")
    return value


def _is_day(value: object) -> object:
    # pydantic also takes numbers and times.
    if not isinstance(value, str) or not _iso_day(value):
        raise ValueError(f"a day is RFC 3339's full-date, as {DAY}")
    return value


Day = Annotated[date, BeforeValidator(_is_day)]
Cursor = Annotated[str, AfterValidator(_is_cursor), WithJsonSchema({"type": "string", "pattern": f"^{_CURSOR}$"})]


class ReconciliationQuery(Strict):
    """A page of the runs and a page of the days."""

    runs_before: int | None = Field(None, ge=1, le=BIGINT_MAX, description="`next_cursor` of the previous page of runs")
    days_before: Day | None = Field(None, description="`next_cursor` of the previous page of days")
    limit: int = Field(30, ge=1, le=PAGE_MAX, description="runs, and days, on a page")


class FindingQuery(Strict):
    """Filters of the list. A finding must match all of them."""

    day: Day | None = Field(None, description="of this day", examples=[DAY])
    kind: Kind | None = Field(None, description="of this kind", examples=["parked"])
    state: Literal["open", "resolved"] | None = Field(
        None,
        description="`open`: the last run over the day found it; `resolved`: it did not, or its day was removed",
    )
    cursor: Cursor | None = Field(None, description="`next_cursor` of the previous page")
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="findings on a page")
    count: bool = Field(False, description=COUNT)


@router.get(
    "/reconciliation",
    summary="Show the state of the nightly proof",
    response_model_exclude_unset=True,
    responses=problems(Invalid),
)
async def get_reconciliation(
    runtime: RuntimeDep, query: Annotated[ReconciliationQuery, Query()]
) -> ReconciliationShown:
    """Return the result of the last run and the open findings, with pages of the runs and of the days, newest first.

    `verdict` covers the days of the last run. `open` covers all days. A run reads the days that have changed or that
    have findings. A final day is read again only if it was touched since, as by a replay, or on demand.
    """
    async with runtime.request_pool.transaction(confirmed=False) as connection:
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
    summary="Show the result of the nightly proof for a day",
    response_model_exclude_unset=True,
    responses=problems(DayNotReconciled, Invalid),
)
async def get_reconciled_day(
    runtime: RuntimeDep, day: Annotated[Day, Path(description="the day, in UTC", examples=[DAY])]
) -> ReconciledDayShown:
    """Return a day's state, counts, findings by kind and figures, and the runs that read the day."""
    async with runtime.request_pool.connection() as connection:
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
    """Return a page of the findings of the nightly proof.

    The time to answer is bounded. If few findings match the filter, a page may hold fewer than `limit` or none and
    still have a `next_cursor`. The list ends when `next_cursor` is null. With `count` the answer has the number of all
    that match.
    """
    whole = FindingFilter(
        day=query.day,
        kind=query.kind,
        resolved=None if query.state is None else query.state == "resolved",
    )
    wanted = whole if query.cursor is None else replace(whole, below=_place(query.cursor))
    async with runtime.request_pool.connection() as connection:
        rows, below = await list_findings(connection, wanted, query.limit)
        counted = await count_findings(connection, whole, COUNTED_MOST) if query.count else None
    # An answer without a count leaves the field out.
    total = {} if counted is None else {"total": TotalShown(count=counted[0], exact=counted[1])}
    cursor = None if below is None else _cursor_of(below)
    return FindingPage(items=[_finding(row) for row in rows], next_cursor=cursor, **total)


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
    async with runtime.request_pool.connection() as connection:
        row = await one_finding(connection, finding_id)
    if row is None:
        raise FindingUnknown(f"There is no finding {finding_id}. GET /findings lists all.")
    return _finding(row)


@router.get(
    "/findings/kinds/{kind}",
    response_class=PlainTextResponse,
    summary="Explain a kind of finding",
    responses=problems(NotFound),
)
async def get_finding_kind(kind: str) -> str:
    """Return the meaning of a kind of finding and the first step to take, as text."""
    if kind not in MEANINGS:
        raise NotFound(f"There is no kind of finding `{kind}`. The kinds are: {', '.join(Kind)}.")
    meaning = MEANINGS[Kind(kind)]
    return f"{kind}\n\n{meaning.means}\n\n{meaning.begin}\n\nMore: docs/findings/{kind}.md\n"


def _not_reconciled(day: date, newest: list[date]) -> DayNotReconciled:
    if not newest:
        return DayNotReconciled("No day has been reconciled yet. Run `halfnote reconcile`.", days=[])
    shown = ", ".join(map(str, newest))
    return DayNotReconciled(
        f"No run has read {day}. The newest days with a run: {shown}. `GET /reconciliation` lists all. "
        f"`halfnote reconcile --day {day}` reads this day, if it is still in the database.",
        days=[str(one) for one in newest],
    )


def _place(cursor: str) -> FindingCursor:
    found = _cursor(cursor)
    assert found is not None  # the shape looked at it
    ordinal = min(max(int(found[1]), 1), date.max.toordinal())
    # An invented cursor may decode to any text, and Postgres refuses NUL.
    return FindingCursor(date.fromordinal(ordinal), found[2], unquote(found[3]).replace("\x00", ""))


def _cursor_of(place: FindingCursor) -> str:
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
        "score": msgspec.json.decode(day.score),
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
