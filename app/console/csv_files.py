"""The lists of the console as CSV files."""

import json
from collections.abc import Iterable, Sequence
from csv import writer
from io import StringIO
from typing import Any

# The beginnings of a cell that spreadsheets run as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]], lacks: str | None) -> str:
    """Return a CSV file. `lacks`: what the file does not have, for its last line; None: nothing."""
    text = StringIO()
    out = writer(text)
    out.writerow(header)
    out.writerows([_cell(value) for value in row] for row in rows)
    if lacks is not None:
        out.writerow([f"This file is not complete. {lacks}"])
    return text.getvalue()


def _cell(value: Any) -> str:
    text = _text(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
