"""Arguments such as `rate_per_s=20`, as a JSON Merge Patch."""

import json
from typing import Any

from app.cli.errors import WRONG_USAGE, Refusal


def changes_of(given: list[str]) -> dict[str, Any]:
    """Return a JSON Merge Patch of arguments such as `destination.url=...`. Raises Refusal."""
    patch: dict[str, Any] = {}
    for one in given:
        path, is_given, written = one.partition("=")
        if not is_given or not path:
            raise Refusal(f"`{one}` is not FIELD=VALUE.", code=WRONG_USAGE)
        try:
            value = json.loads(written)
        except (ValueError, RecursionError):
            value = written
        *parents, name = path.split(".")
        at: Any = patch
        for parent in parents:
            at = at.setdefault(parent, {}) if isinstance(at, dict) else None
        # Otherwise one of the two would be lost.
        if not isinstance(at, dict) or name in at:
            raise Refusal(f"`{path}` contradicts another argument: give each field once.", code=WRONG_USAGE)
        at[name] = value
    return patch
