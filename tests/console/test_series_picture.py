"""The charts of the overview: lines, gaps and what is said of them."""

from datetime import UTC, datetime, timedelta
from typing import Literal

from app.console.series_picture import HEIGHT, KINDS, TOP, WIDTH, chart_of
from app.schemas.series import Metric, PointShown, SeriesShown

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)


def series(metric: Metric, *values: float | None) -> SeriesShown:
    of_step: Literal["sum", "max"] = "sum" if KINDS[metric].is_rate else "max"
    points = [PointShown(at=AT + timedelta(minutes=at), value=value) for at, value in enumerate(values)]
    return SeriesShown(metric=metric, of_step=of_step, step_s=60, points=points)


def test_a_rate_is_per_second_and_the_step_that_has_not_ended_is_left_out() -> None:
    chart = chart_of(series("halves", 0, 60, 120, 3))
    assert chart.lines == [f"M0,{HEIGHT} L{WIDTH / 2:g},{HEIGHT - (HEIGHT - TOP) / 2:g} L{WIDTH},{TOP}"]
    assert chart.areas == [f"M0,{HEIGHT} L0,{HEIGHT} L150,35 L300,6 L300,{HEIGHT} Z"]
    assert (chart.last, chart.most) == ("2.0", "2.0")
    assert chart.described == "Halves per second: last 2.0, at most 2.0"


def test_a_time_without_figures_is_a_gap() -> None:
    chart = chart_of(series("in_doubt", 1, None, 2, 4, None, 0))
    assert chart.lines == ["M150,35 L225,6"]
    assert chart.dots == [(0.0, 49.5)]
    assert (chart.last, chart.most) == ("4", "4")


def test_nothing_and_only_zeros_are_drawn_flat() -> None:
    nothing = chart_of(series("lag_s", None, None, None))
    assert (nothing.lines, nothing.dots, nothing.last) == ([], [], "no figure")
    assert chart_of(series("lag_s", 0, 0, 0)).lines == [f"M0,{HEIGHT} L{WIDTH},{HEIGHT}"]
    assert chart_of(series("lag_s", 90)).last == "2 min"
