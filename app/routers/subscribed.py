"""What the routes of subscriptions share: finding one, and how it is answered."""

from app.database import Connection
from app.errors import SubscriptionUnknown
from app.own_headers import names_of, without_values
from app.runtime import Runtime
from app.sealing import SUBSCRIPTION_SECRETS, Vault
from app.signing import public_key
from app.store import subscriptions as store
from app.store.standing import opened
from app.store.subscriptions import Subscription
from app.subscription_answers import SubscriptionAnswer


async def known(connection: Connection, name: str, *, lock: bool = False) -> Subscription:
    """Return a subscription. Raises SubscriptionUnknown."""
    subscription = await store.one(connection, name, lock=lock)
    if subscription is None:
        raise SubscriptionUnknown(f"No subscription is called `{name}`: PUT /subscriptions/<name> makes one.")
    return subscription


async def answers(
    runtime: Runtime, connection: Connection, subscriptions: list[Subscription]
) -> list[SubscriptionAnswer]:
    """Return subscriptions as they are answered, with the breakers that are open now."""
    reasons = await opened(connection, [one.subscription_id for one in subscriptions]) if subscriptions else {}
    return [answer_of(runtime.vault, one, reasons.get(one.subscription_id)) for one in subscriptions]


def answer_of(vault: Vault, subscription: Subscription, opened_because: str | None) -> SubscriptionAnswer:
    """Return a subscription as it is answered; `opened_because` is set if a breaker of it is open."""
    is_open = subscription.state == "active" and opened_because is not None
    return SubscriptionAnswer(
        name=subscription.name,
        topics=subscription.topics,
        filters=subscription.filters,
        destination=_destination(vault, subscription),
        start=subscription.start,
        ordered=subscription.ordered,
        on_dead=subscription.on_dead,
        shards=subscription.shards,
        max_in_flight=subscription.max_in_flight,
        rate_per_s=subscription.asked_rate_per_s,
        timeout_s=subscription.timeout_s,
        retry=subscription.retry,
        state="open" if is_open else subscription.state,
        state_reason=opened_because if is_open else subscription.state_reason,
        created_at=subscription.created_at,
        updated_at=subscription.updated_at,
    )


def _destination(vault: Vault, subscription: Subscription) -> dict[str, object]:
    stored = subscription.destination
    if stored["type"] != "webhook":
        return stored
    # Only a private key has a public one: nothing else is opened to be shown.
    key = None
    if stored.get("signing") == "v1a":
        key = public_key(vault.secrets(SUBSCRIPTION_SECRETS, subscription.name, subscription.secrets)[0].secret)
    named = {**without_values(stored), "header_names": names_of(stored)}
    return {**named, "public_key": key, "granted_rate_per_s": subscription.granted_per_s}
