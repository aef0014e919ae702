"""The contract of half, end and messages, over the whole ASGI app."""

import asyncio
import base64
from uuid import UUID, uuid4

import httpx
import pytest

from app.database.connection import Connection
from app.ids import uuid7
from app.runtime.state import Runtime

ORDER = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}


async def post_half(client: httpx.AsyncClient, *messages: dict[str, object], **fields: object) -> httpx.Response:
    return await client.post("/half", json={"producer_group": "shop", "messages": messages or [ORDER], **fields})


async def post_end(client: httpx.AsyncClient, transaction_id: str, verdict: str, **fields: object) -> httpx.Response:
    return await client.post(
        "/end", json={"transaction_id": transaction_id, "producer_group": "shop", "verdict": verdict, **fields}
    )


async def test_half_is_stored_and_invisible_until_commit(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    answer = await post_half(client, ORDER, {"topic": "points", "body": None})
    assert answer.status_code == 201
    half = answer.json()
    assert half["replayed"] is False
    assert [m["message_id"] for m in half["messages"]] == [f"{half['transaction_id']}-{n}" for n in (0, 1)]
    assert await db.fetchval("select count(*) from outbox") == 0
    end = await post_end(client, half["transaction_id"], "commit")
    assert end.status_code == 200
    assert end.json()["source"] == "producer"
    first, second = [m["offset"] for m in end.json()["messages"]]
    assert second == first + 1
    assert await db.fetchval("select count(*) from outbox") == 2


async def test_rollback_publishes_nothing(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    half = (await post_half(client)).json()
    end = await post_end(client, half["transaction_id"], "rollback", reason="card refused")
    assert end.status_code == 200
    assert "messages" not in end.json()
    assert await db.fetchval("select count(*) from outbox") == 0
    assert await db.fetchval("select reason from op") == "card refused"


async def test_repeated_half_gets_the_first_answer(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    chosen = str(uuid7(runtime.clock.now()))
    first = await post_half(client, transaction_id=chosen, context={"a": 1, "b": 2})
    again = await post_half(client, transaction_id=chosen, context={"b": 2, "a": 1})
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == {**first.json(), "replayed": True}


@pytest.mark.parametrize("verdict", ["commit", "rollback"])
async def test_repeats_of_a_decided_half_have_its_verdict(
    client: httpx.AsyncClient, runtime: Runtime, group: str, verdict: str
) -> None:
    """Also those that the lane answers from the first one of their batch."""
    chosen = str(uuid7(runtime.clock.now()))
    first = await post_half(client, transaction_id=chosen)
    assert (await post_end(client, chosen, verdict)).status_code == 200
    again = await asyncio.gather(*(post_half(client, transaction_id=chosen) for _ in range(5)))
    assert [answer.status_code for answer in again] == [200] * 5
    assert [answer.json() for answer in again] == [{**first.json(), "replayed": True, "verdict": verdict}] * 5


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"messages": [{**ORDER, "key": "order-1031"}]}, "messages[0].key"),
        ({"messages": [{**ORDER, "body": {"order": 1031}}]}, "messages[0].body"),
        ({"messages": [{**ORDER, "headers": {"a": "b"}}]}, "messages[0].headers"),
        ({"messages": [{**ORDER, "deliver_after_s": 1}]}, "messages[0].deliver_after_s"),
        ({"messages": [ORDER, ORDER]}, "messages"),
        ({"context": 1}, "context"),
        ({"check": {"max_checks": 2}}, "check"),
    ],
)
async def test_other_content_under_the_same_id_is_refused(
    client: httpx.AsyncClient, runtime: Runtime, group: str, changed: dict[str, object], field: str
) -> None:
    chosen = str(uuid7(runtime.clock.now()))
    await post_half(client, transaction_id=chosen)
    other = await client.post(
        "/half", json={"producer_group": "shop", "messages": [ORDER], "transaction_id": chosen, **changed}
    )
    assert other.status_code == 409
    assert other.json()["type"] == "/problems/content-differs"
    assert other.json()["field"] == field


