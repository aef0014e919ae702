"""Batches: many messages in one request, and one that the receiver can't take kept from harming those sent with it.

An answer is for all of a request. When it is a failure that one message alone may have caused, the batch is halved
again and again within the same call, so that the others get through and that one alone has the failure. Where nothing
gets through, the receiver itself is at fault: it is not asked hundreds of times. A message whose former try failed all
the same (its batch got no answer in time, say) goes with a quarter as many others each time, and from its fourth or
fifth try on alone: whatever the others do, it has its own tries.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime, timedelta
from time import monotonic
from typing import TypeAlias

from app.destinations.base import Delivered, Delivery, Failed, Gone, Outcome, Refused

# Messages sent as of a time, with so many seconds for a whole answer.
Send: TypeAlias = Callable[[Sequence[Delivery], datetime, float], Awaitable[Outcome]]

# Bodies of one request together, but for a single message that is larger.
BATCH_BYTES = 4 * 1024 * 1024
# Failures that say nothing about the messages: a wrong address or password, a method or form that is not taken, a proxy
# without its server.
NOT_THE_MESSAGES = frozenset({401, 403, 404, 405, 407, 415, 429, 502, 503, 504})
# This answer is surely about the content.
TOO_LARGE = 413
# So many failures in a row more than one message alone can cause, and halving ends until something gets through.
MISSES = 2
LEFT_OUT = Failed("not sent: others took all of the time", None, None, 1.0, 0)


def groups(deliveries: Sequence[Delivery], batch_max: int) -> Iterator[list[int]]:
    """Yield which messages, by index, go in one request: as many as their tries and their size allow."""
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
    """The messages of one `deliver` on their way; all requests together take at most `timeout_s`."""

    def __init__(self, send: Send, now: datetime, timeout_s: float) -> None:
        self._send, self._now, self._timeout_s = send, now, timeout_s
        self._began = monotonic()
        self._misses = self._patience = 0
        # What holds for everything that is left: the receiver is gone, away, or wants to be left alone.
        self._ended: Outcome | None = None

    async def deliver(self, deliveries: Sequence[Delivery], batch_max: int) -> list[Outcome]:
        """Send messages in as few requests as can be; return what came of each, in their order."""
        found: dict[int, Outcome] = {}
        for group in groups(deliveries, batch_max):
            self._misses, self._patience = 0, len(group).bit_length() + MISSES
            outcomes = await self._narrow([deliveries[index] for index in group], LEFT_OUT)
            found.update(zip(group, outcomes, strict=True))
        return [found[index] for index in range(len(deliveries))]

    async def _narrow(self, part: Sequence[Delivery], otherwise: Outcome) -> list[Outcome]:
        """Send a part and, if it fails, its halves; `otherwise` is what came of it if there is no time left."""
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
        """Tell whether a failure may be that of one message of several."""
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
    """Return what a part's failure is for one of its messages that could not be sent alone: nothing final."""
    if not isinstance(outcome, Refused):
        return outcome
    error = f"{outcome.error}, with others: {outcome.reason}"
    return Failed(error, outcome.status, outcome.response, None, outcome.duration_ms)
