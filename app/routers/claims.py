"""Consumers claim the messages of a subscription, and settle what they hold."""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.database.connection import Connection
from app.delivery import Refused
from app.errors import HandleInvalid, Invalid, NotHeld, NotPulled, Problem, SubscriptionUnknown
from app.field_rules import json_of
from app.ids import message_id
from app.permissions import Caller
from app.pull import settling
from app.pull.claiming import HandedOut, claim
from app.pull.handles import opened
from app.pull.settlements import Refusal, failed
from app.pull.settling import Acknowledged, Extended, GivenBack
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.subscription_lookup import known
from app.runtime.state import Runtime
from app.schemas.claims import (
    AcknowledgeRequest,
    ClaimedMessages,
    ExtendRequest,
    GiveBackRequest,
    MessageClaim,
    RejectRequest,
    SettledMessages,
)
from app.schemas.fields import NamePath
from app.store.pull.claims import HeldMessage, look
from app.store.relay.results import DELIVERED
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import Ordered

router = APIRouter(prefix="/subscriptions", tags=["claims"])

T = TypeVar("T", bound=Acknowledged | GivenBack | Extended)
_JSON = "application/json"
_encode = msgspec.json.Encoder().encode


class _Settled(msgspec.Struct):
    """The outcome of a handle, as SettledMessage describes it."""

    status: int
    message_id: str
    replayed: bool | msgspec.UnsetType = msgspec.UNSET
    result: str | msgspec.UnsetType = msgspec.UNSET
    due_at: datetime | msgspec.UnsetType | None = msgspec.UNSET
    held_until: datetime | msgspec.UnsetType = msgspec.UNSET


class _Message(msgspec.Struct):
    """A message of a claim, as ClaimedMessageShown describes it. A claim has hundreds, and a dict takes longer."""

    handle: str
    message_id: str
    offset: int
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: msgspec.Raw
    content_type: str
    committed_at: datetime
    attempt: int
    replay: int | None
    body: msgspec.Raw | msgspec.UnsetType
    body_base64: str | msgspec.UnsetType


@router.post(
    "/{name}/claim",
    summary="Claim messages",
    response_model=ClaimedMessages,
    responses=problems(SubscriptionUnknown, Invalid, NotPulled),
)
async def post_claim(
    name: NamePath, wanted: MessageClaim, runtime: RuntimeDep, caller: CallerDep, request: Request
) -> Response:
    """Take up to `max` messages, to work on them for `invisible_s` seconds. An empty answer: nothing was there.

    Retries and delayed messages that are due come first, then new messages in the order of their offsets. Any number
    of consumers may claim at the same time; no message is out to two of them. Acknowledge each message, give it back,
    or reject it. What is not settled in time comes again. With `wait_s` the request waits until there is a message.
    Messages of a paused subscription cannot be claimed. With `ordered: key` a claim may have several messages of a
    key, in their order; no other claim gets later ones before these are settled. A subscriber's key needs all topics
    of the subscription in its scope.
    """
    caller.must_have_subscription(name)
    _refuse_over(wanted.max, runtime.settings.claim_max, "max", "HALFNOTE_CLAIM_MAX")
    _refuse_over(wanted.invisible_s, runtime.settings.claim_held_max_s, "invisible_s", "HALFNOTE_CLAIM_HELD_MAX_S")
    loop = asyncio.get_running_loop()
    until = loop.time() + wanted.wait_s
    while True:
        async with runtime.claim_connections.connection() as connection:
            subscription = await _pulled(connection, name)
            caller.must_cover_topics(subscription.topics)
            found = await claim(
                connection, runtime.clock, subscription, wanted.max, timedelta(seconds=wanted.invisible_s)
            )
        left_s = until - loop.time()
        if found.messages or left_s <= 0:
            break
        waits_for = str(subscription.subscription_id)
        # A part of the log had nothing for the subscription, and it goes on.
        if not found.more and not await runtime.waiting_consumers.wait(waits_for, wanted.max, left_s):
            break
        # What it claimed would be lost until its time is over.
        if await request.is_disconnected():
            break
    shown = {"messages": [_shown(one) for one in found.messages], "held_until": found.until, "more": found.more}
    return Response(_encode(shown), media_type=_JSON)


