"""API keys: admins create, rotate and revoke them. A key is shown once, when it is created."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from app.errors import ApiKeyOver, ApiKeyTaken, ApiKeyUnknown, Invalid
from app.operations.api_keys import change_key, make_key, revoke_key, rotate_key, shown, unknown
from app.operations.field_changes import reset_fields
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.list_order import next_rank, rank_of
from app.runtime.live_settings import follow
from app.runtime.state import Runtime
from app.schemas.api_keys import (
    ApiKeyChanged,
    ApiKeyMade,
    ApiKeyNew,
    ApiKeyPage,
    ApiKeyPost,
    ApiKeyShown,
    RotateRequest,
)
from app.schemas.fields import COUNT, Strict
from app.schemas.totals import COUNTED_MOST, total_of
from app.store.admin import api_keys as store
from app.store.admin.api_keys import ApiKey, ApiKeyOrder

router = APIRouter(prefix="/api-keys", tags=["keys and audit"])

PAGE_MAX = 1000

KeyId = Annotated[
    int, Path(ge=1, le=store.HIGHEST, description="the id in the answer of `POST /api-keys`", examples=[1030])
]


class ApiKeyQuery(Strict):
    """A page of API keys."""

    cursor: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")] | None = Field(
        None, description="`next_cursor` of the page before"
    )
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="keys on a page")
    sort: Literal["newest", ApiKeyOrder] = Field("newest", description="`used`: the key that was used last first")
    count: bool = Field(False, description=COUNT)


@router.post(
    "",
    status_code=201,
    response_model=ApiKeyMade,
    summary="Make an API key",
    responses=problems(Invalid, ApiKeyTaken),
)
async def post_api_key(runtime: RuntimeDep, caller: CallerDep, wanted: ApiKeyPost) -> JSONResponse:
    """Create a key. It is shown only in this answer. This process accepts it at once, the others within 2 seconds."""
    now = runtime.clock.now()
    chosen = wanted.key.get_secret_value() if wanted.key else None
    if chosen is not None and runtime.authenticator.is_configured(chosen):
        raise ApiKeyTaken("This is the admin key of the settings: choose another one.", field="key")
    async with runtime.request_pool.transaction() as connection:
        key, made = await make_key(connection, caller, wanted, now, chosen=chosen)
    return await _made(runtime, None if chosen else key, made)


@router.get("", summary="List API keys", responses=problems(Invalid))
async def list_api_keys(runtime: RuntimeDep, query: Annotated[ApiKeyQuery, Query()]) -> ApiKeyPage:
    """List keys, expired and revoked ones included. The keys themselves are not shown.

    With `count` the answer has their number.
    """
    async with runtime.request_pool.connection() as connection:
        if query.sort == "newest":
            below = store.HIGHEST if query.cursor is None else int(query.cursor)
            found = await store.page(connection, below, query.limit + 1)
            cursor = str(found[query.limit - 1].key_id) if len(found) > query.limit else None
        else:
            rank = rank_of(query.cursor)
            found = await store.ranked(connection, query.sort, rank, query.limit + 1)
            cursor = next_rank(rank, found, query.limit)
        total = await store.count_keys(connection, COUNTED_MOST + 1) if query.count else None
    items = [shown(key) for key in found[: query.limit]]
    return ApiKeyPage(items=items, next_cursor=cursor, total=None if total is None else total_of(total))


@router.get("/{key_id}", summary="Show an API key", responses=problems(ApiKeyUnknown))
async def get_api_key(runtime: RuntimeDep, key_id: KeyId) -> ApiKeyShown:
    """Show a key's role and scope, its expiry and its last use. The key itself is not shown."""
    async with runtime.request_pool.connection() as connection:
        key = await store.one(connection, key_id)
    if key is None:
        raise unknown(key_id)
    return shown(key)


@router.put("/{key_id}", summary="Change an API key", responses=problems(Invalid, ApiKeyUnknown, ApiKeyOver))
async def put_api_key(runtime: RuntimeDep, caller: CallerDep, key_id: KeyId, wanted: ApiKeyNew) -> ApiKeyChanged:
    """Give a key another name, role, scope, rate or expiry. The key itself stays valid.

    A missing field gets its default; `reset` names the fields that changed because of that. This process applies the
    change at once, the others within 2 seconds.
    """
    async with runtime.request_pool.transaction() as connection:
        key, changed = await change_key(connection, caller, key_id, wanted, runtime.clock.now())
    await follow(runtime, runtime.clock.now())
    return ApiKeyChanged(**shown(key).model_dump(), changed=changed, reset=reset_fields(changed, wanted))


@router.post(
    "/{key_id}/rotate",
    status_code=201,
    response_model=ApiKeyMade,
    summary="Replace an API key",
    responses=problems(Invalid, ApiKeyUnknown, ApiKeyOver),
)
async def rotate_api_key(runtime: RuntimeDep, caller: CallerDep, key_id: KeyId, wanted: RotateRequest) -> JSONResponse:
    """Create a key with the same role and scope. It is shown only in this answer.

    The former key stays valid for `overlap_s` seconds. The new key expires when the former key would have expired.
    """
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        key, made = await rotate_key(connection, caller, key_id, wanted.overlap_s, now)
    return await _made(runtime, key, made)


@router.delete("/{key_id}", status_code=204, summary="Revoke an API key", responses=problems(ApiKeyUnknown))
async def revoke_api_key(runtime: RuntimeDep, caller: CallerDep, key_id: KeyId) -> None:
    """Revoke a key: at once in this process, within 2 seconds in the others.

    The key stays in the list. Revoking it again changes nothing.
    """
    async with runtime.request_pool.transaction() as connection:
        await revoke_key(connection, caller, key_id, runtime.clock.now())
    await follow(runtime, runtime.clock.now())


async def _made(runtime: Runtime, key: str | None, made: ApiKey) -> JSONResponse:
    await follow(runtime, runtime.clock.now())
    answer = ApiKeyMade(**shown(made).model_dump(), key=key)
    return JSONResponse(answer.model_dump(mode="json"), 201, headers={"cache-control": "no-store"})
