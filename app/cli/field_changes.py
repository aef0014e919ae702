"""Arguments such as `rate_per_s=20`, as a JSON Merge Patch."""

import json
from collections.abc import Sequence
from typing import Any

from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.subscription_options import NOT_TEXT


def changes_of(given: list[str]) -> dict[str, Any]:
    """Return a JSON Merge Patch of arguments such as `destination.url=...`. Raises Refusal."""
    patch: dict[str, Any] = {}
    for one in given:
        path, is_given, written = one.partition("=")
        if not is_given or not path:
            raise Refusal(f"`{one}` is not FIELD=VALUE.", code=WRONG_USAGE)
        *parents, name = path.split(".")
        value = _value(written, is_text=_is_text(parents, name))
        at: Any = patch
        for parent in parents:
            at = at.setdefault(parent, {}) if isinstance(at, dict) else None
        # Otherwise one of the two would be lost.
        if not isinstance(at, dict) or name in at:
            raise Refusal(f"`{path}` contradicts another argument: give each field once.", code=WRONG_USAGE)
        at[name] = value
    return patch


def _is_text(parents: Sequence[str], name: str) -> bool:
    """Return whether a field takes text alone: a password may look like a number."""
    return name == "secret" or parents[-1:] == ["headers"] or (parents == ["destination"] and name not in NOT_TEXT)


def _value(written: str, *, is_text: bool) -> Any:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return value if not is_text or value is None or isinstance(value, str) else written
