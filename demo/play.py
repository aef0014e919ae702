"""Runs the orders 1030 to 1033 step by step and prints each step."""

import subprocess
from datetime import datetime
from typing import Any

import httpx

from demo.processes import StepFailed, await_true
from demo.producer import GROUP

SUBSCRIPTION = "demo-points"
TOPIC = "order"


class Play:
    """One run; each step prints what it does and raises StepFailed if something else happens."""

    def __init__(self, halfnote: httpx.Client, shop: httpx.Client, receiver: httpx.Client, secret: str) -> None:
        self._halfnote = halfnote
        self._shop = shop
        self._receiver = receiver
        self._secret = secret

    def register(self) -> None:
        """Register the shop as a producer group and the receiver as a subscription."""
        title("Registering the shop, and the receiver")
        say(f"PUT /producer-groups/{GROUP}: the URL of the shop for Halfnote's checks.")
        say("A check comes after 1 s, to keep the demo short (the default is 6 s).")
        group = {
            "check_urls": [f"{self._shop.base_url.join('/check')}"],
            "immunity_s": 1,
            "interval_s": 1,
            "secret": self._secret,
        }
        self._put(f"/producer-groups/{GROUP}", group)
        say(f"PUT /subscriptions/{SUBSCRIPTION}: messages of the topic `{TOPIC}` go to the receiver's webhook.")
        destination = {
            "type": "webhook",
            "url": f"{self._receiver.base_url.join('/deliveries')}",
            "secret": self._secret,
        }
        self._put(f"/subscriptions/{SUBSCRIPTION}", {"topics": [TOPIC], "destination": destination})

    def order_1030(self) -> None:
        """An order that succeeds."""
        title("Order 1030: half message, local database transaction, commit, delivery")
        self._order(1030, expected=201)
        self._await_received(1030)

    def order_1031_dies(self, shop: subprocess.Popen[bytes]) -> str:
        """An order whose shop dies between its own commit and the end; return its transaction_id."""
        title("Order 1031: the shop dies after its own commit, before the end")
        try:
            self._order(1031, expected=201, die=True)
        except httpx.RemoteProtocolError:
            shop.wait(10)
        else:
            raise StepFailed("the shop survived order 1031")
        halves = self._halfnote.get("/transactions", params={"producer_group": GROUP, "limit": 1}).raise_for_status()
        transaction: dict[str, Any] = halves.json()["items"][0]
        expect(transaction["state"] in ("half", "in_doubt"), f"order 1031 is {transaction['state']}")
        expect(1031 not in self._received(), "order 1031 was delivered without a commit")
        say("The order is in the shop's database, but Halfnote has no end for it, so nothing is delivered.")
        say("The shop starts again and does not know that the end is missing. Halfnote sends a check to it.")
        return str(transaction["transaction_id"])

    def order_1031_is_rescued(self, transaction_id: str) -> None:
        """A check asks the restarted shop, and its answer commits the transaction."""
        self._await_received(1031)
        verdict = self._transaction(transaction_id)["verdict"]
        expect(verdict["source"] == "check", f"order 1031 was committed by {verdict['source']}, not by a check")

    def order_1032_fails(self) -> None:
        """An order that fails locally and is never delivered, and a later order that is delivered."""
        title("Order 1032: the local database transaction fails, so no message goes out")
        self._order(1032, expected=409, pieces=1000)
        say("Order 1033 follows. Messages go out in order: 1032 would have arrived before 1033.")
        self._order(1033, expected=201)
        self._await_received(1033)
        expect(self._received() == [1030, 1031, 1033], f"the receiver got {self._received()}")
        say("Delivered: 1030, 1031, 1033. Not 1032.")

    def print_timeline(self, transaction_id: str) -> None:
        """Print the timeline of order 1031 from Halfnote."""
        title(f"GET /transactions/{transaction_id}: the timeline of order 1031")
        timeline = self._transaction(transaction_id)["timeline"]
        born = datetime.fromisoformat(timeline[0]["at"])
        for entry in timeline:
            after_s = (datetime.fromisoformat(entry["at"]) - born).total_seconds()
            print(f"  {after_s:7.3f} s  {entry['what']:<10} {details_of(entry)}".rstrip())
        expect({"check", "verdict", "delivered"} <= {entry["what"] for entry in timeline}, "the timeline has gaps")
        print("\nAll steps succeeded. The code of the two services: demo/producer.py and demo/receiver.py.")

    def clean_up(self) -> None:
        """Delete the demo's subscription and producer group."""
        for path in (f"/subscriptions/{SUBSCRIPTION}", f"/producer-groups/{GROUP}"):
            self._halfnote.delete(path)

    def _order(self, number: int, *, expected: int, **fields: object) -> None:
        answer = self._shop.post("/orders", json={"number": number, **fields})
        expect(answer.status_code == expected, f"the shop answered {answer.status_code} to order {number}")

    def _put(self, path: str, content: dict[str, Any]) -> None:
        answer = self._halfnote.put(path, json=content)
        expect(answer.is_success, f"PUT {path} was answered {answer.status_code}: {answer.text}")

    def _transaction(self, transaction_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._halfnote.get(f"/transactions/{transaction_id}").raise_for_status().json()
        return found

    def _received(self) -> list[int]:
        received: list[int] = self._receiver.get("/received").raise_for_status().json()
        return received

    def _await_received(self, number: int) -> None:
        await_true(lambda: number in self._received(), f"order {number} is delivered")


def details_of(entry: dict[str, Any]) -> str:
    """Return the details of one timeline entry."""
    match entry["what"]:
        case "check":
            return f"no. {entry['check']}, {entry['outcome']}"
        case "verdict":
            return f"{entry['verdict']}, source: {entry['source']}"
        case "published":
            return f"offset {entry['offset']}"
        case "delivered":
            return f"to {entry['subscription']}, answered {entry['status']}"
        case _:
            return ""


def expect(condition: bool, otherwise: str) -> None:
    """Raise StepFailed with what happened instead, unless the condition holds."""
    if not condition:
        raise StepFailed(otherwise)


def title(text: str) -> None:
    """Print the title of a step."""
    print(f"\n{text}", flush=True)


def say(text: str) -> None:
    """Print one line about a step."""
    print(f"    {text}", flush=True)
