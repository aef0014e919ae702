"""What `apply` would change: the declared resources compared with those of the service."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from app.cli.api_client import all_pages, call, caller_prefix, path_of
from app.cli.declared.declarations import Declarations, Declared
from app.cli.errors import Refusal
from app.schemas.api_keys import OVERLAP_S, ApiKeyNew

PATHS = {"groups": "producer-groups", "subscriptions": "subscriptions"}
SECRET = "(secret)"  # noqa: S105 -- a text to print
SECRET_PATHS = (
    "secret",
    *(f"destination.{name}" for name in ("secret", "headers", "credentials", "password", "token")),
)
# The names of the service's own resources begin so.
RESERVED = "halfnote"
# A key of this role is never pruned: its loss can lock everybody out.
KEPT_ROLE = "admin"
# The clocks of the machines that run the command differ.
CLOCK_SLACK = timedelta(hours=1)
KEY_FIELDS = ("role", "producer_groups", "topics", "subscriptions", "rate_per_s", "bodies", "expires_at")


class Action(StrEnum):
    """What happens to a resource."""

    CREATE = "create"
    CHANGE = "change"
    UNCHANGED = "unchanged"
    DELETE = "delete"


@dataclass(frozen=True)
class FieldChange:
    """A field's former and new value. `left_out`: the declaration does not have the field, so it gets its default."""

    field: str
    old: Any
    new: Any
    left_out: bool = False


@dataclass(frozen=True)
class Change:
    """A resource and what happens to it. `keys` are the API keys that a declared key stands for."""

    section: str
    name: str
    action: Action
    fields: list[FieldChange] = field(default_factory=list)
    declared: Declared | None = None
    makes_secret: bool = False
    keys: list[dict[str, Any]] = field(default_factory=list)


def changes(url: str, declarations: Declarations, *, prune: bool) -> list[Change]:
    """Return what happens to each resource, in the order in which it is to happen. Changes nothing.

    The service checks every declared group and subscription. Raises Refusal.
    """
    declared_topics = [one["topic"] for one in all_pages(url, "/topics", as_json=False) if one["declared_at"]]
    stored: dict[str, dict[str, Any]] = {"topics": {name: {} for name in declared_topics}}
    found = [_topic(one, one.name in stored["topics"]) for one in declarations.of("topics")]
    for section, path in PATHS.items():
        stored[section] = {one["name"]: one for one in all_pages(url, f"/{path}", as_json=False)}
        found += [_resource(url, one, stored[section].get(one.name)) for one in declarations.of(section)]
    live: dict[str, list[dict[str, Any]]] = {}
    for key in all_pages(url, "/api-keys", as_json=False) if "keys" in declarations.sections else ():
        if _is_live(key):
            live.setdefault(key["name"], []).append(key)
    found += [_key(one, live.get(one.name, [])) for one in declarations.of("keys")]
    return found + (list(_pruned(declarations, stored, live)) if prune else [])


def _topic(declared: Declared, is_known: bool) -> Change:
    return Change("topics", declared.name, Action.UNCHANGED if is_known else Action.CREATE, declared=declared)


def _resource(url: str, declared: Declared, stored: dict[str, Any] | None) -> Change:
    path = path_of(PATHS[declared.section], declared.name)
    try:
        answer = call(url, "PUT", path, query={"dry_run": "true"}, content=declared.content)
    except Refusal as refusal:
        if not refusal.problem:
            raise
        raise declared.refusal(
            f"{refusal.problem.get('detail', refusal)}\n  Nothing was changed.", refusal.problem.get("field")
        ) from None
    is_new = stored is None
    paths = _written(declared.fields) if is_new else answer["changed"]
    fields = [
        FieldChange(one, *(SECRET, SECRET), one in answer["reset"])
        if one in SECRET_PATHS
        else FieldChange(one, _at(stored, one), _at(answer, one), one in answer["reset"])
        for one in paths
    ]
    action = Action.CREATE if is_new else Action.CHANGE if paths else Action.UNCHANGED
    return Change(
        declared.section, declared.name, action, fields, declared, _makes_secret(declared, answer, is_new=is_new)
    )


