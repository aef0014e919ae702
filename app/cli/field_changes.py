"""Arguments such as `rate_per_s=20`, and the JSON of a file, as a JSON Merge Patch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.api_client import json_object_of
from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.subscription_options import NOT_TEXT

# Every user of the machine can read the arguments of a command.
ChangesFile = Annotated[
    Path | None, typer.Option("--file", help="JSON of fields to change, `-` for stdin: for secrets and passwords")
]


def changes_of(given: Sequence[str] | None, file: Path | None = None) -> dict[str, Any]:
    """Return a JSON Merge Patch of arguments such as `destination.url=...` and of a file. Raises Refusal."""
    if not given and file is None:
        raise Refusal("Give FIELD=VALUE, or a JSON object of fields with --file.", code=WRONG_USAGE)
    patch = {} if file is None else json_object_of(file)
    for one in given or ():
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
            other = "another argument" if file is None else "another argument or the file"
            raise Refusal(f"`{path}` contradicts {other}: give each field once.", code=WRONG_USAGE)
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
