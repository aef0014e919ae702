"""Write docs/configuration.md from the class that defines every option: `make docs`."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from app.config import Settings

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

Every option is an environment variable, read when the service starts. `halfnote serve` also takes some of them as
flags (`--port` for `HALFNOTE_PORT`), and a flag overrides the variable. Times are in seconds (`_s`), sizes in bytes.
`make docs` generates this page from `app/config.py`.

| variable | default | what it does |
|---|---|---|
"""

TAIL = """
Commands that call the API (`halfnote groups`, `transactions`, `subscriptions`, `drain`) take its URL from
`HALFNOTE_URL` or `--url`, and send the key in `HALFNOTE_API_KEY` if it is set. Without that key,
`halfnote keys` writes directly to the database if no address is set, or if `HALFNOTE_DATABASE_URL` or
`HALFNOTE_DATABASE_URL_FILE` is.

A variable `HALFNOTE_…` that is not in this table is logged at the start as `unknown_setting`, with the nearest name.

[Processes](operations/README.md#processes) says which processes `--workers` starts. `uvicorn app.main:app` has its own
`--host`, `--port` and `--workers`; with several workers it needs `HALFNOTE_DATABASE_URL` (the embedded Postgres has one
owner), and `PROMETHEUS_MULTIPROC_DIR` with the path of an empty directory to sum the metrics.
"""


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(row(name, field) for name, field in Settings.model_fields.items()) + TAIL


def row(name: str, field: FieldInfo) -> str:
    """Return an option's line: name, default, meaning and allowed values."""
    text = f"{field.description}{limits(field)}".replace("|", "\\|")
    value = field.get_default(call_default_factory=True, validated_data={})
    return f"| `HALFNOTE_{name.upper()}` | {default(value)} | {text} |\n"


def default(value: Any) -> str:
    """Return a default in the form of its variable."""
    if value is None:
        return "(none)"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{','.join(map(str, value)) if isinstance(value, tuple) else value}`"


def limits(field: FieldInfo) -> str:
    """Return an option's allowed values, if they are limited."""
    if get_origin(field.annotation) is Literal:
        return f" (one of {', '.join(f'`{choice}`' for choice in get_args(field.annotation))})"
    bounds = {name: getattr(one, name) for one in field.metadata for name in ("ge", "gt", "le") if hasattr(one, name)}
    words = {"ge": "at least", "gt": "more than", "le": "at most"}
    return f" ({', '.join(f'{words[name]} {bound:,}' for name, bound in bounds.items())})" if bounds else ""


if __name__ == "__main__":
    PAGE.write_text(page())
