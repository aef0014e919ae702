"""Secrets of a declared resource: in the environment or in a file, never in the declaration itself."""

import os
from pathlib import Path
from typing import Any

from app.cli.declared.yaml_lines import Document
from app.cli.declared.yaml_lines import Path as Place

FORM = "`{env: NAME}` or `{file: PATH}`"
# Secret fields of a group, a key and a destination. A header may also be text: not every header is a secret.
OWN_SECRETS = {"groups": ("secret",), "keys": ("key",)}
DESTINATION_SECRETS = ("secret", "password", "token")


def resolve(document: Document, section: str, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a resource's fields with the secrets that they refer to. Raises Refusal."""
    if section in OWN_SECRETS:
        return _resolved(document, (section, name), fields, OWN_SECRETS[section])
    destination = fields.get("destination")
    if section != "subscriptions" or not isinstance(destination, dict):
        return fields
    place = (section, name, "destination")
    resolved = _resolved(document, place, destination, DESTINATION_SECRETS)
    if isinstance(destination.get("headers"), dict):
        resolved["headers"] = {
            header: _referred(document, (*place, "headers", header), value) if isinstance(value, dict) else value
            for header, value in destination["headers"].items()
        }
    return {**fields, "destination": resolved}


def _resolved(document: Document, place: Place, fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: fields[name] for name in names if fields.get(name) is not None}
    return {**fields, **{name: _referred(document, (*place, name), value) for name, value in found.items()}}


def _referred(document: Document, path: Place, value: Any) -> str:
    if not isinstance(value, dict) or len(value) != 1 or not {"env", "file"} & value.keys():
        raise document.refusal(path, f"must not be in the file: write {FORM}, or leave it out.")
    [(kind, where)] = value.items()
    if not isinstance(where, str) or not where:
        raise document.refusal((*path, kind), "must be a name.")
    found = _variable(document, path, where) if kind == "env" else _file(document, path, where)
    if not found:
        raise document.refusal((*path, kind), f"names `{where}`, which is empty.")
    return found


def _variable(document: Document, path: Place, name: str) -> str:
    found = os.environ.get(name)
    if found is None:
        raise document.refusal((*path, "env"), f"names the environment variable `{name}`, which is not set.")
    return found.strip()


def _file(document: Document, path: Place, name: str) -> str:
    # A relative path begins at the declaration's file.
    try:
        return (Path(document.source).parent / name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise document.refusal((*path, "file"), f"names the file `{name}`, which cannot be read: {reason}.") from None
