"""Read and check declarations: topics, groups, subscriptions and keys, from files or stdin."""

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from app.cli.declared import secret_references
from app.cli.declared.folders import SUFFIXES, files_of
from app.cli.declared.yaml_lines import Document, documents
from app.cli.declared.yaml_lines import Path as Place
from app.cli.errors import WRONG_USAGE, Refusal
from app.field_rules import NAME_MAX, SUBSCRIPTION_NAME_FORM, has_control_character, is_subscription_name
from app.schemas.api_keys import ApiKeyNew, ApiKeyPost
from app.schemas.destinations import KafkaPut, NatsPut, PullShape, RabbitPut, RedisPut, WebhookPut
from app.schemas.producer_groups import GroupPut
from app.schemas.subscription_put import Filters, SubscriptionPut
from app.topic_patterns import RESERVED, is_reserved

SECTIONS = ("topics", "groups", "subscriptions", "keys")
# Ignored, for anchors.
EXTENSION = "x-"
MODELS: dict[str, type[BaseModel]] = {"groups": GroupPut, "subscriptions": SubscriptionPut, "keys": ApiKeyPost}
DESTINATIONS: dict[str, type[BaseModel]] = {
    "webhook": WebhookPut,
    "rabbitmq": RabbitPut,
    "nats": NatsPut,
    "kafka": KafkaPut,
    "redis": RedisPut,
    "pull": PullShape,
}


@dataclass(frozen=True)
class Declared:
    """A declared resource: `content` is the body of its request, with its secrets; `fields` is as it was written."""

    section: str
    name: str
    document: Document
    fields: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)

    def refusal(self, text: str, problem_field: str | None = None) -> Refusal:
        """Return the error of this resource, with the line of a field as the API names it (`destination.url`)."""
        parts = (problem_field or "").replace("[", ".").replace("]", "").split(".")
        path: Place = (self.section, self.name, *(int(part) if part.isdigit() else part for part in parts if part))
        return Refusal(f"{self.document.place(path)}: {self.section}.{self.name}: {text}")


@dataclass
class Declarations:
    """All declared resources. `sections` are those that a file has, also those without a resource."""

    sections: set[str] = field(default_factory=set)
    resources: dict[tuple[str, str], Declared] = field(default_factory=dict)

    def of(self, section: str) -> list[Declared]:
        """Return the resources of a section, in the order in which they were written."""
        return [one for one in self.resources.values() if one.section == section]


def read(files: Sequence[Path], *, recursive: bool = False, prune: bool = False) -> Declarations:
    """Read and check files, folders of files, and `-` for stdin. `recursive`: also the subfolders of folders.

    Raises Refusal, with `prune` also for a file of a subfolder that is not read: what it declares would be deleted.
    """
    declarations = Declarations()
    sources = [one for file in files for one in _sources(file, recursive=recursive)]
    if prune and not recursive:
        _refuse_unread(files, sources)
    for one in sources:
        source, load = ("stdin", sys.stdin.read) if str(one) == "-" else (str(one), partial(one.read_text, "utf-8"))
        for document in documents(_text(source, load), source):
            _add(declarations, document)
    if not declarations.sections:
        raise Refusal(f"The files declare nothing: a file has one of {_listed(SECTIONS)}.", code=WRONG_USAGE)
    return declarations


def _sources(file: Path, *, recursive: bool) -> list[Path]:
    if not _is_folder(file):
        return [file]
    found = files_of(file, recursive=recursive)
    if found:
        return found
    below = "" if recursive else " Its subfolders are read with --recursive."
    raise Refusal(f"{file} has no file that ends in {_listed(SUFFIXES)}.{below}", code=WRONG_USAGE)


def _refuse_unread(files: Sequence[Path], sources: Sequence[Path]) -> None:
    """Raise Refusal if a folder has a file in a subfolder that is not one of the sources."""
    known = {one.resolve() for one in sources}
    for folder in filter(_is_folder, files):
        for one in files_of(folder, recursive=True):
            if one.resolve() not in known:
                raise Refusal(
                    f"Nothing was changed. {one} is in a subfolder, which is not read, and --prune would delete what "
                    "it declares.\n  Add --recursive, or name each file or folder by -f.",
                    code=WRONG_USAGE,
                )


def _is_folder(file: Path) -> bool:
    return str(file) != "-" and file.is_dir()


