"""Build the audit rows of people's actions."""

from typing import Any

from app.permissions import Caller
from app.store.admin.audit import Act


def audit_entry(caller: Caller, what: str, target: object, *, actor: str | None = None, **detail: Any) -> Act:
    """Return the audit row of an action, for `store.admin.audit.record`.

    The actor is the key's name; with auth off, the name that the request gives. With a key that name is kept as
    `detail.actor`. A person who signed in by OpenID Connect is named by the issuer's claim, and `detail.subject` is the
    issuer's id of the person. `detail` leaves out values that are None.
    """
    said = {"actor": actor} if caller.name is not None else {}
    said |= {"subject": caller.subject} if caller.subject is not None else {}
    kept = {name: value for name, value in {**said, **detail}.items() if value is not None}
    return Act(what, None if target is None else str(target), kept, caller.name or actor, caller.key_id, caller.role)


def acting_person(caller: Caller, actor: str | None) -> str | None:
    """Return the name that is stored with an action: the request's name and the key's name.

    With auth off it is the request's name. With a key it is never the request's name alone.
    """
    if caller.name is None or actor is None or actor == caller.name:
        return caller.name or actor
    return f"{actor} (key {caller.name})" if caller.subject is None else f"{actor} ({caller.name})"
