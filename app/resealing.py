"""Sealing all secrets by the newest key, while the service runs: `halfnote rotate-keys`, and the embedded start."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from app.access import Caller
from app.acts import act
from app.database import Connection
from app.errors import SecretsUnreadable
from app.migrate import say_oldest_served
from app.own_headers import without_values
from app.sealing import CREDENTIALS, GROUP_SECRETS, SUBSCRIPTION_SECRETS, Column, Vault, is_sealed
from app.store import sealed
from app.store.audit import record
from app.store.sealed import Resealed, Row

# Rows in one database transaction: locked for milliseconds.
AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a rotation came to: rows that were sealed anew, by which key, and why some stay as they are."""

    key: str
    changed: int
    unreadable: list[str]


async def rotate(connection: Connection, vault: Vault, *, by: Caller | None = None, at_once: int = AT_ONCE) -> Rotation:
    """Seal every secret by the newest key of the file. What was interrupted is taken up by another rotation.

    `by`: the person who does it, which is put on record first. Raises SecretsUnreadable if there is no key.
    """
    newest = vault.fresh().newest
    unreadable: list[str] = []
    now: datetime = await connection.fetchval("select clock_timestamp()")
    async with connection.transaction():
        if not await sealed.is_sealed(connection):
            await sealed.turn_on(connection, now)
        # An older version could not read what is written from now on, so it must not start.
        await say_oldest_served(connection)
        if by is not None:
            await record(connection, act(by, "secrets.rotate", newest), now)
    groups, subscriptions = (_by(vault, newest, of, unreadable) for of in (GROUP_SECRETS, SUBSCRIPTION_SECRETS))
    changed = await _all(connection, sealed.groups_resealed, "", at_once, groups)
    changed += await _all(connection, sealed.subscriptions_resealed, 0, at_once, subscriptions)
    return Rotation(newest, changed, unreadable)


async def _all(
    connection: Connection,
    some: Callable[[Connection, Any, int, Resealed], Awaitable[tuple[Any, int]]],
    first: Any,
    at_once: int,
    resealed: Resealed,
) -> int:
    total, after = 0, first
    while after is not None:
        async with connection.transaction():
            after, changed = await some(connection, after, at_once, resealed)
        total += changed
    return total


def _by(vault: Vault, newest: str, column: Column, unreadable: list[str]) -> Resealed:
    def anew(at: Column, name: str, stored: Any) -> Any:
        if not stored or (is_sealed(stored) and stored["key"] == newest):
            return stored
        try:
            return vault.seal(at, name, vault.open(at, name, stored))
        except SecretsUnreadable as error:
            unreadable.append(error.detail)
            return stored

    def resealed(row: Row) -> Row | None:
        secrets = anew(column, row.name, row.secrets)
        plain = row.destination.get("headers")
        credentials = anew(CREDENTIALS, row.name, {"headers": plain} if plain else row.credentials)
        destination = without_values(row.destination)
        wanted = replace(row, secrets=secrets, credentials=credentials, destination=destination)
        return None if wanted == row else wanted

    return resealed
