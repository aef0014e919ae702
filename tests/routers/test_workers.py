"""`GET /workers`: what a worker holds, and what no worker holds."""

from datetime import timedelta

import httpx

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Responder
from tests.support.relay_stepping import step, subscribe


async def test_what_a_worker_holds_and_what_no_worker_holds(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    relay = Relay(runtime)
    async with Responder(status=204) as receiver:
        await subscribe(client, receiver, shards=2)
        await subscribe(client, receiver, "paused")
        await client.post("/subscriptions/paused/pause")
        unheld = (await client.get("/workers")).json()
        both = [{"subscription": "mailer", "shard": shard, "shards": 2} for shard in (0, 1)]
        assert unheld == {"items": [], "unheld": both}
        for _ in range(20):
            await step(relay, runtime)
            found = (await client.get("/workers")).json()
            if not found["unheld"]:
                break
        [worker] = found["items"]
        assert worker["worker"] == runtime.owner
        assert worker["present_until"] is not None
        assert [
            {key: one[key] for key in both[0]} for one in worker["shards"] if one["subscription"] == "mailer"
        ] == both
        # Renewing does not change since when a worker has a lease; another holder does.
        [first] = {one["held_since"] for one in worker["shards"] if one["subscription"] == "mailer"}
        assert first is not None
        runtime.clock.offset_s += 10
        await step(relay, runtime)
        [again] = (await client.get("/workers")).json()["items"]
        assert {one["held_since"] for one in again["shards"]} == {first}
        places = (await client.get("/subscriptions/mailer")).json()["places"]
        assert {one["held_since"] for one in places} == {first}
        # A version that does not know the columns claims the lease: since when is not known.
        await db.execute("update lease set epoch = epoch + 1 where name like 'relay:%'")
        assert {one["held_since"] for one in (await client.get("/subscriptions/mailer")).json()["places"]} == {None}
        await db.execute("update lease set epoch = epoch - 1 where name like 'relay:%'")
        await relay.drain(runtime)
        assert (await client.get("/workers")).json()["unheld"] == both
        # A worker that was killed counts as gone when its leases end.
        runtime.clock.fixed = runtime.clock.now() + timedelta(days=1)
        assert (await client.get("/workers")).json()["items"] == []
