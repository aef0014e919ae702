"""The role `viewer`, and the permission for the bodies of messages."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.admission.authenticator import Authenticator
from app.database.connection import Connection
from app.permissions import Role
from app.store.admin import api_keys as store
from tests.conftest import client_of, register_group
from tests.support.api_keys import bearer, make
from tests.support.console_forms import FORM, sign_in
from tests.support.dead_letters import bury
from tests.support.keyed_services import start

__all__ = ["start"]

SECRET_TEXT = "a diagnosis"
# A role, its permission, and whether it reads bodies.
READING = [
    (Role.VIEWER, None, False),
    (Role.VIEWER, False, False),
    (Role.VIEWER, True, True),
    (Role.OPERATOR, None, True),
    (Role.OPERATOR, True, True),
    (Role.OPERATOR, False, False),
    (Role.ADMIN, None, True),
]


async def dead(client: httpx.AsyncClient, db: Connection, **content: Any) -> str:
    """Commit a half with a context, and write its dead letter; return the message's id."""
    await register_group(db, "shop")
    to = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/in"}}
    assert (await client.put("/subscriptions/mailer", json=to)).status_code == 201
    half = {
        "producer_group": "shop",
        "messages": [{"topic": "order", "headers": {"region": "eu"}, **content}],
        "context": {"note": SECRET_TEXT},
    }
    made = (await client.post("/half", json=half)).json()
    end = {"transaction_id": made["transaction_id"], "producer_group": "shop", "verdict": "commit"}
    assert (await client.post("/end", json=end)).status_code == 200
    message_id = f"{made['transaction_id']}-0"
    await bury(db, message_id, "mailer")
    return message_id


@pytest.mark.parametrize(("role", "permission", "reads"), READING)
@pytest.mark.parametrize(
    "content", [{"body": {"note": SECRET_TEXT}}, {"body_base64": "AAECAw==", "content_type": "image/png"}], ids=len
)
async def test_bodies_are_shown_to_those_with_the_permission(
    start: Callable[..., Any], db: Connection, role: Role, permission: bool | None, reads: bool, content: dict[str, Any]
) -> None:
    runtime, admin = await start()
    message_id = await dead(admin, db, **content)
    key = await make(runtime, role, bodies=permission)
    field, value = next(iter(content.items()))
    for path in (f"/messages/{message_id}", f"/dead-letters/mailer/{message_id}"):
        shown = (await admin.get(path, headers=bearer(key))).json()
        assert shown["headers"] == {"region": "eu"}
        assert shown.get(field) == (value if reads else None)
        assert shown.get("body_hidden") == (None if reads else True)
    transaction = await admin.get(f"/transactions/{message_id[:36]}", headers=bearer(key))
    assert ("context" in transaction.json()) == reads
    async with client_of(runtime) as browser:
        await sign_in(browser, key)
        page = (await browser.get(f"/console/transactions/{message_id[:36]}", headers=FORM)).text
    assert ("The body is hidden" in page) != reads
    if field == "body":
        assert (SECRET_TEXT in page) == reads


async def test_nothing_that_a_viewer_reads_holds_a_body_or_a_secret(start: Callable[..., Any], db: Connection) -> None:
    runtime, admin = await start()
    message_id = await dead(admin, db, body={"note": SECRET_TEXT})
    key = await make(runtime, Role.VIEWER)
    secret = (await admin.post("/subscriptions/mailer/rotate-secret")).json()["secret"]
    for path in (
        f"/messages/{message_id}",
        f"/transactions/{message_id[:36]}",
        f"/transactions/{message_id[:36]}/delivery",
        f"/dead-letters/mailer/{message_id}",
        "/transactions",
        "/dead-letters",
        "/dead-letters/groups",
        "/subscriptions/mailer",
        "/producer-groups/shop",
        "/api-keys",
        "/audit",
        "/audit/chain",
        "/search?q=mailer",
        "/stats",
    ):
        answer = await admin.get(path, headers=bearer(key))
        assert answer.status_code == 200, path
        for hidden in (SECRET_TEXT, secret, key):
            assert hidden not in answer.text, path


async def test_the_permission_is_of_viewers_and_operators(start: Callable[..., Any]) -> None:
    _, admin = await start()
    for role in ("admin", "metrics"):
        refused = await admin.post("/api-keys", json={"name": "x", "role": role, "bodies": True})
        assert (refused.status_code, "bodies" in refused.json()["detail"]) == (422, True)
    made = (await admin.post("/api-keys", json={"name": "support", "role": "viewer", "bodies": True})).json()
    assert (made["role"], made["bodies"]) == ("viewer", True)
    path = f"/api-keys/{made['key_id']}"
    changed = (await admin.put(path, json={"name": "support", "role": "viewer"})).json()
    assert (changed["bodies"], changed["changed"], changed["reset"]) == (None, ["bodies"], ["bodies"])
    again = (await admin.post(f"{path}/rotate", json={})).json()
    assert (again["role"], again["bodies"]) == ("viewer", None)
    path = f"/api-keys/{again['key_id']}"
    other = (await admin.put(path, json={"name": "support", "role": "metrics"})).json()
    assert (other["role"], other["changed"]) == ("metrics", ["role"])
    assert (await admin.get(path)).json()["role"] == "metrics"


async def test_a_version_that_knows_no_viewers_takes_one_for_metrics(start: Callable[..., Any], db: Connection) -> None:
    runtime, _ = await start()
    await make(runtime, Role.VIEWER)
    assert await db.fetchval("select role from api_key") == "metrics"
    # A PUT of that version leaves the column that it does not know.
    await db.execute("update api_key set role = 'operator'")
    [key] = await store.known(db, runtime.clock.now())
    assert key.role == "operator"


async def test_a_key_of_an_unknown_role_is_passed_over(start: Callable[..., Any], db: Connection) -> None:
    runtime, _ = await start()
    known, unknown = await make(runtime, Role.OPERATOR), await make(runtime, Role.VIEWER)
    await db.execute("alter table api_key drop constraint api_key_role")
    await db.execute("update api_key set role = 'sculptor', is_viewer = false where name = 'a viewer'")
    other = Authenticator(runtime.settings, runtime.clock)
    other.learn(await store.known(db, runtime.clock.now()), None)
    assert other.caller(f"Bearer {known}".encode()).role is Role.OPERATOR
    assert other.holder(runtime.authenticator.caller(f"Bearer {unknown}".encode()).digest) is None
