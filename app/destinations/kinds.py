"""Which destination a subscription's `destination` names: the one place that knows every kind.

The clients of brokers are extras of the distribution, and imported only where one is needed.
"""

from importlib import import_module
from importlib.util import find_spec

from app.callbacks import CallbackClient
from app.destinations.base import Destination
from app.destinations.webhook import Webhook
from app.dialling import Dialling
from app.own_headers import headers_of
from app.sealing import CREDENTIALS, SUBSCRIPTION_SECRETS, Vault
from app.store.subscriptions import Subscription

# The module of each broker's client; the extra that brings it is called as the kind is.
CLIENTS = {"rabbitmq": "aio_pika", "nats": "nats", "kafka": "aiokafka", "redis": "redis"}


class NotInstalled(Exception):
    """The client of this kind of destination is not installed here; the text says how to install it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.command = kind, f"pip install 'halfnote-server[{kind}]'"
        super().__init__(f"the client for {kind} is not installed here: {self.command}")


def installed(kind: str) -> bool:
    """Tell whether this process can make destinations of a kind."""
    return kind not in CLIENTS or find_spec(CLIENTS[kind]) is not None


def destination_of(
    subscription: Subscription,
    client: CallbackClient,
    dialling: Dialling,
    vault: Vault,
    origin: str = "halfnote",
) -> Destination:
    """Return where a subscription's messages go. Raises NotInstalled and SecretsUnreadable.

    `client`, which dials allowed addresses only, is for webhooks; `dialling` is for brokers. `origin` is who we
    are to a webhook that was asked for its consent.
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
        stored, credentials, subscription.timeout_s, dialling
    )
    return made
