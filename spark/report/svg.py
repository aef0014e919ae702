"""Draws a report's plots as SVG for its page.

All plots have the same form: strips, one above the other, each with a name, a number and its own scale. So a rare
outcome is as visible as a frequent one, and no information depends on colors alone. Text stays text. Colors are CSS
variables of the page, so that they follow its light or dark mode.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import count
from typing import Any
from xml.sax.saxutils import escape

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# The colors in matplotlib, and the page's variables for them.
INK, MUTED, GRID, BAR, ALARM = "#010203", "#010204", "#010205", "#010206", "#010207"
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", BAR: "--bar", ALARM: "--alarm"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "halfnote",
    "font.size": 8,
    # Used for measurement only; the page has its own fonts.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
}
_FONT = "font-family: 'DejaVu Sans', sans-serif"
# In inches of 72 points; the page shows a point as about 1.5 pixels.
WIDTH, STRIP, AXIS = 4.2, 0.46, 0.34
_HEIGHT = 0.52  # of a strip's bars; its name stands above


_numbers = count()


@dataclass(frozen=True)
class Strip:
    """One row of bars, with its name at the left and its number or remark at the right.

    `alarming`: in the color of findings. `hollow`: the places that are drawn as outlines.
    """

    name: str
    counts: Sequence[int]
    remark: str = ""
    alarming: bool = False
    hollow: frozenset[int] = frozenset()


def strips(rows: Sequence[Strip], ticks: Sequence[tuple[float, str]], *, span: tuple[int, int], title: str) -> str:
    """Return an <svg> of rows over the places `span` (from, to) of their counts.

    `ticks`: labels by their place on the axis. `title`: the text for screen readers.
    """
    with rc_context(_STYLE):
        height = len(rows) * STRIP + AXIS
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((0.012, AXIS / height, 0.976, 1 - AXIS / height))
        for index, row in enumerate(rows):
            _draw(axes, row, -index, span)
        _dress(axes, len(rows), ticks, span)
        return _svg(figure, title)


def _draw(axes: Axes, row: Strip, bottom: float, span: tuple[int, int]) -> None:
    """Draw a strip's bars, base line and texts. Every count above zero has a visible bar."""
    first, last = span
    counts = row.counts[first:last]
    most = max(counts, default=0)
    heights = [max(each / most * _HEIGHT, 0.035) if each else 0.0 for each in counts]
    color = ALARM if row.alarming else BAR
    solid = [0.0 if first + place in row.hollow else height for place, height in enumerate(heights)]
    axes.stairs([bottom + h for h in solid], range(first, last + 1), baseline=bottom, fill=True, color=color, lw=0)
    for place in sorted(place for place in row.hollow if first <= place < last and row.counts[place]):
        edges = [place + 0.12, place + 0.88]
        axes.stairs([bottom + heights[place - first]], edges, baseline=bottom, color=color, lw=0.7)
    axes.plot([first, last], [bottom, bottom], color=MUTED, lw=0.6)
    words: dict[str, Any] = {"y": bottom + 0.63, "va": "baseline", "transform": axes.get_yaxis_transform()}
    axes.text(0, s=row.name, color=INK, ha="left", weight="bold", parse_math=False, **words)
    axes.text(1, s=row.remark, color=INK, ha="right", parse_math=False, **words)


def _dress(axes: Axes, rows: int, ticks: Sequence[tuple[float, str]], span: tuple[int, int]) -> None:
    axes.set_xlim(*span)
    axes.set_ylim(-(rows - 1) - 0.06, 0.94)
    axes.set_yticks([])
    axes.set_xticks([place for place, _ in ticks], [name for _, name in ticks])
    axes.tick_params(colors=MUTED, length=2.5, width=0.6, pad=2, labelsize=7.5)
    axes.grid(axis="x", color=GRID, lw=0.6)
    axes.set_axisbelow(True)
    # Align the labels at the edges inward.
    near = (span[1] - span[0]) * 0.05
    for label, (place, _) in zip(axes.get_xticklabels(), ticks, strict=True):
        if place - span[0] < near:
            label.set_horizontalalignment("left")
        elif span[1] - place < near:
            label.set_horizontalalignment("right")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.patch.set_visible(False)
    axes.figure.patch.set_visible(False)


def _svg(figure: Figure, title: str) -> str:
    """Return the figure's <svg> without a prologue and style sheets, with ids that are unique within a page.

    Texts in it are escaped, so the patterns here cannot match across a text.
    """
    FigureCanvasSVG(figure)
    made = StringIO()
    figure.savefig(made, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = made.getvalue()
    text = text[text.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    text = text[text.index(">") + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    own = f"p{next(_numbers)}-"
    text = re.sub(r'\bid="', f'id="{own}', text)
    text = text.replace("url(#", f"url(#{own}").replace('xlink:href="#', f'href="#{own}')
    text = text.replace(_FONT, "font-family: var(--sans)")
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    label = escape(title, {'"': "&quot;"})
    return f'<svg class="plot" {box[0]} role="img" aria-label="{label}">' + re.sub(r"\s*\n\s*", "\n", text)
