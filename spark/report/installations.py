"""The report of a run over several installations: all findings on one page, each with the name of its installation.

The page of each installation, in the directory of its name, has the plots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Protocol

from spark.report.page import InstallationShown, is_new, render


class Result(Protocol):
    """What a run wrote (spark/proof/store_results.py)."""

    @property
    def run(self) -> Mapping[str, Any]: ...
    @property
    def days(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def findings(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def elsewhere(self) -> Mapping[date, int]: ...


@dataclass(frozen=True)
class Part:
    """An installation: what its run wrote, or why it failed; and the URL of its service, for links."""

    name: str
    result: Result | None
    error: str | None
    base_url: str | None = None


def render_all(parts: Sequence[Part]) -> str:
    """Return the page."""
    written = [(part, part.result) for part in parts if part.result is not None]
    return render(
        _run([result.run for _, result in written]),
        [dict(row) | _of(part) for part, result in written for row in result.days],
        [
            dict(row) | _of(part) | {"new": is_new(result.run, row)}
            for part, result in written
            for row in result.findings
        ],
        [],
        {},
        base_url=None,
        installations=[_shown(part) for part in parts],
    )


def _of(part: Part) -> dict[str, Any]:
    return {"installation": part.name, "base": part.base_url and part.base_url.rstrip("/")}


def _shown(part: Part) -> InstallationShown:
    run = part.result.run if part.result else {}
    return InstallationShown(
        part.name,
        part.error,
        run.get("open", 0),
        run.get("new", 0),
        run.get("resolved", 0),
        len(part.result.days) if part.result else 0,
        sum(part.result.elsewhere.values()) if part.result else 0,
        run.get("seen_at"),
    )


def _run(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the runs as one."""
    now = datetime.now(UTC)
    totals = {name: sum(run[name] for run in runs) for name in ("open", "new", "resolved")}
    return totals | {
        "run_id": None,
        "state": "findings" if totals["open"] else "proved",
        "error": None,
        "started_at": min((run["started_at"] for run in runs), default=now),
        "ended_at": max((run["ended_at"] for run in runs), default=now),
    }
