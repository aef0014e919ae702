"""Messages that a consumer claims instead of receiving them: what is claimed, held and settled. No input or output."""

import base64
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from halfnote.errors import Refused, StillRunning
from halfnote.exchange import Exchange, Request, asked
from halfnote.json_text import JsonText, with_exact
from halfnote.message import Message
from halfnote.times import instant

log = logging.getLogger("halfnote")

# How long messages are held, if the caller does not say.
HELD_S = 60.0
# The part of the lease after which it is extended.
EXTENDED_AFTER = 1 / 3
# How many characters of an error the service keeps.
ERROR_MAX = 500
# When a message comes again that another consumer still works on.
RUNNING_RETRY_S = 5.0
EARLIER_FAILED = "an earlier message of its key failed"
LEFT = "%d messages were not settled (%s), and come again: %s"
FAILED = "messages of %s could not be claimed, which is tried again in %g s: %s"


@dataclass(frozen=True)
class HeldMessage:
    """A claimed message with its handle."""

    message: Message
    handle: str


class Consuming:
    """The requests of one consumer. Durations in seconds; `at_most` messages a claim.

    What is None was not given: the service then chooses the number of messages, and they are held for `HELD_S`, or for
    less if the service refuses that. `invisible_s` is the time for which they are held.
    """

    def __init__(
        self,
        subscription: str,
        at_most: int | None,
        invisible_s: float | None,
        attempt_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if at_most is not None and not 1 <= at_most <= 1000:
            raise ValueError(f"at_most is 1 to 1000, not {at_most}")
        self.subscription = subscription
        self.invisible_s = HELD_S if invisible_s is None else invisible_s
        self._is_lowered = invisible_s is None
        self._at_most = at_most
        self.attempt_s = attempt_s
        self._clock = clock

    def claimed(self, wait_s: float) -> Exchange[list[HeldMessage]]:
        """Claim messages; wait up to `wait_s` if there is none. Raises Refused or Unconfirmed."""
        timeout_s = wait_s + self.attempt_s
        most = {} if self._at_most is None else {"max": self._at_most}
        while True:
            content = {**most, "invisible_s": self.invisible_s, "wait_s": wait_s}
            request = self._post("claim", content, timeout_s)
            try:
                answer = yield from asked(
                    "a claim of messages",
                    request,
                    within_s=timeout_s,
                    clock=self._clock,
                    attempts=1,
                    read=_claim_of,
                )
            except Refused as refused:
                if not self._is_lowered or refused.field != "invisible_s" or self.invisible_s <= 1:
                    raise
                # The service allows less (HALFNOTE_CLAIM_HELD_MAX_S), and the caller has not asked for so much.
                self.invisible_s = max(1.0, self.invisible_s / 2)
                continue
            return [HeldMessage(self._message(found), found["handle"]) for found in answer.content["messages"]]

    def settled(self, act: str, held: Sequence[HeldMessage], **fields: Any) -> Exchange[list[HeldMessage]]:
        """Acknowledge, give back, reject or extend; return those that were not held any more.

        Halfnote sends them again, to this consumer or another one. Raises Refused or Unconfirmed.
        """
        request = self._post(act, {"handles": [one.handle for one in held], **fields}, self.attempt_s)
        answer = yield from asked(f"`{act}` of messages", request, within_s=self.invisible_s, clock=self._clock)
        outcomes = answer.content["outcomes"]
        return [one for one, outcome in zip(held, outcomes, strict=True) if outcome["status"] >= 300]

    def _post(self, act: str, content: Mapping[str, Any], timeout_s: float) -> Request:
        path = f"/subscriptions/{quote(self.subscription, safe='')}/{act}"
        return Request("POST", path, json.dumps(content).encode(), timeout_s)

    def _message(self, found: Mapping[str, Any]) -> Message:
        body: bytes = base64.b64decode(found["body_base64"]) if "body_base64" in found else found["body"]
        replay = found.get("replay")
        return Message(
            message_id=found["message_id"],
            topic=found["topic"],
            body=body,
            content_type=found["content_type"],
            key=found.get("key"),
            tag=found.get("tag"),
            headers=found.get("headers") or {},
            group=found.get("producer_group"),
            transaction_id=found["message_id"].rpartition("-")[0],
            offset=found.get("offset"),
            attempt=found["attempt"],
            subscription=self.subscription,
            replay=None if replay is None else str(replay),
            committed_at=instant(found["committed_at"]),
            traceparent=found.get("traceparent"),
        )


def _claim_of(content: bytes) -> Mapping[str, Any]:
    """Return the answer to a claim; the `body` of each message is JSON in bytes, as the producer sent it."""
    text = JsonText(content)
    found: dict[str, Any] = {}
    for name in text.members():
        if name == "messages":
            found[name] = [with_exact(text, "body") for _ in text.items()]
        else:
            found[name] = text.value()
    text.end()
    return found


def lanes_of(held: Sequence[HeldMessage]) -> list[list[HeldMessage]]:
    """Return the messages of each key in their order, and each message without a key alone."""
    lanes: dict[Any, list[HeldMessage]] = {}
    for number, one in enumerate(held):
        key = number if one.message.key is None else one.message.key
        lanes.setdefault(key, []).append(one)
    return list(lanes.values())


@dataclass(frozen=True)
class GivenBack:
    """Messages to give back with one request, and its fields."""

    held: Sequence[HeldMessage]
    fields: Mapping[str, Any]


def given_back(one: HeldMessage, rest: Sequence[HeldMessage], error: BaseException) -> list[GivenBack]:
    """Return how to give back a message whose handler raised, and the `rest`, the later ones of its key."""
    if isinstance(error, StillRunning):
        fields = {"begun": False, "retry_after_s": RUNNING_RETRY_S, "error": error_of(error)}
        return [GivenBack([one, *rest], fields)]
    failed = GivenBack([one], {"error": error_of(error)})
    return [failed, GivenBack(rest, {"begun": False, "error": EARLIER_FAILED})] if rest else [failed]


def error_of(error: BaseException) -> str:
    """Return what a consumer says of an exception."""
    return said(f"{type(error).__name__}: {error}")


def said(text: str) -> str:
    """Return a text as the service takes it."""
    return text.replace("\0", "")[:ERROR_MAX] or "no reason was given"