@router.post(
    "/{name}/ack",
    summary="Acknowledge messages",
    response_model=SettledMessages,
    responses=problems(SubscriptionUnknown, Invalid, NotPulled),
)
async def post_ack(name: NamePath, wanted: AcknowledgeRequest, runtime: RuntimeDep, caller: CallerDep) -> Response:
    """Record that the messages are done: each gets its receipt, and does not come again.

    To acknowledge a message again by the same handle is 200 with `replayed: true`. A handle whose time is over is 409
    `not-held`, and changes nothing.
    """
    opening = await _Opening.of(runtime, caller, name)
    handles = opening.valid(wanted.handles)
    async with runtime.claim_connections.connection() as connection:
        found = await settling.acknowledge(connection, opening.subscription, handles, runtime.clock.now())
    # The next messages of the keys can be claimed, or those that did not fit beside what waits for its key.
    if opening.subscription.ordered is Ordered.KEY:
        runtime.wake_ups.claimable()
    fresh = sum(one is not None and not one.repeated for one in found)
    runtime.metrics.relay.deliveries.labels(name, DELIVERED).inc(fresh)
    return opening.answer(wanted.handles, found, lambda named, one: _Settled(200, named, replayed=one.repeated))


@router.post(
    "/{name}/nack",
    summary="Give messages back",
    response_model=SettledMessages,
    responses=problems(SubscriptionUnknown, Invalid, NotPulled),
)
async def post_nack(name: NamePath, wanted: GiveBackRequest, runtime: RuntimeDep, caller: CallerDep) -> Response:
    """Record a failed attempt of each message. It comes again after `retry_after_s`, or as `retry` says.

    After the last try of the subscription's `retry` it is a dead letter (`result: dead`).
    """
    return await _give_back(runtime, caller, name, wanted.handles, failed(wanted.error), wanted.retry_after_s)


@router.post(
    "/{name}/reject",
    summary="Make dead letters of messages",
    response_model=SettledMessages,
    responses=problems(SubscriptionUnknown, Invalid, NotPulled),
)
async def post_reject(name: NamePath, wanted: RejectRequest, runtime: RuntimeDep, caller: CallerDep) -> Response:
    """Record that no try can succeed: each message is a dead letter, which a person redelivers or drops."""
    outcome = Refused(wanted.reason, wanted.reason, None, None, 0)
    return await _give_back(runtime, caller, name, wanted.handles, outcome, None)


@router.post(
    "/{name}/extend",
    summary="Hold messages for longer",
    response_model=SettledMessages,
    responses=problems(SubscriptionUnknown, Invalid, NotPulled),
)
async def post_extend(name: NamePath, wanted: ExtendRequest, runtime: RuntimeDep, caller: CallerDep) -> Response:
    """Hold the messages for `invisible_s` seconds from now on. Their handles stay the same."""
    _refuse_over(wanted.invisible_s, runtime.settings.claim_held_max_s, "invisible_s", "HALFNOTE_CLAIM_HELD_MAX_S")
    opening = await _Opening.of(runtime, caller, name)
    handles = opening.valid(wanted.handles)
    now = runtime.clock.now()
    until = now + timedelta(seconds=wanted.invisible_s)
    async with runtime.claim_connections.connection() as connection:
        found = await settling.extend(connection, opening.subscription, handles, until, now)
    return opening.answer(wanted.handles, found, lambda named, one: _Settled(200, named, held_until=one.until))


