"""Builds the report's plots from a day's figures (spark/transforms/figures.py) and from the last days."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import accumulate
from typing import Any

from spark.report.svg import Strip, strips
from spark.score import PARTS

# How many subscriptions are drawn; the table has all of them.
DRAWN_SUBSCRIPTIONS = 12
TREND_DAYS = 30
SCORE_DAYS = 28
_NAME = 28  # characters that have room above a strip, beside its remark
_HOURS = tuple((quarters, f"{quarters // 4:02}:00") for quarters in (0, 24, 48, 72, 96))


@dataclass(frozen=True)
class Drawing:
    """A plot with its title and an optional remark; `svg` is None if there is no data."""

    title: str
    svg: str | None
    remark: str = ""


def of_day(figures: Mapping[str, Any]) -> list[Drawing]:
    """Return a day's plots; none for a day without rows."""
    if not (figures and (figures["subscriptions"] or any(map(any, figures["outcomes"].values())))):
        return []
    return [_outcomes(figures), _verdicts(figures), _checks(figures), _latencies(figures), _tries(figures)]


def of_trend(trend: Sequence[Mapping[str, Any]]) -> Drawing:
    """Return the plot of the last TREND_DAYS days, including days without a run; no plot for a single day."""
    days: dict[date, Mapping[str, Any]] = {row["day"]: row for row in trend}
    if len(days) < 2:
        return Drawing("The last days", None)
    every = _every(days, TREND_DAYS)
    first, last = every[0], every[-1]
    found = [sum(days[day]["found"].values()) if day in days else 0 for day in every]
    hollow = frozenset(n for n, day in enumerate(every) if day in days and days[day]["state"] == "provisional")
    rows = [
        _of_table(name, table, days, every, hollow) for name, table in (("messages", "half"), ("receipts", "receipt"))
    ]
    rows.append(Strip("findings", found, _most(found), alarming=True, hollow=hollow))
    svg = strips(rows, _dates(every), span=(0, len(every)), title=f"Messages, receipts and findings, {first} to {last}")
    looked_at = [count for day, count in zip(every, found, strict=True) if day in days]
    parts = (
        f"{looked_at.count(0)} of {_count(len(every), 'day')} proved",
        f"{len(looked_at) - looked_at.count(0)} with findings",
        f"{len(every) - len(looked_at)} not covered",
    )
    return Drawing(f"The last {_count(len(every), 'day')}", svg, f"{', '.join(parts)}. Outlines: provisional.")


def of_scores(trend: Sequence[Mapping[str, Any]]) -> Drawing:
    """Return the plot of what the last SCORE_DAYS days lack of a score of 100, by part; no plot for a single day."""
    days = {row["day"]: row["score"] for row in trend if row.get("score")}
    title = "What the score lacks"
    if len(days) < 2:
        return Drawing(title, None)
    every = _every(days, SCORE_DAYS)
    rows = [_of_part(part, [days.get(day, {}).get(part) for day in every]) for part in PARTS]
    svg = strips(rows, _dates(every), span=(0, len(every)), title=f"{title}, {every[0]} to {every[-1]}")
    remark = "Points below 100, each part on its own scale. A day without a bar has 100, or no score."
    return Drawing(f"The score of the last {_count(len(every), 'day')}", svg, remark)


def _of_part(part: str, scores: Sequence[float | None]) -> Strip:
    known = [score for score in scores if score is not None]
    last = "no score" if scores[-1] is None else f"last {scores[-1]:g}"
    remark = f"{last}, lowest {min(known):g}" if known else last
    # In hundredths of a point, because bars are whole numbers.
    lacks = [0 if score is None else round(10_000 - 100 * score) for score in scores]
    return Strip(part, lacks, remark, alarming=True)


def _every(days: Collection[date], at_most: int) -> list[date]:
    """Return the days from the first to the last one, the last `at_most` of them."""
    last = max(days)
    first = max(min(days), last - timedelta(days=at_most - 1))
    return [first + timedelta(days=number) for number in range((last - first).days + 1)]


