"""The timeline of a transaction as a picture: a lane for the producer, the checks and each delivery. Pure.

Gaps between times are from milliseconds to days. So the distance of two neighbors grows with the logarithm of the gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from math import log10

from app.console.rendering import duration, exact
from app.schemas.transactions import TimelineEntry, TransactionShown

WIDTH, LEFT, RIGHT, TOP, LANE = 960, 170, 24, 30, 30
TICK_APART = 84
# Marks of the latest entries, and lanes: a picture of thousands is no picture.
MARKS_MOST, LANES_MOST = 400, 40

PRODUCER, CHECKS = "producer", "check-back"
_OF_PRODUCER = ("born", "refused", "reissued", "published")
_OF_CHECKS = ("swept", "check", "parked")
_TONES = {
    "born": "wait",
    "published": "good",
    "delivered": "good",
    "replayed": "good",
    "dead": "bad",
    "dropped": "mute",
    "redelivered": "wait",
    "parked": "bad",
    "refused": "bad",
    "swept": "warn",
    "reissued": "wait",
}
# The lanes that stand above the deliveries, and the tones of deliveries that a crowded picture leaves out first.
_FIRST = {PRODUCER: 0, CHECKS: 1}
_DONE = ("good", "mute")
_OUTCOMES = {"commit": "good", "rollback": "mute", "unknown": "warn", "unanswered": "bad", "lost": "warn"}


@dataclass(frozen=True, slots=True)
class Mark:
    """An event in a lane."""

    x: float
    tone: str
    title: str


@dataclass(slots=True)
class Lane:
    """A row of the picture. `start` and `end`: the bar from its first to its last event."""

    name: str
    y: float
    marks: list[Mark] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    tone: str = "wait"


@dataclass(frozen=True, slots=True)
class Picture:
    """The lanes, and the times on the axis. `left_out`: earlier events; `lanes_left_out`: deliveries."""

    width: int
    height: int
    left: int
    lanes: list[Lane]
    ticks: list[tuple[float, str]]
    left_out: int
    lanes_left_out: int


def picture_of(shown: TransactionShown) -> Picture:
    """Return the picture of a transaction's timeline."""
    entries = shown.timeline[-MARKS_MOST:]
    places = _places([entry.at for entry in entries])
    lanes: dict[str, Lane] = {}
    for entry in entries:
        name = _lane_of(entry, many=len(shown.messages) > 1)
        lane = lanes.setdefault(name, Lane(name, 0.0))
        lane.marks.append(Mark(places[entry.at], _tone(entry), f"{_title(entry)} · {exact(entry.at)}"))
    is_crowded = len(lanes) > LANES_MOST
    found = sorted(lanes.values(), key=lambda lane: (_FIRST.get(lane.name, 2), is_crowded and _tone_of(lane) in _DONE))
    ordered = found[:LANES_MOST]
    for index, lane in enumerate(ordered):
        lane.y = TOP + LANE * index + LANE / 2
        lane.start, lane.end = lane.marks[0].x, lane.marks[-1].x
        lane.tone = _tone_of(lane)
    height = TOP + LANE * len(ordered) + 8
    left_out = len(shown.timeline) - len(entries), len(found) - len(ordered)
    return Picture(WIDTH, height, LEFT, ordered, _ticks(places), *left_out)


def _tone_of(lane: Lane) -> str:
    return lane.marks[-1].tone


def _places(times: Sequence[datetime]) -> dict[datetime, float]:
    distinct = sorted(set(times))
    weights = [0.0]
    for before, after in pairwise(distinct):
        weights.append(weights[-1] + 1 + log10(1 + (after - before).total_seconds() * 1000))
    whole = weights[-1] or 1.0
    room = WIDTH - LEFT - RIGHT
    return {at: LEFT + 8 + (room - 8) * weight / whole for at, weight in zip(distinct, weights, strict=True)}


def _ticks(places: dict[datetime, float]) -> list[tuple[float, str]]:
    """Return labels that do not overlap: the first time, then distances from it."""
    ticks: list[tuple[float, str]] = []
    first = min(places)
    for at, x in places.items():
        if not ticks:
            ticks.append((x, f"{first:%H:%M:%S}"))
        elif x - ticks[-1][0] >= TICK_APART:
            ticks.append((x, f"+{duration((at - first).total_seconds())}"))
    return ticks


def _lane_of(entry: TimelineEntry, *, many: bool) -> str:
    if entry.what in _OF_CHECKS or (entry.what == "verdict" and entry.source in ("check", "policy", "operator")):
        return CHECKS
    if entry.what in _OF_PRODUCER or entry.what == "verdict" or entry.subscription is None:
        return PRODUCER
    position = f" #{(entry.message_id or '').rpartition('-')[2]}" if many else ""
    replay = f" (replay {entry.replay})" if entry.replay else ""
    return f"{entry.subscription}{position}{replay}"


def _tone(entry: TimelineEntry) -> str:
    if entry.what == "verdict":
        return "good" if entry.verdict == "commit" else "mute"
    if entry.what == "check":
        return _OUTCOMES.get(entry.outcome or "", "warn")
    if entry.what == "attempt":
        return "warn"
    return _TONES.get(entry.what, "wait")


def _title(entry: TimelineEntry) -> str:
    parts: list[str] = [entry.what]
    if entry.what == "verdict":
        parts.append(f"{entry.verdict} by {entry.source}")
    if entry.what == "check":
        parts.append(f"{entry.check}: {entry.outcome}")
    if entry.what == "attempt":
        parts.append(f"{entry.attempt}: {entry.outcome}")
    if entry.status is not None:
        parts.append(f"HTTP {entry.status}")
    parts += [text for text in (entry.error, entry.reason) if text]
    return " · ".join(parts)
