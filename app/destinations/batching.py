"""Send many messages in one request, and isolate a message that the receiver cannot take.

An answer is for the whole request. If one message alone may have caused a failure, the batch is halved repeatedly
within the same call, until the others are delivered and only that message fails. If every part fails, the receiver
itself is at fault, and the halving stops. A retried message shares its request with a quarter as many others at each
attempt, and is alone from its fourth or fifth attempt on, so that other messages cannot use up its attempts.
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
LEFT_OUT = Failed("not sent: the other messages of the batch used up the timeout", None, None, 1.0, 0)


def groups(deliveries: Sequence[Delivery], batch_max: int) -> Iterator[list[int]]:
    """Yield the indexes of the messages of each request, by their attempts and sizes."""
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for index, delivery in enumerate(deliveries):
        by_size[max(1, batch_max >> 2 * min(delivery.attempt - 1, 8))].append(index)
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

    def __init__(self, send: Send, now: datetime, timeout_s: float) -> None:
        self._send, self._now, self._timeout_s = send, now, timeout_s
        self._began = monotonic()
        self._misses = self._patience = 0
        # The outcome of all remaining messages: the receiver is gone, unreachable, or asked to wait.
        self._ended: Outcome | None = None

    async def deliver(self, deliveries: Sequence[Delivery], batch_max: int) -> list[Outcome]:
        """Send messages in as few requests as possible; return their outcomes in the same order."""
        found: dict[int, Outcome] = {}
        for group in groups(deliveries, batch_max):
            self._misses, self._patience = 0, len(group).bit_length() + MISSES
            outcomes = await self._narrow([deliveries[index] for index in group], LEFT_OUT)
            found.update(zip(group, outcomes, strict=True))
        return [found[index] for index in range(len(deliveries))]

    async def _narrow(self, part: Sequence[Delivery], otherwise: Outcome) -> list[Outcome]:
        """Send a part and, if it fails, its halves; `otherwise` is the outcome if no time is left."""
        if self._ended is not None:
            return [self._ended] * len(part)
        passed_s = monotonic() - self._began
        if passed_s >= self._timeout_s:
            return [otherwise] * len(part)
        left_s = round(self._timeout_s - passed_s, 3)
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
    """Return a part's outcome for a message that was not sent alone: never a final one."""
    if not isinstance(outcome, Refused):
        return outcome
    error = f"{outcome.error}, with others: {outcome.reason}"
    return Failed(error, outcome.status, outcome.response, None, outcome.duration_ms)
