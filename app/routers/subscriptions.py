"""Subscriptions: where committed messages go. Repeated PUTs change nothing, and secrets are shown once at most."""

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from app.access import Caller
from app.acts import act
from app.callback_urls import without_query
from app.database import Connection
from app.errors import (
    AddressNotAllowed,
    ClientNotInstalled,
    ConsentRefused,
    DatabaseUnavailable,
    Invalid,
    SecretsUnreadable,
    SubscriptionUnknown,
)
from app.routers.sealing import sealing
from app.routers.shared import CallerDep, NamePath, PageQuery, RuntimeDep, problems
from app.routers.subscribed import answer_of, answers, known
from app.routers.subscribing import Granted, ask_consent, checked, consents, private_of, with_grant
from app.routers.webhook_headers import with_headers
from app.runtime import Runtime
from app.store import standing as places
from app.store import subscriptions as store
from app.store.audit import Act, record
from app.store.standing import Standing
from app.store.subscriptions import Private, Subscription, Wanted
from app.subscription_answers import (
    EXAMPLE,
    BreakerShown,
    CheckpointShown,
    LagShown,
    PlaceShown,
    RatesShown,
    SubscriptionAnswer,
    SubscriptionCreated,
    SubscriptionList,
    SubscriptionShown,
)
from app.subscription_shapes import StartOffset, StartTime, SubscriptionPut

router = APIRouter(prefix="/subscriptions", tags=["subscriptions"])

# How far ahead of its checkpoint a subscription's lag is counted.
LAG_LOOKS_AT = 10_000

_CREATED: dict[int | str, dict[str, Any]] = {
    201: {
        "model": SubscriptionCreated,
        "description": "The subscription is new; `secret` is shown this once, unless it was given",
        "content": {"application/json": {"example": {**EXAMPLE, "secret": "whsec_" + "M" * 43 + "="}}},
    }
}


@router.put(
    "/{name}",
    response_model=SubscriptionAnswer,
    summary="Make a subscription, or change it",
    responses={
        **_CREATED,
        **problems(Invalid, AddressNotAllowed, ClientNotInstalled, ConsentRefused, SecretsUnreadable),
    },
)
async def put_subscription(
    name: NamePath, wanted: SubscriptionPut, runtime: RuntimeDep, caller: CallerDep
) -> SubscriptionAnswer | JSONResponse:
    """Send committed messages of the topics to the destination.

    A field that is left out gets its default, so the same PUT again is 200 and changes nothing; only secrets, passwords
    and a webhook's own headers are kept if none are given, and none but signing secrets for another host. Another
    signing secret than the current one is a rotation: for 24 hours both sign. A secret of another kind is needed when
    `signing` changes or a broker becomes a webhook: if none is given, one is made, and `secret` is shown this once with
    a 200 as well. `start` is read when the subscription is made. A change of topics or filters counts from the
    checkpoint on. A subscriber's key may subscribe to the topics that it may read, and change what takes no others.
    """
    caller.must_have_subscription(name)
    caller.must_cover_topics(wanted.topics)
    shape = checked(name, wanted, runtime)
    granted = await _consent(runtime, shape)
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        stored = await store.one(connection, name, lock=True)
        if stored is None:
            created = await _create(runtime, connection, wanted, shape, granted, now)
            if created is not None:
                await record(connection, _put_act(caller, name, wanted, new=True), now)
                return created
            # Another request made it at the same time.
            stored = await store.one(connection, name, lock=True)
        if stored is None:
            raise DatabaseUnavailable(f"`{name}` was deleted at the same time; repeat.", retry_after_s=1)
        # What of other topics is to be tried again would go to the new destination.
        caller.must_cover_topics(stored.topics)
        answer, changed = await _change(runtime, connection, wanted, shape, granted, stored, now)
        if changed:
            await record(connection, _put_act(caller, name, wanted, new=False), now)
        return answer


@router.get("", summary="List subscriptions", responses=problems(Invalid))
async def list_subscriptions(
    runtime: RuntimeDep,
    caller: CallerDep,
    query: Annotated[PageQuery, Query()],
) -> SubscriptionList:
    """List subscriptions by name, a page at a time; to a subscriber's key its own."""
    async with runtime.database.connection() as connection:
        found = await store.page(connection, query.cursor or "", query.limit + 1, caller.subscriptions.within)
        items = await answers(runtime, connection, found[: query.limit])
    return SubscriptionList(items=items, next_cursor=items[-1].name if len(found) > query.limit else None)


