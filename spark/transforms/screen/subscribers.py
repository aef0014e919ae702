"""The subscriptions as plain values, and which messages they take: what spark/transforms/routes.py says in columns."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from spark.transforms.routes import RESERVED


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A row of `routes`; times are microseconds since 1970. `tags` and `headers` None: any."""

    subscription_id: int
    topics: Sequence[str]
    tags: Sequence[str] | None
    headers: Mapping[str, str] | None
    started_after: int
    lowest: int
    matches_since: int
    judged_from: int
    deleted_at: int | None
    matches_until: int | None


def subscribers_of(routes: DataFrame) -> list[Subscriber]:
    """Return the rows of `routes`, by number."""
    names = [field.name for field in fields(Subscriber)]
    plain = [
        F.unix_micros(name).alias(name) if isinstance(routes.schema[name].dataType, TimestampType) else F.col(name)
        for name in names
    ]
    rows = [Subscriber(**row.asDict()) for row in routes.select(*plain).collect()]
    return sorted(rows, key=lambda one: one.subscription_id)


class Takers:
    """Which subscriptions take a topic, each topic looked up once."""

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        self._by_name: dict[str, list[int]] = {}
        self._by_beginning: list[tuple[str, int]] = []
        self._known: dict[str, tuple[int, ...]] = {}
        for place, one in enumerate(subscribers):
            for pattern in one.topics:
                self._by_name.setdefault(pattern, []).append(place)
                if pattern.endswith("*"):
                    self._by_beginning.append((pattern[:-1], place))

    def of(self, topic: str) -> tuple[int, ...]:
        """Return the places of the subscriptions that take a topic."""
        if topic not in self._known:
            reserved = topic.startswith(RESERVED)
            taken = set(self._by_name.get(topic, ()))
            for beginning, place in self._by_beginning:
                if topic.startswith(beginning) and (not reserved or beginning.startswith(RESERVED)):
                    taken.add(place)
            self._known[topic] = tuple(sorted(taken))
        return self._known[topic]


def taking_headers(wanted: Mapping[str, str], sent: Iterable[str | None]) -> list[bool]:
    """Return whether each of the sent headers (a JSON object, or None) has all wanted names and values."""
    return [_has(wanted, one) for one in sent]


def _has(wanted: Mapping[str, str], sent: str | None) -> bool:
    if sent is None:
        return False
    try:
        found = json.loads(sent)
    except ValueError:
        return False
    return isinstance(found, dict) and all(_text(found.get(name)) == value for name, value in wanted.items())


def _text(value: object) -> str | None:
    """Return a JSON value as Spark has it in a map of strings."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
