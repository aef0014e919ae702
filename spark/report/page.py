"""The report of a run: one self-contained HTML page without scripts, fonts or external files."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from spark.report.charts import Drawing, duration, name_of, of_day, of_scores, of_trend, within
from spark.report.finding_texts import MEANINGS, name_of_kind
from spark.score import PARTS

# The most rows in a table of findings; the page says how many more there are.
MOST_ROWS = 200
# Only the newest of a run's days have plots; all days have figures in the table.
DRAWN_DAYS = 5
# The most days outside the run with open findings that the page names.
NAMED_DAYS = 10
_LONGEST = 300  # characters of a detail
# What people call the numbers of the tables.
WORDS: dict[str, dict[int, str]] = {
    "verdict": {1: "commit", 2: "rollback"},
    "source": {0: "producer", 1: "check", 2: "policy", 3: "operator"},
}
# The id of a transaction, perhaps with the position of a message.
_ID = re.compile(r"\b([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})(?:-[0-9]{1,5})?\b")
# What people call the rows of the day's tables.
TABLES = {
    "half": "half messages",
    "op": "verdicts",
    "outbox": "committed messages",
    "receipt": "deliveries",
    "attempt": "attempts on record",
}


@dataclass(frozen=True)
class Found:
    """The findings of one kind: the number of open ones, the shown ones, and how many of these are new."""

    kind: str
    count: int
    new: int
    rows: Sequence[Mapping[str, Any]]
    means: str = ""
    begin: str = ""


@dataclass(frozen=True)
class DrawnDay:
    """A day's plots, and its subscriptions as rows of a table."""

    day: date
    drawings: Sequence[Drawing]
    subscriptions: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class InstallationShown:
    """An installation in the page of several: how its run ended, and how many findings are open and new.

    `elsewhere`: open findings of days that the run did not look at.
    """

    name: str
    error: str | None
    open: int
    new: int
    resolved: int
    days: int
    elsewhere: int
    seen_at: datetime | None


def render(
    run: Mapping[str, Any],
    days: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, Any]],
    trend: Sequence[Mapping[str, Any]],
    elsewhere: Mapping[date, int],
    *,
    base_url: str | None,
    installations: Sequence[InstallationShown] = (),
) -> str:
    """Return the page.

    `run`, `days`, `findings`: rows of reconciliation_run, reconciliation_day and finding, of this run, the findings
    also with the name of their `subscription`, None if it is unknown; `trend`: day, state, counts, found and score of
    the last days; `elsewhere`: open findings of days that the run did not cover, the newest first. `base_url`: the URL
    of the service, for links; without it the page has no links. Raises ValueError if it is not an http or https URL.

    `installations`: of a page about several; then days and findings have `installation` and `base`, its name and the
    URL of its service, and there are no plots.
    """
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise ValueError("base_url must begin with http:// or https://")
    kinds = _by_kind(run, days, [row for row in findings if row["resolved_at"] is None])
    resolved = [row for row in findings if row["resolved_at"] is not None]
    newest = sorted(days, key=lambda row: row["day"], reverse=True)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            days=newest,
            kinds=kinds,
            found=max(sum(found.count for found in kinds), run["open"]),
            resolved=resolved[:MOST_ROWS],
            elsewhere=list(elsewhere.items())[:NAMED_DAYS],
            elsewhere_days=len(elsewhere),
            found_elsewhere=sum(elsewhere.values()),
            drawn=[] if installations else [_drawn(row) for row in newest[:DRAWN_DAYS]],
            installations=installations,
            failed=[one.name for one in installations if one.error is not None],
            trend=of_trend(trend),
            scores=of_scores(trend),
            parts=PARTS,
            tables=TABLES,
            base=None if base_url is None else base_url.rstrip("/"),
        )
    )


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "number": lambda value: f"{value:,}",
        "time": _time,
        "duration": _took,
        "score": _score,
        "details": details_of,
        "subject": subject_of,
        "linked": linked,
        "of_any": lambda rows, name: any(row.get(name) is not None for row in rows),
        "called": name_of_kind,
        "upperfirst": lambda text: text[:1].upper() + text[1:],
        "code": _code,
        "segment": lambda value: quote(str(value), safe=""),
        "svg": Markup,  # made by spark/report/svg.py, which escapes the words in it
    }
    return made


