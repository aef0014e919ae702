"""Seal all secrets by the newest key of the key file while the service runs (`halfnote rotate-keys`)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from app.database.connection import Connection
from app.errors import SecretsUnreadable
from app.operations.audit import audit_entry
from app.permissions import Caller
from app.secrets.vault import CREDENTIALS, GROUP_SECRETS, SUBSCRIPTION_SECRETS, Column, Vault, is_sealed
from app.store.admin.audit import record
from app.store.admin.encrypted_secrets import Resealed, Row, reseal_groups, reseal_subscriptions

# Rows per database transaction. A batch holds its row locks for milliseconds.
BATCH = 50


@dataclass(frozen=True, slots=True)
class Rotation:
    """The result of a rotation: the key that seals now, the number of changed rows, and why others did not change."""

    key: str
    changed: int
    unreadable: list[str]


async def rotate(connection: Connection, vault: Vault, *, by: Caller | None = None, batch: int = BATCH) -> Rotation:
    """Seal every secret by the newest key of the file. Another call continues an interrupted rotation.

    `by`: the person who rotates; the audit records it before any row changes. Raises SecretsUnreadable if the key file
    is unusable.
    """
    newest = vault.fresh().newest
    unreadable: list[str] = []
    if by is not None:
        now: datetime = await connection.fetchval("select clock_timestamp()")
        async with connection.transaction():
            await record(connection, audit_entry(by, "secrets.rotate", newest), now)
    groups, subscriptions = (_by(vault, newest, of, unreadable) for of in (GROUP_SECRETS, SUBSCRIPTION_SECRETS))
    changed = await _all(connection, reseal_groups, "", batch, groups)
    changed += await _all(connection, reseal_subscriptions, 0, batch, subscriptions)
    return Rotation(newest, changed, unreadable)


async def _all(
    connection: Connection,
    reseal: Callable[[Connection, Any, int, Resealed], Awaitable[tuple[Any, int]]],
    first: Any,
    batch: int,
    resealed: Resealed,
) -> int:
    total, after = 0, first
    while after is not None:
        async with connection.transaction():
            after, changed = await reseal(connection, after, batch, resealed)
        total += changed
    return total


def _by(vault: Vault, newest: str, column: Column, unreadable: list[str]) -> Resealed:
    """Return what seals a row by the newest key; the fault of a column that does not open goes to `unreadable`."""

    def sealed(of: Column, name: str, stored: Any) -> Any:
        if not stored or (is_sealed(stored) and stored["key"] == newest):
            return stored
        try:
            return vault.seal(of, name, vault.open(of, name, stored))
        except SecretsUnreadable as error:
            unreadable.append(error.detail)
            return stored

    def resealed(row: Row) -> Row | None:
        secrets, credentials = sealed(column, row.name, row.secrets), sealed(CREDENTIALS, row.name, row.credentials)
        wanted = replace(row, secrets=secrets, credentials=credentials)
        return None if wanted == row else wanted

    return resealed
