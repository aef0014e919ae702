"""Subscriptions: where committed messages go. A repeated PUT changes nothing. A secret is shown at most once."""

from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from app.database.connection import Connection
from app.egress.urls import without_query
from app.errors import (
    AddressNotAllowed,
    ClientNotInstalled,
    ConsentRefused,
    DatabaseUnavailable,
    Invalid,
    SecretsUnreadable,
    SubscriptionExists,
    SubscriptionUnknown,
)
from app.operations.audit import audit_entry
from app.operations.field_changes import changed_fields, reset_fields
from app.operations.merge_patch import patched
from app.permissions import Caller, Within
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.list_order import next_rank, rank_of
from app.routers.subscription_headers import with_headers
from app.routers.subscription_lookup import answer_of, answers, exists, fields_of, known
from app.routers.subscription_upsert import (
    Granted,
    ask_consent,
    changed_secrets,
    checked,
    consents,
    private_of,
    put_of,
    refuse_other_way,
    with_grant,
)
from app.runtime.standing import LAG_LOOKS_AT
from app.runtime.state import Runtime
from app.schemas.fields import DryRun, NamePath, Reason, StandingQuery, SubscriptionNamePath
from app.schemas.subscription_patch import SubscriptionPatch
from app.schemas.subscription_put import StartOffset, StartTime, SubscriptionPut
from app.schemas.subscriptions import (
    EXAMPLE,
    BreakerShown,
    CheckpointShown,
    LagShown,
    PlaceShown,
    RatesShown,
    SubscriptionAnswer,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionList,
    SubscriptionListed,
    SubscriptionShown,
    SubscriptionStanding,
)
from app.schemas.totals import COUNTED_MOST, total_of
from app.secrets.writer import Seal
from app.store.admin.audit import Act, record
from app.store.relay import lag as places
from app.store.relay.lag import SubscriptionLag, opened
from app.store.relay.page_standing import PageStanding, page_standing
from app.store.subscriptions import subscriptions as store
from app.store.subscriptions.new_readers import share_new_readers
from app.store.subscriptions.rankings import SubscriptionOrder, count_subscriptions, ranked_subscriptions
from app.store.subscriptions.subscriptions import Private, Subscription, SubscriptionSpec
from app.verdicts import BreakerState

router = APIRouter(prefix="/subscriptions", tags=["subscriptions"])

_CREATED: dict[int | str, dict[str, Any]] = {
    201: {
        "model": SubscriptionCreated,
        "description": "The subscription is new. `secret` is shown only here, and only if none was given",
        "content": {"application/json": {"example": {**EXAMPLE, "secret": "whsec_" + "M" * 43 + "="}}},
    }
}


@router.put(
    "/{name}",
    response_model=SubscriptionChanged,
    summary="Create or change a subscription",
    responses={
        **_CREATED,
        **problems(
            SubscriptionExists, Invalid, AddressNotAllowed, ClientNotInstalled, ConsentRefused, SecretsUnreadable
        ),
    },
)
async def put_subscription(
    name: SubscriptionNamePath,
    wanted: SubscriptionPut,
    runtime: RuntimeDep,
    caller: CallerDep,
    dry_run: DryRun = False,
    if_none_match: Annotated[
        str | None,
        Header(
            description="`*`: only create; if there is a subscription with this name, the answer is 412 and nothing "
            "changes. Subscriptions have no entity tags, so another value has no effect"
        ),
    ] = None,
) -> SubscriptionChanged | JSONResponse:
    """Send committed messages of the topics to the destination.

    A missing field gets its default, so the same PUT again is 200 and changes nothing; `reset` names the fields that
    changed because of that. Secrets, passwords and a webhook's custom headers are kept if the request gives none; for
    another host only signing secrets are kept. A
    signing secret other than the current one is a rotation: for 24 hours both secrets sign. When `signing` changes or a
    broker becomes a webhook, a secret of another kind is needed: if the request gives none, one is created and `secret`
    is shown only in this answer, which may be a 200. `start` is read only when the subscription is created. A change of
    topics or filters applies from the checkpoint on, and to each message that is committed after the answer. A
    subscriber's key can subscribe to the topics in its scope, and change subscriptions that have no other topics.
    """
    only_new = if_none_match is not None and if_none_match.strip() == "*"
    return await _store(runtime, caller, name, wanted, only_new=only_new, dry_run=dry_run)


