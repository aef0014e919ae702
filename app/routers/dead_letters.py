"""Dead letters: messages that a subscription could not get. A person inspects, redelivers or drops them."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import msgspec
import structlog
from fastapi import APIRouter, Body, Path, Query
from fastapi.responses import Response
from pydantic import Field

from app.database.connection import Connection
from app.errors import DeadLetterUnknown, Forbidden, Invalid, SubscriptionUnknown
from app.ids import message_id, parse_message_id
from app.operations.audit import acting_person, audit_entry
from app.operations.dead_letters import Acted, act_on, act_on_all, would_act_on
from app.permissions import Caller, Role
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.message_body import with_body
from app.routers.timeline import known
from app.runtime.state import Runtime
from app.schemas.dead_letters import (
    BY_FILTER_EXAMPLE,
    BY_IDS_EXAMPLE,
    OF_KIND,
    REPLAY_MAX,
    ByFilter,
    ByIds,
    Cursor,
    DeadLetterFilter,
    DeadLetterGroupPage,
    DeadLetterGroupShown,
    DeadLetterPage,
    DeadLetterRef,
    DeadLetterRow,
    DeadLetterShown,
    DropAnswer,
    EarlierRedelivery,
    Kind,
    RedeliverAnswer,
    Selection,
    Waiting,
    match_cursor,
)
from app.schemas.fields import COUNT, Name, NamePath, Strict, Time
from app.schemas.totals import COUNTED_MOST, TotalShown
from app.schemas.transactions import ID
from app.store.admin.audit import Act, record
from app.store.subscriptions.dead_letters import (
    HIGHEST,
    LOWEST,
    DeadLetter,
    DeadLetterCursor,
    DeadLetterGroup,
    DeadLetterOrder,
    DeadLetterSearch,
    DeadLetterSummary,
    Named,
    count_matching,
    group_dead_letters,
    list_dead_letters,
    named,
    one_dead_letter,
)
from app.store.subscriptions.redeliveries import Deed, Earlier, Key, Moved, earlier_redeliveries
from app.verdicts import SubscriptionState

router = APIRouter(prefix="/dead-letters", tags=["dead letters"])
log = structlog.get_logger(__name__)

PAGE_MAX = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Wanted = Annotated[
    Selection,
    Body(
        openapi_examples={
            "by ids": {"summary": "These", "value": BY_IDS_EXAMPLE},
            "by filter": {"summary": "All dead letters that match a filter", "value": BY_FILTER_EXAMPLE},
        }
    ),
]


class _Filters(Strict):
    subscription: Name | None = Field(None, description="of this subscription", examples=["mailer"])
    topic: Name | None = Field(None, description="of this topic", examples=["order"])
    key: Name | None = Field(None, description="of this key", examples=["order-1030"])
    reason: Name | None = Field(None, description="dead for this reason", examples=["retries_exhausted"])
    error: Kind | None = Field(None, description=OF_KIND, examples=["answered 503"])
    died_after: Time | None = Field(None, description="died at this time or later")
    died_before: Time | None = Field(None, description="died before this time")


class DeadLetterQuery(_Filters):
    """Filters of the list. A dead letter must match all of them."""

    count: bool = Field(False, description=COUNT)
    cursor: Cursor | None = Field(None, description="`next_cursor` of the previous page")
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="dead letters on a page")


class GroupQuery(_Filters):
    """Filters of the groups. A dead letter must match all of them."""

    sort: DeadLetterOrder = Field(
        "count",
        description="`count`: the largest group first; `last`: the group whose last dead letter died last first; "
        "`first`: the group that began first; `subscription`: by name",
    )
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="groups in the answer")


class ReplayQuery(Strict):
    """Selects one of a message's deliveries to a subscription."""

    replay: int = Field(0, ge=0, le=REPLAY_MAX, description="the replay of the dead letter; 0: live delivery")


