"""Both producers: their requests, their results, and their behavior when any step fails."""

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import httpx
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    Half,
    HalfFailed,
    ListenerError,
    Outgoing,
    PlainFailed,
    Refused,
    SyncTransactionProducer,
    Transaction,
    TransactionProducer,
    Unconfirmed,
    Verdict,
    VerdictConflict,
    traceparent,
)
from halfnote.async_driver import AsyncDriver
from halfnote.block import Block, OpenTransaction
from halfnote.conversation import Conversation
from halfnote.exchange import Call, Dropped, Later, NoAnswer, Raised, Request, Response, Wait
from halfnote.ids import new_id
from halfnote.many import Many
from halfnote.sync_driver import SyncDriver
from halfnote.testing import Coordinator

from tests.sdk.coordinators import Scripted, answer, problem

ORDER = Outgoing("order", {"order": 1030}, key="order-1030", tag="created")
RESET = httpx.ReadError("reset by peer")
REFUSED = httpx.ConnectError("connection refused")
QUICK = {"attempt_s": 1.0, "half_within_s": 0.2, "end_within_s": 30.0}


class Shop:
    """A listener whose local work the test chooses."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.ran = work, list[tuple[UUID, Any]]()

    def execute_local(self, transaction: Transaction, arg: Any) -> Any:
        self.ran.append((transaction.transaction_id, arg))
        return self.work()

    def check_local(self, transaction: Any) -> Verdict:
        return UNKNOWN


class AsyncShop(Shop):
    """The same for an event loop."""

    async def execute_local(self, transaction: Transaction, arg: Any) -> Any:
        await asyncio.sleep(0)
        return super().execute_local(transaction, arg)


Using = Callable[[Callable[[Any], Any]], Awaitable[Any]]
Producers = Callable[..., Using]


@pytest.fixture(params=["async", "sync"])
def producing(request: pytest.FixtureRequest) -> Producers:
    """Return a function that makes either producer, runs `use(producer)`, awaits what is awaitable, and closes it."""

    def made(coordinator: Scripted, work: Callable[[], Any] = lambda: COMMIT, **options: Any) -> Using:
        options = {"group": "shop", "transport": coordinator.transport(), **QUICK, **options}

        async def use_async(use: Callable[[Any], Any]) -> Any:
            async with TransactionProducer("http://halfnote", listener=AsyncShop(work), **options) as producer:
                return await use(producer)

        async def use_sync(use: Callable[[Any], Any]) -> Any:
            def inside() -> Any:
                with SyncTransactionProducer("http://halfnote", listener=Shop(work), **options) as producer:
                    return use(producer)

            return await asyncio.to_thread(inside)

        return use_async if request.param == "async" else use_sync

    return made


async def test_half_local_work_end(producing: Producers) -> None:
    halfnote = Scripted()
    result = await producing(halfnote)(lambda p: p.send(ORDER, {"order": 1030}, context={"order": 1030}))
    half, end = (content for _, content in halfnote.came)
    assert [path for path, _ in halfnote.came] == ["/half", "/end"]
    assert half == {
        "producer_group": "shop",
        "transaction_id": str(result.transaction_id),
        "messages": [{"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}],
        "context": {"order": 1030},
    }
    assert end == {"transaction_id": str(result.transaction_id), "producer_group": "shop", "verdict": "commit"}
    assert result.transaction_id.version == 7
    assert result.message_ids == [f"{result.transaction_id}-0"]
    assert (result.local_verdict, result.end, result.error) == (COMMIT, "recorded", None)


@pytest.mark.parametrize(("verdict", "end"), [(COMMIT, "recorded"), (ROLLBACK, "recorded"), (UNKNOWN, "left_to_check")])
async def test_the_listener_decides(producing: Producers, verdict: Verdict, end: str) -> None:
    halfnote = Scripted()
    result = await producing(halfnote, lambda: verdict)(lambda p: p.send(ORDER))
    assert halfnote.asked("/end")[0]["verdict"] == verdict.value
    assert (result.local_verdict, result.end) == (verdict, end)


@pytest.mark.parametrize(
    ("answers", "cause", "withdrawn"),
    [
        ([problem(422, "group-unregistered")], Refused, False),
        ([problem(409, "content-differs", field="messages[0].body")], Refused, False),
        ([REFUSED], Unconfirmed, False),
        ([problem(503, "overloaded")], Unconfirmed, False),
        ([RESET], Unconfirmed, True),
        ([httpx.ReadTimeout("")], Unconfirmed, True),
        ([httpx.Response(500, text="boom")], Unconfirmed, True),
        ([httpx.Response(200, text="<html>")], Unconfirmed, True),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
async def test_without_a_half_nothing_runs(
    producing: Producers, answers: list[Any], cause: type[Exception], withdrawn: bool
) -> None:
    halfnote = Scripted({"/half": answers})
    ran: list[int] = []

    def work() -> Verdict:
        ran.append(1)
        return COMMIT

    with pytest.raises(HalfFailed, match="its local work did not run") as failed:
        await producing(halfnote, work)(lambda p: p.send(ORDER))
    assert isinstance(failed.value.__cause__, cause)
    assert not ran
    ends = [(end["verdict"], end["transaction_id"]) for end in halfnote.asked("/end")]
    assert ends == ([("rollback", str(failed.value.transaction_id))] if withdrawn else [])


async def test_a_half_is_repeated_with_its_own_id_and_content(producing: Producers) -> None:
    halfnote = Scripted({"/half": [RESET, problem(503, "overloaded"), httpx.Response(201, json={})]})
    result = await producing(halfnote, half_within_s=30.0)(lambda p: p.send(ORDER))
    first, second, third = halfnote.asked("/half")
    assert first == second == third
    assert result.end == "recorded"


async def test_an_exception_rolls_back_and_says_why(producing: Producers) -> None:
    halfnote = Scripted()

    def work() -> Verdict:
        raise LookupError("no teapots\x00 left\udcff")

    result = await producing(halfnote, work)(lambda p: p.send(ORDER))
    [end] = halfnote.asked("/end")
    assert (end["verdict"], end["reason"]) == ("rollback", "LookupError: no teapots\ufffd left?")
    assert result.local_verdict is ROLLBACK
    assert isinstance(result.error, LookupError)


@pytest.mark.parametrize("again", [True, False])
async def test_local_work_that_may_have_run_before_is_not_called_rolled_back(producing: Producers, again: bool) -> None:
    """Unless only the request was repeated: then nothing ran between the two."""
    halfnote = Scripted({"/half": [httpx.ReadTimeout("slow"), answer(200, {"replayed": True})]})

    def work() -> Verdict:
        raise LookupError("this order is there already")

    chosen = new_id() if again else None
    result = await producing(halfnote, work, half_within_s=60.0)(lambda p: p.send(ORDER, transaction_id=chosen))
    assert result.local_verdict is (UNKNOWN if again else ROLLBACK)
    assert isinstance(result.error, LookupError)
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["unknown" if again else "rollback"]
    assert [path for path, _ in halfnote.came if path.endswith("/check")] == [
        f"/transactions/{result.transaction_id}/check"
    ] * again


@pytest.mark.parametrize("again", [True, False])
async def test_a_half_in_doubt_is_withdrawn_only_if_it_is_new(producing: Producers, again: bool) -> None:
    halfnote = Scripted({"/half": [httpx.ReadTimeout("slow"), problem(403, "forbidden")]})
    chosen = new_id() if again else None
    with pytest.raises(HalfFailed):
        await producing(halfnote, half_within_s=60.0)(lambda p: p.send(ORDER, transaction_id=chosen))
    assert [end["verdict"] for end in halfnote.asked("/end")] == ([] if again else ["rollback"])


async def test_a_reason_is_cut_to_what_the_service_takes(producing: Producers) -> None:
    halfnote = Scripted()

    def work() -> Verdict:
        raise LookupError("x" * 5000)

    await producing(halfnote, work)(lambda p: p.send(ORDER))
    assert len(halfnote.asked("/end")[0]["reason"]) == 1000


@pytest.mark.parametrize("value", [None, True, "commit", 1])
async def test_a_listener_that_returns_no_verdict_is_told_so(producing: Producers, value: Any) -> None:
    halfnote = Scripted()
    with pytest.raises(ListenerError, match=f"returned {value!r}; it must return COMMIT, ROLLBACK or UNKNOWN"):
        await producing(halfnote, lambda: value)(lambda p: p.send(ORDER))
    # It may have committed: no verdict is made up.
    assert halfnote.asked("/end") == []


@pytest.mark.parametrize("failure", [RESET, REFUSED, problem(503, "outcome-unknown"), httpx.Response(200, text="{")])
async def test_an_end_is_repeated_in_the_background(producing: Producers, failure: Any) -> None:
    halfnote = Scripted({"/end": [failure, failure, httpx.Response(200, json={})]})
    result = await producing(halfnote)(lambda p: p.send(ORDER))
    assert (result.local_verdict, result.end) == (COMMIT, "left_to_check")
    assert isinstance(result.error, Unconfirmed)
    # The first, and two in the background until one succeeds: closing the producer waits for those.
    assert len(halfnote.asked("/end")) == 3
    assert len({json.dumps(end) for end in halfnote.asked("/end")}) == 1


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("failure", "least_s", "most_s"),
    [
        (Response(503, {"retry-after": "5"}, b"{}"), 5.0, 5.0),
        (Response(429, {"retry-after": "0"}, b"{}"), 0.05, 0.1),
        (NoAnswer("reset", sent=True), 0.05, 0.1),
    ],
)
def test_an_end_is_repeated_after_the_pause_that_was_asked_for(
    many: bool, failure: Response | NoAnswer, least_s: float, most_s: float
) -> None:
    talk, transaction = Conversation("shop"), Transaction(new_id(), "shop", [ORDER])
    exchange: Any = Many(talk).ends([(transaction, COMMIT)]) if many else talk.end(transaction, COMMIT)
    assert isinstance(next(exchange), Request)
    background = exchange.send(failure).exchange
    pause = next(background)
    assert isinstance(pause, Wait)
    assert least_s <= pause.seconds <= most_s
    assert isinstance(background.send(None), Request)


def test_pauses_use_no_random_numbers_of_the_application() -> None:
    pauses, state = [], random.getstate()
    for _ in range(2):
        random.setstate(state)
        exchange: Any = Conversation("shop").end(Transaction(new_id(), "shop", [ORDER]), COMMIT)
        next(exchange)
        pauses.append(next(exchange.send(NoAnswer("reset", sent=True)).exchange).seconds)
        assert random.getstate() == state
    assert pauses[0] != pauses[1]


def test_an_end_is_left_to_check_back_if_the_pause_is_longer_than_its_time(caplog: pytest.LogCaptureFixture) -> None:
    exchange: Any = Conversation("shop", end_within_s=60.0).end(Transaction(new_id(), "shop", [ORDER]), COMMIT)
    next(exchange)
    background = exchange.send(Response(503, {"retry-after": "61"}, b"{}")).exchange
    assert list(background) == []
    assert "a pause of 61 s was asked for" in caplog.text


async def test_ends_that_never_succeed_are_left_to_check_back(
    producing: Producers, caplog: pytest.LogCaptureFixture
) -> None:
    halfnote = Scripted({"/end": [REFUSED]})
    result = await producing(halfnote, end_within_s=0.3)(lambda p: p.send(ORDER))
    assert result.end == "left_to_check"
    assert len(halfnote.asked("/end")) >= 2
    assert f"the end of transaction {result.transaction_id} was not confirmed in time" in caplog.text


async def test_the_opposite_verdict_is_a_conflict(producing: Producers, caplog: pytest.LogCaptureFixture) -> None:
    recorded = {"verdict": "rollback", "source": "check", "decided_at": "2026-11-21T08:00:00Z"}
    halfnote = Scripted({"/end": [problem(409, "verdict-conflict", "reissue it", recorded=recorded)]})
    result = await producing(halfnote)(lambda p: p.send(ORDER))
    assert result.end == "conflict"
    assert isinstance(result.error, VerdictConflict)
    assert result.error.recorded == recorded
    assert len(halfnote.asked("/end")) == 1
    assert "reissue it" in caplog.text


@pytest.mark.parametrize("kind", [(403, "wrong-group"), (404, "transaction-unknown"), (410, "day-gone")])
async def test_an_end_that_is_refused_is_not_repeated(producing: Producers, kind: tuple[int, str]) -> None:
    halfnote = Scripted({"/end": [problem(*kind)]})
    result = await producing(halfnote)(lambda p: p.send(ORDER))
    # No check can come.
    assert result.end == "refused"
    assert isinstance(result.error, Refused)
    assert len(halfnote.asked("/end")) == 1


async def test_plain_messages(producing: Producers) -> None:
    sent = {"messages": [{"message_id": "m-0", "topic": "order", "offset": 7}], "replayed": False}
    halfnote = Scripted({"/messages": [RESET, httpx.Response(201, json=sent)]})
    result = await producing(halfnote, half_within_s=30.0)(lambda p: p.send_plain([ORDER, ORDER]))
    assert (result.message_ids, result.offsets, result.replayed) == (["m-0"], [7], False)
    first, second = halfnote.asked("/messages")
    assert first == second
    assert len(first["messages"]) == 2


async def test_plain_messages_that_fail_name_the_id_to_repeat_with(producing: Producers) -> None:
    halfnote = Scripted({"/messages": [RESET]})
    with pytest.raises(PlainFailed) as failed:
        await producing(halfnote)(lambda p: p.send_plain(ORDER))
    assert str(failed.value.transaction_id) == halfnote.asked("/messages")[0]["transaction_id"]


@pytest.mark.parametrize("messages", [[], Outgoing("order", float("nan")), Outgoing("order", object())])
async def test_what_is_no_message_is_refused_before_anything_is_sent(producing: Producers, messages: Any) -> None:
    halfnote = Scripted()
    with pytest.raises((ValueError, TypeError)):
        await producing(halfnote)(lambda p: p.send(messages))
    assert halfnote.came == []


async def test_bytes_go_as_base64(producing: Producers) -> None:
    halfnote = Scripted()
    await producing(halfnote)(lambda p: p.send(Outgoing("image", b"\x00\xff", content_type="image/png")))
    [half] = halfnote.asked("/half")
    assert half["messages"] == [{"topic": "image", "body_base64": "AP8=", "content_type": "image/png"}]


async def test_the_trace_goes_along(producing: Producers) -> None:
    halfnote = Scripted()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    token = traceparent.set(trace)
    try:
        await producing(halfnote)(lambda p: p.send(ORDER))
    finally:
        traceparent.reset(token)
    assert [response["traceparent"] for response in halfnote.headers] == [trace, trace]
    # Only in a header: the content is the same under every span.
    assert "headers" not in halfnote.asked("/half")[0]["messages"][0]


async def test_a_key_is_sent_and_nothing_of_it_shown(producing: Producers, caplog: pytest.LogCaptureFixture) -> None:
    halfnote = Scripted({"/end": [REFUSED]})
    await producing(halfnote, api_key="k-secret", end_within_s=0.1)(lambda p: p.send(ORDER))
    assert halfnote.headers[0]["authorization"] == "Bearer k-secret"
    assert "k-secret" not in caplog.text


async def test_registering(producing: Producers) -> None:
    group = {"name": "shop", "secret": "whsec_x", "check_urls": ["http://127.0.0.1:1/check"]}
    halfnote = Scripted({"/producer-groups/shop": [httpx.Response(201, json=group)]})
    made = await producing(halfnote)(lambda p: p.register(["http://127.0.0.1:1/check"], immunity_s=3))
    assert (made.created, made.secret) == (True, "whsec_x")
    assert "secret" not in made.group
    assert halfnote.came[0][1] == {"check_urls": ["http://127.0.0.1:1/check"], "immunity_s": 3}


@pytest.mark.parametrize(
    ("age", "answered", "first", "given", "warns"),
    [
        (timedelta(seconds=1), 200, RESET, {}, True),
        (timedelta(minutes=-5), 200, problem(503, "outcome-unknown"), {}, True),
        (None, 200, RESET, {}, True),
        # The group was registered long before; no attempt was lost; the secret is known.
        (timedelta(days=1), 200, RESET, {}, False),
        (timedelta(seconds=1), 200, problem(503, "overloaded"), {}, False),
        (timedelta(seconds=1), 201, RESET, {}, False),
        (timedelta(seconds=1), 200, RESET, {"secret": "whsec_x"}, False),
    ],
)
async def test_a_secret_that_was_lost_with_its_answer_is_in_the_log(
    producing: Producers,
    caplog: pytest.LogCaptureFixture,
    age: timedelta | None,
    answered: int,
    first: Any,
    given: dict[str, str],
    warns: bool,
) -> None:
    group = {} if age is None else {"created_at": (datetime.now(timezone.utc) - age).isoformat()}
    halfnote = Scripted({"/producer-groups/shop": [first, answer(answered, group)]})
    await producing(halfnote, half_within_s=30.0)(lambda p: p.register([], **given))
    assert len(halfnote.came) == 2
    assert ("POST /producer-groups/shop/rotate-secret" in caplog.text) is warns


async def test_a_send_needs_a_listener() -> None:
    async with TransactionProducer("http://halfnote", group="shop") as producer:
        with pytest.raises(ValueError, match="needs a listener"):
            await producer.send(ORDER)


async def test_an_async_listener_is_not_for_the_sync_producer() -> None:
    halfnote = Scripted()

    def inside() -> Any:
        with SyncTransactionProducer(
            "http://halfnote", group="shop", listener=AsyncShop(lambda: COMMIT), transport=halfnote.transport()
        ) as producer:
            return producer.send(ORDER)

    result = await asyncio.to_thread(inside)
    assert isinstance(result.error, TypeError)
    assert "use TransactionProducer, which awaits it" in str(result.error)


async def test_a_block_commits_at_its_end_and_rolls_back_what_raises() -> None:
    halfnote = Scripted()
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        async with producer.transaction(ORDER) as tx:
            assert [path for path, _ in halfnote.came] == ["/half"]
        assert tx.result is not None
        assert tx.result.end == "recorded"
        with pytest.raises(LookupError):
            async with producer.transaction(ORDER) as tx:
                raise LookupError("no teapots left")
        assert tx.result.local_verdict is ROLLBACK
        async with producer.transaction(ORDER) as tx:
            tx.rollback("the customer left")
    ends = [(end["verdict"], end.get("reason")) for end in halfnote.asked("/end")]
    assert ends == [("commit", None), ("rollback", "LookupError: no teapots left"), ("rollback", "the customer left")]


def test_a_sync_block_does_the_same() -> None:
    halfnote = Scripted()
    with SyncTransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        with producer.transaction(ORDER):
            pass
        with pytest.raises(LookupError), producer.transaction(ORDER):
            raise LookupError("no teapots left")
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit", "rollback"]


async def test_a_block_without_a_half_is_not_entered() -> None:
    halfnote = Scripted({"/half": [problem(422, "group-unregistered")]})
    entered = False
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        with pytest.raises(HalfFailed):
            async with producer.transaction(ORDER):
                entered = True
    assert not entered


async def test_a_cancelled_block_makes_no_verdict_up() -> None:
    """The cancellation may have come in the midst of the database's commit."""
    halfnote = Scripted()
    began = asyncio.Event()
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:

        async def place() -> None:
            async with producer.transaction(ORDER):
                began.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(place())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [path for path, _ in halfnote.came] == ["/half"]


