"""A webhook's own headers, which often hold a receiver's credential.

Their values are sealed as the `headers` of the column `credentials`. The destination holds their names as
`header_names`, and answers show those alone.
"""

from collections.abc import Mapping
from typing import Any

from app.secrets.vault import CREDENTIALS, Vault
from app.store.subscriptions.subscriptions import Subscription


def headers_of(subscription: Subscription, vault: Vault) -> dict[str, str]:
    """Return the headers that are sent with each delivery. Raises SecretsUnreadable."""
    if not names_of(subscription.destination):
        return {}
    return dict(vault.open(CREDENTIALS, subscription.name, subscription.credentials)["headers"])


def names_of(destination: Mapping[str, Any]) -> list[str]:
    """Return the names of a stored webhook's own headers. The names are not secret."""
    names: list[str] = destination.get("header_names", [])
    return names
