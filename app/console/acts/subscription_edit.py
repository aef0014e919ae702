"""Edit a subscription: only the fields that a person changes are sent, after a dry run that shows the difference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from app.console.acts.act import CONFIRMED, Confirm, ConsoleAct, Done, FormField, Preview
from app.console.rendering import command, json, link, state
from app.console.visit import Visit
from app.errors import Invalid
from app.routers.subscriptions import get_subscription, patch_subscription
from app.schemas.subscription_patch import SubscriptionPatch
from app.schemas.subscriptions import SubscriptionAnswer
from app.schemas.validation import checked

_WAS = "was_"
_EFFECT = "Only the fields that you change are changed. Before they are, the next page shows each of them."


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of the form. `read` gets its text, unless that is empty. `nested`: it is a field of `destination`."""

    name: str
    label: str
    read: Callable[[str], Any]
    hint: str = "empty: the default"
    options: tuple[str, ...] = ()
    nested: bool = False


def _list(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _json(text: str) -> Any:
    return msgspec.json.decode(text)


_FIELDS = (
    _Field("topics", "Topics, with commas", _list, "order, billing.*"),
    _Field("url", "URL of the webhook", str, "", nested=True),
    _Field("filters", "Filters, as JSON", _json, '{"tags": ["created"], "headers": {"region": "eu"}}'),
    _Field("ordered", "Order", str, options=("none", "key")),
    _Field("on_dead", "A dead letter, with order by key", str, options=("release", "hold")),
    _Field("shards", "Shards", int),
    _Field("max_in_flight", "In flight at most", int),
    _Field("rate_per_s", "Messages per second at most", float, "empty: no limit"),
    _Field("timeout_s", "Timeout (s)", float),
    _Field("retry", "Retries after (s), with commas", lambda text: [float(one) for one in _list(text)]),
    _Field("expire_after_s", "A waiting message is dead after (s)", float, "empty: no limit"),
    _Field("max_backlog", "Messages that wait at most", int, "empty: no limit"),
)


def _text(shown: SubscriptionAnswer, field: _Field) -> str | None:
    """Return the stored value as the form shows it; None: the subscription has no such field."""
    if field.nested:
        return getattr(shown.destination, field.name, None)
    value = getattr(shown, field.name)
    if value is None:
        return ""
    if field.name == "filters":
        return json(value.model_dump(mode="json", exclude_none=True))
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return _plain(value)


def _plain(value: object) -> str:
    """Return a value with all its digits, and a whole number without a point: what is shown can be sent back."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


async def _preview(visit: Visit) -> Preview:
    shown = await get_subscription(visit.path["name"], visit.runtime, visit.caller)
    fields: list[FormField] = []
    for one in _FIELDS:
        was = _text(shown, one)
        if was is None:
            continue
        given = visit.form.get(one.name, was)
        kind, options = ("select", tuple((word, word) for word in one.options)) if one.options else ("text", ())
        fields.append(FormField(one.name, one.label, kind, given, one.hint, options))
        # What the person saw: a change of another person meanwhile is not undone.
        fields.append(FormField(_WAS + one.name, "", "hidden", visit.form.get(_WAS + one.name, was)))
    said = f"{command('subscriptions', 'patch', shown.name)} rate_per_s=20"
    facts: list[tuple[str, Any]] = [("subscription", shown.name), ("state", state(shown.state))]
    return Preview(shown.name, link("subscriptions", shown.name), facts, _EFFECT, said, fields=tuple(fields))


def _patch(form: dict[str, str]) -> dict[str, Any]:
    """Return the fields that the form changes. Raises Invalid."""
    patch: dict[str, Any] = {}
    for one in _FIELDS:
        text = form.get(one.name, "").strip()
        if one.name not in form or text == form.get(_WAS + one.name, "").strip():
            continue
        try:
            value = one.read(text) if text else None
        except (ValueError, RecursionError, msgspec.DecodeError):
            raise Invalid(f"`{one.name}`: `{text}` cannot be read. {one.label}.", field=one.name) from None
        if one.nested:
            patch.setdefault("destination", {})[one.name] = value
        else:
            patch[one.name] = value
    if not patch:
        raise Invalid("No field is changed.", field="(body)")
    return patch


async def _run(visit: Visit, reason: str) -> Done | Confirm:
    name, patch = visit.path["name"], _patch(visit.form)
    wanted, is_dry = checked(SubscriptionPatch, patch), visit.form.get(CONFIRMED) != "yes"
    before = await get_subscription(name, visit.runtime, visit.caller)
    try:
        after = await patch_subscription(name, wanted, visit.runtime, visit.caller, is_dry, reason)
    except RequestValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "(body)"
        raise Invalid(f"`{field}`: {str(first['msg']).removeprefix('Value error, ')}.", field=field) from None
    if not is_dry:
        return Done("The subscription is changed.", link("subscriptions", name))
    # Only a change of the kind of signature is answered by a response, and the form has no such field.
    assert not isinstance(after, Response)
    changes = [(one.label, _text(before, one), _text(after, one)) for one in _FIELDS]
    facts: list[tuple[str, Any]] = [
        (label, f"{was or 'none'} → {now or 'none'}") for label, was, now in changes if was != now
    ]
    return Confirm(facts or [("change", "none: it is stored so already")])


EDIT = ConsoleAct("/console/subscriptions/{name}/do/edit", "Edit", ("PATCH", "/subscriptions/{name}"), _preview, _run)
