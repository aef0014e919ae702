"""Pages of lists in another order than by name: their cursor is how many rows come before a page."""

from collections.abc import Sequence

from app.errors import Invalid

_DIGITS_MAX = 9


def rank_of(cursor: str | None) -> int:
    """Return how many rows come before a page. Raises Invalid."""
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= _DIGITS_MAX):
        raise Invalid("`cursor`: send the `next_cursor` of the previous page, with the same `sort`.", field="cursor")
    return int(cursor)


def next_rank(rank: int, found: Sequence[object], limit: int) -> str | None:
    """Return the cursor of the next page, if one row more than a page was found."""
    return str(rank + limit) if len(found) > limit else None
