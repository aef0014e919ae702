"""Seal the secrets of one row before routes store them."""

from dataclasses import dataclass
from typing import Any

from app.secrets.vault import Column, Vault


@dataclass(frozen=True, slots=True)
class Seal:
    """Seals the columns of the row called `name`."""

    vault: Vault
    name: str

    def __call__(self, column: Column, value: Any) -> Any:
        """Return what is stored of a secret. Raises SecretsUnreadable."""
        return self.vault.seal(column, self.name, value)
