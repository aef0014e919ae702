"""The nightly proof: its last run, its days, and its findings."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from functools import partial

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command, number
from app.console.series_picture import Chart, ChartKind, drawn
from app.console.visit import Visit
from app.errors import NotFound
from app.finding_kinds import MEANINGS, Kind
from app.operations.proof_report import last_report
from app.routers.proof_report import get_report
from app.routers.reconciliation import (
    PAGE_MAX,
    FindingQuery,
    ReconciliationQuery,
    get_finding,
    get_reconciled_day,
    get_reconciliation,
    list_of_findings,
)
from app.schemas.reconciliation import DayShown

_DAY_COLUMNS = ("day", "state", "counts", "found", "reconciled_at", "run_id")
_SCORES = ("complete", "agreed", "timely", "orderly")
_COLUMNS = ("finding_id", "day", "kind", "state", "subject", "transaction_id", "subscription", "producer_group")


async def show_proof(visit: Visit) -> Response:
    """Show the last run, the days and the open findings by kind."""
    query = visit.query(ReconciliationQuery, limit=PAGE_MAX if visit.wants_csv else 30)
    shown = await get_reconciliation(visit.runtime, query)
    if visit.wants_csv:
        found = {"counts": lambda day: day.counts.get("half", 0), "found": lambda day: sum(day.found.values())}
        scores = {part: partial(lambda day, part: day.score.get(part), part=part) for part in _SCORES}
        before = shown.days.next_cursor
        lacks = None if before is None else f"Earlier days are at {visit.here(days_before=str(before))}"
        return visit.csv_of("proof", (*_DAY_COLUMNS, *_SCORES), shown.days.items, lacks=lacks, **found, **scores)
    return visit.page(
        "proof.html",
        shown=shown,
        trend=_trend(shown.days.items),
        report=await last_report(visit.runtime.settings),
        days=shown.days.items,
        runs=shown.runs.items,
        meanings=MEANINGS,
        command_shown=command("proof", "list"),
        now=visit.runtime.clock.now(),
    )


async def show_report(visit: Visit) -> Response:
    """Show the report as the proof wrote it, with the policy that its own styles need."""
    return await get_report(visit.runtime)


async def show_day(visit: Visit) -> Response:
    """Show what the proof says of one day: its rows, its findings, its figures, and the runs that read it."""
    day = visit.path["day"]
    shown = await get_reconciled_day(visit.runtime, _day_of(day))
    if visit.wants_csv:
        return visit.csv("proof-day", ("kind", "findings"), sorted(shown.found.items()))
    report = await last_report(visit.runtime.settings)
    return visit.page(
        "proof_day.html",
        shown=shown,
        report=report if report is not None and shown.day in report.days else None,
        meanings=MEANINGS,
        command_shown=command("findings", "list", day=shown.day, state="all"),
        now=visit.runtime.clock.now(),
    )


def _day_of(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise NotFound(f"`{text[:40]}` is not a day like 2026-11-21.") from None


def _trend(days: Sequence[DayShown]) -> list[Chart]:
    """Return the charts of the days, oldest first; none for a single day."""
    if len(days) < 2:
        return []
    ordered = sorted(days, key=lambda one: one.day)
    begins = datetime.combine(ordered[0].day, time(), UTC)
    findings = [float(sum(one.found.values())) for one in ordered]
    halves = [float(one.counts.get("half", 0)) for one in ordered]
    return [
        drawn("findings", ChartKind("Findings by day", number), findings, begins),
        drawn("halves", ChartKind("Halves by day", number), halves, begins),
    ]


async def show_findings(visit: Visit) -> Response:
    """Show a page of findings, newest day first."""
    query = visit.list_query(FindingQuery, count=True)
    read = partial(list_of_findings, visit.runtime)
    if visit.wants_csv:
        return await visit.csv_of_list("findings", _COLUMNS, query, read)
    found = await read(query)
    return visit.page(
        "findings.html",
        query=query,
        rows=found.items,
        kinds=list(Kind),
        next_cursor=found.next_cursor,
        total=found.total,
        command_shown=command("findings", day=query.day, kind=query.kind, state=query.state or "all"),
        now=visit.runtime.clock.now(),
    )


async def show_finding(visit: Visit) -> Response:
    """Show a finding with what it means and the first step."""
    shown = await get_finding(visit.runtime, visit.path["finding_id"])
    meaning = MEANINGS[Kind(shown.kind)] if shown.kind in MEANINGS else None
    return visit.page(
        "finding.html",
        shown=shown,
        meaning=meaning,
        command_shown=command("findings", "show", str(shown.finding_id)),
        now=visit.runtime.clock.now(),
    )


PAGES = [
    Page("GET", "/console/proof", show_proof, ("GET", "/reconciliation")),
    Page("GET", "/console/proof/report", show_report, ("GET", "/reconciliation/report")),
    Page("GET", "/console/proof/{day}", show_day, ("GET", "/reconciliation/{day}")),
    Page("GET", "/console/findings", show_findings, ("GET", "/findings")),
    Page("GET", "/console/findings/{finding_id:int}", show_finding, ("GET", "/findings/{finding_id}")),
]
