"""The cursor of a transaction's deliveries: the place of the last one of a page."""

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from app.field_rules import NAME_MAX, SUBSCRIPTION_NAME_PATTERN
from app.store.coordinator.deliveries import DeliveryPlace

# Position, id of the subscription, replay and name of the subscription.
_CURSOR = f"([0-9]{{1,2}})-([0-9]{{1,9}})-([0-9]{{1,9}})-({SUBSCRIPTION_NAME_PATTERN[1:-1]})"
_cursor = re.compile(_CURSOR).fullmatch


def _is_cursor(value: str) -> str:
    found = _cursor(value)
    if found is None or len(found[4]) > NAME_MAX:
        raise ValueError("send the `deliveries_cursor` or `next_cursor` of the previous answer")
    return value


DeliveryCursor = Annotated[
    str, AfterValidator(_is_cursor), WithJsonSchema({"type": "string", "pattern": f"^{_CURSOR}$"})
]


def place_of(cursor: DeliveryCursor) -> DeliveryPlace:
    """Return the place that a cursor names."""
    found = _cursor(cursor)
    assert found is not None
    return DeliveryPlace(int(found[1]), found[4], int(found[2]), int(found[3]))


def cursor_of(place: DeliveryPlace | None) -> str | None:
    """Return the cursor of the deliveries after a place; None: there are no more."""
    if place is None:
        return None
    return f"{place.position}-{place.subscription_id}-{place.replay}-{place.subscription}"
