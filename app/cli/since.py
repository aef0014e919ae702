"""A time as a distance from now, such as `1h`, for the filters of lists."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from app.cli.errors import WRONG_USAGE, Refusal

Since = Annotated[str | None, typer.Option(help="only of this long ago or less, such as 30s, 15m, 1h or 2d")]

_form = re.compile(r"([0-9]{1,6})(s|m|h|d)", re.A).fullmatch
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def time_of(since: str | None, after: str | None, option: str, now: datetime | None = None) -> str | None:
    """Return `after`, or the time that is `since` before now, in RFC 3339. `option` is the name of `after`'s option.

    Raises Refusal.
    """
    if since is None:
        return after
    if after is not None:
        raise Refusal(f"Give --since or {option}, not both.", code=WRONG_USAGE)
    found = _form(since)
    if found is None:
        raise Refusal(f"`{since}` is no length of time: write 30s, 15m, 1h or 2d.", code=WRONG_USAGE)
    try:
        at = (now or datetime.now(UTC)) - timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        raise Refusal(f"`{since}` is too long ago.", code=WRONG_USAGE) from None
    return at.isoformat()
