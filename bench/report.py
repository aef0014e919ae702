"""The results of a benchmark: figures, the bars for them, a table for people and a JSON file for programs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value. `ratio` is the value divided by the figure `ratio_to`, from interleaved runs.

    `between` is the range of the runs whose median the value is.
    """

    value: float
    unit: str
    ratio_to: str | None = None
    ratio: float | None = None
    between: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit and the measured value. With an `interval`, the bar is missed only if the whole interval is beyond it."""

    claim: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def held(self) -> bool:
        """Whether the value, or a part of its interval, keeps the limit."""
        low, high = self.interval or (self.value, self.value)
        return (self.at_least is None or high >= self.at_least) and (self.at_most is None or low <= self.at_most)

    def __str__(self) -> str:
        limit = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        between = f" ({self.interval[0]:.3f} to {self.interval[1]:.3f})" if self.interval else ""
        verdict = "holds" if self.held else "BELOW THE BAR" if self.at_least is not None else "ABOVE THE BAR"
        return f"{verdict}: {self.claim}: {self.value:.2f}{between}, {limit}"


@dataclass(slots=True)
class Report:
    """The figures of one benchmark, in the order in which they were added."""

    name: str
    title: str
    figures: dict[str, Figure] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        ratio_to: str | None = None,
        ratio: float | None = None,
        between: tuple[float, float] | None = None,
    ) -> None:
        """Add a figure. Without a given ratio, it is the quotient of the two values."""
        if ratio_to is not None and ratio is None:
            ratio = value / self.figures[ratio_to].value
        self.figures[name] = Figure(value, unit, ratio_to, ratio, between)

    def hold(
        self,
        claim: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        interval: tuple[float, float] | None = None,
    ) -> None:
        """Add a bar: a value with its limit."""
        self.bars.append(Bar(claim, value, at_least, at_most, interval))

    def break_off(self, what: str) -> None:
        """Record a part that did not finish: its figures are missing, which is worse than a missed bar."""
        self.broken.append(what)

    def as_json(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's content: `{"machine", "figures": {name: {"value", "unit"}}}`.

        A figure also has `ratio_to` and `ratio`, and `low` and `high`, if they are known.
        """
        return {"machine": dict(machine), "figures": {name: _plain(figure) for name, figure in self.figures.items()}}

    def write(self, machine: Mapping[str, Any], directory: Path = OUT) -> Path:
        """Write `<directory>/<name>.json` and return its path."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        path.write_text(json.dumps(self.as_json(machine), indent=2) + "\n", encoding="utf-8")
        return path

    def __str__(self) -> str:
        lines = [f"\n{self.title}"]
        width = max((len(name) for name in self.figures), default=0)
        for name, figure in self.figures.items():
            compared = f"   {figure.ratio:.2f} of {figure.ratio_to}" if figure.ratio is not None else ""
            if figure.between is not None:
                compared += f"   {_digits(figure.between[0])} to {_digits(figure.between[1])}"
            lines.append(f"  {name:<{width}}  {_digits(figure.value):>10} {figure.unit:<12}{compared}".rstrip())
        broken = (f"NOT FINISHED: {what}" for what in self.broken)
        return "\n".join([*lines, *(f"  {line}" for line in (*self.notes, *self.bars, *broken))])


def _plain(figure: Figure) -> dict[str, Any]:
    plain: dict[str, Any] = {"value": round(figure.value, 4), "unit": figure.unit}
    if figure.ratio is not None:
        plain |= {"ratio_to": figure.ratio_to, "ratio": round(figure.ratio, 4)}
    if figure.between is not None:
        plain |= {"low": round(figure.between[0], 4), "high": round(figure.between[1], 4)}
    return plain


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
