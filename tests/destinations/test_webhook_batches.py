"""Batches on real sockets: one signed POST of many events, and bad messages isolated from the others."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from aiohttp import web
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from standardwebhooks import Webhook as Verifier

from app.delivery import Delivered, Delivery, Failed, Gone, Outcome, Refused
from app.destinations.batching import BATCH_BYTES, LEFT_OUT, REMEMBERED_MOST, CutShort, groups
from app.egress.http_client import EgressClient
from tests.support.check_responder import Answer, Call, RawServer, Responder, Silent
from tests.support.webhooks import SECRET, message, now, webhook

BATCH = "application/cloudevents-batch+json"


def offsets_of(call: Call) -> list[int]:
    """Return the offsets of a batch's events."""
    return [int(event["halfnoteoffset"]) for event in call.json()]


def poisoned(*bad: int, status: int = 500, **headers: str) -> Answer:
    """Return an answer function: `status` for a batch that contains any of these offsets, else 200."""

    async def answer(call: Call) -> web.StreamResponse:
        return web.Response(status=status, headers=headers) if set(bad) & set(offsets_of(call)) else web.Response()

    return answer


async def send(
    http_client: EgressClient, url: str, deliveries: Sequence[Delivery], timeout_s: float = 30
) -> list[Outcome]:
    hook = webhook(http_client, url, mode="batch", batch_max=100, timeout_s=timeout_s)
    assert hook.batch_max == 100
    return list(await hook.deliver(deliveries, now()))


def failed_at(outcomes: Sequence[Outcome]) -> list[int]:
    """Return the indexes of the messages that were not delivered."""
    return [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, Delivered)]


async def test_a_batch_is_one_signed_array_of_events(http_client: EgressClient) -> None:
    async with Responder() as hook:
        deliveries = [
            message(0, body=b'{ "z":1.0 }', headers={"a": "b"}, replay="5"),
            message(1, body=b"\xff", content_type="image/png", key=None, replay="5"),
            message(2, body=b" null", tag="new", replay="5"),
        ]
        outcomes = await send(http_client, hook.url, deliveries)
    assert failed_at(outcomes) == []
    [call] = hook.calls
    Verifier(SECRET).verify(call.body, call.headers)
    assert call.headers["content-type"] == BATCH
    assert (call.headers["halfnote-subscription"], call.headers["halfnote-replay"]) == ("mailer", "5")
    assert b'"data":{ "z":1.0 }' in call.body
    # The published package reads single events, so each element of the array is read by itself.
    read = [
        from_http_event(HTTPMessage({"content-type": "application/cloudevents+json"}, json.dumps(event).encode()))
        for event in call.json()
    ]
    assert [event.get_id() for event in read] == [delivery.message_id for delivery in deliveries]
    assert [event.get_data() for event in read] == [{"z": 1.0}, b"\xff", None]
    assert json.loads(read[0].get_extension("halfnoteheaders")) == {"a": "b"}
    assert [event.get_extension("halfnotetag") for event in read] == [None, None, "new"]
    assert [event.get_subject() for event in read] == ["order-0", None, "order-2"]


async def test_auto_sends_one_message_in_binary_mode_and_more_as_a_batch(http_client: EgressClient) -> None:
    async with Responder() as responder:
        hook = webhook(http_client, responder.url, mode="auto", batch_max=100)
        assert hook.batch_max == 100
        assert failed_at(await hook.deliver([message(0, body=b"\xff", content_type="image/png")], now())) == []
        assert failed_at(await hook.deliver([message(number) for number in range(3)], now())) == []
    single, batch = responder.calls
    assert (single.headers["content-type"], single.headers["ce-id"]) == ("image/png", message(0).message_id)
    assert single.body == b"\xff"
    assert (batch.headers["content-type"], offsets_of(batch)) == (BATCH, [0, 1, 2])
    assert "ce-id" not in batch.headers
    Verifier(SECRET).verify(batch.body, batch.headers)


async def test_auto_narrows_a_failed_batch_down_to_a_binary_message(http_client: EgressClient) -> None:
    async def answer(call: Call) -> web.StreamResponse:
        offsets = offsets_of(call) if call.headers["content-type"] == BATCH else [int(call.headers["halfnote-offset"])]
        return web.Response(status=500 if 2 in offsets else 204)

    async with Responder(answer) as responder:
        hook = webhook(http_client, responder.url, mode="auto", batch_max=100)
        outcomes = await hook.deliver([message(number) for number in range(8)], now())
    assert failed_at(outcomes) == [2]
    alone = [call.headers["halfnote-offset"] for call in responder.calls if call.headers["content-type"] != BATCH]
    assert "2" in alone


