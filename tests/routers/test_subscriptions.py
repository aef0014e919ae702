"""The subscription resource, and where a new subscription begins."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook as Verifier

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.relay.lag import earliest, latest, since
from tests.conftest import shares
from tests.support.check_responder import Responder
from tests.support.relay_stepping import offsets, order, publish, subscribe, turn_until
from tests.support.vaults import subscription_secrets

URL = "http://127.0.0.1:9/orders"
SHAPE: dict[str, Any] = {"topics": ["order"], "destination": {"type": "webhook", "url": URL}}
SECRET = "whsec_" + "M" * 43 + "="


async def put(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.put("/subscriptions/mailer", json={**SHAPE, **fields})


async def test_a_new_one_is_201_with_defaults_and_its_secret_once(client: httpx.AsyncClient) -> None:
    answer = await put(client)
    assert answer.status_code == 201
    made = answer.json()
    assert made["secret"].startswith("whsec_")
    assert (made["state"], made["start"], made["max_in_flight"], made["timeout_s"]) == ("active", "latest", 64, 10)
    assert len(made["retry"]) == 16
    again = await put(client)
    assert again.status_code == 200
    assert "secret" not in again.json()
    shown = (await client.get("/subscriptions/mailer")).json()
    assert "secret" not in str(shown)
    assert shown["checkpoint"]["offset"] == 0
    assert shown["lag"] == {"messages": 0, "seconds": 0, "exact": True}


async def test_the_same_put_again_touches_nothing(client: httpx.AsyncClient, db: Connection) -> None:
    fields = {"filters": {"tags": ["a"]}, "retry": [1, 2.5], "start": {"time": "2026-11-21T08:00:00+01:00"}}
    await put(client, **fields)
    before = await db.fetchrow("select * from subscription")
    assert (await put(client, **fields)).status_code == 200
    assert await db.fetchrow("select * from subscription") == before
    await put(client, **{**fields, "timeout_s": 5})
    assert (await db.fetchval("select timeout_s from subscription")) == 5


async def test_a_start_beyond_the_log_is_refused(client: httpx.AsyncClient, group: str) -> None:
    message = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}
    [sent] = (await client.post("/messages", json=message)).json()["messages"]
    body = {"topics": ["order"], "destination": {"type": "pull"}}
    beyond = await client.put("/subscriptions/points", json={**body, "start": {"offset": sent["offset"] + 1}})
    assert (beyond.status_code, beyond.json()["field"]) == (422, "start")
    assert f"the log ends at offset {sent['offset']}" in beyond.json()["detail"]
    at_end = await client.put("/subscriptions/points", json={**body, "start": {"offset": sent["offset"]}})
    assert at_end.status_code == 201


async def test_a_given_secret_is_not_shown_and_another_one_rotates(client: httpx.AsyncClient, db: Connection) -> None:
    destination = {**SHAPE["destination"], "secret": SECRET}
    assert (await put(client, destination=destination)).json()["secret"] is None
    assert await db.fetchval("select destination ? 'secret' from subscription") is False
    await put(client, destination=destination)
    assert len(await subscription_secrets(db)) == 1
    await put(client, destination={**SHAPE["destination"], "secret": SECRET.replace("M", "N")})
    assert len(await subscription_secrets(db)) == 2


@shares
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"topics": []}, "topics"),
        ({"topics": ["a*b"]}, "topics"),
        ({"topics": ["a**"]}, "topics"),
        ({"topics": ["a\x00"]}, "topics"),
        ({"ordered": "topic"}, "ordered"),
        ({"shards": 65}, "shards"),
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"rate_per_s": 1e-300}, "rate_per_s"),
        ({"destination": {"type": "kafka"}}, "destination"),
        ({"destination": {"type": "webhook", "url": "ftp://x/"}}, "destination.url"),
        ({"destination": {"type": "webhook", "url": URL, "mode": "bulk"}}, "destination.mode"),
        ({"destination": {"type": "webhook", "url": URL, "secret": "x"}}, "destination.secret"),
        ({"destination": {"type": "webhook", "url": "http://user:word@127.0.0.1:9/"}}, "destination.url"),
        ({"destination": {"type": "webhook", "url": URL, "headers": {"Host": "x"}}}, "destination.headers"),
        ({"destination": {"type": "webhook", "url": URL, "headers": {"Webhook-Id": "x"}}}, "destination.headers"),
        ({"destination": {"type": "webhook", "url": URL, "headers": {"ce-id": "x"}}}, "destination.headers"),
        ({"destination": {"type": "webhook", "url": URL, "headers": {"halfnote-x": "x"}}}, "destination.headers"),
        ({"destination": {"type": "webhook", "url": URL, "headers": {"x": "a\r\nb"}}}, "destination.headers"),
        ({"destination": {"type": "webhook", "url": URL, "headers": {"a b": "x"}}}, "destination.headers"),
        ({"filters": {"tags": []}}, "filters.tags"),
        ({"filters": {"topic": ["x"]}}, "filters.topic"),
        ({"start": "first"}, "start"),
        ({"start": {"offset": -1}}, "start"),
        ({"start": {"offset": 1, "time": "2026-11-21T08:00:00Z"}}, "start"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_in_flight": 1001}, "max_in_flight"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"retry": [-1]}, "retry"),
        ({"retry": [True]}, "retry"),
    ],
)
async def test_a_refused_field_is_named(
    shared_client: httpx.AsyncClient, shared_db: Connection, fields: dict[str, Any], field: str
) -> None:
    answer = await put(shared_client, **fields)
    assert answer.status_code == 422
    assert answer.json()["type"] == "/problems/invalid"
    assert answer.json()["field"].startswith(field)
    assert await shared_db.fetchval("select count(*) from subscription") == 0


@shares
async def test_an_address_outside_the_allowed_networks_is_refused(shared_client: httpx.AsyncClient) -> None:
    answer = await put(shared_client, destination={"type": "webhook", "url": "http://10.1.2.3/"})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/address-not-allowed")


async def test_reserved_topics_may_be_subscribed(client: httpx.AsyncClient) -> None:
    assert (await put(client, topics=["halfnote.*", "halfnote.finding", "*"])).status_code == 201


async def test_a_different_start_later_is_refused_and_names_replay(client: httpx.AsyncClient) -> None:
    await put(client, start="earliest")
    answer = await put(client, start="latest")
    assert answer.status_code == 422
    assert answer.json()["field"] == "start"
    assert "replay" in answer.json()["detail"]
    assert (await put(client)).status_code == 200
    assert (await put(client, start="earliest")).status_code == 200


@shares
async def test_unknown_ones_are_404(shared_client: httpx.AsyncClient) -> None:
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/test"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/rotate-secret"),
    ):
        answer = await shared_client.request(method, f"/subscriptions/none{path}")
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/subscription-unknown")


async def test_a_deleted_one_leaves_a_tombstone_and_its_name(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client)
    assert (await client.delete("/subscriptions/mailer")).status_code == 204
    assert (await client.get("/subscriptions/mailer")).status_code == 404
    assert (await put(client, start="earliest")).status_code == 201
    rows = await db.fetch("select subscription_id, deleted_at from subscription order by subscription_id")
    assert [row["deleted_at"] is None for row in rows] == [False, True]


async def test_lists_page_by_name(client: httpx.AsyncClient) -> None:
    for name in ("c", "a", "b"):
        await client.put(f"/subscriptions/{name}", json=SHAPE)
    first = (await client.get("/subscriptions", params={"limit": 2})).json()
    assert [item["name"] for item in first["items"]] == ["a", "b"]
    second = (await client.get("/subscriptions", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert ([item["name"] for item in second["items"]], second["next_cursor"]) == (["c"], None)


async def test_puts_at_once_make_one(client: httpx.AsyncClient, db: Connection) -> None:
    answers = await asyncio.gather(*(put(client, timeout_s=number + 1) for number in range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [201]
    assert await db.fetchval("select count(*) from subscription") == 1
    assert await db.fetchval("select count(*) from checkpoint") == 1


async def test_if_none_match_only_creates(client: httpx.AsyncClient, db: Connection) -> None:
    only_new = {"if-none-match": "*"}
    shape = {**SHAPE, "timeout_s": 5}
    tried = await client.put("/subscriptions/mailer?dry_run=true", json=shape, headers=only_new)
    assert (tried.status_code, await db.fetchval("select count(*) from subscription")) == (201, 0)
    assert (await client.put("/subscriptions/mailer", json=shape, headers=only_new)).status_code == 201
    before = await db.fetchrow("select * from subscription")
    acts = await db.fetchval("select count(*) from audit")
    for query, body in (("", shape), ("", SHAPE), ("?dry_run=true", SHAPE)):
        refused = await client.put(f"/subscriptions/mailer{query}", json=body, headers=only_new)
        assert refused.status_code == 412
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["type"] == "/problems/subscription-exists"
        assert "without If-None-Match" in refused.json()["detail"]
    assert await db.fetchrow("select * from subscription") == before
    assert await db.fetchval("select count(*) from audit") == acts
    # A wrong request is refused as without the header, and no subscription has an entity tag.
    assert (await client.put("/subscriptions/mailer", json={}, headers=only_new)).status_code == 422
    changed = await client.put("/subscriptions/mailer", json=SHAPE, headers={"if-none-match": '"1"'})
    assert (changed.status_code, changed.json()["timeout_s"]) == (200, 10)


async def test_of_puts_at_once_that_only_create_one_does(client: httpx.AsyncClient) -> None:
    shapes = [{**SHAPE, "timeout_s": seconds} for seconds in range(1, 6)]
    only_new = {"if-none-match": "*"}
    answers = await asyncio.gather(
        *(client.put("/subscriptions/mailer", json=shape, headers=only_new) for shape in shapes)
    )
    assert sorted(answer.status_code for answer in answers) == [201, 412, 412, 412, 412]
    [made] = [answer.json() for answer in answers if answer.status_code == 201]
    assert (await client.get("/subscriptions/mailer")).json()["timeout_s"] == made["timeout_s"]


async def test_a_test_delivery_is_signed_and_returns_the_outcome(client: httpx.AsyncClient, db: Connection) -> None:
    async with Responder(status=204) as receiver:
        made = await subscribe(client, receiver)
        answer = (await client.post("/subscriptions/mailer/test")).json()
        assert (answer["outcome"], answer["status"], answer["error"]) == ("delivered", 204, None)
        [call] = receiver.calls
        Verifier(made["secret"]).verify(call.body, call.headers)
        assert call.headers["ce-type"] == "halfnote.test"
        receiver.status, receiver.content = 410, "closed"
        answer = (await client.post("/subscriptions/mailer/test")).json()
        assert (answer["outcome"], answer["error"], answer["response"]) == ("gone", "answered 410", '"closed"')
    assert (await client.post("/subscriptions/mailer/test")).json()["outcome"] == "failed"
    assert (await client.get("/subscriptions/mailer")).json()["state"] == "active"
    assert await db.fetchval("select count(*) from receipt") == 0


async def test_after_a_rotation_both_secrets_sign(client: httpx.AsyncClient) -> None:
    async with Responder() as receiver:
        made = await subscribe(client, receiver)
        new = (await client.post("/subscriptions/mailer/rotate-secret")).json()
        assert new["former_signs_until"] is not None
        await client.post("/subscriptions/mailer/test")
    [call] = receiver.calls
    for secret in (made["secret"], new["secret"]):
        Verifier(secret).verify(call.body, call.headers)


async def test_own_headers_are_sent(client: httpx.AsyncClient) -> None:
    async with Responder() as receiver:
        destination = {"type": "webhook", "url": receiver.url, "headers": {"Authorization": "Bearer x"}}
        await put(client, destination=destination)
        await client.post("/subscriptions/mailer/test")
    assert receiver.calls[0].headers["authorization"] == "Bearer x"


@pytest.mark.parametrize(
    ("start", "begins"),
    [
        ("earliest", 0),
        ({"offset": 0}, 0),
        ({"time": "0001-01-01T00:00:00Z"}, 0),
        ({"time": "9999-12-31T23:59:59Z"}, 3),
        ("latest", 3),
    ],
)
async def test_start(client: httpx.AsyncClient, db: Connection, group: str, start: Any, begins: int) -> None:
    sent = await publish(client, order(1), order(2), order(3))
    await put(client, start=start if start != {"offset": 0} else {"offset": sent[0] - 1})
    assert await db.fetchval('select "offset" from checkpoint') == sent[0] - 1 + begins


async def test_a_time_is_the_lowest_offset_from_a_second_before(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    sent = await publish(client, *(order(number) for number in range(40)))
    first_at = await db.fetchval("select min(committed_at) from outbox")
    # One message each 10 s, and a clock that stepped back by 0.9 s in between; a gap in the offsets.
    await db.execute(
        """update outbox set committed_at = $1::timestamptz + make_interval(secs => 10 * ("offset" - $2))
             - case when "offset" - $2 = 21 then interval '10.9 s' else interval '0' end""",
        first_at,
        sent[0],
    )
    await db.execute('delete from outbox where "offset" between $1 and $2', sent[5], sent[9])
    for number in (*range(5), *range(10, 40)):
        at = await db.fetchval('select committed_at from outbox where "offset" = $1', sent[number])
        found = await since(db, at)
        expected = await db.fetchval(
            'select min("offset") - 1 from outbox where committed_at >= $1', at - timedelta(seconds=1)
        )
        # Messages committed at or after the time are never skipped; a few earlier ones may be included.
        assert found <= expected
        between = await db.fetchval(
            'select count(*) from outbox where "offset" > $1 and "offset" <= $2', found, expected
        )
        assert between <= 1
    assert await since(db, first_at - timedelta(days=9)) == sent[0] - 1
    assert await since(db, first_at + timedelta(days=9)) == sent[-1]


async def test_on_an_empty_log_every_start_is_its_beginning(db: Connection, runtime: Runtime) -> None:
    assert (await latest(db), await earliest(db), await since(db, runtime.clock.now())) == (0, 0, 0)


async def test_nothing_committed_after_the_answer_is_skipped_by_latest(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    relay = Relay(runtime)
    stopping = asyncio.Event()
    # (subscriptions that were acknowledged before the message was asked for, its offset)
    sent: list[tuple[int, int]] = []
    made = 0

    async def write() -> None:
        while not stopping.is_set():
            before = made
            [offset] = await publish(client, order(1))
            sent.append((before, offset))

    async with Responder() as receiver:
        writers = [asyncio.create_task(write()) for _ in range(6)]
        for number in range(12):
            await subscribe(client, receiver, f"mailer-{number}")
            made = number + 1
        stopping.set()
        await asyncio.gather(*writers)
        last = max(offset for _, offset in sent)
        # A drain gives unsent messages back, so wait for the checkpoints.
        await turn_until(
            relay,
            runtime,
            lambda: len(relay.streams) == 12 and min(s.settled_to for s in relay.streams.values()) >= last,
        )
        await relay.drain(runtime)
    received: dict[str, set[int]] = {}
    for call, offset in zip(receiver.calls, offsets(receiver), strict=True):
        received.setdefault(call.headers["halfnote-subscription"], set()).add(offset)
    for number in range(12):
        due = {offset for before, offset in sent if before > number}
        assert due <= received.get(f"mailer-{number}", set())
