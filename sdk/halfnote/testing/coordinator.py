"""A coordinator in memory, with the semantics of the service: for unit tests, without a server, a database or waiting.

The same contract test runs against it and against the service. Of subscriptions it has those whose consumers claim. It
does not have checks that producers claim, policy that decides by itself, people's decisions, reissues and replays.
"""

import json
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import httpx

from halfnote.check import CheckEndpoint
from halfnote.delivery import DeliveryEndpoint
from halfnote.hosting import answered_async, answered_sync
from halfnote.ids import new_id
from halfnote.message import Message
from halfnote.testing.problems import Refusal, invalid
from halfnote.testing.pulled import Pulled
from halfnote.testing.requests import HALF, PLAIN, TRANSACTIONS_MAX, check_end, check_half, check_skew, identity, read
from halfnote.testing.signed import SECRET, Signed, signed_check, signed_delivery
from halfnote.testing.stored import Source, Stored, difference, without_defaults

IMMUNITY_S = 6


class Coordinator:
    """A coordinator. `groups` are registered already; all other groups are refused, as by the service.

    `secret` signs its checks and deliveries: pass it to the endpoints under test.
    """

    def __init__(self, *groups: str, secret: str = SECRET) -> None:
        self.secret = secret
        self.groups: dict[str, dict[str, Any]] = {group: {} for group in groups}
        self.transactions: dict[UUID, Stored] = {}
        # Subscriptions with the destination `pull`, by name: made by their PUT.
        self.subscriptions: dict[str, Pulled] = {}
        self._log: list[Message] = []
        self._delivered = 0
        # The lock is for producers on other threads and in the background.
        self._lock = threading.RLock()

    def transport(self) -> httpx.MockTransport:
        """Return the transport for a producer of either kind."""
        return httpx.MockTransport(self._answer)

    @property
    def published(self) -> list[Message]:
        """The messages of committed transactions, in the order of their offsets."""
        return list(self._log)

    @property
    def undecided(self) -> list[Stored]:
        """Transactions without a verdict, oldest first."""
        return [found for found in self.transactions.values() if found.verdict is None]

    async def check(self, endpoint: CheckEndpoint) -> dict[UUID, str]:
        """Send a check for every undecided transaction to an endpoint; return each answer, or `unanswered`."""
        answers = {}
        for stored in self.undecided:
            headers, body = self._asking(stored)
            reply = await answered_async(endpoint, headers, body)
            answers[stored.transaction_id] = self._heard(stored, reply.status, reply.body)
        return answers

    def check_sync(self, endpoint: CheckEndpoint) -> dict[UUID, str]:
        """The same for a plain listener."""
        answers = {}
        for stored in self.undecided:
            reply = answered_sync(endpoint, *self._asking(stored))
            answers[stored.transaction_id] = self._heard(stored, reply.status, reply.body)
        return answers

    async def deliver(self, endpoint: DeliveryEndpoint, *, again: bool = False) -> list[int]:
        """Deliver messages published since the last call (`again`: all messages); return the answers' statuses."""
        return [(await answered_async(endpoint, *self._delivery(message))).status for message in self._due(again)]

    def deliver_sync(self, endpoint: DeliveryEndpoint, *, again: bool = False) -> list[int]:
        """The same for a plain handler."""
        return [answered_sync(endpoint, *self._delivery(message)).status for message in self._due(again)]

    def _due(self, again: bool) -> list[Message]:
        start, self._delivered = 0 if again else self._delivered, len(self._log)
        return self._log[start:]

    def _delivery(self, message: Message) -> Signed:
        return signed_delivery(message, secret=self.secret)

    def _asking(self, stored: Stored) -> Signed:
        stored.checks += 1
        return signed_check(
            stored.transaction_id,
            stored.group,
            secret=self.secret,
            check=stored.checks,
            born_at=stored.born_at,
            context=stored.request.get("context"),
            messages=[
                {
                    "message_id": stored.message_id(position),
                    "topic": message["topic"],
                    "key": message.get("key"),
                    "tag": message.get("tag"),
                    "headers": message.get("headers") or {},
                }
                for position, message in enumerate(stored.request["messages"])
            ],
        )

    def _heard(self, stored: Stored, status: int, body: bytes) -> str:
        if status in (202, 204):
            return "unknown"
        if status != 200:
            return "unanswered"
        verdict: str = json.loads(body)["verdict"]
        with self._lock:
            if verdict != "unknown" and stored.verdict is None:
                self._decide(stored, verdict, "check", None)
        return verdict

    def _answer(self, request: httpx.Request) -> httpx.Response:
        parts = [unquote(part) for part in request.url.path.strip("/").split("/")]
        trace = request.headers.get("traceparent")
        with self._lock:
            try:
                match (request.method, *parts):
                    case ("POST", "half"):
                        return self._half(read(request.content), trace)
                    case ("POST", "messages"):
                        content = read(request.content)
                        if "transactions" in content:
                            return self._many("transactions", content, trace)
                        return self._plain(content, trace)
                    case ("POST", "end"):
                        return self._end(read(request.content))
                    case ("POST", "halves" | "ends" as many):
                        return self._many(many, read(request.content), trace)
                    case ("PUT", "producer-groups", name):
                        return self._group(name, read(request.content))
                    case ("PUT", "subscriptions", name):
                        return self._subscription(name, read(request.content))
                    case ("POST", "subscriptions", name, act):
                        return self._consumed(name, act, read(request.content))
                    case ("GET", "transactions", found):
                        return httpx.Response(200, json=self._known(identity(found)).shown())
                    case ("POST", "transactions", found, "check"):
                        return self._ask(self._known(identity(found)))
                raise Refusal(404, "not-found", "No such path.")
            except Refusal as refusal:
                return refusal.response()

    def _many(self, field: str, request: Mapping[str, Any], trace: str | None) -> httpx.Response:
        """Answer each transaction of a request as a request of its own."""
        given, traces = request.get(field), request.get("traceparents")
        if (
            request.keys() - {"traceparents"} != {field}
            or not isinstance(given, list)
            or not 1 <= len(given) <= TRANSACTIONS_MAX
        ):
            raise invalid(field, f"a list of 1 to {TRANSACTIONS_MAX} transactions alone is expected")
        if traces is not None and (not isinstance(traces, list) or len(traces) != len(given)):
            raise invalid("traceparents", f"a list of {len(given)} trace contexts is expected")
        outcomes = []
        for one, of_one in zip(given, traces or [None] * len(given), strict=True):
            try:
                if not isinstance(one, dict):
                    raise invalid("(body)", "an object is expected")
                answer = (
                    self._end(one)
                    if field == "ends"
                    else (self._half if field == "halves" else self._plain)(one, of_one or trace)
                )
            except Refusal as refusal:
                answer = refusal.response()
            outcomes.append({"status": answer.status_code, **answer.json()})
        return httpx.Response(200, json={"outcomes": outcomes})

    def _half(self, request: Mapping[str, Any], trace: str | None) -> httpx.Response:
        stored, replayed = self._store(request, trace, plain=False)
        shown = [
            {"message_id": stored.message_id(position), "topic": message["topic"]}
            for position, message in enumerate(request["messages"])
        ]
        content = {
            "transaction_id": str(stored.transaction_id),
            "born_at": stored.born_at.isoformat(),
            "first_check_at": self._first_check_at(stored).isoformat(),
            "replayed": replayed,
            "messages": shown,
        }
        if stored.verdict is not None:
            content["verdict"] = stored.verdict
        return httpx.Response(200 if replayed else 201, json=content)

    def _first_check_at(self, stored: Stored) -> datetime:
        """Return the time of the service's first check; here the test decides when checks are sent."""
        policies = stored.request.get("check") or {}, self.groups[stored.group]
        immunity_s = next((found["immunity_s"] for found in policies if found.get("immunity_s")), IMMUNITY_S)
        return stored.born_at + timedelta(seconds=immunity_s)

    def _plain(self, request: Mapping[str, Any], trace: str | None) -> httpx.Response:
        stored, replayed = self._store(request, trace, plain=True)
        if not replayed:
            self._decide(stored, "commit", "producer", None)
        assert stored.decided_at is not None
        content = {
            "transaction_id": str(stored.transaction_id),
            "committed_at": stored.decided_at.isoformat(),
            "replayed": replayed,
            "messages": stored.placed(),
        }
        return httpx.Response(200 if replayed else 201, json=content)

    def _store(self, request: Mapping[str, Any], trace: str | None, *, plain: bool) -> tuple[Stored, bool]:
        chosen = check_half(request, PLAIN if plain else HALF)
        content = without_defaults(request)
        known = self.transactions.get(chosen) if chosen is not None else None
        if known is not None:
            if known.request != content or known.plain != plain:
                differing = difference(known.request, content) or "endpoint"
                raise Refusal(409, "content-differs", f"Another `{differing}` is stored.", field=differing)
            return known, True
        if chosen is not None:
            check_skew(chosen)
        if request["producer_group"] not in self.groups:
            raise Refusal(422, "group-unregistered", "PUT /producer-groups first.", field="producer_group")
        now = datetime.now(timezone.utc)
        stored = Stored(chosen or new_id(), request["producer_group"], content, plain, now, trace)
        self.transactions[stored.transaction_id] = stored
        return stored, False

    def _end(self, request: Mapping[str, Any]) -> httpx.Response:
        stored = self._known(check_end(request))
        if stored.group != request["producer_group"]:
            raise Refusal(403, "wrong-group", "This transaction belongs to another producer group.")
        verdict = request["verdict"]
        if verdict == "unknown":
            unknown = {"transaction_id": str(stored.transaction_id), "verdict": "unknown", "state": stored.state}
            return httpx.Response(202, json=unknown)
        replayed = stored.verdict is not None
        if not replayed:
            self._decide(stored, verdict, "producer", request.get("reason"))
        elif stored.verdict != verdict:
            raise Refusal(409, "verdict-conflict", f"Recorded as {stored.verdict}.", recorded=stored.recorded())
        content: dict[str, Any] = {"transaction_id": str(stored.transaction_id), **stored.recorded()}
        content["replayed"] = replayed
        if verdict == "commit":
            content["messages"] = stored.placed()
        return httpx.Response(200, json=content)

    def _group(self, name: str, request: Mapping[str, Any]) -> httpx.Response:
        if request.get("checks") == "claim":
            raise invalid("checks", "checks cannot be claimed here: `check` and `check_sync` ask an endpoint")
        if not request.get("check_urls"):
            raise invalid("check_urls", "at least one URL is expected")
        created = name not in self.groups
        shape = {key: value for key, value in request.items() if key != "secret"}
        self.groups[name] = shape
        secret = {"secret": None if "secret" in request else self.secret} if created else {}
        return httpx.Response(201 if created else 200, json={"name": name, **shape, **secret})

    def _subscription(self, name: str, request: Mapping[str, Any]) -> httpx.Response:
        if request.get("destination") != {"type": "pull"}:
            raise invalid("destination", "only `pull` is here; deliver() calls an endpoint")
        if not request.get("topics"):
            raise invalid("topics", "at least one topic is expected")
        created = name not in self.subscriptions
        if created:
            self.subscriptions[name] = Pulled(request["topics"], request.get("ordered") == "key")
        return httpx.Response(201 if created else 200, json={"name": name, **request})

    def _consumed(self, name: str, act: str, request: Mapping[str, Any]) -> httpx.Response:
        pulled = self.subscriptions.get(name)
        if pulled is None:
            raise Refusal(404, "subscription-unknown", f"There is no subscription `{name}`.")
        if act == "claim":
            return pulled.claim(self._log, request)
        if act in ("ack", "nack", "reject", "extend"):
            return pulled.settle(act, request)
        raise Refusal(404, "not-found", "No such path.")

    def _ask(self, stored: Stored) -> httpx.Response:
        if stored.verdict is not None:
            raise Refusal(409, "already-decided", "The transaction has its verdict already.")
        now = datetime.now(timezone.utc).isoformat()
        asked = {"transaction_id": str(stored.transaction_id), "next_check_at": now, "held_until": None}
        return httpx.Response(202, json=asked)

    def _known(self, transaction_id: UUID) -> Stored:
        stored = self.transactions.get(transaction_id)
        if stored is None:
            raise Refusal(404, "transaction-unknown", "No half with this transaction_id was ever acknowledged.")
        return stored

    def _decide(self, stored: Stored, verdict: Any, source: Source, reason: str | None) -> None:
        stored.verdict, stored.source, stored.reason = verdict, source, reason
        stored.decided_at = datetime.now(timezone.utc)
        if verdict == "commit":
            for position in range(len(stored.request["messages"])):
                stored.offsets.append(len(self._log) + 1)
                self._log.append(stored.published(position))