async def test_the_id_is_the_same_for_the_same_set(http_client: EgressClient) -> None:
    async with Responder(status=503) as hook:
        some = [message(number) for number in range(3)]
        await send(http_client, hook.url, some)
        await send(http_client, hook.url, some[::-1])
        await send(http_client, hook.url, some[:2])
        await send(http_client, hook.url, some[:1])
    first, again, fewer, single = [call.headers["webhook-id"] for call in hook.calls]
    assert first == again != fewer
    assert first.startswith("bat_")
    assert "." not in first
    assert single == some[0].message_id


async def test_all_messages_of_a_batch_share_a_success(http_client: EgressClient) -> None:
    async with Responder(status=202) as hook:
        outcomes = await send(http_client, hook.url, [message(number) for number in range(100)])
    assert len(hook.calls) == 1
    assert {(type(outcome), outcome.status) for outcome in outcomes} == {(Delivered, 202)}


@pytest.mark.parametrize("bad", [[0], [57], [99], [0, 1], [3, 60], [10, 50, 90]])
@pytest.mark.parametrize("status", [400, 500])
async def test_a_failure_is_narrowed_down_to_the_messages_that_cause_it(
    http_client: EgressClient, bad: list[int], status: int
) -> None:
    async with Responder(poisoned(*bad, status=status)) as hook:
        outcomes = await send(http_client, hook.url, [message(number) for number in range(100)])
    assert failed_at(outcomes) == bad
    for number in bad:
        failure = outcomes[number]
        assert isinstance(failure, Failed)
        assert (failure.status, failure.error) == (status, f"answered {status}")
    # Bisection takes one request, and two for each level and bad message.
    assert len(hook.calls) <= 1 + 14 * len(bad)
    assert offsets_of(hook.calls[0]) == list(range(100))


async def test_abort_message_refuses_only_the_messages_that_cause_it(http_client: EgressClient) -> None:
    abort = {"webhook-delivery": "abort-message", "halfnote-reason": "no such customer"}
    async with Responder(poisoned(3, 4, 70, status=422, **abort)) as hook:
        outcomes = await send(http_client, hook.url, [message(number) for number in range(100)])
    assert failed_at(outcomes) == [3, 4, 70]
    for number in (3, 4, 70):
        refused = outcomes[number]
        assert isinstance(refused, Refused)
        assert refused.reason == "no such customer"


async def test_a_receiver_that_refuses_every_batch_refuses_each_message(http_client: EgressClient) -> None:
    async with Responder(status=400, **{"webhook-delivery": "abort-message"}) as hook:
        outcomes = await send(http_client, hook.url, [message(number) for number in range(10)])
    assert {type(outcome) for outcome in outcomes} == {Refused}
    assert sorted(number for call in hook.calls if len(call.json()) == 1 for number in offsets_of(call)) == list(
        range(10)
    )


async def test_a_batch_that_is_too_large_is_made_smaller(http_client: EgressClient) -> None:
    async def at_most_8(call: Call) -> web.StreamResponse:
        return web.Response(status=413 if len(call.json()) > 8 else 200)

    async with Responder(at_most_8) as hook:
        outcomes = await send(http_client, hook.url, [message(number) for number in range(100)])
    assert failed_at(outcomes) == []
    assert sorted(number for call in hook.calls if len(call.json()) <= 8 for number in offsets_of(call)) == list(
        range(100)
    )


async def test_a_failing_receiver_does_not_get_hundreds_of_requests(http_client: EgressClient) -> None:
    async with Responder(status=500) as hook:
        outcomes = await send(http_client, hook.url, [message(number) for number in range(100)])
    assert {type(outcome) for outcome in outcomes} == {Failed}
    assert len(hook.calls) <= 20


@pytest.mark.parametrize("status", [302, 401, 403, 404, 405, 415, 429, 502, 503, 504])
async def test_a_status_that_is_not_about_the_messages_ends_the_bisection(
    http_client: EgressClient, status: int
) -> None:
    async with Responder(status=status) as hook:
        outcomes = await send(http_client, hook.url, [message(number) for number in range(100)])
    assert len(hook.calls) == 1
    assert {type(outcome) for outcome in outcomes} == {Failed}


async def test_gone_and_retry_after_apply_to_all_messages(http_client: EgressClient) -> None:
    # The messages have two attempt numbers, and so need two requests; the second is not made.
    deliveries = [message(number, attempt=1 + number % 2) for number in range(4)]
    async with Responder(status=410) as hook:
        assert {type(outcome) for outcome in await send(http_client, hook.url, deliveries)} == {Gone}
        assert len(hook.calls) == 1
    async with Responder(status=429, **{"retry-after": "7"}) as hook:
        outcomes = await send(http_client, hook.url, deliveries)
        assert len(hook.calls) == 1
    assert [outcome.retry_after_s for outcome in outcomes if isinstance(outcome, Failed)] == [7.0] * 4


