"""What is wrong with a database's secrets: in plain text, or sealed by keys that the key file lacks."""

from dataclasses import dataclass

from app.database import Connection
from app.sealing import Vault
from app.store.sealed import is_sealed, keys_in_use, plain_rows

ROTATE = "run `halfnote rotate-keys` once no older version serves on this database"


@dataclass(frozen=True, slots=True)
class SecretsState:
    """`on`: what is written is sealed. `plain`: rows that have something in plain text. `lacking`: how many columns are
    sealed by each key that the file lacks."""

    on: bool
    plain: int
    lacking: dict[str, int]

    @property
    def plain_fault(self) -> str | None:
        """Say what is in plain text, and what to do; None if nothing is."""
        if self.on and not self.plain:
            return None
        since = "" if self.on else ", and so is what is written"
        return f"those of {self.plain} groups and subscriptions are stored in plain text{since}: {ROTATE}"

    @property
    def lacking_fault(self) -> str | None:
        """Say which keys are missing; None if none is."""
        keys = ", ".join(f"{key} ({columns})" for key, columns in self.lacking.items())
        return f"sealed by keys that the key file lacks: {keys}; docs/operations/secrets.md" if keys else None


async def secrets_state(connection: Connection, vault: Vault) -> SecretsState:
    """Look at all secrets of a database, without opening any."""
    used = await keys_in_use(connection)
    lacking = {key: used[key] for key in vault.lacks(used)}
    return SecretsState(await is_sealed(connection), await plain_rows(connection), lacking)