async def _give_back(
    runtime: Runtime,
    caller: Caller,
    name: str,
    given: Sequence[str],
    outcome: Refusal,
    retry_after_s: float | None,
) -> Response:
    opening = await _Opening.of(runtime, caller, name)
    handles = opening.valid(given)
    async with runtime.claim_connections.connection() as connection:
        found, published = await settling.give_back(
            connection, opening.subscription, handles, outcome, runtime.clock.now(), retry_after_s=retry_after_s
        )
    runtime.wake_ups.claimable()
    if published:
        runtime.wake_ups.published()
    what = "refused" if isinstance(outcome, Refused) else "failed"
    runtime.metrics.relay.deliveries.labels(name, what).inc(sum(one is not None for one in found))

    def shown(named: str, one: GivenBack) -> _Settled:
        return _Settled(200, named, result="dead" if one.due_at is None else "retry", due_at=one.due_at)

    return opening.answer(given, found, shown)


class _Opening:
    """The subscription of a request, and what opens its handles."""

    def __init__(self, subscription: Subscription, key: UUID) -> None:
        self.subscription = subscription
        self._key = key
        self._opened: dict[str, HeldMessage | None] = {}

    @classmethod
    async def of(cls, runtime: Runtime, caller: Caller, name: str) -> "_Opening":
        """Raises Forbidden, SubscriptionUnknown and NotPulled."""
        caller.must_have_subscription(name)
        async with runtime.claim_connections.connection() as connection:
            subscription = await _pulled(connection, name)
            key = runtime.handle_keys.get(subscription.subscription_id)
            if key is None:
                found = await look(connection, subscription.subscription_id, runtime.clock.now())
                if found is None:
                    raise SubscriptionUnknown(f"The subscription `{name}` was deleted at this moment.")
                key = runtime.handle_keys[subscription.subscription_id] = found.handle_key
        return cls(subscription, key)

    def valid(self, handles: Sequence[str]) -> list[HeldMessage]:
        """Return what the handles say that Halfnote made for this subscription, each once."""
        self._opened = {handle: opened(handle, self._key_of) for handle in handles}
        return [message for _, message in self._held()]

    def answer(
        self, handles: Sequence[str], found: Sequence[T | None], shown: Callable[[str, T], _Settled]
    ) -> Response:
        """Return an outcome for each handle, in the order of the request. `found`: of the valid ones."""
        outcomes: dict[str, msgspec.Raw | _Settled] = dict.fromkeys(self._opened, msgspec.Raw(_INVALID))
        for (handle, message), outcome in zip(self._held(), found, strict=True):
            named = message_id(message.transaction_id, message.position)
            outcomes[handle] = _not_held(named) if outcome is None else shown(named, outcome)
        return Response(_encode({"outcomes": [outcomes[handle] for handle in handles]}), media_type=_JSON)

    def _held(self) -> Iterator[tuple[str, HeldMessage]]:
        return ((handle, message) for handle, message in self._opened.items() if message is not None)

    def _key_of(self, subscription_id: int) -> UUID | None:
        return self._key if subscription_id == self.subscription.subscription_id else None


def _body_of(problem: Problem) -> bytes:
    return problem.body()


_INVALID = _body_of(HandleInvalid("Halfnote has not made this handle for a message of this subscription."))


def _not_held(named: str) -> msgspec.Raw:
    problem = NotHeld("Its time is over, or it was settled before. Nothing was changed.", message_id=named)
    return msgspec.Raw(problem.body())


def _refuse_over(value: float, most: float, field: str, setting: str) -> None:
    if value > most:
        raise Invalid(f"`{field}` must be at most {most} ({setting}).", field=field)


async def _pulled(connection: Connection, name: str) -> Subscription:
    subscription = await known(connection, name)
    if not subscription.is_pulled:
        raise NotPulled(
            f"Workers deliver the messages of `{name}` to its destination ({subscription.destination['type']})."
        )
    return subscription


def _shown(one: HandedOut) -> _Message:
    message = one.message
    json = json_of(message.body, message.content_type)
    return _Message(
        one.handle,
        message_id(message.transaction_id, message.position),
        message.offset,
        message.producer_group,
        message.topic,
        message.key,
        message.tag,
        msgspec.Raw(message.headers or "{}"),
        message.content_type,
        message.committed_at,
        message.used + 1,
        one.replay or None,
        msgspec.UNSET if json is None else json,
        b64encode(message.body).decode() if json is None else msgspec.UNSET,
    )
