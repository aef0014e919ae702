"""Bounds the series of a label whose values callers choose, such as topics."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

# The value of the label for all values beyond the limit. No subscription may have this name. A producer group, a topic
# or a key may, as it may have almost any, but none is likely to.
OTHER = "(other)"

Value = TypeVar("Value", bound=Hashable)
Series = TypeVar("Series")


class LimitedLabel(Generic[Value, Series]):
    """The series of one label: the first `most` values have their own, all further values share one.

    Invariants: a value that has a series keeps it while the process runs. A value beyond the limit is not stored, so
    memory is bounded however many values come.
    """

    def __init__(self, most: int, make: Callable[[Value], Series], make_other: Callable[[], Series]) -> None:
        self._most, self._make, self._make_other = most, make, make_other
        self._series: dict[Value, Series] = {}
        self._other: Series | None = None

    def of(self, value: Value) -> Series:
        """Return the series of a value."""
        found = self._series.get(value)
        return found if found is not None else self._first(value)

    def learn(self, values: Iterable[Value]) -> None:
        """Make the series of these values, which are in the order of their age, before others come."""
        for value in values:
            self.of(value)

    def _first(self, value: Value) -> Series:
        if len(self._series) < self._most:
            found = self._series[value] = self._make(value)
            return found
        if self._other is None:
            self._other = self._make_other()
        return self._other
