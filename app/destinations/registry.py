"""Make the destination of a subscription. Only this module names every kind.

The brokers' clients are extras of the distribution, and are imported only when needed.
"""

from importlib import import_module
from importlib.util import find_spec

from app.destinations.base import Destination
from app.destinations.webhook import Webhook
from app.egress.http_client import EgressClient
from app.egress.network_policy import NetworkPolicy
from app.secrets.vault import CREDENTIALS, SUBSCRIPTION_SECRETS, Vault
from app.secrets.webhook_headers import headers_of
from app.store.subscriptions.subscriptions import Subscription

# The module of each broker's client. The extra that installs it has the name of the kind.
CLIENTS = {"rabbitmq": "aio_pika", "nats": "nats", "kafka": "aiokafka", "redis": "redis"}


class NotInstalled(Exception):
    """The client for this kind of destination is not installed; the text says how to install it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.command = kind, f"pip install 'halfnote-server[{kind}]'"
        super().__init__(f"the client for {kind} is not installed here: {self.command}")


def installed(kind: str) -> bool:
    """Return whether the client for a kind of destination is installed."""
    return kind not in CLIENTS or find_spec(CLIENTS[kind]) is not None


def destination_of(
    subscription: Subscription,
    client: EgressClient,
    network_policy: NetworkPolicy,
    vault: Vault,
    origin: str = "halfnote",
) -> Destination:
    """Return a subscription's destination. Raises NotInstalled and SecretsUnreadable.

    `client` is for webhooks, `network_policy` for brokers: both permit allowed addresses only. `origin` is this
    service's name for webhooks that gave their consent.
    """
    stored = subscription.destination
    kind: str = stored["type"]
    if kind == "webhook":
        return Webhook(
            client,
            stored["url"],
            headers_of(subscription, vault),
            vault.secrets(SUBSCRIPTION_SECRETS, subscription.name, subscription.secrets),
            subscription.timeout_s,
            stored.get("mode", "binary"),
            stored.get("batch_max", 1),
            origin if stored.get("consent") else None,
        )
    if kind not in CLIENTS:
        raise ValueError(f"subscription {subscription.name} has an unknown destination type {kind!r}")
    if not installed(kind):
        raise NotInstalled(kind)
    credentials = vault.open(CREDENTIALS, subscription.name, subscription.credentials)
    made: Destination = import_module(f"app.destinations.{kind}").of(
        stored, credentials, subscription.timeout_s, network_policy
    )
    return made
