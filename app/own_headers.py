"""A webhook's own headers: often a receiver's credential, so they are kept with the secrets, and answers show names.

Sealed, they are the `headers` of the column `credentials`, and the destination has their `header_names`. As long as an
older version may have to read them, they are the destination's `headers`, in plain text.
"""

from collections.abc import Mapping
from typing import Any

from app.sealing import CREDENTIALS, Vault
from app.store.subscriptions import Subscription


def headers_of(subscription: Subscription, vault: Vault) -> dict[str, str]:
    """Return the headers that are sent with each delivery. Raises SecretsUnreadable."""
    plain = subscription.destination.get("headers")
    if plain is not None:
        return dict(plain)
    if not subscription.destination.get("header_names"):
        return {}
    return dict(vault.open(CREDENTIALS, subscription.name, subscription.credentials)["headers"])


def names_of(destination: Mapping[str, Any]) -> list[str]:
    """Return the names of a stored webhook's headers, which are no secret."""
    names: list[str] = destination.get("header_names") or sorted(destination.get("headers") or {})
    return names


def without_values(destination: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored webhook as it is when its headers are kept elsewhere."""
    named = {name: value for name, value in destination.items() if name != "headers"}
    names = names_of(destination)
    return {**named, "header_names": names} if names else named
