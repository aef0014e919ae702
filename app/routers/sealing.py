"""How routes store what is secret: sealed, unless older versions must still read it."""

from dataclasses import dataclass
from typing import Any

from app.database import Connection
from app.runtime import Runtime
from app.sealing import Column, Vault
from app.store.sealed import Parts, must_seal


@dataclass(frozen=True, slots=True)
class Seal:
    """Makes of a column's JSON in one row what is stored."""

    vault: Vault
    name: str
    parts: Parts

    def __call__(self, column: Column, value: Any) -> Any:
        """Return what is stored of a secret."""
        return self.vault.seal(column, self.name, value) if self.parts.secrets else value


async def sealing(runtime: Runtime, connection: Connection, name: str) -> Seal:
    """Return what seals the secrets of a row, for the rest of the database transaction."""
    return Seal(runtime.vault, name, await must_seal(connection))