class Silent:
    """A coordinator that gives the first request to a path no answer; `came` is set when it is there."""

    def __init__(self, path: str, answers: dict[str, list[Any]]) -> None:
        self.halfnote, self.came = Scripted(answers), asyncio.Event()
        self._path = path

    def transport(self) -> httpx.MockTransport:
        well = self.halfnote.transport()

        async def answers(request: httpx.Request) -> httpx.Response:
            answered = well.handle_request(request)
            if request.url.path == self._path and not self.came.is_set():
                self.came.set()
                await asyncio.Event().wait()
            return answered

        return httpx.MockTransport(answers)


async def canceled(path: str, answers: dict[str, list[Any]], use: Callable[[Any], Any], **options: Any) -> Scripted:
    """Cancel what uses a producer while a request to a path has no answer; return the coordinator."""
    silent = Silent(path, answers)
    options = {"listener": AsyncShop(lambda: COMMIT), "transport": silent.transport(), **QUICK, **options}
    async with TransactionProducer("http://halfnote", group="shop", **options) as producer:
        task = asyncio.ensure_future(use(producer))
        await silent.came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    return silent.halfnote


async def block(producer: Any, **options: Any) -> None:
    async with producer.transaction(ORDER, **options):
        pass


async def failing_block(producer: Any) -> None:
    async with producer.transaction(ORDER):
        raise RuntimeError("no stock")


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("use", [block, lambda p: p.send(ORDER)], ids=["block", "send"])
async def test_a_half_whose_caller_is_canceled_is_withdrawn(use: Callable[[Any], Any], batching: bool) -> None:
    """The half is under way, so that Halfnote may not know it at first."""
    answers: dict[str, list[Any]] = {"/end": [problem(404, "transaction-unknown"), answer(200)]}
    halfnote = await canceled("/half", answers, use, batching=batching)
    [half] = halfnote.asked("/half")
    ends = [(end["transaction_id"], end["verdict"]) for end in halfnote.ends()]
    assert ends == [(half["transaction_id"], "rollback")] * 2


