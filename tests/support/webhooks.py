"""Shared by the tests of webhooks: deliveries, and an HTTP client like the service's."""

import ipaddress
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from app.config import Settings
from app.delivery import Delivery
from app.destinations.webhook import Webhook
from app.egress.denied_addresses import Network
from app.egress.http_client import EgressClient, callback_client
from app.egress.network_policy import NetworkPolicy
from app.secrets.signatures import Secret

SECRET = "whsec_" + "M" * 43 + "="
COMMITTED = datetime(2026, 11, 21, 8, 0, 0, 123456, tzinfo=UTC)


def now() -> datetime:
    """Return the real time, because the receivers' library checks timestamps."""
    return datetime.now(UTC)


def message(number: int = 1, **fields: Any) -> Delivery:
    """Return a delivery of the topic `order`; `fields` replace its fields."""
    transaction_id = UUID(int=(0x0190_0000_0000_7000_8000 << 48) + number)
    defaults: dict[str, Any] = {
        "subscription": "mailer",
        "message_id": f"{transaction_id}-0",
        "transaction_id": transaction_id,
        "offset": number,
        "producer_group": "shop",
        "topic": "order",
        "key": f"order-{number}",
        "tag": None,
        "headers": {},
        "content_type": "application/json",
        "body": b'{"order": %d}' % number,
        "committed_at": COMMITTED + timedelta(seconds=number),
        "attempt": 1,
    }
    return Delivery(**{**defaults, **fields})


def networks_of(*networks: str) -> tuple[Network, ...]:
    """Return networks as NetworkPolicy takes them."""
    return tuple(ipaddress.ip_network(network) for network in networks)


@asynccontextmanager
async def egress_client(networks: str = "127.0.0.0/8,::1/128", **settings: Any) -> AsyncIterator[EgressClient]:
    """Yield a client whose settings open these networks."""
    rules = NetworkPolicy.of(Settings(_env_file=None, allow_networks=networks, **settings))
    async with callback_client(rules) as client:
        yield client


def webhook(client: EgressClient, url: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Webhook:
    """Return a webhook at a URL with one secret and a timeout of 10 s; `fields` replace its fields."""
    return Webhook(client, url, headers or {}, **{"secrets": [Secret(SECRET)], "timeout_s": 10.0, **fields})
