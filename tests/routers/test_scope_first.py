"""Reads outside the scope of a key: they run the statements and get the answer of an id that does not exist."""

import asyncio
from typing import Any

import httpx
import pytest

from app.config import Settings
from app.database.connection import Connection
from app.ids import uuid7
from app.permissions import Role
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.coordinator.test_half_end import ORDER
from tests.support.api_keys import bearer, make
from tests.support.statements import recorded


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with keys."""
    return settings.model_copy(update={"auth": "keys"})


KEYS: dict[Role, dict[str, Any]] = {
    Role.PRODUCER: {"producer_groups": ["shop"], "topics": ["*"]},
    Role.SUBSCRIBER: {"subscriptions": ["*"], "topics": ["point"]},
}


async def transaction_of(runtime: Runtime, client: httpx.AsyncClient, group: str, *, commit: bool) -> str:
    """Store a transaction of a group with the key of its producer."""
    headers = bearer(await make(runtime, Role.PRODUCER, producer_groups=[group], topics=["*"]))
    made = await client.post("/half", json={"producer_group": group, "messages": [ORDER]}, headers=headers)
    assert made.status_code == 201, made.text
    one = str(made.json()["transaction_id"])
    if commit:
        end = {"transaction_id": one, "producer_group": group, "verdict": "commit"}
        assert (await client.post("/end", json=end, headers=headers)).status_code == 200
    return one


async def asked(
    runtime: Runtime, client: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> tuple[int, bytes, list[str]]:
    """Return status, body and statements of a read."""
    with recorded(runtime.database) as statements:
        answer = await client.get(path, headers=headers)
        # asyncpg reports each statement in a callback of the event loop.
        await asyncio.sleep(0)
    return answer.status_code, answer.content, statements


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize(
    ("role", "path"),
    [
        (Role.PRODUCER, "/transactions/{}"),
        (Role.PRODUCER, "/transactions/{}/attempts"),
        (Role.PRODUCER, "/transactions/{}/deliveries"),
        (Role.PRODUCER, "/messages/{}-0"),
        (Role.PRODUCER, "/messages/{}-7"),
        (Role.SUBSCRIBER, "/messages/{}-0"),
        (Role.SUBSCRIBER, "/messages/{}-7"),
    ],
)
async def test_an_id_out_of_scope_is_read_as_one_that_does_not_exist(
    runtime: Runtime, client: httpx.AsyncClient, db: Connection, role: Role, path: str, commit: bool
) -> None:
    await register_group(db, "bank")
    foreign = await transaction_of(runtime, client, "bank", commit=commit)
    headers = bearer(await make(runtime, role, **KEYS[role]))
    never = await asked(runtime, client, path.format(uuid7(runtime.clock.now())), headers)
    assert await asked(runtime, client, path.format(foreign), headers) == never
    assert never[0] == 404
    assert never[2], "no statement was recorded"


async def test_an_id_in_scope_is_read_whole(
    runtime: Runtime, client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    one = await transaction_of(runtime, client, group, commit=True)
    producer = bearer(await make(runtime, Role.PRODUCER, **KEYS[Role.PRODUCER]))
    subscriber = bearer(await make(runtime, Role.SUBSCRIBER, subscriptions=["*"], topics=["order"]))
    for path, headers in (
        (f"/transactions/{one}", producer),
        (f"/transactions/{one}/attempts", producer),
        (f"/messages/{one}-0", producer),
        (f"/messages/{one}-0", subscriber),
    ):
        status, _, statements = await asked(runtime, client, path, headers)
        assert status == 200
        assert any("from attempt" in statement for statement in statements)
