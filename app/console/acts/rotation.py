"""The pages of a secret's rotation: what they say of an earlier one, and how a form rotates no later secret."""

from dataclasses import replace
from typing import Any

from app.console.acts.act import FormField, Preview
from app.console.rendering import exact
from app.console.visit import Visit
from app.routers.secret_rotation import SecretState
from app.schemas.producer_groups import NewSecret

_BEFORE = (
    "The current secret is less than 24 hours old, and another person may have given it to receivers. They refuse "
    "requests from 24 hours after this rotation on, unless they get the new secret."
)
_AFTER = (
    "The secret that this one replaces was less than 24 hours old, and another person may have given it to receivers. "
    "Give them the new one within 24 hours."
)


# The field of the form that holds the version of the secrets that the person saw.
_SEEN = "seen"


def with_state(preview: Preview, state: SecretState) -> Preview:
    """Return a preview whose form rotates this secret only. It says so if a former one signs."""
    fields = (*preview.fields, FormField(_SEEN, "", "hidden", state.version))
    if state.former_signs_until is None:
        return replace(preview, fields=fields)
    facts = [*preview.facts, ("a former secret signs until", exact(state.former_signs_until))]
    return replace(preview, facts=[*facts, ("rotated already", _BEFORE)], fields=fields)


def seen_by(visit: Visit) -> str:
    """Return the version of the secrets that the form shows; empty: none, which no secret has."""
    return visit.form.get(_SEEN, "")


def overlap_of(made: NewSecret) -> list[tuple[str, Any]]:
    """Return what the page with the new secret says of an earlier rotation."""
    if made.earlier_signs_until is None:
        return []
    return [("an earlier secret signs until", exact(made.earlier_signs_until)), ("rotated before", _AFTER)]
