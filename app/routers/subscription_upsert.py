"""PUT of a subscription: check addresses, keep or create secrets, ask a webhook for consent."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from math import ceil
from typing import Any

from app.destinations.registry import NotInstalled, installed
from app.destinations.webhook_consent import consent
from app.egress.network_policy import NetworkPolicy
from app.egress.urls import same_origin, url_fault
from app.errors import (
    AddressNotAllowed,
    ClientNotInstalled,
    ConsentRefused,
    DatabaseUnavailable,
    Invalid,
    SecretsUnreadable,
)
from app.runtime.state import Runtime
from app.schemas.addresses import host_fault
from app.schemas.destinations import DestinationPut, KafkaPut, PullShape, WebhookPut
from app.schemas.subscription_put import SubscriptionPut
from app.secrets.signatures import Secret, dump, kind_of, new_secret, rotated
from app.secrets.vault import CREDENTIALS, SUBSCRIPTION_SECRETS, Vault
from app.secrets.writer import Seal
from app.store.subscriptions.subscriptions import PULL, Private, Subscription, SubscriptionSpec
from app.verdicts import OnDead, Ordered

# Schemes of broker URLs that require TLS.
ENCRYPTED = ("amqps:", "tls:", "rediss:")
_SECRET_FIELDS = {"secret", "password", "token", "headers"}


@dataclass(frozen=True, slots=True)
class Granted:
    """A webhook's consent. `rate`: requests per second; None: no limit."""

    rate_per_s: float | None


def checked(name: str, wanted: SubscriptionPut, runtime: Runtime) -> SubscriptionSpec:
    """Return the wanted subscription without its secrets. Raises Invalid, AddressNotAllowed or ClientNotInstalled."""
    for field, fault in _faults(wanted.destination, runtime.network_policy):
        problem = AddressNotAllowed if "HALFNOTE_" in fault else Invalid
        raise problem(f"`{field}` {fault}.", field=field)
    if isinstance(wanted.destination, PullShape):
        _refuse_unpullable(wanted)
    if not installed(wanted.destination.type):
        missing = NotInstalled(wanted.destination.type)
        raise ClientNotInstalled(f"{str(missing).capitalize()}", field="destination.type", command=missing.command)
    fields = wanted.model_dump(mode="json", exclude={"destination": _SECRET_FIELDS}, exclude_none=True)
    words = {"ordered": Ordered(wanted.ordered), "on_dead": OnDead(wanted.on_dead)}
    unlimited = {"expire_after_s": None, "max_backlog": None}
    return SubscriptionSpec(name=name, **{"filters": None, "rate_per_s": None, **unlimited, **fields, **words})


def _refuse_unpullable(wanted: SubscriptionPut) -> None:
    """Raise Invalid for what a subscription cannot have whose messages consumers claim."""
    if wanted.shards != 1:
        raise Invalid(
            "`shards` cannot be set with a destination of the type pull. Any number of consumers share the "
            "subscription without shards.",
            field="shards",
        )


def refuse_other_way(stored: Subscription, shape: SubscriptionSpec) -> None:
    """Raise Invalid if a change would give a subscription to workers that consumers claim from, or the reverse."""
    if stored.is_pulled != (shape.destination["type"] == PULL):
        raise Invalid(
            "`destination.type` cannot be changed to or from `pull`. Create a subscription with another name, with "
            "`start` at the offset of this one's checkpoint, and delete this one.",
            field="destination.type",
        )


def put_of(stored: Subscription) -> dict[str, Any]:
    """Return a stored subscription in the form of its PUT, without `start` and without secrets, which a PUT keeps."""
    spec = asdict(SubscriptionSpec.of(stored))
    del spec["name"], spec["start"]
    spec["destination"] = {key: value for key, value in stored.destination.items() if key != "header_names"}
    return {key: value for key, value in spec.items() if value is not None}


def _faults(destination: DestinationPut, network_policy: NetworkPolicy) -> Iterator[tuple[str, str]]:
    """Yield the field and the fault of each address of a destination that is not allowed."""
    match destination:
        case WebhookPut(url=url):
            found = [("destination.url", url_fault(url, network_policy))]
        case PullShape():
            return
        case KafkaPut(bootstrap=brokers, tls=tls):
            faults = [host_fault("kafka", one, network_policy, encrypted=tls) for one in brokers]
            found = [(f"destination.bootstrap[{n}]", fault) for n, fault in enumerate(faults)]
        case other:
            encrypted = other.url.startswith(ENCRYPTED)
            found = [("destination.url", host_fault(other.type, other.url, network_policy, encrypted=encrypted))]
    yield from ((field, fault) for field, fault in found if fault is not None)


