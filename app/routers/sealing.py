"""How routes store what is secret: sealed, unless older versions must still read it."""

from collections.abc import Callable
from typing import Any, TypeAlias

from app.database import Connection
from app.runtime import Runtime
from app.sealing import Column
from app.store.sealed import must_seal

# From a column and its JSON to what is stored.
Seal: TypeAlias = Callable[[Column, Any], Any]


async def sealing(runtime: Runtime, connection: Connection, name: str) -> Seal:
    """Return what seals the secrets of a row, for the rest of the database transaction."""
    seals = await must_seal(connection)

    def seal(column: Column, value: Any) -> Any:
        return runtime.vault.seal(column, name, value) if seals else value

    return seal