@router.get(
    "",
    summary="List dead letters, newest first",
    response_model_exclude_unset=True,
    responses=problems(Invalid, SubscriptionUnknown),
)
async def list_of_dead_letters(
    runtime: RuntimeDep, caller: CallerDep, query: Annotated[DeadLetterQuery, Query()]
) -> DeadLetterPage:
    """Return a page of dead letters by time of death, newest first.

    The time to answer is bounded, also that of `count`. If few dead letters match the filter, a page may hold fewer
    than `limit` or none and still have a `next_cursor`. The list ends when `next_cursor` is null. A subscriber's
    key must name one of its subscriptions and sees only the dead letters of its topics.
    """
    _must_reach(caller, query)
    async with runtime.request_pool.connection() as connection:
        whole = wanted = await _readable(connection, caller, query)
        if query.cursor is not None:
            wanted = _below(wanted, query.cursor)
        rows, below = await list_dead_letters(connection, wanted, query.limit)
        counted = await count_matching(connection, whole, COUNTED_MOST) if query.count else None
    # An answer without a count leaves the field out.
    total = {} if counted is None else {"total": TotalShown(count=counted[0], exact=counted[1])}
    return DeadLetterPage(
        items=[_row(row) for row in rows], next_cursor=None if below is None else _cursor_of(below), **total
    )


@router.get(
    "/groups",
    summary="Count dead letters by subscription, reason and error",
    responses=problems(Invalid, SubscriptionUnknown),
)
async def dead_letter_groups(
    runtime: RuntimeDep, caller: CallerDep, query: Annotated[GroupQuery, Query()]
) -> DeadLetterGroupPage:
    """Return groups of dead letters, with the first and the last time of death of each.

    Errors that differ only in addresses, ids and numbers of four digits or more are one group. A group's
    `subscription`, `reason` and `error` are its filter in `GET /dead-letters`, in redeliver and in drop. The newest
    dead letters are looked at, of the subscription and of the time that the filter names: at most 100,000, and fewer
    where the time to answer would be long. `looked_at` says how many, and `complete` whether they are all. A
    subscriber's key must name one of its subscriptions and sees only the dead letters of its topics.
    """
    _must_reach(caller, query)
    async with runtime.request_pool.connection() as connection:
        wanted = await _readable(connection, caller, query)
        found = await group_dead_letters(connection, wanted, query.limit, query.sort)
    return DeadLetterGroupPage(
        items=[DeadLetterGroupShown(error=one.kind, newest=one.error, **_plain(one)) for one in found.rows],
        groups=found.count,
        looked_at=found.looked_at,
        complete=found.complete,
    )


@router.get(
    "/{subscription}/{message_id}",
    summary="Show a dead letter with its message",
    response_model=DeadLetterShown,
    responses=problems(DeadLetterUnknown, SubscriptionUnknown),
)
async def get_dead_letter(
    runtime: RuntimeDep,
    caller: CallerDep,
    subscription: NamePath,
    message_id: Annotated[str, Path(description="the message's id", examples=[f"{ID}-0"])],
    query: Annotated[ReplayQuery, Query()],
) -> Response:
    """Return a dead letter: the result of its last attempt, and the message as in `GET /messages/{message_id}`.

    The message is present even after its day was removed. For a subscriber's key, a dead letter of a topic outside its
    scope does not exist.
    """
    caller.must_have_subscription(subscription)
    parsed = parse_message_id(message_id)
    async with runtime.request_pool.connection() as connection:
        owner = (await _known(connection, [subscription]))[subscription]
        key = None if parsed is None else (owner.subscription_id, query.replay, *parsed)
        letter = None if key is None else await one_dead_letter(connection, *key)
        if key is None or letter is None or not caller.has_topic(letter.topic):
            raise DeadLetterUnknown(f"`{subscription}` has no dead letter of this message.")
        earlier = await earlier_redeliveries(connection, *key, runtime.settings.attempts_page_max)
    return with_body(_shown(subscription, letter, earlier), caller, letter.body, letter.content_type)


@router.post(
    "/redeliver",
    summary="Redeliver dead letters",
    response_model_exclude_unset=True,
    responses=problems(Invalid, SubscriptionUnknown),
)
async def redeliver_dead_letters(runtime: RuntimeDep, caller: CallerDep, wanted: Wanted) -> RedeliverAnswer:
    """Deliver dead letters again, at once, with a full set of tries.

    Repeating the request changes nothing: the dead letters are then `not_found`. With a filter, `dry_run` defaults to
    true. To leave out what dies after a dry run, send its `died_before` in the filter. An act by a filter ends after
    30 s, or if the database fails after a part was done; `next_cursor` then leads on. If the subscription is paused or
    disabled, they are redelivered when it is resumed (`waiting`). A message that uses up its tries again becomes a new
    dead letter.
    """
    acted, answer = await _act(runtime, caller, wanted, drop=False)
    states = {one.subscription: one.state for one in acted.moved}
    if acted.moved:
        runtime.wake_ups.published()
    return RedeliverAnswer(
        **answer,
        redelivered=len(acted.moved),
        waiting=[
            Waiting.model_validate({"subscription": name, "state": state})
            for name, state in sorted(states.items())
            if state is not SubscriptionState.ACTIVE
        ],
    )


