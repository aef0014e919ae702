"""A consumer of a subscription with the destination `pull`, over HTTP, and the sweep that finds what it left."""

from datetime import timedelta
from typing import Any

import httpx

from app.database.connection import Connection
from app.pull import sweep
from app.runtime.state import Runtime


async def put_pulled(client: httpx.AsyncClient, name: str = "worker", **fields: Any) -> None:
    """Create a subscription to `order` that consumers claim from; `fields` replace its fields."""
    put = {"topics": ["order"], "destination": {"type": "pull"}, **fields}
    answer = await client.put(f"/subscriptions/{name}", json=put)
    assert answer.status_code == 201, answer.text


class Consumer:
    """Claims and settles messages of one subscription."""

    def __init__(self, client: httpx.AsyncClient, name: str = "worker") -> None:
        self._client, self._path = client, f"/subscriptions/{name}"

    async def claim(self, **fields: Any) -> list[dict[str, Any]]:
        """Claim messages; return them."""
        answer = await self._client.post(f"{self._path}/claim", json=fields)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["messages"]
        return found

    async def settle(self, action: str, *handles: str, **fields: Any) -> list[dict[str, Any]]:
        """Acknowledge, give back, reject or extend; return the outcomes."""
        answer = await self._client.post(f"{self._path}/{action}", json={"handles": list(handles), **fields})
        assert answer.status_code == 200, answer.text
        outcomes: list[dict[str, Any]] = answer.json()["outcomes"]
        return outcomes

    async def ack(self, *messages: dict[str, Any]) -> list[int]:
        """Acknowledge messages; return the statuses."""
        return [one["status"] for one in await self.settle("ack", *(message["handle"] for message in messages))]


async def lapse(db: Connection, runtime: Runtime) -> None:
    """Let the time of everything that consumers hold be over, and a worker find it."""
    over = "now() - interval '1 second'"
    await db.execute(f"update pull_claim set held_until = {over}, sweep_at = {over}")
    await db.execute(f"update delivery_retry set leased_until = {over}, due_at = {over} where leased_until is not null")
    await sweep_after(runtime)


async def sweep_after(runtime: Runtime, seconds: float = 0) -> None:
    """Let a worker look as if so many seconds had passed, until it finds nothing more."""
    now = runtime.clock.now() + timedelta(seconds=seconds)
    while (await sweep.step(runtime, now)).more:
        pass
