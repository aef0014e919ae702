"""Claim messages of subscriptions and settle them, for clients of either protocol."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from app.rocketmq.buffers import ROOM_WITHIN_S, BufferedBytes
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.paths import path_of
from app.rocketmq.receiving import ClaimedDelivery, read_messages
from app.rocketmq.refusals import CallRefused, outcomes_of
from app.rocketmq.renewals import HELD_S, LOOK_S
from app.rocketmq.subscriptions import Subscriptions

# A request names at most so many handles.
HANDLES_MAX = 500
# How long a claim goes on whose consumer is gone. One that Halfnote answers now is answered by then.
ANSWERED_BY_S = 1.0
# How long Halfnote needs for a claim of messages that are there. One without an answer after that waits for messages.
AT_ONCE_S = 0.2
# How long a gateway that stops waits for what it gives back.
STOPS_WITHIN_S = 5.0


class Claiming:
    """Claims and settles with the API key of the client for which it is done.

    `held_s`: how many seconds a claim, and each renewal, holds messages whose time is renewed. If Halfnote's settings
    (HALFNOTE_CLAIM_HELD_MAX_S, HALFNOTE_CLAIM_MAX) allow less time or fewer messages, each is halved until it is taken.
    """

    def __init__(self, api: HalfnoteApi, subscriptions: Subscriptions) -> None:
        self._api, self._subscriptions, self.buffers = api, subscriptions, api.buffers
        self.held_s = HELD_S
        self._most = sys.maxsize
        self._give_backs: set[asyncio.Task[None]] = set()

    async def claim(
        self, name: str, keys: ApiKeys, *, most: int, held_s: float | None, wait_s: float, buffered: BufferedBytes
    ) -> Sequence[ClaimedDelivery]:
        """Claim up to `most` messages for `held_s` seconds; wait for one up to `wait_s`. Raises CallRefused.

        Without `held_s` the caller renews them, and they are held for the `held_s` of this object. What a caller
        that is canceled does not get comes again soon, as the same attempt. One that is canceled while it waits gets
        nothing. The answer is a part of `buffered`, which the caller releases when the client has the messages.
        """
        begun = time.monotonic()
        claiming = asyncio.create_task(self._claim(name, keys, most, held_s, wait_s, buffered))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            waits = wait_s and not claiming.done() and not buffered.is_answered
            if waits and time.monotonic() - begun > AT_ONCE_S:
                # Its request ends. One that goes on would take a message that comes now, and use up an attempt of it.
                claiming.cancel()
            else:
                self._in_background(self._give_back_claimed(claiming, name, keys, buffered))
            raise

    async def _claim(
        self, name: str, keys: ApiKeys, most: int, held_s: float | None, wait_s: float, buffered: BufferedBytes
    ) -> Sequence[ClaimedDelivery]:
        path = path_of("subscriptions", name, "claim")
        while True:
            at_most = min(most, self._most)
            seconds = self.held_s if held_s is None else held_s
            content = {"max": at_most, "invisible_s": seconds, "wait_s": wait_s}
            try:
                answer = await self._api.claim(path, keys.subscriber, content, wait_s=wait_s, buffered=buffered)
            except CallRefused as refused:
                if refused.slug in ("subscription-unknown", "not-pulled"):
                    self._subscriptions.forget(name, keys)
                if refused.field == "max" and at_most > 1:
                    self._most = min(self._most, at_most // 2)
                # Less could not be renewed in time.
                elif refused.field == "invisible_s" and held_s is None and seconds / 2 > LOOK_S:
                    self.held_s = min(self.held_s, seconds / 2)
                else:
                    raise
            else:
                return read_messages(answer).messages

    async def settle(
        self, name: str, keys: ApiKeys, how: str, handles: Sequence[str], **more: Any
    ) -> list[CallRefused | None]:
        """`ack`, `nack`, `extend` or `reject` messages; return what was refused of each. Raises CallRefused for all."""
        results: list[CallRefused | None] = []
        for start in range(0, len(handles), HANDLES_MAX):
            content = {"handles": list(handles[start : start + HANDLES_MAX]), **more}
            answer = await self._api.post(path_of("subscriptions", name, how), keys.subscriber, content)
            results += outcomes_of(answer)
        return results

    def give_back(
        self, name: str, keys: ApiKeys, handles: Sequence[str], why: str, *, retry_after_s: float | None = 0
    ) -> None:
        """Let messages come again in the background: at once, after a time, or as the subscription says (None).

        That uses up an attempt, because the client may have begun to work on them. If it fails, they come when their
        time is over.
        """
        after = {} if retry_after_s is None else {"retry_after_s": retry_after_s}
        if handles:
            self._in_background(self._give_back(name, keys, handles, why, after))

    def give_back_unsent(self, name: str, keys: ApiKeys, handles: Sequence[str], why: str) -> None:
        """Let messages that no client was sent come again in the background, as the same attempt, after a second."""
        if handles:
            self._in_background(self._give_back(name, keys, handles, why, {"begun": False}))

    async def stop(self) -> None:
        """Wait until what is given back is given back, if that takes no longer than STOPS_WITHIN_S."""
        if self._give_backs:
            await asyncio.wait(self._give_backs, timeout=STOPS_WITHIN_S)
        for task in self._give_backs:
            task.cancel()

    def _in_background(self, giving_back: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(giving_back)
        self._give_backs.add(task)
        task.add_done_callback(self._give_backs.discard)

    async def _give_back(
        self, name: str, keys: ApiKeys, handles: Sequence[str], why: str, how: Mapping[str, Any]
    ) -> None:
        with contextlib.suppress(CallRefused):
            await self.settle(name, keys, "nack", handles, error=why, **how)

    async def _give_back_claimed(
        self,
        claiming: "asyncio.Task[Sequence[ClaimedDelivery]]",
        name: str,
        keys: ApiKeys,
        buffered: BufferedBytes,
    ) -> None:
        """Give back what a claim still gets whose consumer is gone."""
        await asyncio.wait([claiming], timeout=ANSWERED_BY_S)
        if buffered.is_answered:
            # The answer waits for room, or is being read.
            await asyncio.wait([claiming], timeout=ROOM_WITHIN_S + ANSWERED_BY_S)
        claiming.cancel()
        with contextlib.suppress(CallRefused, asyncio.CancelledError):
            try:
                handles = [one.handle for one in await claiming]
            finally:
                # The caller has released what it knew of.
                buffered.release()
            if handles:
                why = "the consumer left before it got the message"
                await self._give_back(name, keys, handles, why, {"begun": False})
