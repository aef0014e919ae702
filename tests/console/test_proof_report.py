"""The report of the nightly proof in the console: linked where its days are shown, and served as it was written."""

import os
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app.database.connection import Connection
from app.operations import proof_report
from app.permissions import Role
from spark.report.page import render
from tests.conftest import client_of
from tests.support.api_keys import make
from tests.support.console_forms import FORM, sign_in
from tests.support.keyed_services import start
from tests.support.proof_runs import DAY, reconciled

__all__ = ["start"]

LINK = 'href="/console/proof/report"'
ENDED = datetime(2026, 11, 21, 2, 14, 7, tzinfo=UTC)


def report_of(*days: date, elsewhere: date | None = None, base_url: str | None = None) -> str:
    """Return the report of a run that read these days, and found something earlier on another one."""
    numbers = {"open": 0, "new": 0, "resolved": 0, "seconds": {}, "error": None}
    when = {"seen_at": ENDED, "started_at": ENDED - timedelta(seconds=57), "ended_at": ENDED}
    run = {"run_id": 412, "state": "proved", "engine": "local[2]", "source": "standby", "days": list(days)}
    rows = [
        {"day": day, "state": state, "run_id": 412, "counts": {"half": 3}, "found": {}, "figures": {}, "score": {}}
        for day, state in zip(days, ("final", "provisional"), strict=False)
    ]
    return render(run | numbers | when, rows, [], [], {elsewhere: 3} if elsewhere else {}, base_url=base_url)


@pytest.mark.parametrize("base_url", [None, "https://halfnote.example"])
async def test_the_report_is_linked_where_its_days_are_shown(
    start: Callable[..., Any], db: Connection, tmp_path: Path, base_url: str | None
) -> None:
    await reconciled(db, "proved", DAY)
    runtime, admin = await start(report_dir=tmp_path)
    viewer = await make(runtime, Role.VIEWER)
    before, after = DAY - timedelta(days=1), DAY + timedelta(days=1)
    async with client_of(runtime) as client:
        assert (await client.get("/console/proof/report", headers=FORM)).status_code == 303
        await sign_in(client, viewer)
        for path in ("/console/proof", f"/console/proof/{DAY}"):
            assert LINK not in (await client.get(path, headers=FORM)).text
        missing = await client.get("/console/proof/report", headers=FORM)
        assert (missing.status_code, "HALFNOTE_REPORT_DIR" in missing.text) == (404, True)
        # The day is only among those whose findings are still open.
        (tmp_path / "report.html").write_text(report_of(before, after, elsewhere=DAY, base_url=base_url))
        found = await proof_report.last_report(runtime.settings)
        assert found is not None
        assert found.days == {before, after}
        assert LINK in (await client.get("/console/proof", headers=FORM)).text
        assert LINK not in (await client.get(f"/console/proof/{DAY}", headers=FORM)).text
        html = report_of(before, DAY, base_url=base_url)
        (tmp_path / "report.html").write_text(html)
        assert LINK in (await client.get(f"/console/proof/{DAY}", headers=FORM)).text
        shown = await client.get("/console/proof/report", headers=FORM)
        assert shown.text == html
    for answer in (shown, await admin.get("/reconciliation/report")):
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(one.strip().partition(" ")[::2] for one in answer.headers["content-security-policy"].split(";"))
        # Its styles are in the page. It runs no script, loads nothing, and no other page shows it in a frame.
        assert policy == {
            "default-src": "'none'",
            "style-src": "'unsafe-inline'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "base-uri": "'none'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


async def test_what_cannot_be_a_report_is_left(start: Callable[..., Any], tmp_path: Path) -> None:
    runtime, admin = await start(report_dir=tmp_path)
    file = tmp_path / proof_report.NAME
    file.write_text("<title>Proved</title>")
    found = await proof_report.last_report(runtime.settings)
    assert found is not None
    assert found.days == frozenset()
    os.truncate(file, proof_report.BYTES_MAX + 1)
    assert (await admin.get("/reconciliation/report")).status_code == 404
    file.unlink()
    file.mkdir()
    assert (await admin.get("/reconciliation/report")).status_code == 404
