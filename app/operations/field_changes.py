"""Compare a resource before and after a PUT: which fields changed, and which of them the request had left out."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

# Fields that are objects of their own fields. `filters.headers` and `destination.headers` are values.
NESTED = ("destination", "filters")


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the fields that differ, in the order of `after`, with those of a nested object as `destination.url`.

    A nested object that is new, or gone, or a destination of another type, is one field.
    """
    return [path for name in after for path in _changed(name, before.get(name), after[name])]


def reset_fields(changed: Collection[str], wanted: BaseModel) -> list[str]:
    """Return the changed fields that a PUT did not contain: they got their defaults."""
    given = set(_given(wanted))
    return [path for path in changed if path not in given]


def _changed(name: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if name not in NESTED or before is None or after is None or before.get("type") != after.get("type"):
        yield name
        return
    yield from (f"{name}.{field}" for field in after if before.get(field) != after[field])


def _given(wanted: BaseModel) -> Iterator[str]:
    for name in wanted.model_fields_set:
        yield name
        value = getattr(wanted, name)
        if name in NESTED and isinstance(value, BaseModel):
            yield from (f"{name}.{field}" for field in value.model_fields_set)
