"""What a PUT of a subscription comes to: addresses are checked, secrets kept or made, a webhook asked for consent."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil
from typing import Any

from app.address_shapes import host_fault
from app.callback_urls import same_origin, url_fault
from app.destination_shapes import DestinationPut, KafkaPut, WebhookPut
from app.destinations.consent import consent
from app.destinations.kinds import NotInstalled, installed
from app.dialling import Dialling
from app.errors import (
    AddressNotAllowed,
    ClientNotInstalled,
    ConsentRefused,
    DatabaseUnavailable,
    Invalid,
    SecretsUnreadable,
)
from app.routers.sealing import Seal
from app.runtime import Runtime
from app.sealing import CREDENTIALS, SUBSCRIPTION_SECRETS, Vault
from app.signing import Secret, dump, kind_of, new_secret, rotated
from app.store.subscriptions import Private, Subscription, Wanted
from app.subscription_shapes import SubscriptionPut

# Brokers' URLs that insist on TLS.
ENCRYPTED = ("amqps:", "tls:", "rediss:")
_SECRET_FIELDS = {"secret", "password", "token", "headers"}


@dataclass(frozen=True, slots=True)
class Granted:
    """A webhook's consent, to so many requests a second (None: without a limit)."""

    rate_per_s: float | None


def checked(name: str, wanted: SubscriptionPut, runtime: Runtime) -> Wanted:
    """Return what is wanted, but for secrets. Raises Invalid, AddressNotAllowed or ClientNotInstalled."""
    for field, fault in _faults(wanted.destination, runtime.dialling):
        problem = AddressNotAllowed if "HALFNOTE_" in fault else Invalid
        raise problem(f"`{field}` {fault}.", field=field)
    if not installed(wanted.destination.type):
        missing = NotInstalled(wanted.destination.type)
        raise ClientNotInstalled(f"{str(missing).capitalize()}", field="destination.type", command=missing.command)
    fields = wanted.model_dump(mode="json", exclude={"destination": _SECRET_FIELDS}, exclude_none=True)
    return Wanted(name=name, **{"filters": None, "rate_per_s": None, **fields})


def _faults(destination: DestinationPut, dialling: Dialling) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a destination's addresses, with the field at fault."""
    match destination:
        case WebhookPut(url=url):
            found = [("destination.url", url_fault(url, dialling))]
        case KafkaPut(bootstrap=brokers, tls=tls):
            faults = [host_fault("kafka", one, dialling, encrypted=tls) for one in brokers]
            found = [(f"destination.bootstrap[{n}]", fault) for n, fault in enumerate(faults)]
        case other:
            encrypted = other.url.startswith(ENCRYPTED)
            found = [("destination.url", host_fault(other.type, other.url, dialling, encrypted=encrypted))]
    yield from ((field, fault) for field, fault in found if fault is not None)


def private_of(
    destination: DestinationPut, stored: Subscription | None, vault: Vault, seal: Seal, now: datetime
) -> tuple[Private, str | None]:
    """Return what is to be kept in secret, and the secret that was made and that nobody has seen yet, if any.

    A stored one of the same type keeps what is not given, as it is stored. Raises Invalid and SecretsUnreadable.
    """
    former = stored if stored is not None and stored.destination["type"] == destination.type else None
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
    assert wanted is not None  # what is neither given nor stored was made
    if former is not None and wanted == current:
        return Private(former.secrets, {}), made
    return Private(seal(SUBSCRIPTION_SECRETS, dump(rotated(known, wanted, now))), {}), made


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
    """Return a broker's password or token: what is given, or what was stored for the same user at the same address.

    At another one it is asked for again: else whoever may change the address would be sent the password.
    """
    names = ("password", "token")
    given = {name: getattr(destination, name, None) for name in names}
    found = {name: value.get_secret_value() for name, value in given.items() if value is not None}
    if not found and former is not None and _same_account(former.destination, destination):
        found = _opened(former, vault, needed=True) or {}
    if destination.username is not None and "password" not in found:
        raise Invalid(
            "`destination.password` is needed with `username`: none is stored for it at this address.",
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
    """Tell whether a webhook (as stored JSON) must be asked: it wants to be, and was not at this URL."""
    if not destination.get("consent"):
        return False
    former = stored.destination if stored is not None else {}
    return not (former.get("consent") and former["url"] == destination["url"])


async def ask_consent(runtime: Runtime, wanted: Wanted) -> Granted:
    """Ask a webhook for its consent. Raises ConsentRefused."""
    url = wanted.destination["url"]
    rate = None if wanted.rate_per_s is None else ceil(wanted.rate_per_s * 60)
    found = await consent(runtime.deliveries_http, url, runtime.settings.origin, rate, wanted.timeout_s)
    if isinstance(found, str):
        raise ConsentRefused(f"`destination.url` {found}.", field="destination.url")
    return Granted(None if found.rate_per_min is None else found.rate_per_min / 60)


def with_grant(private: Private, wanted: Wanted, stored: Subscription | None, granted: Granted | None) -> Private:
    """Return what is kept, with what the webhook granted now or before. Raises DatabaseUnavailable if neither is so."""
    if not wanted.destination.get("consent"):
        return private
    if granted is not None:
        return replace(private, granted_per_s=granted.rate_per_s)
    if stored is None or consents(wanted.destination, stored):
        raise DatabaseUnavailable(f"`{wanted.name}` was changed at the same time; repeat.", retry_after_s=1)
    return replace(private, granted_per_s=stored.granted_per_s)
