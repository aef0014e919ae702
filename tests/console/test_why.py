"""Why order 1030 has not arrived, in three clicks from the overview, for each cause, made by the real relay.

The clicks: the field with the order's key, the transaction in the list, and what the sentence leads to: a person may
have to open the subscription.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from html import unescape
from typing import Any

import httpx
import pytest

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.verdicts import DeliveryReason
from tests.routers.test_delivery_reasons import Held, sent, why
from tests.support.check_responder import Responder
from tests.support.check_stepping import in_doubt, turn
from tests.support.console_forms import FORM
from tests.support.relay_stepping import step, subscribe, turn_until


@dataclass(slots=True)
class Scene:
    """What a cause is made with: a service, its relay, and a receiver that answers 204."""

    client: httpx.AsyncClient
    runtime: Runtime
    relay: Relay
    db: Connection
    receiver: Responder
    held: Held | None = None

    def hold(self) -> Held:
        """Let the receiver answer only after the test."""
        self.receiver.answer = self.held = Held()
        return self.held

    async def until(self, transaction_id: str, reason: str) -> None:
        """Let the relay turn until the subscription has got the message, or not, for this reason."""

        async def reached() -> bool:
            return bool((await why(self.client, transaction_id))["reason"] == reason)

        await turn_until(self.relay, self.runtime, reached)

    async def put(self, name: str, **fields: Any) -> None:
        """Change a subscription."""
        answer = await self.client.patch(f"/subscriptions/{name}", json=fields)
        assert answer.status_code == 200, answer.text

    async def post(self, path: str, **content: Any) -> Any:
        """Send a POST."""
        answer = await self.client.post(path, json=content or None)
        assert answer.status_code < 300, answer.text
        return answer.json()

    async def half(self) -> str:
        """Post the half of an order without its end."""
        message = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}
        made = await self.post("/half", producer_group="shop", messages=[message])
        return str(made["transaction_id"])


@pytest.fixture
async def scene(client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str) -> AsyncIterator[Scene]:
    """A service without subscriptions."""
    relay = Relay(runtime)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(Responder(status=204))
        made = Scene(client, runtime, relay, db, receiver)
        yield made
        if made.held is not None:
            made.held.go.set()
        await relay.drain(runtime)


async def delivered(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver)
    one = await sent(scene.client)
    await scene.until(one, "delivered")
    return one


async def retrying(scene: Scene) -> str:
    scene.receiver.status = 500
    await subscribe(scene.client, scene.receiver, retry=[600])
    one = await sent(scene.client)
    await scene.until(one, "retrying")
    return one


async def dead(scene: Scene) -> str:
    one = await retrying(scene)
    scene.runtime.clock.offset_s += 700
    await scene.until(one, "dead")
    return one


async def dropped(scene: Scene) -> str:
    one = await dead(scene)
    named = {"ids": [{"subscription": "mailer", "message_id": f"{one}-0"}], "reason": "sold out"}
    assert (await scene.client.request("DELETE", "/dead-letters", json=named)).status_code == 200
    return one


async def expired(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver, expire_after_s=60)
    one = await sent(scene.client)
    scene.runtime.clock.offset_s += 120
    await scene.until(one, "expired")
    return one


async def no_subscription(scene: Scene) -> str:
    return await sent(scene.client)


async def no_topic_match(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver, topics=["photo"])
    return await sent(scene.client)


async def filtered_by_tag(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver, filters={"tags": ["refunded"]})
    return await sent(scene.client)


async def filtered_by_header(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver, filters={"headers": {"region": "us"}})
    return await sent(scene.client)


async def half(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver)
    return await scene.half()


async def doubted(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver)
    return str(await in_doubt(scene.client, scene.runtime))


async def parked(scene: Scene) -> str:
    one = await doubted(scene)
    async with Responder(content={"verdict": "unknown"}) as shop:
        put = {"check_urls": [shop.url], "max_checks": 1, "on_exhausted": "park"}
        assert (await scene.client.put("/producer-groups/shop", json=put)).status_code == 200
        assert await turn(scene.runtime, CheckBack()) == 1
    return one


async def rolled_back(scene: Scene) -> str:
    one = await half(scene)
    await scene.post("/end", transaction_id=one, producer_group="shop", verdict="rollback", reason="out of stock")
    return one


async def subscription_newer(scene: Scene) -> str:
    one = await sent(scene.client)
    await subscribe(scene.client, scene.receiver)
    return one


async def changed_since(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver, topics=["photo"])
    one = await sent(scene.client)
    last = await sent(scene.client, topic="photo", key="photo-1")
    await scene.until(last, "delivered")
    # The checkpoint is past both.
    await _past(scene)
    await scene.put("mailer", topics=["order"])
    return one


async def no_record(scene: Scene) -> str:
    one = await delivered(scene)
    await _past(scene)
    # Only a fault does this, so the row is removed by hand.
    await scene.db.execute("delete from receipt")
    return one


async def _past(scene: Scene) -> None:
    async def is_past() -> bool:
        return bool(
            await scene.db.fetchval('select c."offset" >= (select max("offset") from outbox) from checkpoint c')
        )

    await turn_until(scene.relay, scene.runtime, is_past)


async def paused(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver)
    one = await sent(scene.client)
    await scene.post("/subscriptions/mailer/pause")
    return one


async def disabled(scene: Scene) -> str:
    # The receiver says that it is gone for good.
    scene.receiver.status = 410
    await subscribe(scene.client, scene.receiver)
    one = await sent(scene.client)
    await scene.until(one, "disabled")
    return one


async def no_worker(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver)
    return await sent(scene.client)


async def breaker_open(scene: Scene) -> str:
    scene.receiver.status = 500
    await subscribe(scene.client, scene.receiver, retry=[600])
    one = await sent(scene.client)
    for number in range(10):
        await sent(scene.client, key=f"order-{number}")
    await scene.until(one, "breaker_open")
    return one


async def behind_key(scene: Scene) -> str:
    scene.receiver.status = 500
    await subscribe(scene.client, scene.receiver, ordered="key", retry=[600])
    first, second = await sent(scene.client), await sent(scene.client)
    await scene.until(first, "retrying")
    await scene.until(second, "behind_key")
    return second


async def due_later(scene: Scene) -> str:
    await subscribe(scene.client, scene.receiver)
    one = await sent(scene.client, deliver_after_s=3600)
    for _ in range(3):
        await step(scene.relay, scene.runtime)
    return one


async def in_flight(scene: Scene) -> str:
    one = await retrying(scene)
    held = scene.hold()
    scene.runtime.clock.offset_s += 700
    await turn_until(scene.relay, scene.runtime, held.reached.is_set)
    return one


async def not_yet_sent(scene: Scene) -> str:
    held = scene.hold()
    await subscribe(scene.client, scene.receiver, max_in_flight=1)
    await sent(scene.client, key="order-1029")
    one = await sent(scene.client)
    await turn_until(scene.relay, scene.runtime, held.reached.is_set)
    return one


CAUSES: dict[DeliveryReason, Callable[[Scene], Awaitable[str]]] = {
    DeliveryReason.DELIVERED: delivered,
    DeliveryReason.DROPPED: dropped,
    DeliveryReason.DEAD: dead,
    DeliveryReason.EXPIRED: expired,
    DeliveryReason.NO_SUBSCRIPTION: no_subscription,
    DeliveryReason.NO_TOPIC_MATCH: no_topic_match,
    DeliveryReason.FILTERED_BY_TAG: filtered_by_tag,
    DeliveryReason.FILTERED_BY_HEADER: filtered_by_header,
    DeliveryReason.HALF: half,
    DeliveryReason.IN_DOUBT: doubted,
    DeliveryReason.PARKED: parked,
    DeliveryReason.ROLLED_BACK: rolled_back,
    DeliveryReason.SUBSCRIPTION_NEWER: subscription_newer,
    DeliveryReason.CHANGED_SINCE: changed_since,
    DeliveryReason.NO_RECORD: no_record,
    DeliveryReason.PAUSED: paused,
    DeliveryReason.DISABLED: disabled,
    DeliveryReason.NO_WORKER: no_worker,
    DeliveryReason.BREAKER_OPEN: breaker_open,
    DeliveryReason.BEHIND_KEY: behind_key,
    DeliveryReason.DUE_LATER: due_later,
    DeliveryReason.IN_FLIGHT: in_flight,
    DeliveryReason.RETRYING: retrying,
    DeliveryReason.NOT_YET_SENT: not_yet_sent,
}


@pytest.mark.parametrize("reason", list(DeliveryReason))
async def test_three_clicks_lead_from_the_overview_to_the_cause(scene: Scene, reason: DeliveryReason) -> None:
    one = await CAUSES[reason](scene)
    sentence = await _walk(scene.client, one)
    [message] = (await scene.client.get(f"/transactions/{one}/delivery")).json()["messages"]
    if reason is DeliveryReason.NO_SUBSCRIPTION:
        assert message["reason"] == reason
        assert message["sentence"] in sentence
        return
    [found] = [row for row in message["subscriptions"] if row["subscription"] == "mailer"]
    assert found["reason"] == reason
    # The sentence is on the page, beside the name of its subscription.
    assert re.search(rf">mailer</a>.{{0,600}}?{re.escape(found['sentence'])}", sentence, re.DOTALL), sentence


async def _walk(client: httpx.AsyncClient, transaction_id: str) -> str:
    """Go from the overview to the transaction of order 1030 by what the pages show; return the page's text."""
    overview = await client.get("/console", headers=FORM)
    [form] = re.findall(r'<form class="find" method="get" action="([^"]+)"', overview.text)
    [name] = re.findall(r'<input type="search" name="([^"]+)"', overview.text)
    # First: the field. It leads to the transactions of the key.
    found = await client.get(form, params={name: "order-1030"}, headers=FORM, follow_redirects=True)
    assert found.url.path == "/console/transactions"
    # Second: the transaction.
    links = re.findall(r'href="(/console/transactions/[0-9a-f-]{36})"', found.text)
    assert f"/console/transactions/{transaction_id}" in links
    page = await client.get(f"/console/transactions/{transaction_id}", headers=FORM)
    assert page.status_code == 200
    # Third: each subscription that the sentences name is a link that works.
    for link in set(re.findall(r'href="(/console/subscriptions/[^"?/]+)"', page.text)):
        assert (await client.get(unescape(link), headers=FORM)).status_code == 200
    return re.sub("</?code>", "`", unescape(page.text))
