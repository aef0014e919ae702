"""Claims that wait while their key ends or gets another scope: they get nothing more than a new request would."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.pull.wake import wake_consumers
from app.runtime.state import Runtime
from tests.support.api_keys import bearer
from tests.support.check_stepping import in_doubt
from tests.support.consumers import put_pulled
from tests.support.keyed_services import made, start
from tests.support.relay_stepping import order, publish

__all__ = ["start"]

# The route, the key's role, its scope, and the scope that it has afterwards.
MESSAGES = ("/subscriptions/worker/claim", "subscriber", {"subscriptions": ["worker"], "topics": ["order"]})
CHECKS = ("/producer-groups/shop/checks/claim", "producer", {"producer_groups": ["shop"], "topics": ["order"]})
ELSEWHERE: dict[str, dict[str, Any]] = {
    "subscriber": {"subscriptions": ["other"], "topics": ["order"]},
    "producer": {"producer_groups": ["other"], "topics": ["order"]},
}


async def change(client: httpx.AsyncClient, key_id: int, role: str, what: str) -> None:
    """Revoke a key, or change its scope or what does not matter to the claim."""
    if what == "revoked":
        assert (await client.delete(f"/api-keys/{key_id}")).status_code == 204
        return
    scope = ELSEWHERE[role] if what == "narrowed" else {MESSAGES[1]: MESSAGES[2], CHECKS[1]: CHECKS[2]}[role]
    answer = await client.put(f"/api-keys/{key_id}", json={"name": "renamed", "role": role, **scope})
    assert answer.status_code == 200, answer.text


async def offer(client: httpx.AsyncClient, runtime: Runtime, role: str) -> None:
    """Publish a message, or put a transaction in doubt, and wake the claims."""
    if role == "subscriber":
        await publish(client, order(1))
        await wake_consumers(runtime, runtime.clock.now())
    else:
        await in_doubt(client, runtime)
        runtime.waiting_claims.wake("shop", 1)


@pytest.mark.parametrize(("what", "status"), [("revoked", 401), ("narrowed", 403), ("renamed", 200)])
@pytest.mark.parametrize("claim", [MESSAGES, CHECKS], ids=["messages", "checks"])
async def test_a_claim_that_waits_has_the_rights_that_its_key_has_at_the_end(
    start: Callable[..., Any], claim: tuple[str, str, dict[str, Any]], what: str, status: int
) -> None:
    path, role, scope = claim
    runtime, client = await start()
    shop = {"check_urls": [], "checks": "claim"}
    assert (await client.put("/producer-groups/shop", json=shop)).status_code == 201
    await put_pulled(client)
    key = await made(client, role, **scope)
    asked = asyncio.create_task(client.post(path, json={"wait_s": 30}, headers=bearer(key["key"])))
    waiting = runtime.waiting_consumers if role == "subscriber" else runtime.waiting_claims
    async with asyncio.timeout(30):
        while not waiting.any_waiting:
            await asyncio.sleep(0.01)
        await change(client, key["key_id"], role, what)
        await offer(client, runtime, role)
        answer = await asked
    assert answer.status_code == status, answer.text
    # What was not handed out is there for others.
    left = await client.post(path, json={})
    assert len(left.json().get("messages", left.json().get("checks"))) == (0 if status == 200 else 1)
