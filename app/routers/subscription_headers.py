"""The custom headers of a webhook in a PUT: given, kept, or refused because the host changed."""

from dataclasses import replace

from app.egress.urls import same_origin
from app.errors import Invalid, SecretsUnreadable
from app.schemas.destinations import DestinationPut, WebhookPut
from app.secrets.vault import CREDENTIALS, Vault
from app.secrets.webhook_headers import headers_of, names_of
from app.secrets.writer import Seal
from app.store.subscriptions.subscriptions import Private, Subscription, SubscriptionSpec


def with_headers(
    shape: SubscriptionSpec, private: Private, destination: DestinationPut, stored: Subscription | None, seal: Seal
) -> tuple[SubscriptionSpec, Private]:
    """Return the public and the secret columns with a webhook's custom headers in the column that stores them.

    Stored headers stay as they are. Raises Invalid and SecretsUnreadable.
    """
    if not isinstance(destination, WebhookPut):
        return shape, private
    former = stored if stored is not None and stored.destination["type"] == "webhook" else None
    wanted = destination.headers if destination.headers is not None else _kept(destination, former, seal.vault)
    if not wanted:
        return shape, private
    named = replace(shape, destination={**shape.destination, "header_names": sorted(wanted)})
    if former is not None and wanted == _sealed(former, seal.vault):
        return named, replace(private, credentials=former.credentials)
    return named, replace(private, credentials=seal(CREDENTIALS, {"headers": wanted}))


def _kept(destination: WebhookPut, former: Subscription | None, vault: Vault) -> dict[str, str]:
    """Return the stored headers if the request gives none.

    For another host the request must give them. Otherwise a caller could change the URL and receive secret headers.
    """
    if former is None or not names_of(former.destination):
        return {}
    if not same_origin(former.destination["url"], destination.url):
        raise Invalid(
            "`destination.headers` are kept only for the same scheme, host and port. Give them again, or {}.",
            field="destination.headers",
        )
    return headers_of(former, vault)


def _sealed(former: Subscription, vault: Vault) -> dict[str, str] | None:
    """Return the sealed headers; None if there are none, or if their key is lost."""
    if not former.destination.get("header_names"):
        return None
    try:
        return headers_of(former, vault)
    except SecretsUnreadable:
        return None
