"""Replays: a part of the log goes out once more to one subscription, with the same message ids."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from app.access import Caller
from app.acts import act, by_whom
from app.database import Connection
from app.errors import Invalid, LogGone, ReplayOver, ReplayUnknown, SubscriptionUnknown, TooManyReplays
from app.replay_shapes import (
    LogOffset,
    LogTime,
    ReplayAnswer,
    ReplayList,
    ReplayPage,
    ReplayRequest,
    ReplayShown,
)
from app.routers.shared import CallerDep, NamePath, RuntimeDep, problems
from app.routers.subscribed import known
from app.store import replays as store
from app.store.audit import Act, record
from app.store.replays import Asked, StoredReplay
from app.store.standing import latest, since, until

router = APIRouter(prefix="/subscriptions", tags=["subscriptions"])

RUNNING_MAX = 10
ID_MAX = 2**31 - 1

ReplayId = Annotated[int, Path(ge=1, le=ID_MAX, description="as `POST …/replay` answered it")]


@router.post(
    "/{name}/replay",
    status_code=202,
    summary="Send a part of the log once more",
    responses=problems(SubscriptionUnknown, Invalid, LogGone, TooManyReplays),
)
async def post_replay(name: NamePath, wanted: ReplayRequest, runtime: RuntimeDep, caller: CallerDep) -> ReplayAnswer:
    """Send to this subscription once more what it takes of a part of the log, beside its live delivery.

    Messages keep their ids, and `halfnote-replay` names the replay. It has retries and dead letters of its own, keeps
    the order by key within itself, and shares the subscription's rate. At most 10 run at once. A subscriber's key must
    reach every topic of the subscription.
    """
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        subscription = await known(connection, name, lock=True)
        caller.must_cover_topics(subscription.topics)
        after, last = await _part(connection, wanted)
        filters = wanted.filters.model_dump(mode="json", exclude_none=True) if wanted.filters else None
        actor = by_whom(caller, wanted.actor)
        asked = Asked(subscription.subscription_id, after, last, filters or None, actor, wanted.reason)
        made = await store.start(connection, asked, RUNNING_MAX, now)
        if made is not None:
            await record(connection, _replay_act(caller, name, made, wanted), now)
    if made is None:
        raise TooManyReplays(f"{RUNNING_MAX} replays of `{name}` are running.", limit=RUNNING_MAX)
    return _answer(name, made)


@router.get("/{name}/replays", summary="List a subscription's replays", responses=problems(SubscriptionUnknown))
async def list_replays(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, query: Annotated[ReplayPage, Query()]
) -> ReplayList:
    """List the replays of a subscription, running and over, newest first."""
    caller.must_have_subscription(name)
    before = ID_MAX if query.cursor is None else int(query.cursor)
    async with runtime.database.connection() as connection:
        subscription = await known(connection, name)
        found = await store.page(connection, subscription.subscription_id, before, query.limit + 1)
    items = [_answer(name, replay) for replay in found[: query.limit]]
    return ReplayList(items=items, next_cursor=str(items[-1].replay_id) if len(found) > query.limit else None)


@router.get(
    "/{name}/replays/{replay_id}",
    summary="Show a replay and what came of it",
    responses=problems(SubscriptionUnknown, ReplayUnknown),
)
async def get_replay(name: NamePath, replay_id: ReplayId, runtime: RuntimeDep, caller: CallerDep) -> ReplayShown:
    """Show how far a replay has come, and how many of its messages are delivered, wait for a retry, or are dead."""
    caller.must_have_subscription(name)
    async with runtime.database.connection() as connection:
        replay = await _known(connection, name, replay_id)
        found = await store.outcomes(connection, replay)
    return ReplayShown(
        **_answer(name, replay).model_dump(mode="json"),
        delivered=found.delivered,
        retrying=found.retrying,
        dead=found.dead,
    )


@router.delete(
    "/{name}/replays/{replay_id}",
    status_code=204,
    summary="Cancel a replay",
    responses=problems(SubscriptionUnknown, ReplayUnknown, ReplayOver),
)
async def cancel_replay(name: NamePath, replay_id: ReplayId, runtime: RuntimeDep, caller: CallerDep) -> None:
    """End a replay before its time. What is in flight is still settled; its dead letters stay."""
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        replay = await _known(connection, name, replay_id)
        if await store.cancel(connection, replay.subscription_id, replay_id, now):
            await record(connection, act(caller, "replay.cancel", name, replay_id=replay_id), now)
            return
        replay = await _known(connection, name, replay_id)
    if replay.state != "cancelled":
        raise ReplayOver(f"Replay {replay_id} is {replay.state}.", state=replay.state)


async def _part(connection: Connection, wanted: ReplayRequest) -> tuple[int, int]:
    """Return the offsets after which a replay begins and with which it ends. Raises Invalid or LogGone."""
    head, oldest = await latest(connection), await store.oldest(connection)
    if oldest is None:
        raise Invalid("`from`: the log is empty, there is nothing to send again.", field="from")
    match wanted.from_:
        case LogOffset(offset=offset):
            after = offset - 1
        case LogTime(time=time):
            after = max(oldest - 1, await since(connection, time))
        case _:
            after = oldest - 1
    if after >= head:
        raise Invalid(f"`from` lies behind the newest message, whose offset is {head}.", field="from")
    if after + 1 < oldest:
        raise LogGone(f"Offset {after + 1} has left the database; the oldest that is there is {oldest}.", oldest=oldest)
    last = await _last(connection, wanted, head)
    if last <= after:
        raise Invalid(f"`until` lies before `from`: the replay would end with {last}, after {after}.", field="until")
    return after, last


async def _last(connection: Connection, wanted: ReplayRequest, head: int) -> int:
    match wanted.until:
        case None:
            return head
        case LogOffset(offset=offset):
            if offset > head:
                raise Invalid(f"`until` lies behind the newest message, whose offset is {head}.", field="until")
            return offset
        case LogTime(time=time):
            return min(head, await until(connection, time))


async def _known(connection: Connection, name: str, replay_id: int) -> StoredReplay:
    subscription = await known(connection, name)
    replay = await store.one(connection, subscription.subscription_id, replay_id)
    if replay is None:
        raise ReplayUnknown(f"`{name}` has no replay {replay_id}.")
    return replay


def _replay_act(caller: Caller, name: str, made: StoredReplay, wanted: ReplayRequest) -> Act:
    return act(
        caller,
        "subscription.replay",
        name,
        actor=wanted.actor,
        reason=wanted.reason,
        replay_id=made.replay_id,
        after=made.after,
        until=made.until,
    )


def _answer(name: str, replay: StoredReplay) -> ReplayAnswer:
    return ReplayAnswer(
        replay_id=replay.replay_id,
        subscription=name,
        state=replay.state,
        after=replay.after,
        until=replay.until,
        offset=replay.offset,
        filters=replay.filters,
        reason=replay.reason,
        actor=replay.actor,
        created_at=replay.created_at,
        moved_at=replay.moved_at,
        ended_at=replay.ended_at,
    )
