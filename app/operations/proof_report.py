"""The report that the nightly proof wrote last, if this process can read its file."""

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path

from app.config import Settings

NAME = "report.html"
# A report names at most 200 findings of each kind.
BYTES_MAX = 20_000_000
# A row of the report's table of days; a day that the run did not read has none.
_DAY = re.compile(rb'<td class="nowrap">(?:<a [^>]*>)?(\d{4}-\d\d-\d\d)(?:</a>)?</td><td>(?:final|provisional)</td>')


@dataclass(frozen=True, slots=True)
class ProofReport:
    """The page, when it was written, and the days that its run read."""

    html: bytes = field(repr=False)
    written_at: datetime
    days: frozenset[date]


async def last_report(settings: Settings) -> ProofReport | None:
    """Return the report; None if there is none in the directory of the settings."""
    directory = settings.report_dir or settings.data_dir / "reconciliation"
    return await asyncio.to_thread(_read, directory / NAME)


def _read(path: Path) -> ProofReport | None:
    # A run replaces the file.
    with suppress(OSError), path.open("rb") as file:
        html, written_at = file.read(BYTES_MAX + 1), path.stat().st_mtime
        if len(html) <= BYTES_MAX:
            days = frozenset(date.fromisoformat(day.decode()) for day in _DAY.findall(html))
            return ProofReport(html, datetime.fromtimestamp(written_at, UTC), days)
    return None
