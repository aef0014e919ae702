"""What a PUT of a webhook comes to with its own headers: given, kept, or refused to be kept for another host."""

from dataclasses import replace

from app.callback_urls import same_origin
from app.destination_shapes import DestinationPut, WebhookPut
from app.errors import Invalid, SecretsUnreadable
from app.own_headers import headers_of, names_of
from app.routers.sealing import Seal
from app.sealing import CREDENTIALS, Vault
from app.store.subscriptions import Private, Subscription, Wanted


def with_headers(
    shape: Wanted, private: Private, destination: DestinationPut, stored: Subscription | None, seal: Seal
) -> tuple[Wanted, Private]:
    """Return what is wanted and what is kept in secret with a webhook's own headers, where they are to be stored.

    Those that are stored already stay as they are. Raises Invalid and SecretsUnreadable.
    """
    if not isinstance(destination, WebhookPut):
        return shape, private
    former = stored if stored is not None and stored.destination["type"] == "webhook" else None
    wanted = destination.headers if destination.headers is not None else _kept(destination, former, seal.vault)
    if not wanted:
        return shape, private
    if not seal.parts.headers:
        return replace(shape, destination={**shape.destination, "headers": wanted}), private
    named = replace(shape, destination={**shape.destination, "header_names": sorted(wanted)})
    if former is not None and wanted == _sealed(former, seal.vault):
        return named, replace(private, credentials=former.credentials)
    return named, replace(private, credentials=seal(CREDENTIALS, {"headers": wanted}))


def _kept(destination: WebhookPut, former: Subscription | None, vault: Vault) -> dict[str, str]:
    """Return the stored headers where none are given.

    For another host they must be: else whoever may change the URL would be sent what answers do not show.
    """
    if former is None or not names_of(former.destination):
        return {}
    if not same_origin(former.destination["url"], destination.url):
        raise Invalid(
            "`destination.headers` are kept for the same scheme, host and port alone: give them again, or {}.",
            field="destination.headers",
        )
    return headers_of(former, vault)


def _sealed(former: Subscription, vault: Vault) -> dict[str, str] | None:
    """Return the headers that are stored sealed; None if there are none, or if their key is lost."""
    if not former.destination.get("header_names"):
        return None
    try:
        return headers_of(former, vault)
    except SecretsUnreadable:
        return None
