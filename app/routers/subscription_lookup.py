"""Finds a subscription and builds its answer, for all subscription routes."""

from typing import Any

from app.database.connection import Connection
from app.errors import SubscriptionExists, SubscriptionUnknown
from app.runtime.state import Runtime
from app.schemas.subscriptions import SubscriptionAnswer
from app.secrets.signatures import public_key
from app.secrets.vault import SUBSCRIPTION_SECRETS, Vault
from app.secrets.webhook_headers import names_of
from app.store.relay.lag import opened
from app.store.subscriptions import subscriptions as store
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import BreakerState, SubscriptionState


async def known(connection: Connection, name: str, *, lock: bool = False) -> Subscription:
    """Return a subscription. Raises SubscriptionUnknown."""
    subscription = await store.one(connection, name, lock=lock)
    if subscription is None:
        raise unknown(name)
    return subscription


def unknown(name: str) -> SubscriptionUnknown:
    """Return the problem of a name that no subscription has."""
    return SubscriptionUnknown(f"There is no subscription `{name}`. PUT /subscriptions/<name> creates one.")


def exists(name: str) -> SubscriptionExists:
    """Return the problem of a name that a subscription has, although it was to be new."""
    return SubscriptionExists(
        f"There is a subscription `{name}` already, and the request only creates one (If-None-Match: *). "
        "GET /subscriptions/<name> shows it; a PUT without If-None-Match changes it."
    )


async def answers(
    runtime: Runtime, connection: Connection, subscriptions: list[Subscription]
) -> list[SubscriptionAnswer]:
    """Return the answers of subscriptions, with the circuit breakers that are open now."""
    reasons = await opened(connection, [one.subscription_id for one in subscriptions]) if subscriptions else {}
    return [answer_of(runtime.vault, one, reasons.get(one.subscription_id)) for one in subscriptions]


def answer_of(vault: Vault, subscription: Subscription, opened_because: str | None) -> SubscriptionAnswer:
    """Return the answer of a subscription. `opened_because` is set if one of its circuit breakers is open."""
    return SubscriptionAnswer(**fields_of(vault, subscription, opened_because))


def fields_of(vault: Vault, subscription: Subscription, opened_because: str | None) -> dict[str, Any]:
    """Return the fields of the answer of a subscription."""
    is_open = subscription.state is SubscriptionState.ACTIVE and opened_because is not None
    return {
        "name": subscription.name,
        "topics": subscription.topics,
        "filters": subscription.filters,
        "destination": _destination(vault, subscription),
        "start": subscription.start,
        "ordered": subscription.ordered,
        "on_dead": subscription.on_dead,
        "shards": subscription.shards,
        "max_in_flight": subscription.max_in_flight,
        "rate_per_s": subscription.asked_rate_per_s,
        "timeout_s": subscription.timeout_s,
        "retry": subscription.retry,
        "expire_after_s": subscription.expire_after_s,
        "max_backlog": subscription.max_backlog,
        "state": BreakerState.OPEN.value if is_open else subscription.state.value,
        "state_reason": opened_because if is_open else subscription.state_reason,
        "created_at": subscription.created_at,
        "updated_at": subscription.updated_at,
    }


def _destination(vault: Vault, subscription: Subscription) -> dict[str, object]:
    stored = subscription.destination
    if stored["type"] != "webhook":
        return stored
    # Only a private key has a public key. No other secret is opened for an answer.
    key = None
    if stored.get("signing") == "v1a":
        key = public_key(vault.secrets(SUBSCRIPTION_SECRETS, subscription.name, subscription.secrets)[0].secret)
    names = names_of(stored)
    return {**stored, "header_names": names, "public_key": key, "granted_rate_per_s": subscription.granted_per_s}
