"""Consumers claim the messages of a subscription, and settle what they hold."""

import asyncio
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, TypeVar
from uuid import UUID

import msgspec
import structlog
from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.admission.route_roles import RULES
from app.config import Settings
from app.database.connection import Connection, NoConnection, PoolBusy
from app.database.standby_wait import WaitCanceled, noted_waits
from app.delivery import Refused
from app.errors import HandleInvalid, Invalid, NotHeld, NotPulled, Problem, SubscriptionUnknown
from app.field_rules import json_of
from app.ids import message_id
from app.permissions import Caller, Role
from app.pull import settling
from app.pull.claiming import ClaimedBatch, HandedOut, claim, claim_more
from app.pull.handles import opened, opened_together
from app.pull.settlements import Refusal, failed
from app.pull.settling import Acknowledged, Extended, GivenBack
from app.routers.claim_audit import note_act, note_act_first
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.subscription_lookup import unknown
from app.runtime.state import Runtime
from app.schemas.claims import (
    CLAIM_DEFAULT,
    HANDLE_MAX,
    HANDLES_MAX,
    HELD_DEFAULT_S,
    HELD_MOST_S,
    WAIT_MOST_S,
    AcknowledgeRequest,
    ClaimedMessages,
    ExtendRequest,
    GiveBackRequest,
    MessageClaim,
    RejectRequest,
    SettledMessages,
)
from app.schemas.fields import NamePath
from app.store.pull.claims import HeldMessage, PulledSubscription, pulled
from app.store.relay.results import DELIVERED
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import Ordered

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/subscriptions", tags=["claims"])

T = TypeVar("T", bound=Acknowledged | GivenBack | Extended)
_JSON = "application/json"
_encode = msgspec.json.Encoder().encode
CLIENT_LEFT = "the client left before it got the message"


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
    traceparent: str | None
    body: msgspec.Raw | msgspec.UnsetType
    body_base64: str | msgspec.UnsetType


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    """MessageClaim, as it is nearly always sent. What was not sent is unset: a setting may lower its default."""

    max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | msgspec.UnsetType = msgspec.UNSET
    invisible_s: Annotated[float, msgspec.Meta(ge=1, le=HELD_MOST_S)] | msgspec.UnsetType = msgspec.UNSET
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_MOST_S)] = 0


class _Handles(msgspec.Struct, forbid_unknown_fields=True):
    """AcknowledgeRequest, as it is nearly always sent."""

    handles: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=HANDLE_MAX)]],
        msgspec.Meta(min_length=1, max_length=HANDLES_MAX),
    ]