def _text(source: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise Refusal(f"{source} cannot be read: {reason}.", code=WRONG_USAGE) from None


def _add(declarations: Declarations, document: Document) -> None:
    if document.value is None:
        return
    if not isinstance(document.value, dict):
        raise document.refusal((), f"must be a mapping with {_listed(SECTIONS)}.")
    for section, value in document.value.items():
        if section.startswith(EXTENSION):
            continue
        if section not in SECTIONS:
            raise document.refusal((section,), f"is not a section{_nearest(section, SECTIONS)}.")
        declarations.sections.add(section)
        for declared in _topics(document, value) if section == "topics" else _resources(document, section, value):
            known = declarations.resources.get((section, declared.name))
            if known is not None:
                raise document.refusal(
                    (section, declared.name),
                    f"is declared twice: also at {known.document.place((section, known.name))}.",
                )
            declarations.resources[section, declared.name] = declared


def _topics(document: Document, value: Any) -> list[Declared]:
    if not isinstance(value, list):
        raise document.refusal(("topics",), "must be a list of names; `[]` is no topic.")
    for n, name in enumerate(value):
        if not isinstance(name, str):
            raise document.refusal(("topics", n), "must be text: put it in quotation marks.")
        _check_name(document, ("topics", n), "topics", name)
        document.lines.setdefault(("topics", name), document.lines["topics", n])
        if name in value[:n]:
            raise document.refusal(("topics", n), f"names `{name}` again.")
    return [Declared("topics", name, document) for name in value]


def _resources(document: Document, section: str, value: Any) -> list[Declared]:
    if not isinstance(value, dict):
        raise document.refusal((section,), "must be a mapping of names; `{}` is none.")
    found = []
    for name, fields in value.items():
        _check_name(document, (section, name), section, name)
        if not isinstance(fields, dict):
            raise document.refusal((section, name), "must be a mapping of fields.")
        content = secret_references.resolve(document, section, name, fields)
        _check(document, section, name, content)
        found.append(Declared(section, name, document, fields, content))
    return found


def _check_name(document: Document, path: Place, section: str, name: str) -> None:
    if section == "subscriptions" and not is_subscription_name(name):
        raise document.refusal(path, f"is not a name: it must have {SUBSCRIPTION_NAME_FORM}.")
    if not 1 <= len(name) <= NAME_MAX or has_control_character(name) or "/" in name or name in (".", ".."):
        form = f"it must have 1 to {NAME_MAX} characters, none of them `/` or a control character"
        raise document.refusal(path, f"is not a name: {form}, and not be `.` or `..`.")
    if section == "topics" and is_reserved(name):
        raise document.refusal(path, f"is reserved: topics that begin with `{RESERVED}` are Halfnote's own.")


def _check(document: Document, section: str, name: str, content: dict[str, Any]) -> None:
    """Check a resource's fields by the model of its request. Raises Refusal with the first fault."""
    named = {"name": name} if section == "keys" else {}
    if "name" in content and named:
        raise document.refusal((section, name, "name"), "is not a field: the key of the mapping is the name.")
    try:
        made = MODELS[section].model_validate({**content, **named})
    except ValidationError as error:
        # A misspelled field explains the missing one.
        first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        where = _in(content, first["loc"], is_missing=first["type"] == "missing")
        path = (section, name, *where)
        if first["type"] == "missing":
            raise document.refusal((section, name, *where[:-1]), f"needs the field `{where[-1]}`.") from None
        if first["type"] == "extra_forbidden":
            known = _fields_at(section, where[:-1], content)
            raise document.refusal(path, f"is not a field{_nearest(str(where[-1]), known)}.") from None
        raise document.refusal(path, f"is wrong: {first['msg'].removeprefix('Value error, ')}.") from None
    if isinstance(made, GroupPut) and not made.check_urls and made.checks == "call":
        raise document.refusal((section, name), "needs the field `check_urls`, or `checks: claim`.")
    if isinstance(made, ApiKeyNew) and made.expires_at is not None and made.expires_at <= datetime.now(UTC):
        raise document.refusal((section, name, "expires_at"), "is in the past: give a later time, or remove the key.")


def _in(content: Any, location: Sequence[str | int], *, is_missing: bool) -> Place:
    """Return the parts of a fault's location that the content has: pydantic also names variants of a union."""
    found: list[str | int] = []
    for n, part in enumerate(location):
        names_missing = is_missing and n == len(location) - 1
        if isinstance(content, dict) and part in content:
            content = content[part]
        elif isinstance(content, list) and isinstance(part, int):
            content = content[part] if part < len(content) else None
        elif not names_missing:
            continue
        found.append(part)
    return tuple(found)


def _fields_at(section: str, path: Place, content: dict[str, Any]) -> list[str]:
    match path:
        case ("destination",):
            kind = content["destination"].get("type")
            return list(DESTINATIONS[kind].model_fields) if kind in DESTINATIONS else []
        case ("filters",):
            return list(Filters.model_fields)
        case ():
            return [name for name in MODELS[section].model_fields if (section, name) != ("keys", "name")]
    return []


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f" (did you mean `{near[0]}`?)"
    return f"; known are {_listed(names)}" if names else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