@pytest.mark.parametrize("many", [False, True])
def test_a_withdrawal_of_a_half_that_never_came_ends_with_the_time_of_its_request(many: bool) -> None:
    now, unknown = [100.0], {"status": 404, "type": "/problems/transaction-unknown"}
    talk = Conversation("shop", attempt_s=5.0, clock=lambda: now[0])
    half: Any = Many(talk).halves([ORDER]) if many else talk.half(ORDER)
    next(half)
    effects = half.throw(Dropped()).exchange
    effect, sent = next(effects), 0
    with pytest.raises(StopIteration):
        while True:
            if isinstance(effect, Wait):
                now[0] += effect.seconds
                effect = effects.send(None)
            else:
                sent += 1
                content = {"outcomes": [unknown]} if many else unknown
                effect = effects.send(Response(200 if many else 404, {}, json.dumps(content).encode()))
    assert 4 < sent < 10
    # A pause of 3.2 s at most that would pass the end is not begun.
    assert 101.8 <= now[0] < 105


async def test_a_half_with_an_id_of_the_caller_s_is_not_withdrawn_when_it_is_canceled() -> None:
    """An earlier run may have committed its local work."""
    halfnote = await canceled("/half", {}, lambda p: block(p, transaction_id=new_id()))
    assert halfnote.ends() == []