@router.get("/{name}", summary="Show a subscription and where it stands", responses=problems(SubscriptionUnknown))
async def get_subscription(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> SubscriptionShown:
    """Show a subscription, how far it lags, how fast it goes, its breaker and its last error, but no secrets."""
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.database.connection() as connection:
        subscription = await known(connection, name)
        place = await places.standing(connection, subscription, LAG_LOOKS_AT, now)
        holders = await places.holders(connection, subscription.subscription_id, now)
    because = None if place.opened_at is None else place.opened_because or ""
    return SubscriptionShown(
        **answer_of(runtime.vault, subscription, because).model_dump(mode="json"),
        **_standing(place, now),
        places=[
            PlaceShown(shard=one.shard, offset=one.offset, holder=one.holder, held_until=one.held_until)
            for one in holders
        ],
    )


@router.delete("/{name}", status_code=204, summary="Delete a subscription", responses=problems(SubscriptionUnknown))
async def delete_subscription(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> None:
    """Delete a subscription. What is in flight is still settled; its retries, dead letters and replays go with it."""
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        if await store.remove(connection, name, now):
            await record(connection, act(caller, "subscription.delete", name), now)
        else:
            await known(connection, name)


def _put_act(caller: Caller, name: str, wanted: SubscriptionPut, *, new: bool) -> Act:
    """Return what is put on record of a PUT; of a destination only where it leads, because it may hold secrets."""
    asked = wanted.model_dump(mode="json", exclude={"destination"}, exclude_unset=True)
    to = wanted.destination.model_dump(mode="json", include={"type", "url", "bootstrap"})
    if "url" in to:
        to["url"] = without_query(to["url"])
    return act(caller, "subscription.put", name, new=new, asked=asked, destination=to)


async def _start(connection: Connection, wanted: SubscriptionPut) -> int:
    """Return the offset after which a new subscription begins."""
    match wanted.start:
        case StartOffset(offset=offset):
            return offset
        case StartTime(time=time):
            return await places.since(connection, time)
        case "earliest":
            return await places.earliest(connection)
        case _:
            return await places.latest(connection)


async def _consent(runtime: Runtime, shape: Wanted) -> Granted | None:
    """Ask a webhook that is to be asked; None if there is nothing to ask. Raises ConsentRefused."""
    if not shape.destination.get("consent"):
        return None
    async with runtime.database.connection() as connection:
        stored = await store.one(connection, shape.name)
    return await ask_consent(runtime, shape) if consents(shape.destination, stored) else None


async def _create(
    runtime: Runtime,
    connection: Connection,
    wanted: SubscriptionPut,
    shape: Wanted,
    granted: Granted | None,
    now: datetime,
) -> JSONResponse | None:
    """Store a new subscription; None if there is one of this name."""
    seal = await sealing(runtime, connection, shape.name)
    private, made = private_of(wanted.destination, None, runtime.vault, seal, now)
    shape, private = with_headers(shape, private, wanted.destination, None, seal)
    after = await _start(connection, wanted)
    created = await store.create(connection, shape, with_grant(private, shape, None, granted), after, now)
    return None if created is None else _with_secret(answer_of(runtime.vault, created, None), made, 201)


async def _change(
    runtime: Runtime,
    connection: Connection,
    wanted: SubscriptionPut,
    shape: Wanted,
    granted: Granted | None,
    stored: Subscription,
    now: datetime,
) -> tuple[SubscriptionAnswer | JSONResponse, bool]:
    """Store what differs; what does not differ is left alone, so that deliveries go on undisturbed.

    Return also whether anything differed.
    """
    if "start" in wanted.model_fields_set and shape.start != stored.start:
        raise Invalid("`start` is read when a subscription is made; to send again, use a replay.", field="start")
    seal = await sealing(runtime, connection, shape.name)
    private, made = private_of(wanted.destination, stored, runtime.vault, seal, now)
    shape, private = with_headers(shape, private, wanted.destination, stored, seal)
    private = with_grant(private, shape, stored, granted)
    same = replace(shape, start=stored.start) == Wanted.of(stored) and private == Private.of(stored)
    changed = stored if same else await store.change(connection, shape, private, now)
    [answer] = await answers(runtime, connection, [changed])
    return (_with_secret(answer, made, 200) if made else answer), not same


def _with_secret(answer: SubscriptionAnswer, secret: str | None, status: int) -> JSONResponse:
    shown = SubscriptionCreated(**answer.model_dump(mode="json"), secret=secret)
    return JSONResponse(shown.model_dump(mode="json"), status, headers={"cache-control": "no-store"})


def _standing(place: Standing, now: datetime) -> dict[str, Any]:
    age_s = (now - place.oldest_at).total_seconds() if place.oldest_at else 0.0
    return {
        "checkpoint": CheckpointShown(offset=place.offset, moved_at=place.moved_at),
        "lag": LagShown(messages=place.waiting, seconds=max(0.0, age_s), exact=place.looked_at < LAG_LOOKS_AT),
        "rates": RatesShown(delivered_per_s=place.delivered_per_s, failed_per_s=place.failed_per_s),
        "breaker": BreakerShown(
            state="closed" if place.opened_at is None else "open",
            opened_at=place.opened_at,
            because=place.opened_because,
        ),
        "retrying": place.retrying,
        "held": place.held,
        "dead_letters": place.dead_letters,
        "last_error": place.last_error,
        "replays": place.replays,
    }