def _makes_secret(declared: Declared, answer: dict[str, Any], *, is_new: bool) -> bool:
    if declared.section == "groups":
        return is_new and declared.content.get("secret") is None
    destination = declared.content["destination"]
    if destination["type"] != "webhook" or destination.get("secret") is not None:
        return False
    return is_new or "destination.secret" in answer["changed"]


def _written(fields: dict[str, Any]) -> list[str]:
    """Return the paths of a new resource's fields, as they were written."""
    own = [name for name in fields if name != "destination"]
    return own + [f"destination.{name}" for name in fields.get("destination", ())]


def _at(resource: dict[str, Any] | None, path: str) -> Any:
    value: Any = resource
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_live(key: dict[str, Any]) -> bool:
    expires_at = key["expires_at"]
    is_expired = expires_at is not None and datetime.fromisoformat(expires_at) <= datetime.now(UTC)
    return key["revoked_at"] is None and not is_expired


def wanted_key(declared: Declared) -> dict[str, Any]:
    """Return the rights of a declared key, as its requests have them."""
    content = {name: value for name, value in declared.content.items() if name != "key"}
    return ApiKeyNew(name=declared.name, **content).model_dump(mode="json")


def _key(declared: Declared, live: list[dict[str, Any]]) -> Change:
    """Compare a declared key with the live keys of its name, the newest first: several, while one is being replaced."""
    wanted = wanted_key(declared)
    if not live:
        fields = [FieldChange(name, None, wanted.get(name, SECRET)) for name in declared.fields]
        makes_secret = declared.content.get("key") is None
        return Change("keys", declared.name, Action.CREATE, fields, declared, makes_secret=makes_secret)
    changed = {
        name: FieldChange(name, key[name], wanted[name], name not in declared.content)
        for n, key in enumerate(live)
        for name in (KEY_FIELDS if n == 0 else KEY_FIELDS[:-1])
        if not _same(key[name], wanted[name])
    }
    if replaces(declared, live):
        changed["key"] = FieldChange("key", SECRET, SECRET)
    elif declared.content.get("key") is not None:
        # A run that ended early made the newest key, and gave the former ones no end.
        for key in filter(outlives_overlap, live[1:]):
            changed[key["prefix"]] = FieldChange(f"{key['prefix']}… expires_at", key["expires_at"], "in a day")
    action = Action.CHANGE if changed else Action.UNCHANGED
    return Change("keys", declared.name, action, list(changed.values()), declared, keys=live)


def replaces(declared: Declared, live: list[dict[str, Any]]) -> bool:
    """Return whether a declaration names another key than the newest one. Lists show the first characters of a key."""
    chosen = declared.content.get("key")
    return chosen is not None and not chosen.startswith(live[0]["prefix"])


def outlives_overlap(key: dict[str, Any]) -> bool:
    """Return whether a former key is valid for longer than a replaced one may be."""
    end = key["expires_at"]
    return end is None or datetime.fromisoformat(end) > datetime.now(UTC) + timedelta(seconds=OVERLAP_S) + CLOCK_SLACK


def _same(old: Any, new: Any) -> bool:
    if old == new or old is None or new is None or not isinstance(old, str):
        return bool(old == new)
    try:
        return datetime.fromisoformat(old) == datetime.fromisoformat(new)
    except ValueError:
        return False


def _pruned(
    declarations: Declarations, stored: dict[str, dict[str, Any]], live: dict[str, list[dict[str, Any]]]
) -> Iterator[Change]:
    """Yield what no file declares, in the sections that the files have: keys, then subscriptions, groups and topics."""

    def extra(section: str, names: Any) -> list[str]:
        if section not in declarations.sections:
            return []
        return [name for name in names if (section, name) not in declarations.resources]

    for name in extra("keys", live):
        ends = [one for one in live[name] if one["role"] != KEPT_ROLE and one["prefix"] != caller_prefix()]
        if ends:
            yield Change("keys", name, Action.DELETE, keys=ends)
    for section in ("subscriptions", "groups", "topics"):
        for name in extra(section, stored[section]):
            if name != RESERVED and not name.startswith(f"{RESERVED}."):
                yield Change(section, name, Action.DELETE)
