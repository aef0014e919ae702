"""Print tables and lists of fields: as wide as the terminal, wrapped and never cut; in a pipe one line for each row."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

NARROWEST = 80
# Wider than any row.
_UNWRAPPED = 1_000_000
# Control characters but for the line break, line separators, directions of text, and halves of surrogate pairs, which
# no encoding has.
_UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

_LINE_BREAK = re.compile("\r?\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, whole: Sequence[str] = ()) -> None:
    """Print rows under their columns' names; columns in `whole` (ids to copy) never wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name.upper(), overflow="fold", no_wrap=name in whole)
    for row in rows:
        table.add_row(*map(_shown, row))
    _print(table)


def print_fields(fields: Mapping[str, str | None]) -> None:
    """Print one name and value per line, in a pipe also a value of several lines; omit fields without a value."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value is not None:
            table.add_row(name, _shown(value))
    _print(table)


def print_new_secret(answer: dict[str, Any]) -> None:
    """Print the answer of a secret's rotation."""
    until = moment(answer["former_signs_until"])
    # Absent from the answer of an older service.
    earlier = answer.get("earlier_signs_until")
    fields = {"secret": answer["secret"], "the former signs until": until}
    print_fields(fields if earlier is None else {**fields, "an earlier one signs until": moment(earlier)})


def reset_line(answer: dict[str, Any]) -> dict[str, str | None]:
    """Return the line of a PUT's answer that names the fields that got their defaults, if any did."""
    return {"left out, so now the default": ", ".join(answer.get("reset") or []) or None}


def _print(table: Table) -> None:
    """Print as wide as the terminal, at least 80 columns, or unwrapped in a pipe; no line ends in blanks."""
    screen = Console(file=sys.stdout, highlight=False)
    width = max(NARROWEST, screen.width) if is_for_people() else _UNWRAPPED
    # Values are data: `[bold]` and `:x:` in them stay as they are.
    page = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width)
    with page.capture() as printed:
        page.print(table)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _shown(value: str) -> str:
    """Return a value as it is printed: for programs on one line."""
    return harmless(value if is_for_people() else ", ".join(_LINE_BREAK.split(value.rstrip("\r\n"))))


def is_for_people() -> bool:
    """Return whether a width counts: there is a terminal, or COLUMNS names one. Programs read whole lines."""
    return sys.stdout.isatty() or bool(os.environ.get("COLUMNS"))


def harmless(value: str) -> str:
    """Return a text with the characters that would command a terminal, or reorder its text, as `\\u…`; not `\\n`."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", value)


def moment(value: str | None) -> str | None:
    """Return a time of the API as text: UTC to the second; None for None."""
    if value is None:
        return None
    return f"{datetime.fromisoformat(value).astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def short_moment(value: str) -> str:
    """Return a time of the API for a narrow column: UTC to the minute, without the year."""
    return f"{datetime.fromisoformat(value).astimezone(UTC):%m-%d %H:%M}"


def span(seconds: float) -> str:
    """Return a number of seconds in its largest fitting unit, such as `72 h`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def text(value: Any) -> str | None:
    """Return a value of an answer as text: JSON for a nested value, None for null."""
    if value is None or isinstance(value, str):
        return value
    return json_text(value)


def json_text(value: Any) -> str:
    """Return a value as JSON on one line; a text has quotes, so that it differs from a number, or from null."""
    return json.dumps(value, ensure_ascii=False)


def duration(seconds: float) -> str:
    """Return a number of seconds in one unit for people, such as `12 min`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def age(value: str, now: datetime) -> str:
    """Return a time of the API as its distance from `now`, such as `12 min ago`."""
    apart_s = (now - datetime.fromisoformat(value)).total_seconds()
    return f"{duration(apart_s)} ago" if apart_s >= 0 else f"in {duration(-apart_s)}"


def amount(count: int) -> str:
    """Return a count with separators for thousands."""
    return f"{count:,}"


def share(page: dict[str, Any]) -> str:
    """Return how many of a counted list's items a page has."""
    total = page["total"]
    return f"{amount(len(page['items']))} of {'' if total['exact'] else 'at least '}{amount(total['count'])}."


def bytes_text(count: int) -> str:
    """Return a number of bytes with its unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
