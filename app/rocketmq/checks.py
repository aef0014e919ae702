"""Claim the checks of connected producers, and ask over their connections.

RocketMQ's gRPC protocol has no producer group; its proxy takes the topic for it, and so does this gateway. Each process
claims checks only for groups of which a producer is connected here, so a check reaches a process that can ask.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol
from uuid import UUID

import structlog

from app.rocketmq.credentials import ApiKeys
from app.rocketmq.gateway_metrics import GatewayMetrics, Transport
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.paths import path_of
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.receiving import ClaimedOrphan, read_checks
from app.rocketmq.refusals import CallRefused

log = structlog.get_logger(__name__)

CHECKS_MAX = 32
# The time for an answer; an unanswered check comes again after it, to the next producer.
ANSWER_S = 30
WAIT_S = 20
# After a claim that failed: the wait doubles.
FAILED_S, FAILED_MOST_S = 1.0, 30.0

Published = tuple[str, ApiKeys]


class AskedProducer(Protocol):
    """A producer to which checks are sent."""

    @property
    def client_id(self) -> str:
        """The id by which the log names it."""

    async def all_taken(self) -> None:
        """Wait until it has taken what was sent to it, or is gone."""


class ConnectedProducers(Protocol):
    """The producers that are connected to this process."""

    def published(self) -> set[Published]:
        """Return the producer groups that have a producer here, with the keys under which their checks are claimed."""

    def ask(self, group: str, keys: ApiKeys, check: ClaimedOrphan) -> AskedProducer | None:
        """Send a check to one of the group's producers; return it, or None if none takes it."""


class CheckClaims:
    """A claim for each producer group that has a producer here, and the checks that are out to a client."""

    def __init__(
        self, api: HalfnoteApi, producers: ConnectedProducers, metrics: GatewayMetrics, protocol: Transport
    ) -> None:
        self._api, self._producers = api, producers
        self._metrics, self._protocol = metrics, protocol
        self._claims: dict[Published, asyncio.Task[None]] = {}
        # Until when, by group, transaction and keys.
        self._out: dict[tuple[str, UUID, ApiKeys], float] = {}
        self._stopped = False

    def __len__(self) -> int:
        now = time.monotonic()
        return sum(until > now for until in list(self._out.values()))

    def adjust(self) -> None:
        """Begin claims for groups that have got a producer, and end those of groups without one."""
        if self._stopped:
            # Clients leave, and the end of a check that goes to one of them would not be read.
            return
        published = self._producers.published()
        for one in self._claims.keys() - published:
            self._claims.pop(one).cancel()
        for one in published - self._claims.keys():
            self._claims[one] = asyncio.create_task(self._claim(*one))

    def declared(self, group: str) -> None:
        """Claim at once for a producer group that was just declared."""
        for one in [one for one in self._claims if one[0] == group]:
            self._claims.pop(one).cancel()
        self.adjust()

    async def stop(self) -> None:
        """End all claims, and begin none."""
        self._stopped = True
        claims = list(self._claims.values())
        self._claims.clear()
        for claim in claims:
            claim.cancel()
        await asyncio.gather(*claims, return_exceptions=True)

    def is_out(self, group: str, transaction_id: UUID, keys: ApiKeys) -> bool:
        """Return whether a check of this transaction is out to a client of this group with these rights.

        Clients in Go do not say whether an end is the answer to a check.
        """
        return self._out.get((group, transaction_id, keys), 0.0) > time.monotonic()

    def answered(self, group: str, transaction_id: UUID, keys: ApiKeys) -> None:
        """Note that the answer to a check is recorded, or refused for good."""
        until, now = self._out.pop((group, transaction_id, keys), 0.0), time.monotonic()
        if until > now:
            self._metrics.check_answered(self._protocol, now - until + ANSWER_S)

    async def _claim(self, group: str, keys: ApiKeys) -> None:
        started, pause_s = True, FAILED_S
        while True:
            try:
                await self._claim_once(group, keys, started=started)
            except Exception as error:
                self._note(group, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, FAILED_MOST_S)
            else:
                started, pause_s = False, FAILED_S

    async def _claim_once(self, group: str, keys: ApiKeys, *, started: bool) -> None:
        wanted = {"max": CHECKS_MAX, "invisible_s": ANSWER_S, "wait_s": WAIT_S, "started": started}
        path = path_of("producer-groups", group, "checks", "claim")
        # Without a part of the buffers: their time would pass while claimed messages wait for slow consumers.
        answer = await self._api.claim(path, keys.producer, wanted, wait_s=WAIT_S)
        asked = [self._ask(group, keys, check) for check in read_checks(answer).checks]
        await _until_taken({one for one in asked if one is not None})

    def _ask(self, group: str, keys: ApiKeys, check: ClaimedOrphan) -> AskedProducer | None:
        now = time.monotonic()
        self._out = {one: until for one, until in self._out.items() if until > now}
        transaction_id = str(check.transaction_id)
        try:
            client = self._producers.ask(group, keys, check)
        except Exception:
            # A message that has no form for the client. The other checks of the claim go on; this one comes again.
            log.exception("rocketmq_check_not_encoded", group=group, transaction_id=transaction_id)
            self._metrics.check(self._protocol, "not_encoded")
            return None
        if client is None:
            # The producer left after the claim: the check comes again when the claim is over.
            self._metrics.check(self._protocol, "no_producer")
            log.info("rocketmq_check_without_a_producer", group=group, transaction_id=transaction_id)
            return None
        self._out[group, check.transaction_id, keys] = now + ANSWER_S
        self._metrics.check(self._protocol, "sent")
        log.info("rocketmq_check_sent", group=group, transaction_id=transaction_id, client=client.client_id)
        return client

    def _note(self, group: str, refused: Exception) -> None:
        if not isinstance(refused, CallRefused):
            log.error("rocketmq_checks_failed", group=group, exc_info=refused)
            return
        if refused.slug == "group-unknown":
            # No transaction was sent yet. The first one declares the group, or says who has to.
            return
        if refused.slug == "checks-not-claimed":
            log.warning(
                "rocketmq_checks_are_not_claimed", group=group, hint=f"run `halfnote groups put {group} --checks claim`"
            )
        elif refused.code != Code.PROXY_TIMEOUT:
            log.warning("rocketmq_checks_cannot_be_claimed", group=group, error=refused.text)
        else:
            log.info("rocketmq_halfnote_does_not_answer", group=group, error=refused.text)


async def _until_taken(asked: Iterable[AskedProducer]) -> None:
    """Wait until one of the producers that were asked has taken its checks, for at most ANSWER_S.

    A check that no producer takes uses up one of its tries. The others of a group go on beside one that does not read.
    """
    waiting = [asyncio.ensure_future(one.all_taken()) for one in asked]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
