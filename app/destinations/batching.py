"""Send many messages in one request, and isolate a message that the receiver cannot take.

An answer is for the whole request. If one message alone may have caused a failure, the batch is halved repeatedly
within the same call, until the others are delivered and only that message fails. If every part fails, the receiver
itself is at fault, and the halving stops. A retried message shares its request with a quarter as many others at each
attempt, and is alone from its fourth or fifth attempt on, so that other messages cannot use up its attempts. When no
time is left, what was not sent alone uses up no attempt, and comes again with a quarter as many others all the same.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime, timedelta
from time import monotonic
from typing import TypeAlias

from app.delivery import Delivered, Delivery, Failed, Gone, Outcome, Refused

# Takes the messages, the time of sending, and the seconds for a whole answer.
Send: TypeAlias = Callable[[Sequence[Delivery], datetime, float], Awaitable[Outcome]]

# The most bytes of all bodies in one request, unless a single message is larger.
BATCH_BYTES = 4 * 1024 * 1024
# Failures that no message causes: a wrong address or password, a refused method or content type, a proxy without its
# server.
NOT_THE_MESSAGES = frozenset({401, 403, 404, 405, 407, 415, 429, 502, 503, 504})
# The content caused this answer.
TOO_LARGE = 413
# Halving stops after this many more failures in a row than one message alone can cause.
MISSES = 2
# How soon a message comes again that was left out because no time was left, or that was not sent alone.
AGAIN_S = 1.0
LEFT_OUT = Failed("not sent: the other messages of the batch used up the timeout", None, None, AGAIN_S, 0)
# Messages of which is remembered how often they were not sent alone. The oldest are forgotten, and may share a request
# with as many others as before.
REMEMBERED_MOST = 10_000


class CutShort:
    """How often each message of a destination was in a batch whose time was over before it was sent alone."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def times(self, message_id: str) -> int:
        """Return how often this has happened to a message."""
        return self._times.get(message_id, 0)

    def add(self, message_id: str) -> None:
        """Count it once more."""
        self._times[message_id] = self._times.pop(message_id, 0) + 1
        if len(self._times) > REMEMBERED_MOST:
            del self._times[next(iter(self._times))]

    def forget(self, message_id: str) -> None:
        """Forget a message that does not come again."""
        self._times.pop(message_id, None)


def groups(deliveries: Sequence[Delivery], batch_max: int, cut_short: CutShort) -> Iterator[list[int]]:
    """Yield the indexes of the messages of each request, by their attempts and sizes."""
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for index, delivery in enumerate(deliveries):
        earlier = delivery.attempt - 1 + cut_short.times(delivery.message_id)
        by_size[max(1, batch_max >> 2 * min(earlier, 8))].append(index)
    for size, indices in by_size.items():
        group: list[int] = []
        taken = 0
        for index in indices:
            many = len(deliveries[index].body)
            if group and (len(group) == size or taken + many > BATCH_BYTES):
                yield group
                group, taken = [], 0
            group.append(index)
            taken += many
        yield group


class Batches:
    """Sends the messages of one `deliver`. All requests together take at most `timeout_s`."""

    def __init__(self, send: Send, now: datetime, timeout_s: float, cut_short: CutShort) -> None:
        self._send, self._now, self._timeout_s, self._cut_short = send, now, timeout_s, cut_short
        self._began = monotonic()
        self._misses = self._patience = 0
        # The outcome of all remaining messages: the receiver is gone, unreachable, or asked to wait.
        self._ended: Outcome | None = None

    async def deliver(self, deliveries: Sequence[Delivery], batch_max: int) -> list[Outcome]:
        """Send messages in as few requests as possible; return their outcomes in the same order."""
        found: dict[int, Outcome] = {}
        for group in groups(deliveries, batch_max, self._cut_short):
            self._misses, self._patience = 0, len(group).bit_length() + MISSES
            outcomes = await self._narrow([deliveries[index] for index in group], LEFT_OUT)
            found.update(zip(group, outcomes, strict=True))
        for index, outcome in found.items():
            if not isinstance(outcome, Failed):
                self._cut_short.forget(deliveries[index].message_id)
        return [found[index] for index in range(len(deliveries))]

    async def _narrow(self, part: Sequence[Delivery], otherwise: Outcome) -> list[Outcome]:
        """Send a part and, if it fails, its halves; `otherwise` is the outcome if no time is left."""
        if self._ended is not None:
            return [self._ended] * len(part)
        passed_s = monotonic() - self._began
        left_s = round(self._timeout_s - passed_s, 3)
        if left_s <= 0:
            if otherwise is not LEFT_OUT:
                for delivery in part:
                    self._cut_short.add(delivery.message_id)
            return [otherwise] * len(part)
        outcome = await self._send(part, self._now + timedelta(seconds=passed_s), left_s)
        self._misses = 0 if isinstance(outcome, Delivered) else self._misses + 1
        if _is_for_all(outcome):
            self._ended = outcome
        if len(part) == 1 or not self._may_split(outcome):
            return [outcome] * len(part)
        middle = (len(part) + 1) // 2
        together = _without_company(outcome)
        return [*await self._narrow(part[:middle], together), *await self._narrow(part[middle:], together)]

    def _may_split(self, outcome: Outcome) -> bool:
        """Return whether a single message of the part may have caused the failure."""
        if isinstance(outcome, Refused):
            return True
        if not isinstance(outcome, Failed) or self._ended is not None:
            return False
        status = outcome.status or 0
        if status == TOO_LARGE:
            return True
        if status in NOT_THE_MESSAGES or 300 <= status < 400:
            return False
        return self._misses <= self._patience


def _is_for_all(outcome: Outcome) -> bool:
    if isinstance(outcome, Failed):
        return outcome.unreachable or outcome.retry_after_s is not None
    return isinstance(outcome, Gone)


def _without_company(outcome: Outcome) -> Outcome:
    """Return a part's outcome for a message that was not sent alone: never a final one, and it uses up no attempt.

    It has no status, because the answer is not about this message, and its pause is not the receiver's.
    """
    if isinstance(outcome, Delivered):
        return outcome
    reason = f": {outcome.reason}" if isinstance(outcome, Refused) else ""
    return Failed(f"{outcome.error}, with others{reason}", None, outcome.response, AGAIN_S, outcome.duration_ms)
