"""`halfnote keys`: API keys, over HTTP or on the database itself (`_over_http`).

The first key is made on the database: access to the database replaces a key.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from app.cli.api_client import DEFAULT_URL, AsJson, Url, all_pages, call, encoded, own_key, path_of, print_json
from app.cli.confirmation import Yes, must_agree
from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.finite import finite
from app.cli.sorted_commands import SortedCommands
from app.cli.standard_output import printable
from app.cli.tables import moment, print_fields, print_table
from app.database.url_file import SETTING

app = typer.Typer(
    help="API keys. Over HTTP with HALFNOTE_API_KEY (an admin's), or with --url or HALFNOTE_URL unless "
    "HALFNOTE_DATABASE_URL or HALFNOTE_DATABASE_URL_FILE is set. Otherwise directly in the database.",
    no_args_is_help=True,
    cls=SortedCommands,
)

# Of the column's type.
HIGHEST_KEY_ID = 2**31 - 1
KeyId = Annotated[
    int, typer.Argument(metavar="KEY_ID", min=1, max=HIGHEST_KEY_ID, help="as `halfnote keys list` shows it")
]
Name = Annotated[str, typer.Option(help="the holder's name")]
RoleName = Annotated[str, typer.Option(help="producer, subscriber, operator, viewer, admin or metrics")]
Groups = Annotated[list[str] | None, typer.Option("--group", help="a producer group, or a prefix and *; repeatable")]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="a topic, or a prefix and *; repeatable")]
Subscriptions = Annotated[
    list[str] | None, typer.Option("--subscription", help="a subscription, or a prefix and *; repeatable")
]
ExpiresAt = Annotated[str | None, typer.Option(help="when the key expires (RFC 3339)")]
Rate = Annotated[float | None, typer.Option(callback=finite, help="the most requests a second, in each process")]
Bodies = Annotated[bool | None, typer.Option(help="of an operator or viewer: whether it reads the bodies of messages")]
Overlap = Annotated[int, typer.Option(help="seconds for which the former key stays valid")]

Model = TypeVar("Model", bound=BaseModel)
# Acts on the database: takes a connection inside a database transaction, and the time.
Action: TypeAlias = Callable[[Any, datetime], Awaitable[Any]]


@app.command("create")
def create(
    role: RoleName,
    name: Name = "",
    group: Groups = None,
    topic: Topics = None,
    subscription: Subscriptions = None,
    expires_at: ExpiresAt = None,
    rate_per_s: Rate = None,
    bodies: Bodies = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once."""
    asked = {
        "name": name or role,
        "role": role,
        "producer_groups": group,
        "topics": topic,
        "subscriptions": subscription,
        "expires_at": expires_at,
        "rate_per_s": rate_per_s,
        "bodies": bodies,
    }
    asked = {field: value for field, value in asked.items() if value is not None}
    # Refused alike on both ways.
    encoded(asked)
    if _over_http(url):
        made = call(url, "POST", "/api-keys", content=asked, as_json=as_json)
    else:
        made = _in_database(_create(asked))
    _show_new(made, as_json)


class ApiKeySort(StrEnum):
    """The order of the list."""

    NEWEST = "newest"
    NAME = "name"
    USED = "used"