@router.patch(
    "/{name}",
    response_model=SubscriptionChanged,
    summary="Change some fields of a subscription",
    responses={
        200: {"model": SubscriptionChanged},
        **problems(
            SubscriptionUnknown, Invalid, AddressNotAllowed, ClientNotInstalled, ConsentRefused, SecretsUnreadable
        ),
    },
)
async def patch_subscription(
    name: NamePath,
    wanted: SubscriptionPatch,
    runtime: RuntimeDep,
    caller: CallerDep,
    dry_run: DryRun = False,
    reason: Annotated[Reason | None, Query(description="why, for the audit")] = None,
) -> SubscriptionChanged | JSONResponse:
    """Change the fields that the request has, by JSON Merge Patch (RFC 7396); the others stay as they are.

    Null gives a field its default. A field of `destination` or `filters` can be changed alone. Apart from that the
    rules are those of PUT.
    """
    caller.must_have_subscription(name)
    async with runtime.request_pool.connection() as connection:
        base = await known(connection, name)
    patch = wanted.model_dump(mode="json", exclude_unset=True)
    whole = patched(SubscriptionPut, put_of(base), patch)
    return await _store(runtime, caller, name, whole, base=base, dry_run=dry_run, reason=reason)


async def _store(
    runtime: Runtime,
    caller: Caller,
    name: str,
    wanted: SubscriptionPut,
    *,
    base: Subscription | None = None,
    only_new: bool = False,
    dry_run: bool,
    reason: str | None = None,
) -> SubscriptionChanged | JSONResponse:
    """Create or change a subscription, or with `only_new` only create it.

    `base`: what a patch was applied to; it must be stored unchanged.
    """
    caller.must_have_subscription(name)
    caller.must_cover_topics(wanted.topics)
    shape = checked(name, wanted, runtime)
    granted = await _consent(runtime, shape, only_new=only_new, dry_run=dry_run)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction(dry_run=dry_run) as connection:
        await share_new_readers(connection)
        stored = await store.one(connection, name, lock=True)
        if base is not None and (stored is None or SubscriptionSpec.of(stored) != SubscriptionSpec.of(base)):
            raise DatabaseUnavailable(f"`{name}` was changed at the same time. Repeat the request.", retry_after_s=1)
        if stored is None:
            created = await _create(runtime, connection, wanted, shape, granted, now)
            if created is not None:
                answer, made = created
                await record(connection, _put_act(caller, name, wanted), now)
                return _created(answer, None if dry_run else made, 201)
            # Another request created it at the same time.
            stored = await store.one(connection, name, lock=True)
        if stored is None:
            raise DatabaseUnavailable(f"`{name}` was deleted at the same time. Repeat the request.", retry_after_s=1)
        if only_new:
            raise exists(name)
        # Retries of other topics would go to the new destination.
        caller.must_cover_topics(stored.topics)
        answer, made = await _change(runtime, connection, wanted, shape, granted, stored, now)
        if answer.changed:
            await record(connection, _put_act(caller, name, wanted, answer, reason=reason), now)
        if base is not None:
            # A patch leaves out what is to stay.
            answer = answer.model_copy(update={"reset": []})
        return answer if made is None or dry_run else _created(answer, made, 200)


class SubscriptionQuery(StandingQuery):
    """A page of subscriptions."""

    sort: Literal["name", SubscriptionOrder] = Field(
        "name",
        description="`lag`: furthest behind in the log first; `dead`: the most dead letters first; `state`: those that "
        "are not active and those with an open breaker first; `changed`: the last change first. Only `name` is stable "
        "over pages while these change",
    )


@router.get("", summary="List subscriptions", responses=problems(Invalid))
async def list_subscriptions(
    runtime: RuntimeDep,
    caller: CallerDep,
    query: Annotated[SubscriptionQuery, Query()],
) -> SubscriptionList:
    """List subscriptions, one page at a time. A subscriber's key sees only its own subscriptions.

    With `standing` each has its lag, its dead letters and its last error. With `count` the answer has their number.
    """
    now, within = runtime.clock.now(), caller.subscriptions.within
    async with runtime.request_pool.connection() as connection:
        page, cursor = await _page(connection, query, within)
        total = await count_subscriptions(connection, COUNTED_MOST + 1, within) if query.count else None
        standing = await page_standing(connection, [one.subscription_id for one in page]) if query.standing else {}
        opened_because = await opened(connection, [one.subscription_id for one in page])
    # Each is validated once: validation is most of the time of a page of a thousand.
    items = [
        SubscriptionListed(
            **fields_of(runtime.vault, one, opened_because.get(one.subscription_id)),
            standing=_brief(standing.get(one.subscription_id), now),
        )
        for one in page
    ]
    if query.sort == "lag" and query.standing:
        # By the age of what waits: a checkpoint far behind may have nothing that matches after it.
        items.sort(key=lambda one: -(one.standing.seconds if one.standing else 0.0))
    return SubscriptionList(items=items, next_cursor=cursor, total=None if total is None else total_of(total))


