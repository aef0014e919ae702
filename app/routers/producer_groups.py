"""Producer groups: check URLs and policy. A repeated PUT changes nothing. A secret is shown at most once."""

import asyncio
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from app.checkback.check_requests import ping
from app.checkback.registrations import ask_unanswered
from app.database.connection import Connection
from app.egress.urls import url_fault, without_query
from app.errors import (
    AddressNotAllowed,
    DatabaseUnavailable,
    Forbidden,
    GroupInUse,
    GroupReserved,
    GroupUnknown,
    Invalid,
    SecretsUnreadable,
)
from app.operations.audit import audit_entry
from app.operations.field_changes import changed_fields, reset_fields
from app.operations.merge_patch import patched
from app.permissions import Caller, Role, Within
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.list_order import next_rank, rank_of
from app.routers.secret_rotation import SecretState, refuse_if_changed, version_of
from app.runtime.state import Runtime
from app.schemas.fields import ActNote, DryRun, NamePath, StandingQuery
from app.schemas.producer_groups import (
    EXAMPLE,
    CheckAnswersShown,
    GroupAnswer,
    GroupChanged,
    GroupCreated,
    GroupList,
    GroupListed,
    GroupPatch,
    GroupPut,
    GroupShown,
    GroupStandingShown,
    NewSecret,
    PingAnswer,
    PingResult,
    UrlState,
)
from app.schemas.totals import COUNTED_MOST, total_of
from app.secrets.signatures import Secret, dump, new_secret, overlap_end, rotated, signs
from app.secrets.vault import GROUP_SECRETS
from app.secrets.writer import Seal
from app.store.admin.audit import record
from app.store.checkback import producer_groups as store
from app.store.checkback.check_urls import CheckUrl, forget_urls, note_urls, urls_of
from app.store.checkback.group_rankings import GroupOrder, count_groups, ranked_groups
from app.store.checkback.group_standing import GroupStanding, check_answers, group_standings
from app.store.checkback.producer_groups import GroupShape, ProducerGroup
from app.store.relay.announcements import GROUP
from app.verdicts import Checks, OnExhausted

router = APIRouter(prefix="/producer-groups", tags=["producer groups"])

_CREATED: dict[int | str, dict[str, Any]] = {
    201: {
        "model": GroupCreated,
        "description": "The group is new. `secret` is shown only here, and only if the request gave none",
        "content": {"application/json": {"example": {**EXAMPLE, "secret": "whsec_" + "M" * 43 + "="}}},
    }
}


@router.put(
    "/{name}",
    response_model=GroupChanged,
    summary="Register a producer group, or change it",
    responses={**_CREATED, **problems(Invalid, AddressNotAllowed, GroupReserved, SecretsUnreadable)},
)
async def put_group(
    name: NamePath, wanted: GroupPut, runtime: RuntimeDep, caller: CallerDep, dry_run: DryRun = False
) -> GroupChanged | JSONResponse:
    """Give a group its check URLs and policy.

    A missing field gets its default, so the same PUT again is 200 and changes nothing; `reset` names the fields that
    changed because of that. Only the secret is kept if none is given. A secret other than the current one is a
    rotation: for 24 hours both secrets sign.

    Producers register when they start: checks of the group that were not answered are due again at once, also if it
    asked for a pause by `Retry-After`. With a producer's key only a PUT of its own group that changes nothing is
    allowed; an admin registers a group and changes it. A `secret` in it must be one that signs now.

    A name is one path segment, so a name with `/` cannot be registered. The name `halfnote` is reserved for operational
    messages.
    """
    if caller.role is Role.PRODUCER:
        return await _repeat(runtime, caller, name, wanted, dry_run=dry_run)
    return await _store(runtime, caller, name, wanted, dry_run=dry_run)


@router.patch(
    "/{name}",
    response_model=GroupChanged,
    summary="Change some fields of a producer group",
    responses=problems(GroupUnknown, Invalid, AddressNotAllowed, GroupReserved, SecretsUnreadable),
)
async def patch_group(
    name: NamePath, wanted: GroupPatch, runtime: RuntimeDep, caller: CallerDep, dry_run: DryRun = False
) -> GroupChanged | JSONResponse:
    """Change the fields that the request has, by JSON Merge Patch (RFC 7396); the others stay as they are.

    Null gives a field its default. Apart from that the rules are those of PUT.
    """
    async with runtime.request_pool.connection() as connection:
        base = await _known(connection, name)
    patch = wanted.model_dump(mode="json", exclude_unset=True, exclude={"secret"})
    whole = patched(GroupPut, asdict(base.shape), patch)
    if wanted.secret is not None:
        whole = whole.model_copy(update={"secret": wanted.secret})
    return await _store(runtime, caller, name, whole, base=base.shape, dry_run=dry_run)


