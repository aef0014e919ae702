"""The nightly proof: its last run, its days, and its findings."""

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.finding_kinds import MEANINGS, Kind
from app.routers.reconciliation import (
    FindingQuery,
    ReconciliationQuery,
    get_finding,
    get_reconciliation,
    list_of_findings,
)

_COLUMNS = ("finding_id", "day", "kind", "state", "subject", "transaction_id", "subscription", "producer_group")


async def show_proof(visit: Visit) -> Response:
    """Show the last run, the days and the open findings by kind."""
    query = visit.query(ReconciliationQuery, limit=30)
    shown = await get_reconciliation(visit.runtime, query)
    return visit.page(
        "proof.html",
        shown=shown,
        days=shown.days.items,
        runs=shown.runs.items,
        meanings=MEANINGS,
        command_shown=command("findings"),
        now=visit.runtime.clock.now(),
    )


async def show_findings(visit: Visit) -> Response:
    """Show a page of findings, newest day first."""
    query = visit.list_query(FindingQuery)
    found = await list_of_findings(visit.runtime, query)
    if visit.wants_csv:
        return visit.csv_of("findings", _COLUMNS, found.items)
    return visit.page(
        "findings.html",
        query=query,
        rows=found.items,
        kinds=list(Kind),
        next_cursor=found.next_cursor,
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
    Page("GET", "/console/findings", show_findings, ("GET", "/findings")),
    Page("GET", "/console/findings/{finding_id:int}", show_finding, ("GET", "/findings/{finding_id}")),
]