@pytest.mark.parametrize(
    ("stored", "sent"),
    [
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": [0]}, {"a": [False]}),
        (1.0, True),
        ({"a": 1.0}, {"a": "1.0"}),
        (1e300, 1e301),
    ],
    ids=str,
)
@pytest.mark.parametrize("checks", [False, True], ids=["", "and another check"])
async def test_a_context_that_python_takes_for_equal_is_named(
    client: httpx.AsyncClient, runtime: Runtime, group: str, stored: object, sent: object, checks: bool
) -> None:
    for first, then in ((stored, sent), (sent, stored)):
        chosen = str(uuid7(runtime.clock.now()))
        assert (await post_half(client, transaction_id=chosen, context=first)).status_code == 201
        more = {"check": {"max_checks": 2}} if checks else {}
        other = await post_half(client, transaction_id=chosen, context=then, **more)
        assert (other.status_code, other.json().get("field")) == (409, "context")


@pytest.mark.parametrize("context", [1e22, 1e300, 1.0, 1.5e-7, -0.0, [True, 1, {"a": 1e16}]], ids=str)
async def test_a_context_that_postgres_writes_in_another_way_does_not_differ(
    client: httpx.AsyncClient, runtime: Runtime, group: str, context: object
) -> None:
    chosen = str(uuid7(runtime.clock.now()))
    assert (await post_half(client, transaction_id=chosen, context=context)).status_code == 201
    other = await post_half(client, transaction_id=chosen, context=context, check={"max_checks": 2})
    assert (other.status_code, other.json()["field"]) == (409, "check")


