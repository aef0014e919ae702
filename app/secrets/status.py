"""Find the keys that sealed secrets of a database and are missing in the key file."""

from collections.abc import Mapping

from app.database.connection import Connection
from app.secrets.vault import Vault
from app.store.admin.encrypted_secrets import keys_in_use


async def missing_keys(connection: Connection, vault: Vault) -> dict[str, int]:
    """Return how many columns each missing key sealed, by the key's id. Opens no secret."""
    used = await keys_in_use(connection)
    return {key: used[key] for key in vault.lacks(used)}


def missing_keys_fault(missing: Mapping[str, int]) -> str | None:
    """Name the missing keys and the page that says what to do; None if no key is missing."""
    keys = ", ".join(f"{key} ({columns})" for key, columns in missing.items())
    return f"sealed by keys that the key file lacks: {keys}; docs/operations/secrets.md" if keys else None
