"""What the pages of a secret's rotation say of an earlier one, which another person may have made."""

from dataclasses import replace
from datetime import datetime
from typing import Any

from app.console.acts.act import Preview
from app.console.rendering import exact
from app.schemas.producer_groups import NewSecret

_BEFORE = (
    "The current secret is less than 24 hours old, and another person may have given it to receivers. They refuse "
    "requests from 24 hours after this rotation on, unless they get the new secret."
)
_AFTER = (
    "The secret that this one replaces was less than 24 hours old, and another person may have given it to receivers. "
    "Give them the new one within 24 hours."
)


def with_overlap(preview: Preview, until: datetime | None) -> Preview:
    """Return a preview that says so if a former secret signs. `until`: when that ends."""
    if until is None:
        return preview
    facts = [*preview.facts, ("a former secret signs until", exact(until)), ("rotated already", _BEFORE)]
    return replace(preview, facts=facts)


def overlap_of(made: NewSecret) -> list[tuple[str, Any]]:
    """Return what the page with the new secret says of an earlier rotation."""
    if made.earlier_signs_until is None:
        return []
    return [("an earlier secret signs until", exact(made.earlier_signs_until)), ("rotated before", _AFTER)]
