"""`halfnote keys`: API keys. With HALFNOTE_API_KEY set it asks the service, else it writes to the database itself.

So the first key is made where the database is: whoever can write to it needs no key.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import typer

from app.cli.api import DEFAULT_URL, AsJson, Url, all_pages, call, path_of, print_json
from app.cli.refusal import Refusal
from app.cli.tables import moment, print_fields, print_table

app = typer.Typer(
    help="API keys. With HALFNOTE_API_KEY (an admin's) over HTTP, else in the database itself.", no_args_is_help=True
)

KeyId = Annotated[int, typer.Argument(metavar="KEY_ID", help="as `halfnote keys list` shows it")]
Name = Annotated[str, typer.Option(help="whose it is")]
RoleName = Annotated[str, typer.Option(help="producer, subscriber, operator, admin or metrics")]
Groups = Annotated[list[str] | None, typer.Option("--group", help="a producer's group, or a beginning with a *")]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="to publish to or read, or a beginning with a *")]
Subscriptions = Annotated[list[str] | None, typer.Option("--subscription", help="a subscriber's, or a beginning")]
ExpiresAt = Annotated[str | None, typer.Option(help="when it ends by itself (RFC 3339)")]
Rate = Annotated[float | None, typer.Option(help="requests a second, in each process")]
Overlap = Annotated[int, typer.Option(help="seconds for which the former key stays valid beside the new one")]

# Asks for something beside the database: a connection inside a database transaction, and the time.
Deed: TypeAlias = Callable[[Any, datetime], Awaitable[Any]]


@app.command("create")
def create(
    role: RoleName,
    name: Name = "",
    group: Groups = None,
    topic: Topics = None,
    subscription: Subscriptions = None,
    expires_at: ExpiresAt = None,
    rate_per_s: Rate = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown this once."""
    asked = {
        "name": name or role,
        "role": role,
        "producer_groups": group,
        "topics": topic,
        "subscriptions": subscription,
        "expires_at": expires_at,
        "rate_per_s": rate_per_s,
    }
    asked = {field: value for field, value in asked.items() if value is not None}
    if _over_http():
        made = call(url, "POST", "/api-keys", content=asked, as_json=as_json)
    else:
        made = _beside_the_database(_create(asked))
    _show_new(made, as_json)


@app.command("list")
def list_keys(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List keys, newest first, also those that are over."""
    found = all_pages(url, "/api-keys", as_json=as_json) if _over_http() else _beside_the_database(_list)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            str(one["key_id"]),
            one["name"],
            one["prefix"] + "…",
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
    """Make a key that may do the same, shown this once; the former one ends after the overlap."""
    if _over_http():
        content = {"overlap_s": overlap_s}
        made = call(url, "POST", path_of("api-keys", str(key_id), "rotate"), content=content, as_json=as_json)
    else:
        made = _beside_the_database(_rotate(key_id, overlap_s))
    _show_new(made, as_json)


@app.command("revoke")
def revoke(key_id: KeyId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """End a key, on every replica within 2 seconds."""
    if _over_http():
        call(url, "DELETE", path_of("api-keys", str(key_id)), as_json=as_json)
    else:
        _beside_the_database(_revoke(key_id))


def _over_http() -> bool:
    return bool(os.environ.get("HALFNOTE_API_KEY", "").strip())


def _beside_the_database(deed: Deed) -> Any:
    """Run a deed in a database transaction on the service's database. Raises Refusal."""
    # Only here: what they need takes long to import, and commands over HTTP don't need it.
    from app.cli.proof import database_of
    from app.cli.serve import settings_with

    with database_of(settings_with()) as url:
        return asyncio.run(_in_transaction(url, deed))


async def _in_transaction(url: str, deed: Deed) -> Any:
    from app.database import connect
    from app.errors import Problem

    connection = await connect(url)
    try:
        async with connection.transaction():
            # The database's own clock, by which keys are judged.
            return await deed(connection, await connection.fetchval("select clock_timestamp()"))
    except Problem as problem:
        raise Refusal(problem.detail) from None
    finally:
        await connection.close()


def _create(asked: dict[str, Any]) -> Deed:
    async def deed(connection: Any, now: datetime) -> Any:
        from pydantic import ValidationError

        from app.api_key_shapes import ApiKeyNew
        from app.cli.person import person
        from app.key_making import make_key, shown

        try:
            wanted = ApiKeyNew.model_validate(asked)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            told = first["msg"].removeprefix("Value error, ")
            raise Refusal(f"{place}: {told}" if place else told, code=2) from None
        key, made = await make_key(connection, person(), wanted, now)
        return {**shown(made).model_dump(mode="json"), "key": key}

    return deed


def _rotate(key_id: int, overlap_s: int) -> Deed:
    async def deed(connection: Any, now: datetime) -> Any:
        from app.cli.person import person
        from app.key_making import rotate_key, shown

        key, made = await rotate_key(connection, person(), key_id, overlap_s, now)
        return {**shown(made).model_dump(mode="json"), "key": key}

    return deed


def _revoke(key_id: int) -> Deed:
    async def deed(connection: Any, now: datetime) -> Any:
        from app.cli.person import person
        from app.key_making import revoke_key

        await revoke_key(connection, person(), key_id, now)

    return deed


async def _list(connection: Any, now: datetime) -> Any:
    from app.key_making import shown
    from app.store.api_keys import HIGHEST, page

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
    return [f"{word}: {', '.join(one[name])}" for name, word in words.items() if one[name]]


def _end(one: dict[str, Any]) -> str:
    if one["revoked_at"] is not None:
        return f"revoked {moment(one['revoked_at'])}"
    return moment(one["expires_at"]) or ""
