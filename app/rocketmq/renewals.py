"""Keep messages of push consumers out to them while their handlers run, as RocketMQ's proxy does."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import structlog

from app.rocketmq.credentials import ApiKeys
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.paths import path_of
from app.rocketmq.refusals import CallRefused, outcomes_of

log = structlog.get_logger(__name__)

# RocketMQ's proxy has the same times: how long a message is held at once, how long before the end that is renewed,
# how often it looks, and when it gives up.
HELD_S = 60.0
AHEAD_S = 20.0
LOOK_S = 5.0
RENEWED_MOST_S = 3 * 3600.0
# How long it renews after a settlement that was refused for now. Each further try begins this time again.
TRIED_AGAIN_S = 60.0
# A connection that breaks is noticed within this time: the server pings after 60 s and waits 20 s. An answer that was
# written longer before has arrived.
BREAK_NOTICED_S = 90.0
# Requests at the same time, so that one that hangs holds up no other subscription.
AT_ONCE = 16


class ConnectionTimes:
    """What is known of the connection by which a client is connected, in monotonic seconds.

    `streams`: how many streams of settings it has.
    `broke_at`: when it broke; None: it has not, or its streams were ended in order, which says nothing of it.
    `arrived_at`: what was written until then has arrived.
    """

    def __init__(self) -> None:
        self.streams = 0
        self.broke_at: float | None = None
        self.arrived_at = 0.0


class SentAnswer:
    """An answer with messages to a client, and the connection that brings it.

    `is_written`: also its end. `is_left`: its client said that it ends before that.
    """

    def __init__(self, connection: ConnectionTimes | None) -> None:
        self._connection, self.was_reported, self.is_written = connection, False, False
        self.is_left = False
        self._passed: set[str] = set()
        self._over = asyncio.Event()
        # When its end was written; until then a break ends the call.
        self._written_at: float | None = None

    def passes(self, handle: str) -> None:
        """Note that a message is passed on to the client."""
        self._passed.add(handle)

    def has_passed(self, handle: str) -> bool:
        """Return whether a message was passed on to the client, perhaps in vain."""
        return handle in self._passed

    def written(self, now: float) -> None:
        """Note that the end of the answer was written."""
        self._written_at, self.is_written = now, True
        self._over.set()

    def broke(self) -> None:
        """Note that the answer has no end."""
        self._over.set()

    async def over(self) -> None:
        """Wait until the answer is written, or broke."""
        await self._over.wait()

    def arrived(self) -> None:
        """Note that the client has it, and so all that the connection brought before."""
        if self._connection is not None and self._written_at is not None:
            self._connection.arrived_at = max(self._connection.arrived_at, self._written_at)
        self._written_at = None

    @property
    def may_be_lost(self) -> bool:
        """Whether the connection broke so soon after the answer that the client may not have it."""
        if self._connection is None or self._connection.broke_at is None or self._written_at is None:
            return False
        since = max(self._connection.arrived_at, self._connection.broke_at - BREAK_NOTICED_S)
        return self._written_at > since


class ConnectedConsumers(Protocol):
    """The consumers that are connected to this process."""

    def get(self, client_id: str, keys: ApiKeys) -> object | None:
        """Return the client with this id and these rights; None: it is not connected."""


@dataclass(slots=True)
class HeldReceipt:
    """A message that a push consumer works on. `tried_at`: when it last tried to settle it; None: it has not tried.

    `settling`: how many requests to settle it are under way.
    `answer`: the answer that brought it; None: it has surely arrived.
    """

    client_id: str
    subscription: str
    keys: ApiKeys
    since: float
    until: float
    held_s: float
    tried_at: float | None = None
    answer: SentAnswer | None = None
    settling: int = 0

    @property
    def is_sent(self) -> bool:
        """Whether the answer that brings it is not still being written."""
        return self.answer is None or self.answer.is_written


class Renewals:
    """The receipt handles that are renewed for connected push consumers."""

    def __init__(self, api: HalfnoteApi, clients: ConnectedConsumers) -> None:
        self._api, self._clients = api, clients
        self._held: dict[str, HeldReceipt] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, handle: str) -> bool:
        return handle in self._held

    def hold(
        self,
        handles: Iterable[str],
        client_id: str,
        subscription: str,
        keys: ApiKeys,
        held_s: float,
        answer: SentAnswer | None = None,
    ) -> None:
        """Renew these handles, each time for `held_s` seconds, until they are settled or the client stays away.

        Those of an `answer` that may be lost are not renewed: the client would not know of them.
        """
        now = time.monotonic()
        for handle in handles:
            self._held[handle] = HeldReceipt(client_id, subscription, keys, now, now + held_s, held_s, answer=answer)

    def settling(self, handles: Iterable[str]) -> None:
        """Note that a client settles these handles, so that the answers that brought them have arrived."""
        for handle in handles:
            if (one := self._held.get(handle)) is not None:
                one.settling += 1
                if one.answer is not None:
                    one.answer.arrived()

    def settled(self, handles: Iterable[str]) -> None:
        """Renew these handles no more."""
        for handle in handles:
            self._held.pop(handle, None)

    def take_of(self, client_id: str, keys: ApiKeys) -> dict[str, list[str]]:
        """Forget what a client holds, and return it by subscription; nothing if it is connected.

        What it is settling, and what is still being sent to it, stays: that has an outcome soon.
        """
        taken: dict[str, list[str]] = defaultdict(list)
        if self._clients.get(client_id, keys) is None:
            for handle, one in list(self._held.items()):
                if (one.client_id, one.keys) == (client_id, keys) and not one.settling and one.is_sent:
                    taken[one.subscription].append(handle)
                    del self._held[handle]
        return taken

    def take_unsent(self, client_id: str, keys: ApiKeys) -> dict[str, list[str]]:
        """Note that a client leaves; forget what answers to it have not passed on yet, and return it by subscription.

        These answers then end.
        """
        taken: dict[str, list[str]] = defaultdict(list)
        for handle, one in list(self._held.items()):
            if (one.client_id, one.keys) == (client_id, keys) and one.answer is not None and not one.is_sent:
                one.answer.is_left = True
                if not one.answer.has_passed(handle):
                    taken[one.subscription].append(handle)
                    del self._held[handle]
        return taken

    def sent_to(self, client_id: str, keys: ApiKeys) -> set[SentAnswer]:
        """Return the answers that are still being sent to a client, and were as it left."""
        held = [one for one in self._held.values() if (one.client_id, one.keys) == (client_id, keys)]
        return {one.answer for one in held if one.answer is not None and one.answer.is_left and not one.is_sent}

    def tried(self, handles: Iterable[str]) -> None:
        """Renew these handles for TRIED_AGAIN_S more: they were not settled, and the consumer may try again.

        For clients that try again at once, as those of RocketMQ 5. One of RocketMQ 4 may run its handler before.
        """
        now = time.monotonic()
        for handle in handles:
            if (one := self._held.get(handle)) is not None:
                one.tried_at, one.settling = now, max(0, one.settling - 1)

    async def run(self) -> None:
        """Renew without end."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.renew(time.monotonic())
            except Exception:
                # A defect with one of them: the others stay held, and the next look renews them.
                log.exception("rocketmq_renewal_failed")

    async def renew(self, now: float) -> None:
        """Renew what is due at `now` (monotonic seconds). Forget what is over.

        A client whose connection breaks works on, and may be back only with its next heartbeat. While it is away, what
        it holds is not renewed.
        """
        due: dict[tuple[str, ApiKeys, float], list[str]] = defaultdict(list)
        for handle, one in list(self._held.items()):
            tried_long_ago = one.tried_at is not None and now - one.tried_at > TRIED_AGAIN_S
            if now > one.until or now - one.since > RENEWED_MOST_S or tried_long_ago:
                del self._held[handle]
            elif one.answer is not None and one.answer.may_be_lost:
                # If the client names the message in time, the answer has arrived, and the others are renewed again.
                if not one.answer.was_reported:
                    one.answer.was_reported = True
                    log.info("rocketmq_answer_may_be_lost", subscription=one.subscription)
            elif one.until - now <= AHEAD_S and self._clients.get(one.client_id, one.keys) is not None:
                due[one.subscription, one.keys, one.held_s].append(handle)
        free, begun = asyncio.Semaphore(AT_ONCE), time.monotonic()

        async def extend(subscription: str, keys: ApiKeys, handles: list[str], held_s: float) -> None:
            waits = free.locked()
            async with free:
                # Halfnote holds what is renewed later until later.
                sent_at = now + time.monotonic() - begun if waits else now
                await self._extend(subscription, keys, handles, held_s, sent_at)

        await asyncio.gather(
            *(
                extend(subscription, keys, handles[start : start + 1000], held_s)
                for (subscription, keys, held_s), handles in due.items()
                for start in range(0, len(handles), 1000)
            )
        )

    async def _extend(self, subscription: str, keys: ApiKeys, handles: list[str], held_s: float, now: float) -> None:
        """Hold messages for longer. One that is not held any more is forgotten; one refused for now stays due."""
        content = {"handles": handles, "invisible_s": held_s}
        try:
            answer = await self._api.post(path_of("subscriptions", subscription, "extend"), keys.subscriber, content)
        except CallRefused as refused:
            log.warning("rocketmq_messages_not_renewed", subscription=subscription, error=refused.text)
            return
        for handle, refusal in zip(handles, outcomes_of(answer), strict=True):
            if refusal is None:
                if (one := self._held.get(handle)) is not None:
                    one.until = now + held_s
            # It may be settled meanwhile.
            elif handle in self._held:
                log.warning("rocketmq_message_not_renewed", subscription=subscription, error=refusal.text)
                if not refusal.for_now:
                    self.settled([handle])
