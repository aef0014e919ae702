"""Replays: send a part of the log to one subscription again, with the same message ids."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse

from app.database.connection import Connection
from app.errors import (
    Invalid,
    LogGone,
    ReplayOver,
    ReplayRunning,
    ReplayUnknown,
    SubscriptionUnknown,
    TooManyReplays,
)
from app.operations.audit import acting_person, audit_entry
from app.permissions import Caller
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.subscription_lookup import known
from app.runtime.state import Runtime
from app.schemas.fields import NamePath
from app.schemas.replays import (
    LogOffset,
    LogTime,
    ReplayAnswer,
    ReplayList,
    ReplayPage,
    ReplayPreview,
    ReplayRequest,
    ReplayShown,
)
from app.store.admin.audit import Act, record
from app.store.relay.lag import latest, since, until
from app.store.subscriptions import replays as store
from app.store.subscriptions.new_readers import share_new_readers
from app.store.subscriptions.replays import NewReplay, StoredReplay
from app.verdicts import ReplayState

router = APIRouter(prefix="/subscriptions", tags=["subscriptions"])

RUNNING_MAX = 10
ID_MAX = 2**31 - 1

ReplayId = Annotated[int, Path(ge=1, le=ID_MAX, description="the id in the answer of `POST …/replay`")]


@router.post(
    "/{name}/replay",
    status_code=202,
    response_model=ReplayAnswer,
    summary="Send a part of the log again",
    responses={
        200: {"model": ReplayPreview, "description": "`dry_run`: what the replay would send"},
        **problems(SubscriptionUnknown, Invalid, LogGone, ReplayRunning, TooManyReplays),
    },
)
async def post_replay(
    name: NamePath, wanted: ReplayRequest, runtime: RuntimeDep, caller: CallerDep
) -> ReplayAnswer | JSONResponse:
    """Send the matching messages of a part of the log to this subscription again, beside its live delivery.

    Messages keep their ids, and `halfnote-replay` names the replay. A replay has its own retries and dead letters,
    keeps the order by key within itself, and shares the subscription's rate. At most 10 replays run at once. The same
    request is refused (`replay-running`) while its first replay reads the log, and in any case for 10 minutes after its
    beginning if it still runs; later a repeated one also sends what the first still retries. Without `until`, one with
    the same `from` and filters is the same. The scope of a subscriber's key must include every topic of the
    subscription. With `dry_run` nothing is sent: the answer has the part and how many messages match.
    """
    if wanted.dry_run:
        return JSONResponse((await preview_replay(name, wanted, runtime, caller)).model_dump(mode="json"))
    return await start_replay(name, wanted, runtime, caller)


async def preview_replay(name: str, wanted: ReplayRequest, runtime: Runtime, caller: Caller) -> ReplayPreview:
    """Count what a replay would send. Raises what the route names."""
    caller.must_have_subscription(name)
    async with runtime.request_pool.connection() as connection:
        subscription = await known(connection, name)
        caller.must_cover_topics(subscription.topics)
        after, last = await _part(connection, wanted)
        filters = wanted.filters.model_dump(mode="json", exclude_none=True) if wanted.filters else {}
        messages, exact = await store.count_messages(connection, subscription, after, last, filters)
    return ReplayPreview(subscription=name, after=after, until=last, messages=messages, exact=exact)


async def start_replay(
    name: str, wanted: ReplayRequest, runtime: Runtime, caller: Caller, *, to_newest: bool = False
) -> ReplayAnswer:
    """Begin a replay. Raises what the route names.

    `to_newest`: `until` was the newest message when it was counted, and was not asked for.
    """
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        await share_new_readers(connection)
        subscription = await known(connection, name, lock=True)
        caller.must_cover_topics(subscription.topics)
        after, last = await _part(connection, wanted)
        filters = wanted.filters.model_dump(mode="json", exclude_none=True) if wanted.filters else None
        actor = acting_person(caller, wanted.actor)
        asked = NewReplay(subscription.subscription_id, after, last, filters or None, actor, wanted.reason)
        made = await begin(connection, name, asked, now, to_newest=to_newest or wanted.until is None)
        await record(connection, _replay_act(caller, name, made, wanted), now)
    return replay_answer(name, made)


async def begin(
    connection: Connection, name: str, asked: NewReplay, now: datetime, *, to_newest: bool = False
) -> StoredReplay:
    """Store a replay of the subscription `name`, whose row is locked. Raises ReplayRunning or TooManyReplays."""
    same = await store.same_running(connection, asked, to_newest=to_newest)
    if same is not None:
        raise ReplayRunning(
            f"Replay {same.replay_id} of `{name}` sends the same messages, up to offset {same.until}, and is running. "
            "Wait for its end, or cancel it.",
            replay_id=same.replay_id,
            until=same.until,
        )
    made = await store.start(connection, asked, RUNNING_MAX, now)
    if made is None:
        raise TooManyReplays(
            f"{RUNNING_MAX} replays of `{name}` are running. Wait for one to end, or cancel one.", limit=RUNNING_MAX
        )
    return made


@router.get("/{name}/replays", summary="List a subscription's replays", responses=problems(SubscriptionUnknown))
async def list_replays(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, query: Annotated[ReplayPage, Query()]
) -> ReplayList:
    """List the running and ended replays of a subscription, newest first."""
    caller.must_have_subscription(name)
    before = ID_MAX if query.cursor is None else int(query.cursor)
    async with runtime.request_pool.connection() as connection:
        subscription = await known(connection, name)
        found = await store.page(connection, subscription.subscription_id, before, query.limit + 1)
    items = [replay_answer(name, replay) for replay in found[: query.limit]]
    return ReplayList(items=items, next_cursor=str(items[-1].replay_id) if len(found) > query.limit else None)


@router.get(
    "/{name}/replays/{replay_id}",
    summary="Show a replay and its progress",
    responses=problems(SubscriptionUnknown, ReplayUnknown),
)
async def get_replay(name: NamePath, replay_id: ReplayId, runtime: RuntimeDep, caller: CallerDep) -> ReplayShown:
    """Show a replay's progress and its counts of messages delivered, waiting for a retry, and dead."""
    caller.must_have_subscription(name)
    async with runtime.request_pool.connection() as connection:
        replay = await _known(connection, name, replay_id)
        found = await store.outcomes(connection, replay)
    return ReplayShown(
        **replay_answer(name, replay).model_dump(mode="json"),
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
    """Cancel a replay. Deliveries in flight are still settled. Its dead letters stay.

    Those that a person has redelivered, and that wait for their delivery, are dead letters again.
    """
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        replay = await _known(connection, name, replay_id)
        if await store.cancel(connection, replay.subscription_id, replay_id, now):
            await record(connection, audit_entry(caller, "replay.cancel", name, replay_id=replay_id), now)
            return
        replay = await _known(connection, name, replay_id)
    if replay.state is not ReplayState.CANCELLED:
        raise ReplayOver(f"Replay {replay_id} is {replay.state}.", state=replay.state)


async def _part(connection: Connection, wanted: ReplayRequest) -> tuple[int, int]:
    """Return the offset before the first message of a replay, and the offset of the last. Raises Invalid or LogGone."""
    head, oldest = await latest(connection), await store.oldest(connection)
    if oldest is None:
        raise Invalid("`from`: the log is empty, so there is nothing to replay.", field="from")
    match wanted.from_:
        case LogOffset(offset=offset):
            after = offset - 1
        case LogTime(time=time):
            after = max(oldest - 1, await since(connection, time))
        case _:
            after = oldest - 1
    if after >= head:
        raise Invalid(f"`from` is after the newest message, which has offset {head}.", field="from")
    if after + 1 < oldest:
        raise LogGone(f"Offset {after + 1} was removed from the database. The oldest is {oldest}.", oldest=oldest)
    last = await _last(connection, wanted, head)
    if last <= after:
        raise Invalid(
            f"`until` is before `from`: the replay would start after offset {after} and end at {last}.", field="until"
        )
    return after, last


async def _last(connection: Connection, wanted: ReplayRequest, head: int) -> int:
    match wanted.until:
        case None:
            return head
        case LogOffset(offset=offset):
            if offset > head:
                raise Invalid(f"`until` is after the newest message, which has offset {head}.", field="until")
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
    return audit_entry(
        caller,
        "subscription.replay",
        name,
        actor=wanted.actor,
        reason=wanted.reason,
        replay_id=made.replay_id,
        after=made.after,
        until=made.until,
    )


def replay_answer(name: str, replay: StoredReplay) -> ReplayAnswer:
    """Return the answer that shows a replay of the subscription `name`."""
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