async def _page(
    connection: Connection, query: SubscriptionQuery, within: Within
) -> tuple[list[Subscription], str | None]:
    """Return the subscriptions of a page, and the cursor of the next one."""
    if query.sort == "name":
        found = await store.page(connection, query.cursor or "", query.limit + 1, within)
        page = found[: query.limit]
        return page, page[-1].name if len(found) > query.limit else None
    rank = rank_of(query.cursor)
    names = await ranked_subscriptions(connection, query.sort, rank, query.limit + 1, within)
    return await store.of_names(connection, names[: query.limit]), next_rank(rank, names, query.limit)


@router.get("/{name}", summary="Show a subscription and its state", responses=problems(SubscriptionUnknown))
async def get_subscription(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> SubscriptionShown:
    """Show a subscription, its lag, its throughput, its circuit breaker and its last error. Secrets are not shown."""
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.request_pool.connection() as connection:
        subscription = await known(connection, name)
        place = await places.subscription_lag(connection, subscription, LAG_LOOKS_AT, now)
        holders = await places.holders(connection, subscription.subscription_id, now)
    because = None if place.opened_at is None else place.opened_because or ""
    return SubscriptionShown(
        **answer_of(runtime.vault, subscription, because).model_dump(mode="json"),
        **_standing(place, now),
        places=[PlaceShown(**asdict(one)) for one in holders],
    )


@router.delete("/{name}", status_code=204, summary="Delete a subscription", responses=problems(SubscriptionUnknown))
async def delete_subscription(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> None:
    """Delete a subscription with its retries, dead letters and replays. Deliveries in flight are still settled."""
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        if await store.remove(connection, name, now):
            await record(connection, audit_entry(caller, "subscription.delete", name), now)
        else:
            await known(connection, name)


def _put_act(
    caller: Caller,
    name: str,
    wanted: SubscriptionPut,
    changed: SubscriptionChanged | None = None,
    *,
    reason: str | None = None,
) -> Act:
    """Return the audit row of a PUT or PATCH. `changed`: the answer, unless the subscription is new.

    Of a destination only the address, because a destination may hold secrets, and the names of what changed.
    """
    asked = wanted.model_dump(mode="json", exclude={"destination"}, exclude_unset=True)
    to = wanted.destination.model_dump(mode="json", include={"type", "url", "bootstrap"})
    if "url" in to:
        to["url"] = without_query(to["url"])
    fields: dict[str, Any] = {} if changed is None else {"changed": changed.changed, "reset": changed.reset}
    return audit_entry(
        caller, "subscription.put", name, new=changed is None, asked=asked, destination=to, **fields, reason=reason
    )


async def _start(connection: Connection, wanted: SubscriptionPut) -> int:
    """Return the offset before the first message of a new subscription."""
    match wanted.start:
        case StartOffset(offset=offset):
            newest = await places.latest(connection)
            if offset > newest:
                raise Invalid(f"`start`: the log ends at offset {newest}, before {offset}.", field="start")
            return offset
        case StartTime(time=time):
            return await places.since(connection, time)
        case "earliest":
            return await places.earliest(connection)
        case _:
            return await places.latest(connection)


async def _consent(runtime: Runtime, shape: SubscriptionSpec, *, only_new: bool, dry_run: bool) -> Granted | None:
    """Ask a webhook for consent if required; None if not. A dry run assumes it.

    Raises ConsentRefused, or SubscriptionExists instead of asking for what would not be stored.
    """
    if not shape.destination.get("consent"):
        return None
    async with runtime.request_pool.connection() as connection:
        stored = await store.one(connection, shape.name)
    if only_new and stored is not None:
        raise exists(shape.name)
    if not consents(shape.destination, stored):
        return None
    return Granted(None) if dry_run else await ask_consent(runtime, shape)


async def _create(
    runtime: Runtime,
    connection: Connection,
    wanted: SubscriptionPut,
    shape: SubscriptionSpec,
    granted: Granted | None,
    now: datetime,
) -> tuple[SubscriptionChanged, str | None] | None:
    """Store a new subscription; return its answer and the secret that was made. None if the name exists."""
    seal = Seal(runtime.vault, shape.name)
    private, made = private_of(wanted.destination, None, runtime.vault, seal, now)
    shape, private = with_headers(shape, private, wanted.destination, None, seal)
    after = await _start(connection, wanted)
    created = await store.create(connection, shape, with_grant(private, shape, None, granted), after, now)
    if created is None:
        return None
    return SubscriptionChanged(**answer_of(runtime.vault, created, None).model_dump(mode="json")), made


async def _change(
    runtime: Runtime,
    connection: Connection,
    wanted: SubscriptionPut,
    shape: SubscriptionSpec,
    granted: Granted | None,
    stored: Subscription,
    now: datetime,
) -> tuple[SubscriptionChanged, str | None]:
    """Store the fields that differ. Deliveries continue undisturbed if none does.

    Return the answer, and the secret that was made, if any.
    """
    if "start" in wanted.model_fields_set and shape.start != stored.start:
        raise Invalid(
            "`start` is read only when a subscription is created. To send messages again, use a replay.", field="start"
        )
    refuse_other_way(stored, shape)
    seal = Seal(runtime.vault, shape.name)
    private, made = private_of(wanted.destination, stored, runtime.vault, seal, now)
    shape, private = with_headers(shape, private, wanted.destination, stored, seal)
    private = with_grant(private, shape, stored, granted)
    same = replace(shape, start=stored.start) == SubscriptionSpec.of(stored) and private == Private.of(stored)
    current = stored if same else await store.change(connection, shape, private, now)
    [after] = await answers(runtime, connection, [current])
    before = answer_of(runtime.vault, stored, None)
    changed = changed_fields(_settings_of(before), _settings_of(after))
    said = {"changed": changed + changed_secrets(stored, private), "reset": reset_fields(changed, wanted)}
    return SubscriptionChanged(**after.model_dump(mode="json"), **said), made


def _settings_of(answer: SubscriptionAnswer) -> dict[str, Any]:
    """Return the fields that a PUT sets. Secret ones are compared by `changed_secrets`."""
    shown = answer.model_dump(mode="json", include=set(SubscriptionPut.model_fields))
    named = ("header_names", "public_key", "granted_rate_per_s")
    shown["destination"] = {name: value for name, value in shown["destination"].items() if name not in named}
    return shown


def _created(answer: SubscriptionChanged, secret: str | None, status: int) -> JSONResponse:
    shown = SubscriptionCreated(**answer.model_dump(mode="json"), secret=secret)
    return JSONResponse(shown.model_dump(mode="json"), status, headers={"cache-control": "no-store"})


def _brief(found: PageStanding | None, now: datetime) -> SubscriptionStanding | None:
    if found is None:
        return None
    return SubscriptionStanding(
        messages=found.waiting,
        seconds=max(0.0, (now - found.oldest_at).total_seconds()) if found.oldest_at else 0.0,
        dead_letters=found.dead_letters,
        exact=found.exact,
        last_error=found.last_error,
    )


def _standing(place: SubscriptionLag, now: datetime) -> dict[str, Any]:
    age_s = (now - place.oldest_at).total_seconds() if place.oldest_at else 0.0
    return {
        "checkpoint": CheckpointShown(offset=place.offset, moved_at=place.moved_at),
        "lag": LagShown(messages=place.waiting, seconds=max(0.0, age_s), exact=place.looked_at < LAG_LOOKS_AT),
        "rates": RatesShown(delivered_per_s=place.delivered_per_s, failed_per_s=place.failed_per_s),
        "breaker": BreakerShown(
            state=(BreakerState.CLOSED if place.opened_at is None else BreakerState.OPEN).value,
            opened_at=place.opened_at,
            because=place.opened_because,
            paused_until=place.paused_until,
        ),
        "retrying": place.retrying,
        "held": place.held,
        "dead_letters": place.dead_letters,
        "last_error": place.last_error,
        "replays": place.replays,
    }