@app.command("list")
def list_keys(
    sort: Annotated[ApiKeySort, typer.Option(help="used: the last used first")] = ApiKeySort.NEWEST,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List keys, newest first, with expired and revoked ones."""
    found = all_pages(url, "/api-keys", as_json=as_json) if _over_http(url) else _in_database(_list)
    if sort is ApiKeySort.NAME:
        found.sort(key=lambda one: one["name"])
    elif sort is ApiKeySort.USED:
        found.sort(key=lambda one: one["last_used_at"] or "", reverse=True)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            str(one["key_id"]),
            one["name"],
            one["prefix"] + printable("…", "..."),
            one["role"],
            "\n".join(_scope(one)),
            moment(one["last_used_at"]) or "never",
            _end(one),
        )
        for one in found
    ]
    print_table(("id", "name", "key", "role", "scope", "last used", "ends"), rows, whole=("id",))


@app.command("rotate")
def rotate(key_id: KeyId, overlap_s: Overlap = 86_400, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Make a key with the same rights, shown once; the former one expires after the overlap."""
    if _over_http(url):
        content = {"overlap_s": overlap_s}
        made = call(url, "POST", path_of("api-keys", str(key_id), "rotate"), content=content, as_json=as_json)
    else:
        made = _in_database(_rotate(key_id, overlap_s))
    _show_new(made, as_json)


@app.command("revoke")
def revoke(key_id: KeyId, yes: Yes = False, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Revoke a key for good. Every replica refuses it within 2 seconds."""
    must_agree(f"The key {key_id} will be revoked for good. Go on?", "Nothing was revoked.", yes=yes)
    if _over_http(url):
        call(url, "DELETE", path_of("api-keys", str(key_id)), as_json=as_json)
    else:
        _in_database(_revoke(key_id))


def _over_http(url: str) -> bool:
    """Return whether to call the service: a key is set, or an address is and no database is."""
    if own_key() is not None:
        return True
    has_address = url != DEFAULT_URL or bool(os.environ.get("HALFNOTE_URL"))
    return has_address and not any(os.environ.get(name) for name in ("HALFNOTE_DATABASE_URL", SETTING))


def _in_database(action: Action) -> Any:
    """Run an action in a database transaction on the service's database. Raises Refusal."""
    # Imported here: these modules take long to import, and commands over HTTP do not need them.
    from app.cli.reconcile import database_of
    from app.cli.refusals import refusals
    from app.cli.serve import settings_with

    with database_of(settings_with()) as url, refusals():
        return asyncio.run(_in_transaction(url, action))


async def _in_transaction(url: str, action: Action) -> Any:
    """Run an action in a database transaction. Raises Refusal, and what the database raises before the action."""
    from asyncpg import PostgresError

    from app.database.connection import connect
    from app.database.errors import BROKEN, GONE
    from app.errors import Problem

    connection = await connect(url)
    try:
        async with connection.transaction():
            # The database's own clock decides whether a key is valid.
            return await action(connection, await connection.fetchval("select clock_timestamp()"))
    except Problem as problem:
        raise Refusal(problem.detail) from None
    except (*BROKEN, PostgresError) as error:
        if (getattr(error, "sqlstate", None) or GONE[0]).startswith(GONE):
            raise _unknown(error) from None
        raise
    finally:
        await connection.close()


def _unknown(error: Exception) -> Refusal:
    """Return the error of an action whose commit may have been lost."""
    return Refusal(
        f"The connection to the database broke: {error or type(error).__name__}. It is not known whether anything was "
        "changed: see `halfnote keys list`. A new key in it was not shown and is of no use: revoke it."
    )


def _checked(model: type[Model], asked: dict[str, Any]) -> Model:
    """Return a request as the API reads it. Raises Refusal."""
    try:
        return model.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        fault = first["msg"].removeprefix("Value error, ")
        raise Refusal(f"{field}: {fault}" if field else fault, code=WRONG_USAGE) from None


def _create(asked: dict[str, Any]) -> Action:
    async def action(connection: Any, now: datetime) -> Any:
        from app.cli.os_user import person
        from app.operations.api_keys import make_key, shown
        from app.schemas.api_keys import ApiKeyNew

        key, made = await make_key(connection, person(), _checked(ApiKeyNew, asked), now)
        return {**shown(made).model_dump(mode="json"), "key": key}

    return action


def _rotate(key_id: int, overlap_s: int) -> Action:
    async def action(connection: Any, now: datetime) -> Any:
        from app.cli.os_user import person
        from app.operations.api_keys import rotate_key, shown
        from app.schemas.api_keys import RotateRequest

        wanted = _checked(RotateRequest, {"overlap_s": overlap_s})
        key, made = await rotate_key(connection, person(), key_id, wanted.overlap_s, now)
        return {**shown(made).model_dump(mode="json"), "key": key}

    return action


def _revoke(key_id: int) -> Action:
    async def action(connection: Any, now: datetime) -> Any:
        from app.cli.os_user import person
        from app.operations.api_keys import revoke_key

        await revoke_key(connection, person(), key_id, now)

    return action


async def _list(connection: Any, now: datetime) -> Any:
    from app.operations.api_keys import shown
    from app.store.admin.api_keys import HIGHEST, page

    return [shown(key).model_dump(mode="json") for key in await page(connection, HIGHEST, HIGHEST)]


def _show_new(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    print_fields(
        {
            "key (shown this once)": made["key"],
            "id": str(made["key_id"]),
            "name": made["name"],
            "role": made["role"],
            "scope": "\n".join(_scope(made)) or None,
            "replaces": None if made["rotated_from"] is None else str(made["rotated_from"]),
            "ends": moment(made["expires_at"]),
        }
    )


def _scope(one: dict[str, Any]) -> list[str]:
    words = {"producer_groups": "groups", "subscriptions": "subscriptions", "topics": "topics"}
    scope = [f"{word}: {', '.join(one[name])}" for name, word in words.items() if one[name]]
    return scope if one["bodies"] is None else [*scope, f"bodies: {'yes' if one['bodies'] else 'no'}"]


def _end(one: dict[str, Any]) -> str:
    if one["revoked_at"] is not None:
        return f"revoked {moment(one['revoked_at'])}"
    return moment(one["expires_at"]) or ""