async def test_halves_whose_caller_is_canceled_are_withdrawn() -> None:
    chosen = new_id()
    outcomes = [{"status": 404, "type": "/problems/transaction-unknown"}]
    answers = {"/ends": [answer(200, {"outcomes": outcomes}), answer(200, {"outcomes": [{"status": 200}]})]}
    halfnote = await canceled("/halves", answers, lambda p: p.post_halves([ORDER, Half(ORDER, transaction_id=chosen)]))
    first, second = halfnote.asked("/halves")[0]["halves"]
    assert second["transaction_id"] == str(chosen)
    ends = [(end["transaction_id"], end["verdict"]) for end in halfnote.ends()]
    assert ends == [(first["transaction_id"], "rollback")] * 2


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize(
    ("use", "verdict"),
    [(block, "commit"), (failing_block, "rollback"), (lambda p: p.send(ORDER), "commit")],
    ids=["block", "failing block", "send"],
)
async def test_an_end_whose_caller_is_canceled_is_posted_in_the_background(
    use: Callable[[Any], Any], verdict: str, batching: bool
) -> None:
    halfnote = await canceled("/end", {}, use, batching=batching)
    assert [end["verdict"] for end in halfnote.ends()] == [verdict] * 2


async def test_ends_whose_caller_is_canceled_are_posted_in_the_background() -> None:
    ends = [(Transaction(new_id(), "shop", [ORDER]), verdict) for verdict in (COMMIT, UNKNOWN, ROLLBACK)]
    answers = {"/ends": [answer(200, {"outcomes": [{"status": 200}] * 2})]}
    halfnote = await canceled("/ends", answers, lambda p: p.post_ends(ends))
    assert [end["verdict"] for end in halfnote.ends()] == ["commit", "unknown", "rollback", "commit", "rollback"]


