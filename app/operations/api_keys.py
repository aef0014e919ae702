"""Make, rotate and revoke API keys, for the API and for commands on the database."""

from dataclasses import asdict, fields
from datetime import datetime, timedelta

from app.database.connection import Connection
from app.errors import ApiKeyOver, ApiKeyTaken, ApiKeyUnknown, Invalid
from app.operations.audit import audit_entry
from app.operations.field_changes import changed_fields
from app.permissions import SHOWN_CHARACTERS, Caller, digest_of, new_key
from app.schemas.api_keys import ApiKeyNew, ApiKeyShown
from app.store.admin import api_keys as store
from app.store.admin.api_keys import ApiKey, KeyRights, NewApiKey
from app.store.admin.audit import record


async def make_key(
    connection: Connection, caller: Caller, wanted: ApiKeyNew, now: datetime, *, chosen: str | None = None
) -> tuple[str, ApiKey]:
    """Make a key, or store the chosen one; return it and its row. Runs in a database transaction of the caller.

    Raises Invalid and ApiKeyTaken.
    """
    if wanted.expires_at is not None and wanted.expires_at <= now:
        raise Invalid("`expires_at` is in the past: give a later time.", field="expires_at")
    await store.note_change(connection, store.CHANGED, now)
    asked = wanted.model_dump(exclude={"key"}) | {"role": wanted.role.value}
    key, made = await _add(connection, caller, asked, now, chosen=chosen)
    said = wanted.model_dump(mode="json", exclude_defaults=True, exclude={"key"})
    entry = audit_entry(caller, "api_key.create", made.key_id, **said)
    await record(connection, entry, now)
    return key, made


async def rotate_key(
    connection: Connection, caller: Caller, key_id: int, overlap_s: float, now: datetime
) -> tuple[str, ApiKey]:
    """Make a key with the same rights, and let the former one expire after the overlap; return the key and its row.

    The new key keeps the former one's expiry; if that was rotated before, the expiry that it had until then. Runs in a
    database transaction of the caller. Raises ApiKeyUnknown or ApiKeyOver.
    """
    await store.note_change(connection, store.CHANGED, now)
    former = await store.one(connection, key_id, lock=True)
    if former is None:
        raise unknown(key_id)
    if _is_over(former, now):
        raise ApiKeyOver("This key has expired or was revoked: make a new one.")
    same = {field.name: getattr(former, field.name) for field in fields(NewApiKey)}
    same |= {"rotated_from": key_id, "expires_at": await _own_end(connection, former)}
    key, made = await _add(connection, caller, same, now)
    await store.expire(connection, key_id, now + timedelta(seconds=overlap_s))
    entry = audit_entry(caller, "api_key.rotate", key_id, new_key_id=made.key_id, overlap_s=overlap_s)
    await record(connection, entry, now)
    return key, made


async def change_key(
    connection: Connection, caller: Caller, key_id: int, wanted: ApiKeyNew, now: datetime
) -> tuple[ApiKey, list[str]]:
    """Give a key other rights; return its row and the fields that changed. The key itself stays.

    A key that was rotated ends with its overlap, or earlier. Runs in a database transaction of the caller. Raises
    ApiKeyUnknown, ApiKeyOver and Invalid.
    """
    await store.note_change(connection, store.CHANGED, now)
    former = await store.one(connection, key_id, lock=True)
    if former is None:
        raise unknown(key_id)
    if _is_over(former, now):
        raise ApiKeyOver("This key has expired or was revoked: make a new one.")
    if wanted.expires_at is not None and wanted.expires_at <= now:
        raise Invalid("`expires_at` is in the past: give a later time, or revoke the key.", field="expires_at")
    end = wanted.expires_at
    if former.expires_at is not None and await store.successor(connection, key_id) is not None:
        end = former.expires_at if end is None else min(end, former.expires_at)
    wanted = wanted.model_copy(update={"expires_at": end})
    rights = KeyRights(**wanted.model_dump() | {"role": wanted.role.value})
    changed = changed_fields(asdict(former), asdict(rights))
    if not changed:
        return former, []
    said = wanted.model_dump(mode="json", include=set(changed))
    removed = sorted(name for name, value in said.items() if value is None) or None
    entry = audit_entry(caller, "api_key.change", key_id, **said, removed=removed)
    await record(connection, entry, now)
    return await store.change(connection, key_id, rights, now), changed


async def revoke_key(connection: Connection, caller: Caller, key_id: int, now: datetime) -> None:
    """Revoke a key at once; a repeat changes nothing. Runs in a database transaction. Raises ApiKeyUnknown."""
    await store.note_change(connection, store.CHANGED, now)
    if await store.revoke(connection, key_id, now) is not None:
        await record(connection, audit_entry(caller, "api_key.revoke", key_id), now)
    elif await store.one(connection, key_id) is None:
        raise unknown(key_id)


def unknown(key_id: int) -> ApiKeyUnknown:
    """Return the problem for an unknown key id."""
    return ApiKeyUnknown(f"No API key has the id {key_id}.")


def shown(key: ApiKey) -> ApiKeyShown:
    """Return a key in the form of the API."""
    return ApiKeyShown.model_validate({name: value for name, value in asdict(key).items() if name != "digest"})


async def _own_end(connection: Connection, key: ApiKey) -> datetime | None:
    """Return the end that a key has, or had before a rotation: each successor took it over."""
    while (following := await store.successor(connection, key.key_id)) is not None:
        key = following
    return key.expires_at


def _is_over(key: ApiKey, now: datetime) -> bool:
    return key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now)


async def _add(
    connection: Connection, caller: Caller, like: dict[str, object], now: datetime, *, chosen: str | None = None
) -> tuple[str, ApiKey]:
    key = chosen or new_key()
    own = {"prefix": key[:SHOWN_CHARACTERS], "digest": digest_of(key), "created_by": caller.name}
    made = await store.add(connection, NewApiKey(**(like | own)), now)  # type: ignore[arg-type]
    if made is None:
        raise ApiKeyTaken("This key exists, or existed before: choose another one.", field="key")
    return key, made