def _by_kind(
    run: Mapping[str, Any], days: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]
) -> list[Found]:
    """Return the kinds with findings, in the order of MEANINGS; unknown kinds come last."""
    counts: dict[str, int] = defaultdict(int)
    for row in days:
        for kind, count in row["found"].items():
            counts[kind] += count
    rows: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for finding in findings:
        rows[finding["kind"]].append(finding)
    order = {kind: place for place, kind in enumerate(MEANINGS)}
    here = sorted({kind for kind in counts if counts[kind]} | set(rows), key=lambda kind: (order.get(kind, 99), kind))
    return [
        Found(
            kind,
            max(counts[kind], len(rows[kind])),
            sum(_is_new(run, row) for row in rows[kind]),
            [dict(row) | {"new": _is_new(run, row)} for row in rows[kind][:MOST_ROWS]],
            *MEANINGS.get(kind, ()),
        )
        for kind in here
    ]


def is_new(run: Mapping[str, Any], finding: Mapping[str, Any]) -> bool:
    """Whether the run is the first that found it; a run without a database has no older findings."""
    return run["run_id"] is not None and bool(finding["first_run"] == run["run_id"])


def _is_new(run: Mapping[str, Any], finding: Mapping[str, Any]) -> bool:
    return bool(finding["new"]) if "new" in finding else is_new(run, finding)


def _drawn(row: Mapping[str, Any]) -> DrawnDay:
    figures = row["figures"]
    if not figures:
        return DrawnDay(row["day"], [], [])
    listed = [_subscription(one, name_of(one), figures) for one in figures["subscriptions"]]
    if figures["others"]:
        others = figures["others"]
        listed.append(_subscription(others, f"{others['subscriptions']:,} others", figures))
    return DrawnDay(row["day"], of_day(figures), listed)


def _subscription(one: Mapping[str, Any], name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: one[key] for key in ("delivered", "dropped", "waiting", "dead")}
    spread = {key: within(one["latency"], figures["from_s"], share) for key, share in (("half", 0.5), ("most", 0.99))}
    return {"name": name, "again": sum(one["attempts"][1:]), **numbers, **spread}


def details(detail: Mapping[str, Any] | str) -> list[tuple[str, str]]:
    """Return a finding's detail, name by name. The detail is an object, or the JSON text of one."""
    known = json.loads(detail) if isinstance(detail, str) else detail
    said = [(str(name), value) for name, value in known.items() if value is not None]
    return [(name.replace("_", " "), _cut(_said(value, name))) for name, value in said]


def details_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a finding's detail without the name of its subscription, which has a column of its own."""
    name = row.get("subscription")
    return [one for one in details(row["detail"]) if name is None or one != ("name", name)]


def subject_of(row: Mapping[str, Any]) -> str:
    """Return a finding's subject without the number of the subscription at its end, which has a column of its own."""
    subject, number = str(row["subject"]), row.get("subscription_id")
    return subject if number is None or not row.get("subscription") else subject.removesuffix(f":{number}")


def linked(text: str, base: str | None) -> str:
    """Return a text whose ids of transactions and messages are links to the transactions; plain without a base URL."""
    if base is None:
        return text
    parts, end = [], 0
    for found in _ID.finditer(text):
        link = Markup('<a href="{}/transactions/{}">{}</a>').format(base, found[1], found[0])
        parts += [escape(text[end : found.start()]), link]
        end = found.end()
    return Markup().join([*parts, escape(text[end:])])


def _said(value: Any, name: str = "") -> str:
    if isinstance(value, list):
        return ", ".join(_said(each, name) for each in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{each} {_said(inner, each)}" for each, inner in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value in WORDS.get(name, {}):
        return WORDS[name][value]
    return "none" if value is None else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _code(text: str) -> Markup:
    """Format text between backticks as code."""
    parts = text.split("`")
    return Markup().join(Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts))


def _time(at: datetime | None) -> str:
    return "unknown" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _score(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")


def _took(seconds: float) -> str:
    """Return a duration as text; `under 1 ms` for a shorter one."""
    return "under 1 ms" if seconds < 0.001 else duration(seconds)