async def test_local_work_whose_caller_is_canceled_has_no_verdict() -> None:
    halfnote, began = Scripted(), asyncio.Event()

    class Waiting(AsyncShop):
        async def execute_local(self, transaction: Transaction, arg: Any) -> Any:
            began.set()
            await asyncio.Event().wait()

    options: dict[str, Any] = {"listener": Waiting(lambda: COMMIT), "transport": halfnote.transport()}
    async with TransactionProducer("http://halfnote", group="shop", **options) as producer:
        task = asyncio.create_task(producer.send(ORDER))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [path for path, _ in halfnote.came] == ["/half"]


class Read:
    """A barrier of which a test needs only its calls."""

    read = settle = drop = staticmethod(lambda transaction_id: None)


@pytest.mark.parametrize("drops", [False, True])
def test_a_barrier_whose_reader_is_canceled_is_read_in_the_background(drops: bool) -> None:
    opened = Block(Conversation("shop", barrier=Read()), lambda _: True, None)  # type: ignore[arg-type]
    opened.transaction = OpenTransaction(new_id(), "shop", [ORDER])
    if drops:
        opened.transaction.rollback("sold out")
    closing: Any = opened.closing(None)
    assert isinstance(next(closing), Call)
    later = closing.throw(Dropped())
    assert isinstance(later, Later)
    with pytest.raises(Dropped):
        closing.send(True)
    assert isinstance(next(later.exchange), Call)


