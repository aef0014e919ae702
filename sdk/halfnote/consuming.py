"""Messages that a consumer claims instead of receiving them: what is claimed, held and settled. No input or output."""

import base64
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from halfnote.errors import Refused, StillRunning, Unconfirmed
from halfnote.exchange import SHORTEST_TIMEOUT_S, Answer, Exchange, Request, asked
from halfnote.json_text import JsonText, with_exact
from halfnote.message import Message
from halfnote.times import instant

T = TypeVar("T")
log = logging.getLogger("halfnote")

# How long messages are held, if the caller does not say.
HELD_S = 60.0
# How long a consumer that gives back tries to settle what it holds.
GRACE_S = 5.0
# The part of the lease after which it is extended.
EXTENDED_AFTER = 1 / 3
# The service refuses a longer `error` of a nack, and a longer `reason` of a reject.
TEXT_MAX = 1000
# The most handles of one request.
HANDLES_MOST = 1000
# When a message comes again that another consumer still works on.
RUNNING_RETRY_S = 5.0
EARLIER_FAILED = "an earlier message of its key failed"
NOT_BEGUN = "its time, or that of another message of its key, was over before the work on it began"
LEFT = "%d messages were not settled (%s), and come again: %s"
WORKED_ON = "message %s is still worked on as its consumer closes: it comes again unless that ends in time"
UNREADABLE = "message %s with the handle %s of %s cannot be read, and is given back: %s: %s"
ENDS = "messages of %s cannot be claimed, which ends `run` after the handlers under way: %s"
NOT_GIVEN_BACK = "messages of %s could not be given back, and come again when their time is over"
FAILED = "messages of %s could not be claimed, which is tried again in %g s: %s"


@dataclass(eq=False)
class Lane:
    """The messages of one key in a claim. `is_lost`: one of them comes again, before those that are not begun yet."""

    is_lost: bool = False


@dataclass(eq=False)
class HeldMessage:
    """A claimed message with its handle. `until`: when its time is over, unless it is held for longer by then."""

    message: Message
    handle: str
    lane: Lane
    until: float