@router.delete(
    "",
    summary="Drop dead letters",
    response_model_exclude_unset=True,
    responses=problems(Invalid, SubscriptionUnknown),
)
async def drop_dead_letters(runtime: RuntimeDep, caller: CallerDep, wanted: Wanted) -> DropAnswer:
    """Drop dead letters for good. They are never delivered to their subscription.

    The request body selects them as in `/dead-letters/redeliver`. With a filter, `dry_run` defaults to true, and its
    answer has the `died_before` that leaves out what dies later. A key that `on_dead: hold` stopped continues.
    """
    acted, answer = await _act(runtime, caller, wanted, drop=True)
    return DropAnswer(**answer, dropped=len(acted.moved))


async def _act(
    runtime: Runtime, caller: Caller, wanted: ByIds | ByFilter, *, drop: bool
) -> tuple[Acted, dict[str, Any]]:
    """Act on a selection. Return what changed, and the fields that every answer has."""
    deed, now = Deed(drop, acting_person(caller, wanted.actor), wanted.reason), runtime.clock.now()
    if isinstance(wanted, ByIds):
        async with runtime.request_pool.transaction() as connection:
            keys = await _keys(connection, wanted)
            acted = await act_on(connection, keys, deed, now, died_before=wanted.died_before or HIGHEST.died_at)
            for one in acted.moved:
                await record(connection, _act_of(caller, wanted, drop=drop, target=_message(one)), now)
    else:
        async with runtime.request_pool.connection() as connection:
            meets = await _filter(connection, wanted.filter)
        if not wanted.dry_run:
            # The audit row comes first, because a filter takes several database transactions.
            async with runtime.request_pool.transaction() as connection:
                await record(connection, _act_of(caller, wanted, drop=drop, target=wanted.filter.subscription), now)
        if wanted.cursor is not None:
            meets = _below(meets, wanted.cursor)
        if wanted.dry_run:
            found, count, exact = await would_act_on(runtime.request_pool, meets, wanted.at_most)
            acted = Acted([], left=count, left_exact=exact)
            return acted, {**_answer(acted, found), "dry_run": True, "died_before": _bound(wanted.filter, found, now)}
        acted = await act_on_all(runtime.request_pool, meets, wanted.at_most, deed, now)
    log.info(
        "dead_letters_dropped" if drop else "dead_letters_redelivered",
        count=len(acted.moved),
        subscriptions=sorted({one.subscription for one in acted.moved}),
        actor=deed.actor,
        reason=wanted.reason,
        left=acted.left,
        whole=acted.below is None,
    )
    return acted, _answer(acted, acted.moved)


def _answer(acted: Acted, concerned: Sequence[Moved | DeadLetterSummary]) -> dict[str, Any]:
    return {
        "dry_run": False,
        "not_found": acted.not_found,
        "left": acted.left,
        "left_exact": acted.left_exact,
        "ids": [_ref(one.subscription, one.place) for one in concerned],
        **known(next_cursor=None if acted.below is None else _cursor_of(acted.below)),
    }


def _bound(asked: DeadLetterFilter, found: Sequence[DeadLetterSummary], now: datetime) -> datetime:
    """Return a time before which all died that a dry run counted, and none that dies later.

    It is after the newest, because the clocks of workers may be ahead of this process.
    """
    bound = found[0].place.died_at + timedelta(microseconds=1) if found else now
    return bound if asked.died_before is None else min(bound, asked.died_before)


def _act_of(caller: Caller, wanted: ByIds | ByFilter, *, drop: bool, target: str | None) -> Act:
    chosen = wanted.filter.model_dump(mode="json", exclude_none=True) if isinstance(wanted, ByFilter) else None
    what = "dead_letter.drop" if drop else "dead_letter.redeliver"
    return audit_entry(caller, what, target, actor=wanted.actor, reason=wanted.reason, filter=chosen)


def _message(one: Moved) -> str:
    return f"{one.subscription}/{message_id(one.place.transaction_id, one.place.position)}"


async def _known(connection: Connection, names: Collection[str]) -> dict[str, Named]:
    """Return the subscriptions of these names. Raises SubscriptionUnknown for the first that does not exist."""
    found = await named(connection, list(names))
    for name in names:
        if name not in found:
            raise SubscriptionUnknown(
                f"There is no subscription `{name}`, so it has no dead letters. GET /subscriptions lists all."
            )
    return found