def test_an_unknown_outcome_whose_caller_is_canceled_is_left_to_check_back() -> None:
    opened = Block(Conversation("shop", barrier=Read()), lambda _: True, None)  # type: ignore[arg-type]
    opened.transaction = OpenTransaction(new_id(), "shop", [ORDER])
    opened.transaction.settle = lambda: None
    closing: Any = opened.closing(None)
    next(closing)
    assert isinstance(closing.send(Raised(RuntimeError("no database"))), Request)
    with pytest.raises(Dropped):
        closing.throw(Dropped())


def test_a_check_whose_caller_is_canceled_is_not_asked_for_twice() -> None:
    opened = Block(Conversation("shop", barrier=Read()), lambda _: True, None)  # type: ignore[arg-type]
    opened.transaction = OpenTransaction(new_id(), "shop", [ORDER], settle=lambda: None)
    closing: Any = opened.closing(None)
    next(closing)
    closing.send(Raised(RuntimeError("no database")))
    assert closing.send(Response(202, {}, b"{}")).path.endswith("/check")
    with pytest.raises(Dropped):
        closing.throw(Dropped())


async def test_an_end_in_the_background_that_is_canceled_by_the_close_leaves_nothing_behind() -> None:
    silent = Silent("/end", {})
    driver = AsyncDriver("http://halfnote", {}, silent.transport())
    assert driver.later(Conversation("shop").end(Transaction(new_id(), "shop", [ORDER]), COMMIT))
    await silent.came.wait()
    await driver.close(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(silent.halfnote.ends()) == 1


def test_a_loop_that_ends_in_the_midst_of_a_send_harms_no_later_one() -> None:
    halfnote = Scripted()
    producer = TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport())

    async def cut_short() -> None:
        began = asyncio.Event()

        async def place() -> None:
            async with producer.transaction(ORDER):
                began.set()
                await asyncio.Event().wait()

        asyncio.create_task(place())  # noqa: RUF006 - the end of the loop ends it
        await began.wait()

    asyncio.run(cut_short())

    async def again() -> None:
        async with producer.transaction(ORDER) as tx:
            pass
        assert tx.result is not None
        assert tx.result.end == "recorded"
        await producer.close()

    asyncio.run(again())
    assert [path for path, _ in halfnote.came] == ["/half", "/half", "/end"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_producer_that_was_used_before_a_fork_is_of_use_after_it() -> None:
    """The child has neither the parent's thread for ends nor its connections; it makes its own."""
    halfnote = Scripted({"/end": [REFUSED, httpx.Response(200, json={})]})
    producer = SyncTransactionProducer(
        "http://halfnote", group="shop", listener=Shop(lambda: COMMIT), transport=halfnote.transport()
    )
    assert producer.send(ORDER).end == "left_to_check"

    def again() -> str:
        halfnote.came.clear()
        halfnote.answers = {"/end": [REFUSED, httpx.Response(200, json={})]}
        producer.send(ORDER)
        producer.close(grace_s=60)
        return ",".join(path for path, _ in halfnote.came)

    assert in_a_child(again) == "/half,/end,/end"
    producer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_so_is_an_asynchronous_one() -> None:
    halfnote = Scripted()
    producer = TransactionProducer(
        "http://halfnote", group="shop", listener=AsyncShop(lambda: COMMIT), transport=halfnote.transport()
    )
    assert asyncio.run(producer.send(ORDER)).end == "recorded"

    def again() -> str:
        halfnote.came.clear()
        end = asyncio.run(producer.send(ORDER)).end
        return end + ",".join(path for path, _ in halfnote.came)

    assert in_a_child(again) == "recorded/half,/end"


def in_a_child(told_by: Callable[[], str]) -> str:
    """Return the result of a function in a forked child; "failed" if it raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        reported = "failed"
        try:
            reported = told_by()
        finally:
            os.write(write, reported.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


FAULTS = {
    "away": REFUSED,
    "lost": RESET,
    "slow": httpx.ReadTimeout("slow"),
    "500": httpx.Response(500, text="boom"),
    "503": problem(503, "overloaded"),
    "409": problem(409, "some-conflict"),
    "garbage": httpx.Response(200, text="<html>"),
    "half of an answer": httpx.Response(201, content=b'{"transaction_id": "0193'),
}
REPEATED = FAULTS.keys() - {"409"}
CHECK = "/transactions/0193a7d6-a5c8-7b1e-8f00-1030a1030a10/check"


async def test_each_fault_at_the_half(producing: Producers) -> None:
    ran: list[str] = []

    async def one(fault: str) -> None:
        halfnote = Scripted({"/half": [FAULTS[fault]]})
        with pytest.raises(HalfFailed) as failed:
            await producing(halfnote, lambda: ran.append(fault))(lambda p: p.send(ORDER))
        assert isinstance(failed.value.__cause__, Unconfirmed if fault in REPEATED else Refused), fault
        assert (len(halfnote.asked("/half")) > 1) == (fault in REPEATED), fault

    await asyncio.gather(*map(one, FAULTS))
    assert not ran


async def test_each_fault_at_the_end(producing: Producers) -> None:
    """Local work is done: nothing is raised."""

    async def one(fault: str) -> None:
        halfnote = Scripted({"/end": [FAULTS[fault], FAULTS[fault], httpx.Response(200, json={})]})
        result = await producing(halfnote)(lambda p: p.send(ORDER))
        assert (result.local_verdict, result.end) == (COMMIT, "left_to_check"), fault
        assert isinstance(result.error, Unconfirmed if fault in REPEATED else Refused), fault
        assert len(halfnote.asked("/end")) == (3 if fault in REPEATED else 1), fault

    await asyncio.gather(*map(one, FAULTS))


async def test_each_fault_where_a_check_is_asked_for(producing: Producers) -> None:
    """It is asked sooner or later in any case."""

    def work() -> Verdict:
        raise LookupError("this order is there already")

    async def one(fault: str) -> None:
        halfnote = Scripted({"/half": [answer(200, {"replayed": True})], CHECK: [FAULTS[fault]]})
        chosen = UUID(CHECK.split("/")[2])
        result = await producing(halfnote, work)(lambda p: p.send(ORDER, transaction_id=chosen))
        assert (result.local_verdict, result.end) == (UNKNOWN, "left_to_check"), fault
        assert isinstance(result.error, LookupError), fault
        assert len(halfnote.asked(CHECK)) == 1, fault

    await asyncio.gather(*map(one, FAULTS))


async def test_each_fault_of_plain_messages_and_registering(producing: Producers) -> None:
    async def one(path: str, fault: str) -> None:
        halfnote = Scripted({path: [FAULTS[fault]]})

        def use(producer: Any) -> Any:
            return (
                producer.send_plain(ORDER) if path == "/messages" else producer.register(["http://127.0.0.1:9/check"])
            )

        with pytest.raises((PlainFailed, Unconfirmed, Refused)) as failed:
            await producing(halfnote)(use)
        cause = failed.value.__cause__ if path == "/messages" else failed.value
        assert isinstance(cause, Unconfirmed if fault in REPEATED else Refused), fault
        assert (len(halfnote.asked(path)) > 1) == (fault in REPEATED), fault

    paths = ("/messages", "/producer-groups/shop")
    await asyncio.gather(*(one(path, fault) for path in paths for fault in FAULTS))


@pytest.mark.parametrize(
    ("chosen", "replayed", "attempts_s", "anew"),
    [
        (False, True, [6, 1], True),
        # The last attempt stored it.
        (False, False, [6, 1], False),
        (False, False, [1, 6], True),
        (False, False, [7], True),
        (True, True, [7], False),
    ],
)
async def test_a_half_that_is_answered_too_late_is_posted_anew(
    chosen: bool, replayed: bool, attempts_s: list[int], anew: bool
) -> None:
    """It may have been asked about already, and a barrier have answered `rollback`; nothing of it has happened yet."""
    now, left, attempts = [100.0], list(attempts_s), len(attempts_s)

    def slow(request: httpx.Request) -> httpx.Response:
        now[0] += left.pop(0)
        if left:
            raise httpx.ReadTimeout("slow")
        return first

    times = {"born_at": "2026-11-21T08:00:00Z", "first_check_at": "2026-11-21T08:00:06.000Z"}
    first = answer(200 if replayed else 201, {**times, "replayed": replayed})
    halfnote = Scripted({"/half": [*[slow] * attempts, answer(201)]})
    conversation = Conversation("shop", half_within_s=15.0, clock=lambda: now[0])
    driver = SyncDriver("http://halfnote", {}, halfnote.transport())
    one = new_id() if chosen else None
    begun = driver.run(conversation.half(ORDER, transaction_id=one, context=7))
    driver.close(60)
    halves = halfnote.asked("/half")[attempts - 1 :]
    assert [half["transaction_id"] for half in halves][-1] == str(begun.transaction_id)
    if not anew:
        assert begun.transaction_id == (one or begun.transaction_id)
        assert [path for path, _ in halfnote.came] == ["/half"] * attempts
    else:
        assert halves[0] == {**halves[1], "transaction_id": halves[0]["transaction_id"]}
        ends = [(end["transaction_id"], end["verdict"]) for end in halfnote.asked("/end")]
        assert ends == [(halves[0]["transaction_id"], "rollback")]


@pytest.mark.parametrize("born", [{}, {"born_at": "yesterday"}, {"born_at": 7, "first_check_at": None}])
async def test_an_answer_without_times_is_taken_as_it_is(born: dict[str, Any]) -> None:
    now = [100.0]

    def slow(request: httpx.Request) -> httpx.Response:
        now[0] += 7
        return answer(201, born)

    halfnote = Scripted({"/half": [slow]})
    driver = SyncDriver("http://halfnote", {}, halfnote.transport())
    driver.run(Conversation("shop", clock=lambda: now[0]).half(ORDER))
    driver.close(60)
    assert len(halfnote.came) == 1


async def test_an_own_id_is_not_taken_for_a_clock_in_a_request_of_many() -> None:
    coordinator, chosen = Coordinator("shop"), new_id(time.time() - 3600)
    async with TransactionProducer("http://halfnote", group="shop", transport=coordinator.transport()) as producer:
        for post in (producer.post_halves, producer.send_plain_many):
            [failed] = await post([Half(ORDER, transaction_id=chosen)])
            assert "its id is too old: " in str(failed)
