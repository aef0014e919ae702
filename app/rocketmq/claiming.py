"""Claim messages of subscriptions and settle them, for clients of either protocol."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from app.rocketmq.credentials import ApiKeys
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.paths import path_of
from app.rocketmq.receiving import ClaimedDelivery, read_messages
from app.rocketmq.refusals import CallRefused, refusal_of
from app.rocketmq.subscriptions import Subscriptions

# A request names at most so many handles.
HANDLES_MAX = 500


class Claiming:
    """Claims and settles with the API key of the client for which it is done."""

    def __init__(self, api: HalfnoteApi, subscriptions: Subscriptions) -> None:
        self._api, self._subscriptions = api, subscriptions
        self._give_backs: set[asyncio.Task[None]] = set()

    async def claim(
        self, name: str, keys: ApiKeys, *, most: int, held_s: float, wait_s: float
    ) -> Sequence[ClaimedDelivery]:
        """Claim up to `most` messages for `held_s` seconds; wait for one up to `wait_s`. Raises CallRefused."""
        content = {"max": most, "invisible_s": held_s, "wait_s": wait_s}
        path = path_of("subscriptions", name, "claim")
        try:
            answer = await self._api.post(path, keys.subscriber, content, wait_s=wait_s)
        except CallRefused as refused:
            if refused.slug in ("subscription-unknown", "not-pulled"):
                self._subscriptions.forget(name, keys)
            raise
        return read_messages(answer).messages

    async def settle(
        self, name: str, keys: ApiKeys, how: str, handles: Sequence[str], **more: Any
    ) -> list[CallRefused | None]:
        """`ack`, `nack`, `extend` or `reject` messages; return what was refused of each. Raises CallRefused for all."""
        results: list[CallRefused | None] = []
        for start in range(0, len(handles), HANDLES_MAX):
            content = {"handles": list(handles[start : start + HANDLES_MAX]), **more}
            answer = await self._api.post(path_of("subscriptions", name, how), keys.subscriber, content)
            results += [
                None if one["status"] == 200 else refusal_of(one["status"], one)
                for one in json.loads(answer)["outcomes"]
            ]
        return results

    def give_back(self, name: str, keys: ApiKeys, handles: Sequence[str], why: str) -> None:
        """Let messages come again at once, in the background. If that fails, they come when their time is over."""
        if not handles:
            return

        async def settle() -> None:
            try:
                await self.settle(name, keys, "nack", handles, retry_after_s=0, error=why)
            except CallRefused:
                return

        task = asyncio.create_task(settle())
        self._give_backs.add(task)
        task.add_done_callback(self._give_backs.discard)