async def _store(
    runtime: Runtime, caller: Caller, name: str, wanted: GroupPut, *, base: GroupShape | None = None, dry_run: bool
) -> GroupChanged | JSONResponse:
    """Register or change a group. `base`: what a patch was applied to; it must be stored unchanged."""
    _refuse_reserved(name)
    shape = _checked(wanted, runtime)
    secret = wanted.secret.get_secret_value() if wanted.secret else None
    made = Secret(secret or new_secret())
    now = runtime.clock.now()
    async with runtime.request_pool.transaction(dry_run=dry_run) as connection:
        if base is not None:
            stored = await store.lock_group(connection, name)
            if stored is None or stored.deleted_at is not None or stored.shape != base:
                raise DatabaseUnavailable(
                    f"`{name}` was changed at the same time. Repeat the request.", retry_after_s=1
                )
        fresh, changed = await _put(runtime, connection, name, shape, made, given=secret is not None)
        reset = reset_fields(changed, wanted)
        if fresh or changed:
            said = wanted.model_dump(mode="json", exclude={"secret"}, exclude_unset=True)
            said["check_urls"] = [without_query(url) for url in wanted.check_urls]
            fields: dict[str, Any] = {} if fresh else {"changed": changed, "reset": reset}
            entry = audit_entry(caller, "producer_group.put", name, new=fresh, asked=said, **fields)
            await record(connection, entry, now)
        await forget_urls(connection, name, shape.check_urls)
        # A producer registers when it starts, so it can answer now.
        await store.note_registration(connection, name, now)
        [answer] = await _answers(connection, [await _known(connection, name)], now)
    if not fresh:
        if not dry_run:
            await _ask_unanswered(runtime, name, now)
        # A patch leaves out what is to stay.
        return GroupChanged(**answer.model_dump(), changed=changed, reset=reset if base is None else [])
    created = GroupCreated(**answer.model_dump(), secret=None if secret or dry_run else made.secret)
    return JSONResponse(created.model_dump(mode="json"), 201, headers={"cache-control": "no-store"})


async def _repeat(runtime: Runtime, caller: Caller, name: str, wanted: GroupPut, *, dry_run: bool) -> GroupChanged:
    """Answer the PUT of a producer, which has started and changes nothing. Raises Forbidden if it would change it."""
    caller.must_have_group(name)
    _refuse_reserved(name)
    shape = _checked(wanted, runtime)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction(dry_run=dry_run) as connection:
        stored = await store.read_group(connection, name)
        if stored is None:
            raise _for_admins(f"There is no producer group `{name}`, and a producer's key cannot register one.")
        changed = changed_fields(asdict(stored.shape), asdict(shape))
        if wanted.secret is not None:
            known = runtime.vault.secrets(GROUP_SECRETS, name, stored.secrets)
            changed += [] if signs(known, wanted.secret.get_secret_value(), now) else ["secret"]
        if changed:
            fields = ", ".join(f"`{field}`" for field in changed)
            raise _for_admins(f"This PUT would change {fields} of `{name}`, but a producer's key may change nothing.")
        await store.note_registration(connection, name, now)
        [answer] = await _answers(connection, [await _known(connection, name)], now)
    if not dry_run:
        await _ask_unanswered(runtime, name, now)
    return GroupChanged(**answer.model_dump())


async def _ask_unanswered(runtime: Runtime, name: str, now: datetime) -> None:
    async with runtime.request_pool.connection() as connection:
        await ask_unanswered(connection, name, now)


def _for_admins(refused: str) -> Forbidden:
    return Forbidden(
        f"{refused} An admin registers and changes groups: PUT /producer-groups/<name>, or `halfnote groups put`.",
        role=Role.PRODUCER,
        missing={"role": [Role.ADMIN]},
    )


def _refuse_reserved(name: str) -> None:
    if name == GROUP:
        raise GroupReserved(f"`{GROUP}` is the producer group of operational messages. Choose another name.")


class ProducerGroupQuery(StandingQuery):
    """A page of producer groups."""

    sort: Literal["name", GroupOrder] = Field(
        "name",
        description="`undecided`: the most transactions in doubt and parked first; `oldest`: the one in doubt longest "
        "first. Only `name` is stable over pages while these change",
    )


@router.get("", summary="List producer groups", responses=problems(Invalid))
async def list_groups(
    runtime: RuntimeDep,
    caller: CallerDep,
    query: Annotated[ProducerGroupQuery, Query()],
) -> GroupList:
    """List registered groups, one page at a time. A producer's key sees only its own groups.

    With `standing` each has the numbers of its transactions in doubt and parked. With `count` the answer has their
    number.
    """
    within = caller.groups.within
    async with runtime.request_pool.connection() as connection:
        page, cursor = await _page(connection, query, within)
        total = await count_groups(connection, COUNTED_MOST + 1, within) if query.count else None
        standing = await group_standings(connection, [group.name for group in page]) if query.standing else {}
        items = [
            GroupListed(**answer.model_dump(), standing=_standing(standing.get(answer.name)))
            for answer in await _answers(connection, page, runtime.clock.now())
        ]
    return GroupList(items=items, next_cursor=cursor, total=None if total is None else total_of(total))


