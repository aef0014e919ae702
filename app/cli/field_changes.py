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
        except ValueError:
            value = written
        *parents, name = path.split(".")
        at = patch
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = value
    return patch
