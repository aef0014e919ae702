"""The two stories: orders that delivery, points and billing must get, and transfers that bank B must credit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from examples.order_1030 import bank, shop
from examples.order_1030.plan import Placed
from examples.order_1030.service import Options


@dataclass(frozen=True)
class Story:
    """A service with its consumers. `path`: where customers post `request(placed)`; `table`: where it is stored."""

    name: str
    create_app: Callable[[Options], FastAPI]
    schema: str
    path: str
    table: str
    request: Callable[[Placed], dict[str, Any]]
    consumers: tuple[str, ...]


def order_of(placed: Placed) -> dict[str, Any]:
    """Return a customer's order for the shop."""
    customer = shop.UNKNOWN if placed.refused_by_commit else "nemo" if placed.without_account else shop.KNOWN
    pieces = 1_000_000 if placed.too_much else 1
    lines = [
        {"article": placed.number % shop.ARTICLES, "pieces": pieces, "cents": 1250},
        {"article": (placed.number + 7) % shop.ARTICLES, "pieces": 2, "cents": 300},
    ]
    return {"number": placed.number, "customer": customer, "lines": lines}


def transfer_of(placed: Placed) -> dict[str, Any]:
    """Return a customer's transfer for bank A."""
    account = bank.POOR if placed.too_much else bank.RICH
    return {"number": placed.number, "account": account, "amount": bank.AMOUNT}


SHOP = Story("shop", shop.create_app, shop.SCHEMA, "/orders", "orders", order_of, ("delivery", "points", "billing"))
BANK = Story("bank", bank.create_app, bank.SCHEMA, "/transfers", "transfers", transfer_of, ("bank-b",))