def private_of(
    destination: DestinationPut, stored: Subscription | None, vault: Vault, seal: Seal, now: datetime
) -> tuple[Private, str | None]:
    """Return the secrets to store, and the newly created secret to show once, or None.

    A stored destination of the same type keeps the secrets that the request leaves out. Raises Invalid and
    SecretsUnreadable.
    """
    former = stored if stored is not None and stored.destination["type"] == destination.type else None
    if isinstance(destination, PullShape):
        return Private([], {}), None
    if not isinstance(destination, WebhookPut):
        credentials = _credentials(destination, former, vault)
        if former is not None and credentials == _opened(former, vault, needed=False):
            return Private([], former.credentials), None
        return Private([], seal(CREDENTIALS, credentials)), None
    given = destination.secret.get_secret_value() if destination.secret else None
    known = _signing(former, vault, needed=given is None) if former else []
    current = known[0].secret if known else None
    if given is None and (current is None or kind_of(current) != destination.signing):
        made = new_secret(destination.signing)
    else:
        made = None
    wanted = given or made or current
    assert wanted is not None  # a secret that is neither given nor stored was created
    if former is not None and wanted == current:
        return Private(former.secrets, {}), made
    return Private(seal(SUBSCRIPTION_SECRETS, dump(rotated(known, wanted, now))), {}), made


def changed_secrets(stored: Subscription, private: Private) -> list[str]:
    """Return the secret fields of the destination that a PUT changes."""
    changed = ["destination.secret"] if private.secrets != stored.secrets and private.secrets else []
    if private.credentials != stored.credentials:
        is_webhook = bool(private.secrets or stored.secrets)
        changed.append("destination.headers" if is_webhook else "destination.credentials")
    return changed


def _signing(former: Subscription, vault: Vault, *, needed: bool) -> list[Secret]:
    """Return the stored secrets; none if their key is lost and they are not `needed`. Raises SecretsUnreadable."""
    try:
        return vault.secrets(SUBSCRIPTION_SECRETS, former.name, former.secrets)
    except SecretsUnreadable:
        if needed:
            raise
        return []


def _opened(former: Subscription, vault: Vault, *, needed: bool) -> dict[str, str] | None:
    """Return the stored credentials; None if their key is lost and they are not `needed`. Raises SecretsUnreadable."""
    try:
        return dict(vault.open(CREDENTIALS, former.name, former.credentials))
    except SecretsUnreadable:
        if needed:
            raise
        return None


def _credentials(destination: Any, former: Subscription | None, vault: Vault) -> dict[str, str]:
    """Return a broker's password or token: the given one, or the stored one for the same user at the same address.

    For another address the request must give it. Otherwise a caller could change the address and receive the password.
    """
    names = ("password", "token")
    given = {name: getattr(destination, name, None) for name in names}
    found = {name: value.get_secret_value() for name, value in given.items() if value is not None}
    if not found and former is not None and _same_account(former.destination, destination):
        found = _opened(former, vault, needed=True) or {}
    if destination.username is not None and "password" not in found:
        raise Invalid(
            "`destination.password` is required with `username`: none is stored for this user at this address.",
            field="destination.password",
        )
    return found


def _same_account(former: dict[str, Any], destination: Any) -> bool:
    if former.get("username") != destination.username:
        return False
    if isinstance(destination, KafkaPut):
        return set(destination.bootstrap) <= set(former["bootstrap"]) and destination.tls == former["tls"]
    return same_origin(former["url"], destination.url)


def consents(destination: dict[str, Any], stored: Subscription | None) -> bool:
    """Return whether a webhook (stored JSON) must give consent: consent is on, and this URL has not given it."""
    if not destination.get("consent"):
        return False
    former = stored.destination if stored is not None else {}
    return not (former.get("consent") and former["url"] == destination["url"])


async def ask_consent(runtime: Runtime, wanted: SubscriptionSpec) -> Granted:
    """Ask a webhook for its consent. Raises ConsentRefused."""
    url = wanted.destination["url"]
    rate = None if wanted.rate_per_s is None else ceil(wanted.rate_per_s * 60)
    found = await consent(runtime.deliveries_http, url, runtime.settings.origin, rate, wanted.timeout_s)
    if isinstance(found, str):
        raise ConsentRefused(f"`destination.url` {found}.", field="destination.url")
    return Granted(None if found.rate_per_min is None else found.rate_per_min / 60)


def with_grant(
    private: Private, wanted: SubscriptionSpec, stored: Subscription | None, granted: Granted | None
) -> Private:
    """Return the secrets with the consent given now or before. Raises DatabaseUnavailable if there is none."""
    if not wanted.destination.get("consent"):
        return private
    if granted is not None:
        return replace(private, granted_per_s=granted.rate_per_s)
    if stored is None or consents(wanted.destination, stored):
        raise DatabaseUnavailable(f"`{wanted.name}` was changed at the same time. Repeat the request.", retry_after_s=1)
    return replace(private, granted_per_s=stored.granted_per_s)
