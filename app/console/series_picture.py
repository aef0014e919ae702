"""Draws a figure over time as an SVG: the coordinates of its line, its highest value, and what to say of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.console.rendering import duration, number, rate, size
from app.schemas.series import Metric, PointShown, SeriesShown

WIDTH, HEIGHT, TOP = 300, 64, 6


@dataclass(frozen=True, slots=True)
class ChartKind:
    """What a chart is of: its title, how a value is written, and whether values are shown per second."""

    title: str
    written: Callable[[float], str]
    is_rate: bool = False


KINDS: dict[Metric, ChartKind] = {
    "halves": ChartKind("Halves per second", rate, is_rate=True),
    "deliveries": ChartKind("Deliveries per second", rate, is_rate=True),
    "failed_attempts": ChartKind("Failed attempts per second", rate, is_rate=True),
    "in_doubt": ChartKind("In doubt", number),
    "dead_letters": ChartKind("Dead letters", number),
    "lag_s": ChartKind("Oldest lag", duration),
    "database_bytes": ChartKind("Database", lambda value: size(round(value))),
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart to render. `lines` and `areas`: SVG paths, one for each run of steps without a gap."""

    # The metric, or another name.
    metric: str
    title: str
    lines: list[str]
    areas: list[str]
    dots: list[tuple[float, float]]
    last: str
    most: str
    begins: datetime
    described: str


def chart_of(series: SeriesShown) -> Chart:
    """Return the chart of a series with at least one point. The last step, which has not ended, is left out."""
    kind = KINDS[series.metric]
    points = series.points[:-1] if len(series.points) > 1 else series.points
    values = [_shown(point, kind, series.step_s) for point in points]
    return drawn(series.metric, kind, values, points[0].at)


def drawn(name: str, kind: ChartKind, values: Sequence[float | None], begins: datetime) -> Chart:
    """Return the chart of values at equal distances; None: a gap."""
    known = [value for value in values if value is not None]
    highest = max(known, default=0.0)
    runs = _runs(_places(values, highest))
    last = kind.written(known[-1]) if known else "no figure"
    most = kind.written(highest)
    return Chart(
        metric=name,
        title=kind.title,
        lines=["M" + " L".join(f"{x:g},{y:g}" for x, y in run) for run in runs if len(run) > 1],
        areas=[_area(run) for run in runs if len(run) > 1],
        dots=[run[0] for run in runs if len(run) == 1],
        last=last,
        most=most,
        begins=begins,
        described=f"{kind.title}: last {last}, at most {most}",
    )


def _shown(point: PointShown, kind: ChartKind, step_s: int) -> float | None:
    if point.value is None:
        return None
    return point.value / step_s if kind.is_rate else point.value


def _places(values: Sequence[float | None], highest: float) -> list[tuple[float, float] | None]:
    across = WIDTH / max(1, len(values) - 1)
    scale = (HEIGHT - TOP) / highest if highest else 0.0
    return [
        None if value is None else (round(at * across, 1), round(HEIGHT - value * scale, 1))
        for at, value in enumerate(values)
    ]


def _runs(places: Sequence[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for place in places:
        if place is not None:
            runs[-1].append(place)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _area(run: Sequence[tuple[float, float]]) -> str:
    inner = " L".join(f"{x:g},{y:g}" for x, y in run)
    return f"M{run[0][0]:g},{HEIGHT} L{inner} L{run[-1][0]:g},{HEIGHT} Z"
