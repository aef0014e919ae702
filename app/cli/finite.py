"""The callback of options whose value is a number: float() also reads `nan` and `inf`."""

from math import isfinite

import typer


def finite(value: float | None) -> float | None:
    """Return an option's value. Raises typer.BadParameter for one that is no finite number."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value
