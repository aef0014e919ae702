"""What people do, as it is put on record."""

from typing import Any

from app.access import Caller
from app.store.audit import Act


def act(caller: Caller, what: str, target: object, *, actor: str | None = None, **detail: Any) -> Act:
    """Return what a caller does, to be written by `store.audit.record`.

    Who did it is the key's name; with auth off, who they say they are. With a key that is kept as `detail.actor`.
    What is None is left out of `detail`.
    """
    said = {"actor": actor} if caller.name is not None else {}
    kept = {name: value for name, value in {**said, **detail}.items() if value is not None}
    return Act(what, None if target is None else str(target), kept, caller.name or actor, caller.key_id, caller.role)


def by_whom(caller: Caller, actor: str | None) -> str | None:
    """Return who did something, as it stays with what was done: the key's name, and first whom the request names.

    With auth off, who they say they are. Of a key's holder it is never another's name alone.
    """
    if caller.name is None or actor is None or actor == caller.name:
        return caller.name or actor
    return f"{actor} (key {caller.name})"