def _dates(every: Sequence[date]) -> list[tuple[float, str]]:
    return [(place + 0.5, f"{every[place]:%m-%d}") for place in sorted({0, len(every) // 2, len(every) - 1})]


def within(counts: Sequence[int], from_s: Sequence[float], share: float) -> str:
    """Return the upper bound of the bucket that completes that share of durations; an empty text if there are none."""
    needed = share * sum(counts)
    if not needed:
        return ""
    place = next(place for place, sum_of in enumerate(accumulate(counts)) if sum_of >= needed)
    return duration(from_s[place + 1]) if place + 1 < len(from_s) else f"over {duration(from_s[-1])}"


def duration(seconds: float) -> str:
    """Return a duration as text, to two digits."""
    for unit, length, until in (("ms", 0.001, 1.0), ("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until:
            return f"{seconds / length:.3g} {unit}" if length <= 1 else f"{seconds / length:.2g} {unit}"
    return f"{seconds / 86_400:.2g} days"


def _outcomes(figures: Mapping[str, Any]) -> Drawing:
    outcomes = figures["outcomes"]
    rows = [
        Strip(name.replace("_", " "), counts, _in_all(counts), alarming=name in ("parked", "undecided"))
        for name, counts in outcomes.items()
    ]
    title = "Transactions by outcome, over the day"
    return Drawing(title, strips(rows, _HOURS, span=(0, 96), title=title), "By the time of the half, UTC.")


def _verdicts(figures: Mapping[str, Any]) -> Drawing:
    rows = [Strip(f"by {source}", counts, _spread(counts, figures)) for source, counts in figures["verdict"].items()]
    return _durations("Time from half to verdict", [row for row in rows if any(row.counts)], figures)


def _checks(figures: Mapping[str, Any]) -> Drawing:
    title, counts = "Check-backs per transaction", figures["checks"]
    checked = sum(counts[1:])
    if not checked:
        return Drawing(title, None, "No transaction was checked.")
    last = max(place for place, count in enumerate(counts) if count)
    most = len(counts) - 1
    ticks = [(n + 0.5, f"{n} or more" if n == most else str(n)) for n in (1, 5, 10, 15, most) if n <= last]
    remark = f"{checked:,} of {_count(sum(counts), 'transaction')}"
    svg = strips([Strip("checked", counts, remark)], ticks, span=(1, max(last + 1, 6)), title=f"{title}: {remark}")
    return Drawing(title, svg)


def _latencies(figures: Mapping[str, Any]) -> Drawing:
    rows = [Strip(name, one["latency"], _spread(one["latency"], figures)) for name, one in _drawn(figures)]
    one_in = figures["latency_of_one_in"]
    part = "" if one_in == 1 else f" From one in {one_in} messages."
    drawing = _durations("Delivery latency by subscription", [row for row in rows if any(row.counts)], figures)
    return Drawing(drawing.title, drawing.svg, f"From the commit, or from the due time, to the receipt.{part}")


def _tries(figures: Mapping[str, Any]) -> Drawing:
    title = "Deliveries with more than one attempt"
    rows, most = [], 0
    for name, one in _drawn(figures):
        again, delivered = sum(one["attempts"][1:]), one["delivered"]
        if again:
            rows.append(Strip(name, one["attempts"], f"{again:,} of {delivered:,} ({again / delivered:.2%})"))
            most = len(one["attempts"])
    every = [*figures["subscriptions"], *([figures["others"]] if figures["others"] else [])]
    dead, waiting = (sum(one[name] for one in every) for name in ("dead", "waiting"))
    if not rows:
        first = "Every other delivery" if dead or waiting else "Every delivery"
        return Drawing(title, None, f"{_unsettled(dead, waiting)}{first} succeeded at the first attempt.")
    ticks = [(n - 0.5, f"{n} or more" if n == most else str(n)) for n in (2, 5, 10, most)]
    remark = f"By the number of attempts. {_unsettled(dead, waiting)}".rstrip()
    return Drawing(title, strips(rows, ticks, span=(1, most), title=title), remark)


def _unsettled(dead: int, waiting: int) -> str:
    """Return how many deliveries did not succeed, as a sentence; an empty text if none."""
    parts = [f"{_count(dead, 'dead letter')}" if dead else "", f"{waiting:,} waiting" if waiting else ""]
    return f"{' and '.join(filter(None, parts))}. ".capitalize() if dead or waiting else ""


def _drawn(figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(_short(name_of(one)), one) for one in figures["subscriptions"][:DRAWN_SUBSCRIPTIONS]]


def name_of(one: Mapping[str, Any]) -> str:
    """Return the display name of a subscription in the figures."""
    return f"subscription {one['subscription_id']}" if one["name"] is None else str(one["name"])


def _durations(title: str, rows: list[Strip], figures: Mapping[str, Any]) -> Drawing:
    """Draw buckets of time, from the first to the last one in use, in whole decades."""
    if not rows:
        return Drawing(title, None)
    places = [place for row in rows for place, count in enumerate(row.counts) if count]
    from_s = figures["from_s"]
    first, last = min(places) // 3 * 3, min(-(-(max(places) + 1) // 3) * 3, len(from_s))
    step = 3 if last - first <= 18 else 6
    ticks = [(place, duration(from_s[place])) for place in range(first, min(last + 1, len(from_s)), step)]
    return Drawing(title, strips(rows, ticks, span=(first, last), title=title))


def _spread(counts: Sequence[int], figures: Mapping[str, Any]) -> str:
    if not any(counts):
        return ""
    half, most = (within(counts, figures["from_s"], share) for share in (0.5, 0.99))
    return f"50 % ≤ {half}, 99 % ≤ {most}".replace("≤ over", ">")


def _of_table(
    name: str, table: str, days: Mapping[date, Mapping[str, Any]], every: Sequence[date], hollow: frozenset[int]
) -> Strip:
    counts = [days[day]["counts"].get(table, 0) if day in days else 0 for day in every]
    return Strip(name, counts, _most(counts), hollow=hollow)


def _in_all(counts: Sequence[int]) -> str:
    return f"{sum(counts):,}, at most {max(counts):,} in 15 min" if any(counts) else "none"


def _most(counts: Sequence[int]) -> str:
    return f"at most {max(counts):,} a day" if any(counts) else "none"


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}" + ("" if number == 1 else "s")


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
