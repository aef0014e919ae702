"""Store messages and halves in Halfnote, for clients of either protocol."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import structlog

from app.rocketmq.checks import CheckClaims
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.message_ids import step_of, transaction_id
from app.rocketmq.paths import path_of
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused
from app.rocketmq.sending import SentMessage

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredSend:
    """Where a sent message is. `offset`: in the log; 0 for a half."""

    transaction_id: str
    offset: int


class Storing:
    """Stores messages, each once, and declares producer groups with the rights of the client's own key."""

    def __init__(self, api: HalfnoteApi, checks: CheckClaims) -> None:
        self._api, self._checks = api, checks

    async def store(self, group: str, topic: str, message: SentMessage, keys: ApiKeys) -> StoredSend:
        """Store one message of a producer group. Raises CallRefused."""
        now = datetime.now(UTC)
        at = message.made_at or step_of(now)
        for last in (False, False, True):
            try:
                return await self._stored(group, topic, message, keys, at, now)
            except CallRefused as refused:
                if not last and refused.slug == "group-unregistered":
                    await self._declare(group, topic, keys)
                elif not last and refused.slug == "id-time-skew":
                    # The client's clock is wrong.
                    at = step_of(now)
                else:
                    raise
        raise AssertionError("the last turn returns or raises")

    async def store_all(
        self, group: str, topic: str, messages: Sequence[SentMessage], keys: ApiKeys
    ) -> list[StoredSend | CallRefused]:
        """Store messages of a producer group; return each one's place, or why it is refused.

        Those of a key are stored in their order. After a refusal the later ones of its key are refused as well.
        """
        by_key: dict[object, list[int]] = {}
        for number, message in enumerate(messages):
            by_key.setdefault(number if message.key is None else message.key, []).append(number)
        found: dict[int, StoredSend | CallRefused] = {}

        async def store_in_order(numbers: Sequence[int]) -> None:
            refused: CallRefused | None = None
            for number in numbers:
                try:
                    found[number] = refused or await self.store(group, topic, messages[number], keys)
                except CallRefused as error:
                    found[number] = refused = error

        await asyncio.gather(*(store_in_order(numbers) for numbers in by_key.values()))
        return [found[number] for number in range(len(messages))]

    async def end(self, group: str, transaction: UUID, verdict: str, keys: ApiKeys, *, checked: bool) -> None:
        """Record a verdict. `checked`: it answers a check. Raises CallRefused."""
        content = {
            "producer_group": group,
            "transaction_id": str(transaction),
            "verdict": verdict,
            "from_check": checked,
        }
        try:
            await self._api.post("/end", keys.producer, content)
        except CallRefused as refused:
            # A client that is refused for now says it again.
            if checked and not refused.for_now:
                self._checks.answered(group, transaction, keys)
            raise
        if checked:
            self._checks.answered(group, transaction, keys)

    async def _stored(
        self, group: str, topic: str, message: SentMessage, keys: ApiKeys, at: datetime, now: datetime
    ) -> StoredSend:
        named = str(transaction_id(at, topic.encode() + b"\0" + message.content))
        path = "/half" if message.transactional else "/messages"
        offset = 0
        try:
            answer = json.loads(await self._api.post(path, keys.producer, message.request(group, named, now)))
            offset = answer["messages"][0].get("offset", 0)
        except CallRefused as refused:
            # The id has the digest of what a repeat of a message must have in common with it.
            if refused.slug != "content-differs" or refused.field not in message.may_differ:
                raise
        return StoredSend(named, offset)

    async def _declare(self, group: str, topic: str, keys: ApiKeys) -> None:
        try:
            await self._api.call("PUT", path_of("producer-groups", group), keys.producer, {"checks": "claim"})
        except CallRefused as refused:
            if refused.code not in (Code.FORBIDDEN, Code.UNAUTHORIZED):
                raise
            whose = "has no producer group" if group == topic else f"cannot be sent to: there is no group `{group}`"
            raise CallRefused(
                Code.TOPIC_NOT_FOUND,
                f"The topic `{topic}` {whose} in Halfnote, and this client may not register one. An admin runs "
                f"`halfnote groups put {group} --checks claim`.",
            ) from None
        log.info("rocketmq_producer_group_declared", group=group)
        self._checks.declared(group)
