"""The HTML report of the nightly proof, as the last run with `--out` wrote it."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from app.errors import NotFound
from app.operations.proof_report import last_report
from app.routers.dependencies import RuntimeDep, problems

router = APIRouter(tags=["nightly proof"])

# The report has its styles in the page, and neither scripts nor other files.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@router.get(
    "/reconciliation/report",
    summary="Show the last report of the nightly proof",
    response_class=HTMLResponse,
    responses=problems(NotFound),
)
async def get_report(runtime: RuntimeDep) -> HTMLResponse:
    """Return the page that `halfnote reconcile --out` wrote last, of the days that its run read.

    It is read from HALFNOTE_REPORT_DIR. It has no bodies of messages.
    """
    report = await last_report(runtime.settings)
    if report is None:
        raise NotFound(
            "This process finds no report. `make reconcile`, or `halfnote reconcile --out` with the directory of "
            "HALFNOTE_REPORT_DIR, writes one."
        )
    return HTMLResponse(report.html, headers=HEADERS)