async def test_a_context_that_differs_before_it_is_stored_is_named(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    chosen = str(uuid7(runtime.clock.now()))
    # Postgres stores both as 0.0.
    assert (await post_half(client, transaction_id=chosen, context=0.0)).status_code == 201
    other = await post_half(client, transaction_id=chosen, context=-0.0)
    assert (other.status_code, other.json()["field"]) == (409, "context")


async def test_another_endpoint_is_named(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    chosen = str(uuid7(runtime.clock.now()))
    assert (await post_half(client, transaction_id=chosen)).status_code == 201
    content = {"producer_group": "shop", "messages": [ORDER], "transaction_id": chosen}
    other = await client.post("/messages", json=content)
    assert (other.status_code, other.json()["field"]) == (409, "endpoint")


async def test_one_verdict_ever(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    half = (await post_half(client)).json()
    first = await post_end(client, half["transaction_id"], "commit")
    again = await post_end(client, half["transaction_id"], "commit")
    assert again.status_code == 200
    assert again.json() == {**first.json(), "replayed": True}
    for _ in range(2):
        opposite = await post_end(client, half["transaction_id"], "rollback")
        assert opposite.status_code == 409
        assert opposite.json()["recorded"]["verdict"] == "commit"
    assert await db.fetchval("select count(*) from op") == 1
    assert await db.fetchval("select count(*) from attempt where kind = 'refused'") == 1


async def test_a_contrary_end_writes_nothing_into_a_day_that_is_being_archived(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    """Upkeep has counted the day's rows by then, and compares them with the archive."""
    half = (await post_half(client)).json()
    await post_end(client, half["transaction_id"], "commit")
    await db.execute("update day set state = 'archiving'")
    refused = await post_end(client, half["transaction_id"], "rollback")
    assert (refused.status_code, refused.json()["recorded"]["verdict"]) == (409, "commit")
    assert await db.fetchval("select count(*) from attempt") == 0
    await db.execute("update day set state = 'open'")
    assert (await post_end(client, half["transaction_id"], "rollback")).status_code == 409
    assert await db.fetchval("select count(*) from attempt where kind = 'refused'") == 1


async def test_commit_after_rollback_is_told_of_reissue(client: httpx.AsyncClient, group: str) -> None:
    half = (await post_half(client)).json()
    await post_end(client, half["transaction_id"], "rollback")
    late = await post_end(client, half["transaction_id"], "commit")
    assert late.status_code == 409
    assert "reissue" in late.json()["detail"]


async def test_another_groups_transaction(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    half = (await post_half(client)).json()
    for verdict in ("commit", "unknown"):
        answer = await client.post(
            "/end",
            json={"transaction_id": half["transaction_id"], "producer_group": "other", "verdict": verdict},
        )
        assert answer.status_code == 403
    assert await db.fetchval("select count(*) from op") == 0


async def test_unknown_ids_and_gone_days(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    never = str(uuid7(runtime.clock.now()))
    for verdict in ("commit", "unknown"):
        assert (await post_end(client, never, verdict)).status_code == 404
    await db.execute("update day set state = 'gone', archive = 's3://archive/day' where day = current_date")
    gone = await post_end(client, never, "commit")
    assert gone.status_code == 410
    assert gone.json()["archive"] == "s3://archive/day"


async def test_a_day_that_is_archiving_takes_no_verdict(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    half = (await post_half(client)).json()
    await db.execute("update day set state = 'archiving' where day = current_date")
    assert (await post_end(client, half["transaction_id"], "commit")).status_code == 410
    assert await db.fetchval("select count(*) from op") == 0


async def test_unknown_verdict_changes_nothing(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    half = (await post_half(client)).json()
    answer = await post_end(client, half["transaction_id"], "unknown")
    assert answer.status_code == 202
    assert answer.json()["state"] == "half"
    assert await db.fetchval("select count(*) from op") == 0


async def test_from_check_counts_only_while_a_check_is_open(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    unasked = (await post_half(client)).json()
    answer = await post_end(client, unasked["transaction_id"], "commit", from_check=True)
    assert answer.json()["source"] == "producer"
    asked = (await post_half(client)).json()
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at, asked, next_check_at) "
        "values ($1, 'shop', 1, now(), 1, now())",
        UUID(asked["transaction_id"]),
    )
    answer = await post_end(client, asked["transaction_id"], "commit", from_check=True)
    assert answer.json()["source"] == "check"


async def test_delayed_message_carries_its_due_time(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    half = (await post_half(client, {**ORDER, "deliver_after_s": 90})).json()
    await post_end(client, half["transaction_id"], "commit")
    row = await db.fetchrow("select due_at - committed_at as delay, tag, key from outbox")
    assert row is not None
    assert row["delay"].total_seconds() == 90
    assert (row["tag"], row["key"]) == ("created", "order-1030")


async def test_bodies_are_kept_byte_for_byte(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    raw = b'{ "z":1.0,\t"a" : [1e2, "\\u00e9"] }'
    await client.post(
        "/half",
        content=b'{"producer_group":"shop","messages":[{"topic":"order","body":%s}]}' % raw,
        headers={"content-type": "application/json"},
    )
    assert await db.fetchval("select body from half") == raw
    await post_half(client, {"topic": "png", "body_base64": base64.b64encode(b"\x00\xff").decode()})
    row = await db.fetchrow("select body, content_type from half where topic = 'png'")
    assert row is not None
    assert tuple(row) == (b"\x00\xff", "application/octet-stream")


async def test_plain_messages(client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str) -> None:
    chosen = str(uuid7(runtime.clock.now()))
    request = {"producer_group": "shop", "messages": [ORDER, ORDER], "transaction_id": chosen}
    first = await client.post("/messages", json=request)
    again = await client.post("/messages", json=request)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == {**first.json(), "replayed": True}
    assert await db.fetchval("select count(*) from outbox") == 2
    other = await client.post("/half", json=request)
    assert (other.status_code, other.json()["field"]) == (409, "endpoint")


async def test_unregistered_group_is_told_how_to_register(client: httpx.AsyncClient) -> None:
    for path in ("/half", "/messages"):
        answer = await client.post(path, json={"producer_group": "nobody", "messages": [ORDER]})
        assert answer.status_code == 422
        assert "PUT /producer-groups" in answer.json()["detail"]


async def test_ids_must_be_uuid7_of_about_now(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    assert (await post_half(client, transaction_id=str(uuid4()))).status_code == 422
    now = runtime.clock.now()
    for shift in (-360_000, 360_000):
        chosen = UUID(int=uuid7(now).int + (shift << 80))
        answer = await post_half(client, transaction_id=str(chosen))
        assert answer.status_code == 422
        assert abs(answer.json()["skew_s"] - shift / 1000) < 5


async def test_stored_id_is_answered_whatever_its_age(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    chosen = str(uuid7(runtime.clock.now()))
    await post_half(client, transaction_id=chosen)
    runtime.clock.offset_s += 3600
    again = await post_half(client, transaction_id=chosen)
    assert (again.status_code, again.json()["replayed"]) == (200, True)


async def test_refusing_halves_still_takes_ends(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    half = (await post_half(client)).json()
    runtime.refusing_halves = True
    refused = await post_half(client)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert (await post_end(client, half["transaction_id"], "commit")).status_code == 200


async def test_many_at_once_share_flushes(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    halves = await asyncio.gather(*(post_half(client) for _ in range(200)))
    ids = [half.json()["transaction_id"] for half in halves]
    ends = await asyncio.gather(*(post_end(client, one, "commit") for one in ids))
    assert {end.status_code for end in ends} == {200}
    offsets = [end.json()["messages"][0]["offset"] for end in ends]
    assert len(set(offsets)) == 200
    assert await db.fetchval("select count(distinct transaction_id) from outbox") == 200