async def _page(
    connection: Connection, query: ProducerGroupQuery, within: Within
) -> tuple[list[ProducerGroup], str | None]:
    """Return the groups of a page, and the cursor of the next one."""
    if query.sort == "name":
        groups = await store.read_groups(connection, query.cursor or "", query.limit + 1, within)
        page = groups[: query.limit]
        return page, page[-1].name if len(groups) > query.limit else None
    rank = rank_of(query.cursor)
    names = await ranked_groups(connection, query.sort, rank, query.limit + 1, within)
    return await store.groups_of(connection, names[: query.limit]), next_rank(rank, names, query.limit)


@router.get("/{name}", summary="Show a producer group", responses=problems(GroupUnknown))
async def get_group(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> GroupShown:
    """Show a group, the last result of each check URL, what stands open, and what checks answered.

    Secrets are not shown.
    """
    caller.must_have_group(name)
    async with runtime.request_pool.connection() as connection:
        [answer] = await _answers(connection, [await _known(connection, name)], runtime.clock.now())
        standing = (await group_standings(connection, [name]))[name]
        answered = await check_answers(connection, name)
    return GroupShown(
        **answer.model_dump(),
        standing=GroupStandingShown(**asdict(standing)),
        answers=[CheckAnswersShown(**asdict(one)) for one in answered],
    )


@router.delete(
    "/{name}", status_code=204, summary="Delete a producer group", responses=problems(GroupUnknown, GroupInUse)
)
async def delete_group(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> None:
    """Delete a group that has no undecided transaction."""
    async with runtime.request_pool.transaction() as connection:
        group = await store.lock_group(connection, name)
        if group is None or group.deleted_at is not None:
            raise _unknown(name)
        undecided = await store.count_undecided(connection, name)
        if undecided:
            raise GroupInUse(
                f"`{name}` has {undecided} undecided transactions. Wait until all are decided, then delete the group.",
                undecided=undecided,
            )
        now = runtime.clock.now()
        await store.delete_group(connection, name, now)
        await record(connection, audit_entry(caller, "producer_group.delete", name), now)
        await forget_urls(connection, name, [])


@router.post("/{name}/test", summary="Ping a group's URLs now", responses=problems(GroupUnknown, SecretsUnreadable))
async def test_group(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, note: Annotated[ActNote, Query()]
) -> PingAnswer:
    """Send a signed `halfnote.ping` to each URL of the group concurrently and return the results."""
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        group = await _known(connection, name)
        await record(connection, audit_entry(caller, "producer_group.test", name, **dict(note)), now)
    secrets = runtime.vault.secrets(GROUP_SECRETS, name, group.secrets)
    timeout_s = group.shape.check_timeout_s
    results = await asyncio.gather(
        *(ping(runtime.checks_http, name, url, secrets, timeout_s=timeout_s, now=now) for url in group.shape.check_urls)
    )
    async with runtime.request_pool.connection() as connection:
        await note_urls(connection, [CheckUrl.of(name, result.url, result.error, now) for result in results])
    return PingAnswer(
        results=[
            PingResult(url=r.url, ok=r.error is None, status=r.status, duration_ms=r.duration_ms, error=r.error)
            for r in results
        ]
    )


@router.post(
    "/{name}/rotate-secret", summary="Give a group a new secret", responses=problems(GroupUnknown, SecretsUnreadable)
)
async def rotate_secret(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, response: Response, note: Annotated[ActNote, Query()]
) -> NewSecret:
    """Create a new secret, shown only in this answer.

    For 24 hours the old secret signs as well, so that receivers can be changed. This also holds for an old secret that
    another person was shown a moment ago: `earlier_signs_until` is set then.
    """
    response.headers["cache-control"] = "no-store"
    return await rotate_seen_secret(name, runtime, caller, note)


async def rotate_seen_secret(
    name: str, runtime: Runtime, caller: Caller, note: ActNote, *, seen: str | None = None
) -> NewSecret:
    """Create a new secret. `seen`: the version of the secrets that the caller saw; None: any.

    Raises GroupUnknown, SecretsUnreadable, and Invalid if the secrets are not those that were seen.
    """
    now = runtime.clock.now()
    secret = new_secret()
    async with runtime.request_pool.transaction() as connection:
        group = await store.lock_group(connection, name)
        if group is None or group.deleted_at is not None:
            raise _unknown(name)
        refuse_if_changed(group.secrets, seen)
        former = runtime.vault.secrets(GROUP_SECRETS, name, group.secrets)
        secrets = rotated(former, secret, now)
        seal = Seal(runtime.vault, name)
        await store.change_secrets(connection, name, seal(GROUP_SECRETS, dump(secrets)), now)
        await record(connection, audit_entry(caller, "producer_group.rotate_secret", name, **dict(note)), now)
    return NewSecret(
        secret=secret, former_signs_until=overlap_end(secrets, now), earlier_signs_until=overlap_end(former, now)
    )


async def secret_state(name: str, runtime: Runtime, caller: Caller) -> SecretState:
    """Return the version of the secrets, and until when a former one signs. Raises GroupUnknown."""
    caller.must_have_group(name)
    async with runtime.request_pool.connection() as connection:
        group = await _known(connection, name)
    until = overlap_end(_readable(runtime, group), runtime.clock.now())
    return SecretState(version_of(group.secrets), until)


def _checked(wanted: GroupPut, runtime: Runtime) -> GroupShape:
    """Return the validated shape. Raises Invalid or AddressNotAllowed with the field."""
    if not wanted.check_urls and wanted.checks == "call":
        raise Invalid("`check_urls` is empty. Give a URL, or `checks: claim`.", field="check_urls")
    for index, url in enumerate(wanted.check_urls):
        fault = url_fault(url, runtime.network_policy)
        if fault is None:
            continue
        problem = AddressNotAllowed if "HALFNOTE_" in fault else Invalid
        raise problem(f"`check_urls[{index}]` {fault}.", field=f"check_urls[{index}]")
    if len(set(wanted.check_urls)) < len(wanted.check_urls):
        raise Invalid("`check_urls` contains a URL twice. Send each URL once.", field="check_urls")
    enums = {"on_exhausted": OnExhausted(wanted.on_exhausted), "checks": Checks(wanted.checks)}
    return GroupShape(**{**wanted.model_dump(exclude={"secret"}), **enums})


async def _put(
    runtime: Runtime, connection: Connection, name: str, shape: GroupShape, secret: Secret, *, given: bool
) -> tuple[bool, list[str]]:
    """Store the shape. Return whether the group is new, and the fields of a known group that changed.

    `given`: the caller chose the secret.
    """
    now = runtime.clock.now()
    seal = Seal(runtime.vault, name)
    if await store.add_group(connection, name, shape, seal(GROUP_SECRETS, dump([secret])), now):
        return True, []
    stored = await store.lock_group(connection, name)
    assert stored is not None  # a group's row is never deleted
    if stored.deleted_at is not None:
        await store.change_group(connection, name, shape, seal(GROUP_SECRETS, dump([secret])), now)
        return True, []
    known = _readable(runtime, stored) if given else []
    rotates = given and [secret.secret] != [one.secret for one in known[:1]]
    changed = changed_fields(asdict(stored.shape), asdict(shape)) + (["secret"] if rotates else [])
    if changed:
        secrets = seal(GROUP_SECRETS, dump(rotated(known, secret.secret, now))) if rotates else stored.secrets
        await store.change_group(connection, name, shape, secrets, now)
    return False, changed


def _readable(runtime: Runtime, stored: ProducerGroup) -> list[Secret]:
    """Return a group's secrets; none if their key is lost, because a new secret replaces them."""
    try:
        return runtime.vault.secrets(GROUP_SECRETS, stored.name, stored.secrets)
    except SecretsUnreadable:
        return []


async def _answers(connection: Connection, groups: list[ProducerGroup], now: datetime) -> list[GroupAnswer]:
    known = await urls_of(connection, [group.name for group in groups])
    return [
        GroupAnswer(
            name=group.name,
            **asdict(group.shape),
            claimed_at=group.claimed_at,
            held_until=group.held_until if group.held_until is not None and group.held_until > now else None,
            created_at=group.created_at,
            updated_at=group.updated_at,
            urls=[_url_state(known.get((group.name, url)), url) for url in group.shape.check_urls],
        )
        for group in groups
    ]


def _url_state(known: CheckUrl | None, url: str) -> UrlState:
    if known is None:
        return UrlState(url=url, last_ok=None, last_error=None, last_error_at=None)
    return UrlState(url=url, last_ok=known.last_ok_at, last_error=known.last_error, last_error_at=known.last_error_at)


def _standing(found: GroupStanding | None) -> GroupStandingShown | None:
    return None if found is None else GroupStandingShown(**asdict(found))


async def _known(connection: Connection, name: str) -> ProducerGroup:
    group = await store.read_group(connection, name)
    if group is None:
        raise _unknown(name)
    return group


def _unknown(name: str) -> GroupUnknown:
    return GroupUnknown(f"There is no producer group `{name}`. PUT /producer-groups/<name> registers one.")