async def test_an_unreachable_receiver_fails_all_messages(http_client: EgressClient) -> None:
    async with Responder() as hook:
        pass
    outcomes = await send(http_client, hook.url, [message(number, attempt=1 + number % 2) for number in range(4)])
    assert [outcome.unreachable for outcome in outcomes if isinstance(outcome, Failed)] == [True] * 4


async def test_a_message_that_breaks_the_connection_is_found(http_client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        if b'"halfnoteoffset":"2"' in server.requests[-1].body:
            writer.close()
        else:
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with RawServer(write) as server:
        outcomes = await send(http_client, server.url, [message(number) for number in range(8)])
    assert failed_at(outcomes) == [2]
    failure = outcomes[2]
    assert isinstance(failure, Failed)
    assert (failure.status, failure.unreachable) == (None, False)


async def test_no_answer_in_time_fails_all_within_the_time(http_client: EgressClient) -> None:
    async with Silent() as hook:
        # The messages form two groups; no time is left for the second, so it uses up no attempt.
        deliveries = [message(number, attempt=1 + number // 3) for number in range(6)]
        outcomes = await send(http_client, hook.url, deliveries, timeout_s=0.5)
        assert hook.connections == 1
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    assert [outcome.error for outcome in outcomes[:3] if isinstance(outcome, Failed)] == [
        "no whole answer within 0.5 s, with others"
    ] * 3
    # None of them was sent alone.
    assert all(outcome.retry_after_s for outcome in outcomes if isinstance(outcome, Failed))
    assert outcomes[3:] == [LEFT_OUT] * 3
    assert LEFT_OUT.retry_after_s


async def test_a_message_is_refused_only_after_it_was_sent_alone(
    http_client: EgressClient,
) -> None:
    async def abort_then_hang(call: Call) -> web.StreamResponse:
        if len(hook.calls) > 1:
            await released.wait()
        return web.Response(status=400, headers={"webhook-delivery": "abort-message", "halfnote-reason": "bad"})

    released = asyncio.Event()
    async with Responder(abort_then_hang) as hook:
        outcomes = await send(http_client, hook.url, [message(number) for number in range(4)], timeout_s=1)
        released.set()
    assert {type(outcome) for outcome in outcomes} == {Failed}
    last = outcomes[-1]
    assert isinstance(last, Failed)
    assert (last.error, last.status) == ("answered 400, with others: bad", None)
    assert last.retry_after_s


async def test_a_message_that_gets_no_answer_uses_up_no_attempt_of_others(http_client: EgressClient) -> None:
    async def hang(call: Call) -> web.StreamResponse:
        if 17 in offsets_of(call):
            await released.wait()
        return web.Response()

    released, attempts = asyncio.Event(), dict.fromkeys(range(64), 1)
    async with Responder(hang) as server:
        hook = webhook(http_client, server.url, mode="batch", batch_max=64, timeout_s=1)
        for _ in range(4):
            deliveries = [message(number, attempt=attempt) for number, attempt in attempts.items()]
            for delivery, outcome in zip(deliveries, await hook.deliver(deliveries, now()), strict=True):
                if isinstance(outcome, Delivered):
                    del attempts[delivery.offset]
                elif isinstance(outcome, Failed) and outcome.retry_after_s is None:
                    attempts[delivery.offset] += 1
        released.set()
    # The message was alone at last, and only then it used up an attempt.
    assert [offsets_of(call) for call in server.calls][-1] == [17]
    assert attempts.pop(17) == 2
    assert set(attempts.values()) == {1}


def test_messages_that_were_not_sent_alone_are_remembered_up_to_a_number() -> None:
    cut_short = CutShort()
    for number in range(REMEMBERED_MOST + 1):
        cut_short.add(f"{number}")
    assert [cut_short.times("0"), cut_short.times("1")] == [0, 1]
    cut_short.add("1")
    assert cut_short.times("1") == 2
    cut_short.forget("1")
    assert cut_short.times("1") == 0


def test_later_attempts_are_sent_in_ever_smaller_batches() -> None:
    def sizes(attempt: int, batch_max: int = 100) -> set[int]:
        deliveries = [message(number, attempt=attempt) for number in range(100)]
        found = list(groups(deliveries, batch_max, CutShort()))
        assert sorted(index for group in found for index in group) == list(range(100))
        return {len(group) for group in found}

    assert [sizes(attempt) for attempt in (1, 2, 4, 5, 17)] == [{100}, {25}, {1}, {1}, {1}]
    assert max(sizes(5, 1000)) == 3
    assert sizes(6, 1000) == {1}


def test_a_request_is_bounded_in_bytes() -> None:
    deliveries = [message(number, body=b"x" * (BATCH_BYTES // 3)) for number in range(7)]
    assert list(groups(deliveries, 100, CutShort())) == [[0, 1, 2], [3, 4, 5], [6]]
    whole = [message(number, body=b"x" * (BATCH_BYTES + 1)) for number in range(2)]
    assert list(groups(whole, 100, CutShort())) == [[0], [1]]