_claim_of = msgspec.json.Decoder(_Claim).decode
_handles_of = msgspec.json.Decoder(_Handles).decode


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
    of the subscription in its scope. If the client closes its connection before the answer is sent, the messages come
    again after a second, as the same attempt.
    """
    sent = _Claim(**wanted.model_dump(exclude_unset=True))
    return Response(await _claimed(runtime, caller, name, sent, request.is_disconnected), media_type=_JSON)


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
    return Response(await _acknowledged(runtime, caller, name, wanted.handles), media_type=_JSON)


@router.post(
    "/{name}/nack",
    summary="Give messages back",
    response_model=SettledMessages,
    responses=problems(SubscriptionUnknown, Invalid, NotPulled),
)
async def post_nack(name: NamePath, wanted: GiveBackRequest, runtime: RuntimeDep, caller: CallerDep) -> Response:
    """Record a failed attempt of each message. It comes again after `retry_after_s`, or as `retry` says.

    After the last try of the subscription's `retry` it is a dead letter (`result: dead`). With `begun: false` no
    attempt is recorded, and the same one comes again.
    """
    opening = await _Opening.of(runtime, caller, name)
    handles = opening.valid(wanted.handles)
    await note_act_first(runtime, caller, "subscription.give_back", name, handles)
    if wanted.begun:
        outcome, retry_after_s = failed(wanted.error), wanted.retry_after_s
    else:
        outcome, retry_after_s = failed(wanted.error, postponed_s=wanted.retry_after_s or 0), None
    found = await _give_back(runtime, opening, handles, outcome, retry_after_s)
    return _given_back_answer(opening, wanted.handles, found)


@router.post(
    "/{name}/reject",
    summary="Make dead letters of messages",
    response_model=SettledMessages,
    responses=problems(SubscriptionUnknown, Invalid, NotPulled),
)
async def post_reject(name: NamePath, wanted: RejectRequest, runtime: RuntimeDep, caller: CallerDep) -> Response:
    """Record that no try can succeed: each message is a dead letter, which a person redelivers or drops."""
    opening = await _Opening.of(runtime, caller, name)
    handles = opening.valid(wanted.handles)
    await note_act_first(runtime, caller, "subscription.reject", name, handles, wanted.reason)
    outcome = Refused(wanted.reason, wanted.reason, None, None, 0)
    found = await _give_back(runtime, opening, handles, outcome, None)
    return _given_back_answer(opening, wanted.handles, found)


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
    await note_act_first(runtime, caller, "subscription.extend", name, handles)
    invisible = timedelta(seconds=wanted.invisible_s)
    async with runtime.claim_connections.connection() as connection:
        found = await settling.extend(connection, opening.subscription, handles, invisible, runtime.clock)
    answer = opening.answer(wanted.handles, found, lambda named, one: _Settled(200, named, held_until=one.until))
    return Response(answer, media_type=_JSON)


async def claim_directly(
    runtime: Runtime, caller: Caller, name: str, body: bytes, is_gone: Callable[[], Awaitable[bool]]
) -> bytes | None:
    """Answer what `post_claim` answers, without the framework; None if the request is not as MessageClaim says."""
    try:
        wanted = _claim_of(body)
    except msgspec.DecodeError:
        return None
    return await _claimed(runtime, caller, name, wanted, is_gone)


async def acknowledge_directly(
    runtime: Runtime, caller: Caller, name: str, body: bytes, is_gone: Callable[[], Awaitable[bool]]
) -> bytes | None:
    """Answer what `post_ack` answers, without the framework; None if the request is not as AcknowledgeRequest says."""
    try:
        wanted = _handles_of(body)
    except msgspec.DecodeError:
        return None
    return await _acknowledged(runtime, caller, name, wanted.handles)


async def _claimed(
    runtime: Runtime,
    caller: Caller,
    name: str,
    wanted: _Claim,
    is_gone: Callable[[], Awaitable[bool]],
) -> bytes:
    caller.must_have_subscription(name)
    at_most, invisible = _bounds(runtime.settings, wanted)
    loop = asyncio.get_running_loop()
    until = loop.time() + wanted.wait_s
    known, found = await _claim_connected(runtime, caller, name, at_most, invisible)
    while not found.messages and (left_s := until - loop.time()) > 0:
        waits_for, waiting = str(known.subscription.subscription_id), runtime.waiting_consumers
        # With `more` a part of the log had nothing for the subscription, and it goes on. One claim at a time reads on,
        # so that those that wait for the cursor do not use up the connections.
        async with waiting.turn(waits_for, left_s) if found.more else nullcontext(True) as may_go_on:
            if not may_go_on:
                break
            woken = found.more or await waiting.wait(waits_for, at_most, left_s)
            # What it claimed would only be given back.
            if runtime.stopping or await is_gone():
                break
            if not woken and await _is_same(runtime, name, known.subscription):
                break
            # The key may have ended, or have another scope, since the request came.
            caller = runtime.authenticator.still_valid(caller, RULES["POST", "/subscriptions/{name}/claim"])
            caller.must_have_subscription(name)
            known, found = await _claim_connected(runtime, caller, name, at_most, invisible)
    # What the client does not get would be missing until its time is over.
    if found.messages and await is_gone():
        opening, given = _Opening(known), [one.handle for one in found.messages]
        try:
            await _give_back(runtime, opening, opening.valid(given), failed(CLIENT_LEFT, postponed_s=0), None)
        except Exception as error:
            log.warning("claim_not_given_back", subscription=name, messages=len(given), error=repr(error))
            raise
        found = replace(found, messages=[])
    return _encode({"messages": [_shown(one) for one in found.messages], "held_until": found.until, "more": found.more})


async def _claim_connected(
    runtime: Runtime, caller: Caller, name: str, at_most: int, invisible: timedelta
) -> tuple[PulledSubscription, ClaimedBatch]:
    once = _claim_and_note if caller.role is Role.ADMIN else _claim_once
    async with runtime.claim_connections.connection() as connection:
        return await once(runtime, connection, caller, name, at_most, invisible)


async def _is_same(runtime: Runtime, name: str, subscription: Subscription) -> bool:
    """Return whether a subscription still has its name, after a claim that no one woke has waited for it.

    Without a connection nothing is known, and the claim ends without messages.
    """
    try:
        async with runtime.claim_connections.connection() as connection:
            known = await _pulled(runtime, connection, name)
    except (PoolBusy, NoConnection):
        return True
    return known.subscription.subscription_id == subscription.subscription_id


def _bounds(settings: Settings, wanted: _Claim) -> tuple[int, timedelta]:
    """Return how many messages a claim takes, and for how long. Raises Invalid for a value above its setting.

    A default above it is lowered, because the client has not sent it.
    """
    at_most, held_s = wanted.max, wanted.invisible_s
    if at_most is msgspec.UNSET:
        at_most = min(CLAIM_DEFAULT, settings.claim_max)
    if held_s is msgspec.UNSET:
        held_s = min(HELD_DEFAULT_S, settings.claim_held_max_s)
    _refuse_over(at_most, settings.claim_max, "max", "HALFNOTE_CLAIM_MAX")
    _refuse_over(held_s, settings.claim_held_max_s, "invisible_s", "HALFNOTE_CLAIM_HELD_MAX_S")
    return at_most, timedelta(seconds=held_s)


async def _claim_once(
    runtime: Runtime, connection: Connection, caller: Caller, name: str, at_most: int, invisible: timedelta
) -> tuple[PulledSubscription, ClaimedBatch]:
    known = runtime.pulled.get(name)
    if known is not None and known.goes_on and caller.covers_topics(known.subscription.topics):
        more = await claim_more(connection, runtime.clock, known, at_most, invisible)
        known.goes_on = more is not None and more.goes_on
        if more is not None:
            return known, more
    known = await _pulled(runtime, connection, name)
    caller.must_cover_topics(known.subscription.topics)
    found = await claim(connection, runtime.clock, known, at_most, invisible)
    known.goes_on = found.goes_on
    return known, found


async def _claim_and_note(
    runtime: Runtime, connection: Connection, caller: Caller, name: str, at_most: int, invisible: timedelta
) -> tuple[PulledSubscription, ClaimedBatch]:
    """Claim for an admin, with the audit row in the same database transaction. A claim of nothing leaves no row."""
    async with connection.transaction():
        known, found = await _claim_once(runtime, connection, caller, name, at_most, invisible)
        messages = [one.message for one in found.messages]
        await note_act(runtime, connection, caller, "subscription.claim", name, messages)
    return known, found


async def _acknowledge(
    runtime: Runtime, connection: Connection, name: str, given: Sequence[str]
) -> tuple["_Opening", list[Acknowledged | None]]:
    # After the connection was opened: it may be the first one to a promoted server.
    known = runtime.pulled.get(name)
    # After the wait for a connection, so that no message is acknowledged whose time is over.
    now = runtime.clock.now()
    if known is not None:
        opening = _Opening(known)
        handles = opening.valid(given)
        found = await settling.acknowledge(connection, known.subscription, handles, now, version=known.version)
        if found is not None:
            return opening, found
    # This process has not read the subscription, or it was changed since then, or nothing is held.
    opening = _Opening(await _pulled(runtime, connection, name))
    handles = opening.valid(given)
    found = await settling.acknowledge(connection, opening.subscription, handles, now)
    assert found is not None
    return opening, found


async def _acknowledged(runtime: Runtime, caller: Caller, name: str, given: Sequence[str]) -> bytes:
    caller.must_have_subscription(name)
    if caller.role is Role.ADMIN:
        acting = await _Opening.of(runtime, caller, name)
        await note_act_first(runtime, caller, "subscription.acknowledge", name, acting.valid(given))
    async with runtime.claim_connections.connection() as connection:
        with noted_waits(connection) as canceled:
            opening, found = await _acknowledge(runtime, connection, name, given)
    # The next messages of the keys can be claimed, or those that did not fit beside what waits for its key.
    if opening.subscription.ordered is Ordered.KEY:
        runtime.wake_ups.claimable()
    fresh = sum(one is not None and not one.repeated for one in found)
    runtime.metrics.relay.deliveries.labels(name, DELIVERED).inc(fresh)
    if canceled:
        raise WaitCanceled(canceled[0])
    return opening.answer(given, found, lambda named, one: _Settled(200, named, replayed=one.repeated))


async def _give_back(
    runtime: Runtime,
    opening: "_Opening",
    handles: Sequence[HeldMessage],
    outcome: Refusal,
    retry_after_s: float | None,
) -> list[GivenBack | None]:
    async with runtime.claim_connections.connection() as connection:
        found, published = await settling.give_back(
            connection, opening.subscription, handles, outcome, runtime.clock, retry_after_s=retry_after_s
        )
    runtime.wake_ups.claimable()
    if published:
        runtime.wake_ups.published()
    for what, times in Counter(one.what for one in found if one is not None).items():
        runtime.metrics.relay.deliveries.labels(opening.subscription.name, what).inc(times)
    return found


def _given_back_answer(opening: "_Opening", given: Sequence[str], found: Sequence[GivenBack | None]) -> Response:
    def shown(named: str, one: GivenBack) -> _Settled:
        return _Settled(200, named, result="dead" if one.due_at is None else "retry", due_at=one.due_at)

    return Response(opening.answer(given, found, shown), media_type=_JSON)


class _Opening:
    """The subscription of a request, and what opens its handles."""

    def __init__(self, pulled: PulledSubscription) -> None:
        self.subscription = pulled.subscription
        self._key = pulled.handle_key
        self._opened: dict[str, HeldMessage | None] = {}

    @classmethod
    async def of(cls, runtime: Runtime, caller: Caller, name: str) -> "_Opening":
        """Raises Forbidden, SubscriptionUnknown and NotPulled."""
        caller.must_have_subscription(name)
        async with runtime.claim_connections.connection() as connection:
            return cls(await _pulled(runtime, connection, name))

    def valid(self, handles: Sequence[str]) -> list[HeldMessage]:
        """Return what the handles say that Halfnote made for this subscription, each once."""
        each = list(dict.fromkeys(handles))
        together = opened_together(each, self.subscription.subscription_id, self._key)
        if together is not None:
            self._opened = dict(zip(each, together, strict=True))
            return together
        self._opened = {handle: opened(handle, self._key_of) for handle in each}
        return [message for _, message in self._held()]

    def answer(self, handles: Sequence[str], found: Sequence[T | None], shown: Callable[[str, T], _Settled]) -> bytes:
        """Return an outcome for each handle, in the order of the request. `found`: of the valid ones."""
        outcomes: dict[str, msgspec.Raw | _Settled] = dict.fromkeys(self._opened, msgspec.Raw(_INVALID))
        for (handle, message), outcome in zip(self._held(), found, strict=True):
            named = message_id(message.transaction_id, message.position)
            outcomes[handle] = _not_held(named) if outcome is None else shown(named, outcome)
        return _encode({"outcomes": [outcomes[handle] for handle in handles]})

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


async def _pulled(runtime: Runtime, connection: Connection, name: str) -> PulledSubscription:
    """Read a subscription, and remember it for the next request. Raises SubscriptionUnknown and NotPulled."""
    found = await pulled(connection, name)
    if isinstance(found, PulledSubscription):
        runtime.pulled[name] = found
        return found
    runtime.pulled.pop(name, None)
    if found is None:
        raise unknown(name)
    raise NotPulled(f"Workers deliver the messages of `{name}` to its destination ({found.destination['type']}).")


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
        message.traceparent,
        msgspec.UNSET if json is None else json,
        b64encode(message.body).decode() if json is None else msgspec.UNSET,
    )