class Consuming:
    """The requests of one consumer. Durations in seconds; `at_most` messages a claim.

    What is None was not given: the service then chooses the number of messages, and they are held for `HELD_S`, or for
    less if the service refuses that. `invisible_s` is the time for which they are held. `grace_s`: see `hurrying`.
    `lock`: of a consumer with several threads.
    """

    def __init__(
        self,
        subscription: str,
        at_most: int | None,
        invisible_s: float | None,
        attempt_s: float,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = GRACE_S,
        lock: "AbstractContextManager[Any] | None" = None,
    ) -> None:
        if at_most is not None and not 1 <= at_most <= 1000:
            raise ValueError(f"at_most is 1 to 1000, not {at_most}")
        self.subscription = subscription
        self.invisible_s = HELD_S if invisible_s is None else invisible_s
        self._is_lowered = invisible_s is None
        self.at_most = at_most
        self.attempt_s = attempt_s
        self._clock = clock
        self._grace_s = grace_s
        self._hurry_lock, self._hurries, self._settle_by = lock or nullcontext(), 0, math.inf
        self._stopped_at = math.inf
        # Of claimed messages that cannot be read: the handle of each, and why.
        self._unreadable: list[tuple[str, str]] = []

    def stop(self) -> None:
        """Settle within `grace_s` seconds from now on, each time; extend as before, for the handlers under way."""
        # Without a lock: a signal's handler may call this.
        self._stopped_at = min(self._stopped_at, self._clock())

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Settle and extend within `grace_s` seconds in all; a request or pause that is under way then still ends.

        What is not settled comes again when its time is over, so a consumer that ends has little to wait for.
        """
        with self._hurry_lock:
            if not self._hurries:
                self._settle_by = self._clock() + self._grace_s
            self._hurries += 1
        try:
            yield
        finally:
            with self._hurry_lock:
                self._hurries -= 1
                if not self._hurries:
                    self._settle_by = math.inf

    def claimed(self, wait_s: float) -> Exchange[list[HeldMessage]]:
        """Claim messages; wait up to `wait_s` if there is none. Raises Refused or Unconfirmed."""
        timeout_s = wait_s + self.attempt_s
        most = {} if self.at_most is None else {"max": self.at_most}
        while True:
            content = {**most, "invisible_s": self.invisible_s, "wait_s": wait_s}
            request = self._post("claim", content, timeout_s)
            claim = asked(
                "a claim of messages", request, within_s=timeout_s, clock=self._clock, attempts=1, read=_claim_of
            )
            try:
                answer, sent_at = yield from _dated(claim, self._clock)
            except Refused as refused:
                if not self._is_lowered or refused.field != "invisible_s" or self.invisible_s <= 1:
                    raise
                # The service allows less (HALFNOTE_CLAIM_HELD_MAX_S), and the caller has not asked for so much.
                self.invisible_s = max(1.0, self.invisible_s / 2)
                continue
            # The time began between request and answer. A claim may have waited, so its answer is taken to be not older
            # than a part of the lease.
            since = max(sent_at, self._clock() - self.invisible_s * EXTENDED_AFTER)
            messages = answer.content.get("messages")
            held = self._held(messages, since + self.invisible_s) if isinstance(messages, list) else []
            if not isinstance(messages, list) or (messages and not held and not self._unreadable):
                # As of a proxy.
                why = f"answered {answer.status} without messages that can be read"
                raise Unconfirmed("a claim of messages", why, perhaps_done=True)
            return held

    def unreadable_given_back(self) -> Exchange[None]:
        """Give back the messages of the last claim that cannot be read, so that they become dead letters in the end.

        What fails is logged: they come again when their time is over.
        """
        unreadable, self._unreadable = self._unreadable, []
        for handle, why in unreadable:
            request = self._post("nack", {"handles": [handle], "error": why}, self.attempt_s)
            try:
                yield from self._asked("`nack` of a message that cannot be read", request, is_settled=True)
            except (Refused, Unconfirmed) as error:
                log.warning("%s", error)

    def extended(self, held: Sequence[HeldMessage]) -> Exchange[list[HeldMessage]]:
        """Hold messages for longer; return those that were not held any more. Raises Refused or Unconfirmed."""
        invisible_s, not_held = self.invisible_s, list[HeldMessage]()
        for some in _parts(held):
            lost, sent_at = yield from _dated(self.settled("extend", some, invisible_s=invisible_s), self._clock)
            for one in set(some).difference(lost):
                one.until = sent_at + invisible_s
            not_held += lost
        return not_held

    def may_begin(self, one: HeldMessage) -> bool:
        """Return whether the time of a message is not over, as far as is known, and no other of its key was lost.

        The answer to a claim is taken to be young, so until the first extension this may be wrong by its way here.
        """
        return not one.lane.is_lost and self._clock() < one.until

    def over(self, held: Mapping[str, HeldMessage], begun: Collection[str]) -> list[HeldMessage]:
        """Return what must not be begun any more, of those that are held by handle; `begun`: handles."""
        return [one for one in list(held.values()) if one.handle not in begun and not self.may_begin(one)]

    def settled(self, act: str, held: Sequence[HeldMessage], **fields: Any) -> Exchange[list[HeldMessage]]:
        """Acknowledge, give back, reject or extend; return those that were not held any more.

        Halfnote sends them again, to this consumer or another one. Raises Refused or Unconfirmed.
        """
        lost: list[HeldMessage] = []
        for some in _parts(held):
            request = self._post(act, {"handles": [one.handle for one in some], **fields}, self.attempt_s)
            answer = yield from self._asked(f"`{act}` of messages", request, is_settled=act != "extend")
            statuses = _statuses(answer.content, len(some))
            if statuses is None:
                # As of a proxy.
                raise Unconfirmed(f"`{act}` of messages", f"answered without {len(some)} outcomes", perhaps_done=True)
            lost += [one for one, status in zip(some, statuses, strict=True) if status >= 300]
        return lost

    def _asked(self, what: str, request: Request, *, is_settled: bool) -> Exchange[Answer]:
        began, invisible_s = self._clock(), self.invisible_s

        def left_s() -> float:
            """Return the seconds from the beginning to the end."""
            stopped_s = max(self._stopped_at - began, 0.0) + self._grace_s if is_settled else math.inf
            return min(invisible_s, max(min(self._settle_by - began, stopped_s), SHORTEST_TIMEOUT_S))

        within_s = left_s()

        def clock() -> float:
            # The hurry or the stop may begin while the request is repeated, which then has less time.
            return self._clock() + max(within_s - left_s(), 0.0)

        return (yield from asked(what, request, within_s=within_s, clock=clock))

    def _post(self, act: str, content: Mapping[str, Any], timeout_s: float) -> Request:
        path = f"/subscriptions/{quote(self.subscription, safe='')}/{act}"
        return Request("POST", path, json.dumps(content).encode(), timeout_s)

    def _held(self, messages: Sequence[Any], until: float) -> list[HeldMessage]:
        """Return the messages that can be read, and note the others."""
        lanes: dict[str, Lane] = {}
        held = list[HeldMessage]()
        for found in messages:
            try:
                message, handle = self._message(found), _text(found["handle"])
                lane = Lane() if message.key is None else lanes.setdefault(message.key, Lane())
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                if isinstance(found, dict) and isinstance(key := found.get("key"), str):
                    # The later ones of its key come after it.
                    lanes[key] = Lane(is_lost=True)
                self._note(found, error)
                continue
            held.append(HeldMessage(message, handle, lane, until))
        return held

    def _note(self, found: Any, error: Exception) -> None:
        """Log that a message cannot be read, and keep its handle, if it has one."""
        named = found if isinstance(found, dict) else {}
        handle = named.get("handle")
        log.error(UNREADABLE, named.get("message_id"), handle, self.subscription, type(error).__name__, error)
        if isinstance(handle, str):
            self._unreadable.append((handle, said(f"the message cannot be read: {error_of(error)}")))

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


def _parts(held: Sequence[HeldMessage]) -> list[Sequence[HeldMessage]]:
    """Return the messages of each request."""
    return [held[n : n + HANDLES_MOST] for n in range(0, len(held), HANDLES_MOST)]


def _statuses(content: Mapping[str, Any], count: int) -> list[int] | None:
    """Return the status of each outcome; None if there are not so many."""
    outcomes = content.get("outcomes")
    if not isinstance(outcomes, list) or len(outcomes) != count:
        return None
    statuses = [one["status"] for one in outcomes if isinstance(one, dict) and isinstance(one.get("status"), int)]
    return statuses if len(statuses) == count else None


def is_parents(process: int | None) -> bool:
    """Return whether a consumer belongs to the parent of a fork; `process`: the one that claims, None before that."""
    return process not in (None, os.getpid())


def require_own(process: int | None) -> None:
    """Raise RuntimeError if a consumer belongs to the parent of a fork."""
    if is_parents(process):
        raise RuntimeError(
            f"process {process} claims with this consumer, and process {os.getpid()} is a fork of it: "
            "create a consumer in the child process, after the fork"
        )


def _dated(exchange: Exchange[T], clock: Callable[[], float]) -> Exchange[tuple[T, float]]:
    """Run an exchange; return its result, and when its last request began."""
    sent_at = clock()
    try:
        effect = next(exchange)
        while True:
            sent_at = clock()
            effect = exchange.send((yield effect))
    except StopIteration as stop:
        return stop.value, sent_at


def _claim_of(content: bytes) -> Mapping[str, Any]:
    """Return the answer to a claim; the `body` of each message is JSON in bytes, as the producer sent it."""
    text = JsonText(content)
    found: dict[str, Any] = {}
    for name in text.members():
        if name == "messages":
            found[name] = _messages_of(text)
        else:
            found[name] = text.value()
    text.end()
    return found


def _messages_of(text: JsonText) -> Any:
    if not text.is_array:
        return text.value()
    return [with_exact(text, "body") if text.is_object else text.value() for _ in text.items()]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is expected, not {type(value).__name__}")
    return value


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


def again_of(error: BaseException | None, ends: type[BaseException]) -> dict[str, Any]:
    """Return the fields of what was begun and is given back at an exception: at once only if that ended the consumer.

    `ends`: the exception that does, besides KeyboardInterrupt.

    Any other exception may be the work's own, and comes again with the message: without the pauses of `retry` it would
    use up all tries in a moment. So may a loop that was left.
    """
    return {"retry_after_s": 0.0} if isinstance(error, (ends, KeyboardInterrupt)) else {}


def still_held(held: Mapping[str, HeldMessage], but: HeldMessage | None) -> dict[str, HeldMessage]:
    """Return what stays held as the rest is given back: the message that the body of a loop works on, if any."""
    return {} if but is None or but.handle not in held else {but.handle: but}


def error_of(error: BaseException) -> str:
    """Return what a consumer says of an exception."""
    return said(f"{type(error).__name__}: {error}")


def said(text: str) -> str:
    """Return a text as the service takes it: in UTF-8, so without the surrogates of, say, a file name that is not."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:TEXT_MAX] or "no reason was given"