async def _keys(connection: Connection, wanted: ByIds) -> list[Key]:
    owners = await _known(connection, {one.subscription for one in wanted.ids})
    keys = []
    for one in wanted.ids:
        parsed = parse_message_id(one.message_id)
        assert parsed is not None  # the shape looked at it
        keys.append(Key(owners[one.subscription].subscription_id, one.replay, *parsed))
    return keys


async def _filter(connection: Connection, asked: _Filters | DeadLetterFilter) -> DeadLetterSearch:
    owner = None
    if asked.subscription is not None:
        owner = (await _known(connection, [asked.subscription]))[asked.subscription].subscription_id
    return DeadLetterSearch(
        subscription_id=owner,
        topic=asked.topic,
        key=asked.key,
        reason=asked.reason,
        kind=asked.error,
        died_after=asked.died_after or LOWEST.died_at,
        below=DeadLetterCursor(asked.died_before) if asked.died_before else HIGHEST,
    )


def _must_reach(caller: Caller, asked: _Filters) -> None:
    """Raise Forbidden if a subscriber's key asks for more than one of its subscriptions and its topics."""
    if caller.role is not Role.SUBSCRIBER:
        return
    if asked.subscription is None:
        raise Forbidden(
            "A subscriber's key lists the dead letters of one of its subscriptions: send `subscription`.",
            role=caller.role,
            missing={"subscriptions": "*"},
        )
    caller.must_have_subscription(asked.subscription)
    if asked.topic is not None:
        caller.must_have_topic(asked.topic)


async def _readable(connection: Connection, caller: Caller, asked: _Filters) -> DeadLetterSearch:
    """Return a filter of what the caller may read."""
    wanted = await _filter(connection, asked)
    return replace(wanted, topics=caller.topics.topic_patterns) if caller.role is Role.SUBSCRIBER else wanted


def _plain(one: DeadLetterGroup) -> dict[str, Any]:
    """Return the fields of a group that the answer has as they are."""
    return {name: value for name, value in asdict(one).items() if name not in ("kind", "error")}


def _below(wanted: DeadLetterSearch, cursor: str) -> DeadLetterSearch:
    found = match_cursor(cursor)
    assert found is not None  # the shape looked at it
    micros, transaction_id, *rest = found.groups()
    place = DeadLetterCursor(_EPOCH + timedelta(microseconds=int(micros)), UUID(transaction_id), *map(int, rest))
    return replace(wanted, below=min(wanted.below, place))


def _cursor_of(place: DeadLetterCursor) -> str:
    micros = (place.died_at - _EPOCH) // timedelta(microseconds=1)
    return f"{micros}_{message_id(place.transaction_id, place.position)}_{place.subscription_id}_{place.replay}"


def _ref(subscription: str, place: DeadLetterCursor) -> DeadLetterRef:
    return DeadLetterRef(
        subscription=subscription,
        message_id=message_id(place.transaction_id, place.position),
        **known(replay=place.replay or None),
    )


def _row(row: DeadLetterSummary) -> DeadLetterRow:
    return DeadLetterRow(
        **_ref(row.subscription, row.place).model_dump(exclude_unset=True),
        topic=row.topic,
        key=row.key,
        offset=row.offset,
        attempts=row.attempts,
        reason=row.reason,
        died_at=row.place.died_at,
        **known(status=row.status, error=row.error),
    )


def _shown(subscription: str, letter: DeadLetter, earlier: list[Earlier]) -> DeadLetterShown:
    return DeadLetterShown(
        **_ref(subscription, letter.place).model_dump(exclude_unset=True),
        transaction_id=letter.place.transaction_id,
        producer_group=letter.producer_group,
        topic=letter.topic,
        key=letter.key,
        tag=letter.tag,
        headers=msgspec.json.decode(letter.headers) if letter.headers else {},
        content_type=letter.content_type,
        offset=letter.offset,
        attempts=letter.attempts,
        reason=letter.reason,
        died_at=letter.place.died_at,
        redelivered=[EarlierRedelivery(at=one.at, **known(actor=one.actor, reason=one.reason)) for one in earlier],
        **known(
            first_at=letter.first_at,
            committed_at=letter.committed_at,
            status=letter.status,
            error=letter.error,
            response=letter.response,
        ),
    )
