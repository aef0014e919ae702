"""Claims of a subscription with `ordered: key`: what is out, failed or dead of a key keeps its later messages back."""

import asyncio
import random
from collections import defaultdict
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.pull.wake import wake_consumers
from app.runtime.state import Runtime
from tests.support.consumers import Consumer, lapse, put_pulled, sweep_after
from tests.support.relay_stepping import order, publish


@pytest.fixture
async def consumer(client: httpx.AsyncClient, group: str) -> Consumer:
    """A consumer of `worker`, which takes `order` in the order of keys."""
    await put_pulled(client, ordered="key")
    return Consumer(client)


def keyed(key: str | None, number: int = 0, **fields: object) -> dict[str, object]:
    return {**order(number), "key": key, **fields}


def offsets(messages: list[dict[str, Any]]) -> list[int]:
    return [message["offset"] for message in messages]


async def test_a_claim_takes_several_of_a_key_in_order_and_others_wait_for_it(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    sent = await publish(client, *(keyed(key, n) for n, key in enumerate("aabac")))
    first = await consumer.claim(max=3)
    assert offsets(first) == sent[:3]
    # `a` is out, so its next message waits, and `c` does not wait for it.
    assert offsets(await consumer.claim()) == sent[4:]
    assert await consumer.claim() == []
    # In whatever order they are settled, the last of them frees the key.
    assert await consumer.ack(first[1]) == [200]
    assert await consumer.claim() == []
    assert await consumer.ack(first[0]) == [200]
    [last] = await consumer.claim()
    assert (last["offset"], last["attempt"]) == (sent[3], 1)
    assert await consumer.ack(last, first[2]) == [200, 200]
    assert await db.fetchval("select count(*) from receipt") == 4


async def test_messages_without_a_key_have_no_order(client: httpx.AsyncClient, consumer: Consumer) -> None:
    sent = await publish(client, *(keyed(None, n) for n in range(3)))
    assert [offsets(await consumer.claim(max=1)) for _ in range(3)] == [[one] for one in sent]
    sent = await publish(client, *(keyed(None, n, deliver_after_s=600) for n in range(3)))
    assert await consumer.claim() == []


@pytest.mark.parametrize("how", ["nack", "lapse", "extended", "held long"])
async def test_what_is_not_settled_keeps_its_key_back(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, how: str
) -> None:
    sent = await publish(client, *(keyed(key, n) for n, key in enumerate("aab")))
    claimed = await consumer.claim(max=1, invisible_s=20 if how == "extended" else 3600)
    [first] = claimed
    match how:
        case "nack":
            await consumer.settle("nack", first["handle"], retry_after_s=1000)
        case "lapse":
            await lapse(db, runtime)
            [first] = await consumer.claim(max=1)
            assert (first["offset"], first["attempt"]) == (sent[0], 2)
        case "extended":
            await consumer.settle("extend", first["handle"], invisible_s=3600)
        case "held long":
            await sweep_after(runtime, 31)
    assert offsets(await consumer.claim()) == sent[2:]
    if how == "nack":
        assert await consumer.claim() == []
        await db.execute("update delivery_retry set due_at = now() - interval '1 second' where first_at is not null")
    else:
        assert await consumer.ack(first) == [200]
        sent = sent[1:]
    # The one that failed and the next come together.
    assert offsets(await consumer.claim()) == sent[:-1]


async def test_a_message_that_failed_waits_for_later_ones_that_are_out(
    client: httpx.AsyncClient, consumer: Consumer
) -> None:
    sent = await publish(client, *(keyed("a", n) for n in range(4)))
    first, second, *_ = await consumer.claim(max=3)
    await consumer.settle("nack", first["handle"], retry_after_s=0)
    assert await consumer.claim() == []
    await consumer.settle("nack", second["handle"], retry_after_s=0)
    third = (await consumer.settle("extend", _[0]["handle"], invisible_s=60))[0]
    assert third["status"] == 200
    assert await consumer.claim() == []
    await consumer.settle("nack", _[0]["handle"], retry_after_s=0)
    again = await consumer.claim()
    assert offsets(again) == sent
    assert [one["attempt"] for one in again] == [2, 2, 2, 1]


async def test_a_dead_letter_frees_its_key(client: httpx.AsyncClient, consumer: Consumer) -> None:
    sent = await publish(client, keyed("a", 1), keyed("a", 2))
    [first] = await consumer.claim(max=1)
    assert await consumer.claim() == []
    await consumer.settle("reject", first["handle"], reason="no address")
    assert offsets(await consumer.claim()) == sent[1:]


async def test_with_on_dead_hold_a_key_waits_until_its_dead_letter_is_gone(
    client: httpx.AsyncClient, group: str, db: Connection
) -> None:
    await put_pulled(client, ordered="key", on_dead="hold")
    consumer = Consumer(client)
    sent = await publish(client, *(keyed(key, n) for n, key in enumerate("aab")))
    [first] = await consumer.claim(max=1)
    assert offsets(await consumer.claim()) == sent[2:]
    await consumer.settle("reject", first["handle"], reason="no address")
    assert await consumer.claim() == []
    later = await publish(client, keyed("a", 3), keyed("c", 4))
    assert offsets(await consumer.claim()) == later[1:]
    ids = [{"subscription": "worker", "message_id": first["message_id"]}]
    assert (await client.post("/dead-letters/redeliver", json={"ids": ids})).status_code == 200
    assert offsets(await consumer.claim()) == [*sent[:2], later[0]]


async def test_with_on_dead_hold_a_dead_letter_alone_keeps_its_key(client: httpx.AsyncClient, group: str) -> None:
    await put_pulled(client, ordered="key", on_dead="hold")
    consumer = Consumer(client)
    await publish(client, keyed("a", 1))
    [first] = await consumer.claim()
    await consumer.settle("reject", first["handle"], reason="no address")
    # Nothing of the key waits in delivery_retry before the first claim of each.
    sent = await publish(client, keyed("a", 2), keyed("b", 3))
    assert offsets(await consumer.claim()) == sent[1:]
    assert await consumer.claim() == []
    ids = [{"subscription": "worker", "message_id": first["message_id"]}]
    assert (await client.request("DELETE", "/dead-letters", json={"ids": ids})).status_code == 200
    assert offsets(await consumer.claim()) == sent[:1]


async def test_with_on_dead_hold_a_dead_letter_holds_none_before_it(client: httpx.AsyncClient, group: str) -> None:
    await put_pulled(client, ordered="key", on_dead="hold")
    consumer = Consumer(client)
    sent = await publish(client, *(keyed("a", n) for n in range(3)))
    first, second = await consumer.claim(max=2)
    await consumer.settle("reject", second["handle"], reason="no address")
    await consumer.settle("nack", first["handle"], retry_after_s=0)
    [again] = await consumer.claim()
    assert (again["offset"], again["attempt"]) == (sent[0], 2)
    assert await consumer.ack(again) == [200]
    assert await consumer.claim() == []


@pytest.mark.parametrize("stored", [False, True])
async def test_a_claim_whose_time_is_over_keeps_its_keys_until_its_attempt_is_counted(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, stored: bool
) -> None:
    sent = await publish(client, *(keyed("a", n) for n in range(2)))
    [held] = await consumer.claim(max=1)
    if stored:
        # The second waits in delivery_retry, and not in the log.
        assert await consumer.claim() == []
    await db.execute("update pull_claim set held_until = now() - interval '1 s', sweep_at = now() - interval '1 s'")
    assert await consumer.ack(held) == [409]
    assert await consumer.claim() == []
    await sweep_after(runtime)
    again = await consumer.claim()
    assert [(one["offset"], one["attempt"]) for one in again] == [(sent[0], 2), (sent[1], 1)]


async def test_a_delayed_message_is_ordered_from_its_due_time(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    [late] = await publish(client, keyed("a", 1, deliver_after_s=600))
    [soon] = await publish(client, keyed("a", 2))
    [message] = await consumer.claim()
    assert message["offset"] == soon
    runtime.clock.offset_s += 20
    # Due, it waits for the later message that is out, and later ones wait for it.
    await db.execute("update outbox set due_at = now() - interval '1 s' where due_at is not null")
    await db.execute("update delivery_retry set due_at = now()")
    [after] = await publish(client, keyed("a", 3))
    assert await consumer.claim() == []
    assert await consumer.ack(message) == [200]
    assert offsets(await consumer.claim(max=1)) == [late]
    assert await consumer.claim() == []
    assert await db.fetchval('select count(*) from delivery_retry where "offset" = $1', after) == 1


async def test_a_clock_that_is_set_back_keeps_the_order(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    """A message whose commit or redelivery was later than `now` is not delayed by its producer, so it keeps its key."""
    sent = await publish(client, *(keyed("a", n) for n in range(3)))
    await db.execute("update outbox set committed_at = committed_at + interval '1 hour' where \"offset\" = $1", sent[1])
    [first] = await consumer.claim(max=1)
    assert await consumer.claim() == []
    await db.execute("update delivery_retry set due_at = now() + interval '1 hour' where \"offset\" = $1", sent[1])
    assert await consumer.ack(first) == [200]
    assert await consumer.claim() == []
    await publish(client, keyed("a", 4))
    assert await consumer.claim() == []


async def test_a_delayed_message_that_failed_keeps_its_key_after_a_clock_that_is_set_back(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    [late] = await publish(client, keyed("a", 1, deliver_after_s=600))
    runtime.clock.offset_s += 601
    [message] = await consumer.claim()
    assert message["offset"] == late
    await consumer.settle("nack", message["handle"], retry_after_s=1000)
    runtime.clock.offset_s -= 601
    sent = await publish(client, keyed("a", 2), keyed("b", 3))
    assert offsets(await consumer.claim()) == sent[1:]


async def test_a_change_to_ordered_counts_what_is_out(client: httpx.AsyncClient, group: str, db: Connection) -> None:
    await put_pulled(client)
    consumer = Consumer(client)
    sent = await publish(client, *(keyed(key, n) for n, key in enumerate("aab")))
    [first] = await consumer.claim(max=1)
    put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key"}
    assert (await client.put("/subscriptions/worker", json=put)).status_code == 200
    assert offsets(await consumer.claim()) == sent[2:]
    await consumer.ack(first)
    assert offsets(await consumer.claim()) == sent[1:2]
    more = await publish(client, keyed("a", 4))
    assert await consumer.claim() == []
    # And back: what waits is no longer kept.
    assert (await client.put("/subscriptions/worker", json={**put, "ordered": "none"})).status_code == 200
    assert offsets(await consumer.claim()) == more


async def test_a_long_run_of_a_key_is_divided_and_leaves_room_for_others(
    client: httpx.AsyncClient, consumer: Consumer
) -> None:
    sent = await publish(client, *(keyed("a", n) for n in range(60)))
    [first] = await consumer.claim(max=1)
    assert await consumer.claim(max=100) == []
    await consumer.ack(first)
    [other] = await publish(client, keyed("b", 1))
    run = await consumer.claim(max=100)
    assert offsets(run) == sent[1:33]
    assert offsets(await consumer.claim(max=100)) == [other]
    await consumer.ack(*run)
    assert offsets(await consumer.claim(max=5)) == sent[33:38]


async def test_a_claim_of_one_message_passes_all_that_wait_for_a_key(
    client: httpx.AsyncClient, consumer: Consumer
) -> None:
    await publish(client, keyed("a", 0))
    assert len(await consumer.claim(max=1)) == 1
    await publish(client, *(keyed("a", n) for n in range(1, 60)))
    sent = await publish(client, *(keyed(key, n) for n, key in enumerate("babca")))
    assert offsets(await consumer.claim(max=1)) == sent[:1]
    # The next message of `b` waits for the first now, and `c` does not.
    assert offsets(await consumer.claim(max=1)) == sent[3:4]
    assert await consumer.claim(max=1) == []


async def test_a_claim_passes_what_waits_only_up_to_what_does_not_fit(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    await publish(client, keyed("a", 0))
    [held] = await consumer.claim(max=1)
    early = await publish(client, *(keyed("a", n) for n in range(1, 30)))
    sent = await publish(client, *(keyed(key, n) for n, key in enumerate(["b", "a", "c", "a", "b", None, "a", "d"])))
    first = await consumer.claim(max=3)
    assert offsets(first) == [sent[0], sent[2], sent[4]]
    waiting_rows = await db.fetch('select "offset" from delivery_retry order by "offset"')
    assert [row["offset"] for row in waiting_rows] == [*early, sent[1], sent[3]]
    assert await db.fetchval('select "offset" from pull_cursor') == sent[5] - 1
    assert offsets(await consumer.claim(max=3)) == [sent[5], sent[7]]
    assert await consumer.ack(held) == [200]
    assert offsets(await consumer.claim(max=100)) == [*early, sent[1], sent[3], sent[6]]


async def test_a_large_message_that_waits_takes_no_room_of_another(
    client: httpx.AsyncClient, consumer: Consumer
) -> None:
    await publish(client, keyed("a", 0))
    assert len(await consumer.claim(max=1)) == 1
    await publish(client, *(keyed("a", n, body="x" * 3_000_000) for n in range(4)))
    sent = await publish(client, *(keyed("b", n, body="x" * 3_000_000) for n in range(4)))
    assert offsets(await consumer.claim(max=10)) == sent[:3]


async def test_bodies_that_are_large_keep_the_order(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    sent = await publish(client, *(keyed("a", n, body="x" * 3_000_000) for n in range(4)))
    first = await consumer.claim(max=10)
    assert offsets(first) == sent[:3]
    await lapse(db, runtime)
    again = await consumer.claim(max=10)
    assert offsets(again) == sent[:3]
    assert await consumer.claim(max=10) == []
    await consumer.ack(*again)
    assert offsets(await consumer.claim(max=10)) == sent[3:]


async def test_with_many_waiting_messages_the_log_is_not_read_on(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.store.pull import ordered_claims, waiting

    for statement in (ordered_claims.CLAIM_NEW_IN_ORDER, ordered_claims.CLAIM_FURTHER_IN_ORDER):
        parameters, sql = statement.plain
        monkeypatch.setattr(statement, "plain", (parameters, sql.replace("10000", "20")))
    monkeypatch.setattr(waiting, "CLAIMABLE", waiting.CLAIMABLE.replace("10000", "20"))
    [first, *_] = await publish(client, *(keyed("a", n) for n in range(60)))
    [held] = await consumer.claim(max=1)
    assert held["offset"] == first
    while await consumer.claim(max=5):
        raise AssertionError("only one message of the key is out")
    # What was found in one read waits, and nothing more.
    assert await db.fetchval("select count(*) from delivery_retry") == 59
    *_, other = await publish(client, keyed("a", 60), keyed("b", 1))
    assert await consumer.claim(max=5) == []
    assert await db.fetchval("select count(*) from delivery_retry") == 59
    # A consumer that waits is not woken for what it cannot get.
    task = asyncio.create_task(consumer.claim(max=5, wait_s=25))
    async with asyncio.timeout(20):
        while not runtime.waiting_consumers.any_waiting:
            await asyncio.sleep(0.01)
    woken: list[int] = []
    wake = runtime.waiting_consumers.wake
    monkeypatch.setattr(runtime.waiting_consumers, "wake", lambda group, due: (woken.append(due), wake(group, due)))
    await wake_consumers(runtime, runtime.clock.now())
    assert woken == [0]
    await consumer.ack(held)
    await wake_consumers(runtime, runtime.clock.now())
    assert woken[1] == 5
    got = await task
    while got:
        await consumer.ack(*got)
        if other in offsets(got):
            break
        got = await consumer.claim(max=100)
    assert got


@pytest.mark.parametrize("how", ["delayed", "without a key"])
async def test_what_keeps_no_other_message_back_does_not_stop_the_log(
    client: httpx.AsyncClient,
    consumer: Consumer,
    runtime: Runtime,
    db: Connection,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    from app.store.pull import ordered_claims, waiting

    for statement in (ordered_claims.CLAIM_NEW_IN_ORDER, ordered_claims.CLAIM_FURTHER_IN_ORDER):
        parameters, sql = statement.plain
        monkeypatch.setattr(statement, "plain", (parameters, sql.replace("10000", "20")))
    monkeypatch.setattr(waiting, "CLAIMABLE", waiting.CLAIMABLE.replace("10000", "20"))
    if how == "delayed":
        await publish(client, *(keyed(f"k{n}", n, deliver_after_s=1800) for n in range(25)))
        assert await consumer.claim(max=30) == []
    else:
        await publish(client, *(keyed(None, n) for n in range(25)))
        claimed = await consumer.claim(max=30)
        await consumer.settle("nack", *(one["handle"] for one in claimed), retry_after_s=1800)
    assert await db.fetchval("select count(*) from delivery_retry") == 25
    [other] = await publish(client, keyed("b", 1))
    subscription_id = await db.fetchval("select subscription_id from subscription where name = 'worker'")
    [found] = await waiting.claimable(db, {subscription_id: 5}, runtime.clock.now())
    assert found.logged == 1
    assert offsets(await consumer.claim(max=5)) == [other]


async def test_with_very_many_delayed_messages_the_log_is_not_read_on(
    client: httpx.AsyncClient,
    consumer: Consumer,
    runtime: Runtime,
    db: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from app.store.pull import ordered_claims, waiting

    for statement in (ordered_claims.CLAIM_NEW_IN_ORDER, ordered_claims.CLAIM_FURTHER_IN_ORDER):
        parameters, sql = statement.plain
        monkeypatch.setattr(statement, "plain", (parameters, sql.replace("50000", "20")))
    monkeypatch.setattr(waiting, "CLAIMABLE", waiting.CLAIMABLE.replace("50000", "20"))
    await publish(client, *(keyed(f"k{n}", n, deliver_after_s=1800) for n in range(25)))
    assert await consumer.claim(max=30) == []
    await publish(client, keyed("b", 1))
    subscription_id = await db.fetchval("select subscription_id from subscription where name = 'worker'")
    [found] = await waiting.claimable(db, {subscription_id: 5}, runtime.clock.now())
    assert found.logged == 0
    assert await consumer.claim(max=5) == []


async def test_an_acknowledgement_asks_for_a_look_for_those_that_wait(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    sent = await publish(client, keyed("a", 1), keyed("a", 2))
    [first] = await consumer.claim(max=1)
    task = asyncio.create_task(consumer.claim(wait_s=25))
    async with asyncio.timeout(20):
        while not runtime.waiting_consumers.any_waiting:
            await asyncio.sleep(0.01)
    runtime.waiting_consumers.look.clear()
    await consumer.ack(first)
    assert runtime.waiting_consumers.look.is_set()
    await wake_consumers(runtime, runtime.clock.now())
    assert offsets(await task) == sent[1:]


@pytest.mark.parametrize("seed", range(3))
async def test_consumers_at_once_get_each_key_in_order(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, seed: int
) -> None:
    """Six consumers race, with attempts that fail; delivered is only what follows the settled ones of its key."""
    chance = random.Random(seed)
    sent = await publish(client, *(keyed(f"k{n % 7}", n) for n in range(90)))
    keys: dict[str, list[int]] = defaultdict(list)
    for n, offset in enumerate(sent):
        keys[f"k{n % 7}"].append(offset)
    out: dict[str, int] = {}
    done: dict[str, int] = defaultdict(int)

    async def consume(name: int) -> None:
        while sum(done.values()) < len(sent):
            claimed = await consumer.claim(max=chance.choice([1, 3, 20]))
            by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for message in claimed:
                by_key[message["key"]].append(message)
            for key, messages in by_key.items():
                assert out.setdefault(key, name) == name
                assert offsets(messages) == keys[key][done[key] : done[key] + len(messages)]
            await asyncio.sleep(0)
            for key, messages in by_key.items():
                fails = chance.randint(0, len(messages)) if chance.random() < 0.3 else len(messages)
                del out[key]
                done[key] += fails
                if messages[:fails]:
                    assert set(await consumer.ack(*messages[:fails])) == {200}
                if messages[fails:]:
                    await consumer.settle("nack", *(one["handle"] for one in messages[fails:]), retry_after_s=0)

    async with asyncio.timeout(60):
        await asyncio.gather(*(consume(n) for n in range(6)))
    assert await db.fetchval("select count(*) from receipt") == len(sent)


async def test_claims_at_once_of_what_failed_get_each_key_once_and_in_order(
    client: httpx.AsyncClient, consumer: Consumer
) -> None:
    sent = await publish(client, *(keyed(f"k{n % 4}", n) for n in range(40)))
    claimed = await consumer.claim(max=100)
    for _ in range(6):
        assert len(claimed) == len(sent)
        await consumer.settle("nack", *(one["handle"] for one in claimed), retry_after_s=0)
        claims = await asyncio.gather(*(consumer.claim(max=most) for most in (1, 3, 40, 2, 40, 7)))
        keys = [key for messages in claims for key in {one["key"] for one in messages}]
        assert keys
        assert len(keys) == len(set(keys))
        for messages in claims:
            for n in range(4):
                mine = [one["offset"] for one in messages if one["key"] == f"k{n}"]
                assert mine == sent[n::4][: len(mine)]
        claimed = [one for messages in claims for one in messages]
        await consumer.settle("nack", *(one["handle"] for one in claimed), retry_after_s=0)
        claimed = await consumer.claim(max=100)
    assert len(claimed) == len(sent)
