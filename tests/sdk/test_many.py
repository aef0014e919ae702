"""Many transactions in one request of a producer: an outcome of each, and only what may be repeated is repeated."""

import asyncio
import json
from collections.abc import Callable
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
    Outgoing,
    PlainFailed,
    PlainResult,
    Refused,
    SyncTransactionProducer,
    Transaction,
    TransactionProducer,
    Unconfirmed,
)
from halfnote.conversation import Conversation
from halfnote.exchange import Answer, NoAnswer, Request, Response, Wait, asked_each
from halfnote.ids import new_id
from halfnote.many import Many
from halfnote.testing import Coordinator

from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.sdk.coordinators import Scripted, answer, problem
from tests.sdk.in_process import FromThreads, service

ORDER = Outgoing("order", {"order": 1030})
TIMES = {"born_at": "2026-11-21T08:00:00Z", "first_check_at": "2026-11-21T08:00:06Z"}


def refusal(status: int, kind: str, **extra: Any) -> dict[str, Any]:
    return {"type": f"/problems/{kind}", "title": kind, "status": status, "detail": "no", **extra}


def outcomes_of(field: str, *outcomes: dict[str, Any]) -> Callable[[httpx.Request], httpx.Response]:
    """Answer each transaction of a request in turn; the last outcome is repeated."""
    left = list(outcomes)

    def answers(request: httpx.Request) -> httpx.Response:
        given = json.loads(request.content)[field]
        return answer(200, {"outcomes": [left.pop(0) if len(left) > 1 else left[0] for _ in given]})

    return answers


def ids_of(halfnote: Scripted, path: str, field: str) -> list[list[str]]:
    return [[one["transaction_id"] for one in content[field]] for content in halfnote.asked(path)]


def play(answers: list[Any], count: int, **limits: Any) -> tuple[list[Any], list[list[int]], list[float]]:
    """Play an exchange of `count` transactions; return the outcomes, what each request had, and the pauses."""
    now, sent, pauses = [100.0], [], []

    def request_of(numbers: Any) -> Request:
        sent.append(list(numbers))
        return Request("POST", "/ends", b"{}", 5.0)

    exchange = asked_each("it", request_of, count, **{"within_s": 15.0, "clock": lambda: now[0], **limits})
    effect: Any = next(exchange)
    try:
        while True:
            if isinstance(effect, Wait):
                pauses.append(effect.seconds)
                now[0] += effect.seconds
                effect = exchange.send(None)
            else:
                effect = exchange.send(answers.pop(0) if len(answers) > 1 else answers[0])
    except StopIteration as stop:
        return stop.value, sent, pauses


def listed(*outcomes: dict[str, Any]) -> Response:
    return Response(200, {}, json.dumps({"outcomes": outcomes}).encode())


WELL: dict[str, Any] = {"status": 200, "verdict": "commit"}


def test_only_what_may_be_repeated_is_sent_again() -> None:
    first = listed(WELL, refusal(422, "invalid", field="verdict"), refusal(503, "overloaded", retry_after_s=2), WELL)
    found, sent, pauses = play([first, listed(WELL)], 4)
    assert sent == [[0, 1, 2, 3], [2]]
    assert pauses == [2.0]
    assert [isinstance(one, Answer) for one in found] == [True, False, True, True]
    assert isinstance(found[1], Refused)
    assert (found[1].field, found[1].perhaps_done) == ("verdict", False)


@pytest.mark.parametrize("after_s", [0, 0.001])
def test_an_outcome_that_asks_for_no_pause_has_the_usual_one(after_s: float) -> None:
    _, _, pauses = play([listed(refusal(503, "overloaded", retry_after_s=after_s)), listed(WELL)], 1)
    assert len(pauses) == 1
    assert 0.05 <= pauses[0] <= 0.1


def test_what_may_have_been_stored_is_said_of_the_transactions_alone() -> None:
    first = listed(refusal(503, "outcome-unknown"), refusal(503, "overloaded"))
    found, _, _ = play([first, listed(refusal(409, "x"), refusal(409, "x"))], 2)
    assert [one.perhaps_done for one in found] == [True, False]


def test_an_attempt_before_the_answer_may_have_been_stored() -> None:
    answers = [NoAnswer("reset", sent=True), listed(refusal(503, "overloaded"), refusal(422, "invalid"), WELL)]
    found, _, _ = play([*answers, listed(refusal(409, "x"))], 3)
    assert [isinstance(one, Answer) or one.perhaps_done for one in found] == [True, True, True]


@pytest.mark.parametrize("whole", [NoAnswer("reset", sent=True), Response(503, {}, b"{}"), listed(WELL)])
def test_an_answer_that_does_not_fit_leaves_all(whole: Any) -> None:
    found, _, _ = play([whole], 2, attempts=1)
    assert [(type(one), one.perhaps_done) for one in found] == [(Unconfirmed, True)] * 2


def test_it_ends_in_time() -> None:
    found, sent, pauses = play([listed(refusal(503, "overloaded"))], 1, within_s=3.0)
    assert isinstance(found[0], Unconfirmed)
    assert 1.5 < sum(pauses) < 3
    assert len(sent) == len(pauses) + 1


async def test_each_half_has_an_outcome() -> None:
    halves = outcomes_of("halves", {"status": 201, **TIMES}, refusal(422, "group-unregistered", field="producer_group"))
    halfnote = Scripted({"/halves": [halves]})
    mine = new_id()
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        begun, failed = await producer.post_halves([Half([ORDER, ORDER], mine, {"order": 1}), ORDER])
    assert isinstance(begun, Transaction)
    assert (begun.transaction_id, begun.context, begun.repeated, len(begun.message_ids)) == (
        mine,
        {"order": 1},
        False,
        2,
    )
    assert isinstance(failed, HalfFailed)
    assert failed.field == "producer_group"
    [content] = halfnote.asked("/halves")
    assert content["halves"][0]["context"] == {"order": 1}
    assert "context" not in content["halves"][1]
    assert [one["producer_group"] for one in content["halves"]] == ["shop", "shop"]
    assert halfnote.asked("/ends") == []


async def test_halves_that_may_have_been_stored_are_withdrawn_unless_their_ids_were_chosen() -> None:
    stored = outcomes_of("halves", {"status": 201, **TIMES}, refusal(503, "outcome-unknown"))
    halfnote = Scripted({"/halves": [stored, httpx.ConnectError("down")], "/ends": [outcomes_of("ends", WELL)]})
    mine = new_id()
    options = {"group": "shop", "half_within_s": 0.3, "transport": halfnote.transport()}
    async with TransactionProducer("http://halfnote", **options) as producer:
        found = await producer.post_halves([ORDER, ORDER, Half(ORDER, mine)])
    assert [isinstance(one, HalfFailed) for one in found] == [False, True, True]
    first, *_ = ids_of(halfnote, "/halves", "halves")
    assert ids_of(halfnote, "/ends", "ends") == [[first[1]]]
    assert halfnote.asked("/ends")[0]["ends"][0]["verdict"] == "rollback"


async def test_halves_that_were_answered_too_late_are_withdrawn() -> None:
    times = iter([0.0, 0.0, 0.0, 0.0, 0.0, 7.0])
    halfnote = Scripted(
        {"/halves": [outcomes_of("halves", {"status": 200, "replayed": True, **TIMES})], "/ends": [answer(200)]}
    )
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        object.__setattr__(producer._conversation, "clock", lambda: next(times, 7.0))
        late, chosen = await producer.post_halves([ORDER, Half(ORDER, new_id())])
    assert isinstance(late, HalfFailed)
    assert isinstance(chosen, Transaction)
    assert chosen.repeated
    assert ids_of(halfnote, "/ends", "ends")[0] == [str(late.transaction_id)]


@pytest.mark.parametrize(("waited_s", "began"), [([7.0, 0.0], 1), ([0.0, 7.0], 0), ([4.0, 3.0], 1), ([1.0, 4.0], 2)])
async def test_halves_of_which_others_were_waited_for_are_withdrawn(waited_s: list[float], began: int) -> None:
    """The first attempt stored the first, and a check may have been sent about it before the other was answered."""
    now, first = [100.0], outcomes_of("halves", {"status": 201, **TIMES}, refusal(503, "overloaded"))
    then = outcomes_of("halves", {"status": 201, **TIMES})

    def after(seconds: float, then: Any) -> Callable[[httpx.Request], httpx.Response]:
        def answers(request: httpx.Request) -> httpx.Response:
            now[0] += seconds
            found: httpx.Response = then(request)
            return found

        return answers

    slow = [after(seconds, one) for seconds, one in zip(waited_s, (first, then), strict=True)]
    halfnote = Scripted({"/halves": [*slow], "/ends": [outcomes_of("ends", WELL)]})
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        object.__setattr__(producer._conversation, "clock", lambda: now[0])
        found = await producer.post_halves([ORDER, ORDER])
    first_ids, second_ids = ids_of(halfnote, "/halves", "halves")
    assert second_ids == first_ids[1:]
    late = [str(one.transaction_id) for one in found if isinstance(one, HalfFailed)]
    assert late == first_ids[: 2 - began]
    assert ids_of(halfnote, "/ends", "ends") == ([late] if late else [])


async def test_ends_that_fail_are_repeated_in_the_background_and_a_conflict_is_the_result() -> None:
    conflict = refusal(409, "verdict-conflict", recorded={"verdict": "rollback"})
    first = outcomes_of("ends", WELL, conflict, {"status": 202}, refusal(503, "overloaded"))
    halfnote = Scripted({"/ends": [first, outcomes_of("ends", WELL)]})
    transactions = [Transaction(new_id(), "shop", [ORDER]) for _ in range(4)]
    verdicts = [COMMIT, COMMIT, UNKNOWN, ROLLBACK]
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        results = await producer.post_ends(list(zip(transactions, verdicts, strict=True)))
    assert [one.end for one in results] == ["recorded", "conflict", "left_to_check", "left_to_check"]
    assert [one.local_verdict for one in results] == verdicts
    assert results[1].error is not None
    ids = [str(one.transaction_id) for one in transactions]
    assert ids_of(halfnote, "/ends", "ends") == [ids, [ids[3]]]


def test_ends_of_which_some_must_wait_are_repeated_after_the_longest_pause() -> None:
    transactions = [Transaction(new_id(), "shop", [ORDER]) for _ in range(3)]
    exchange: Any = Many(Conversation("shop")).ends([(one, COMMIT) for one in transactions])
    next(exchange)
    waits = [refusal(503, "overloaded", retry_after_s=after_s) for after_s in (2, 4)]
    background = exchange.send(listed(WELL, *waits)).exchange
    assert next(background) == Wait(4)
    assert len(json.loads(background.send(None).content)["ends"]) == 2


async def test_without_a_wait_ends_are_posted_in_the_background() -> None:
    halfnote = Scripted({"/ends": [outcomes_of("ends", WELL)]})
    options = {"group": "shop", "wait_for_end": False, "transport": halfnote.transport()}
    async with TransactionProducer("http://halfnote", **options) as producer:
        [result] = await producer.post_ends([(Transaction(new_id(), "shop", [ORDER]), COMMIT)])
        assert result.end == "posted"
        assert halfnote.asked("/ends") == []
    assert len(halfnote.asked("/ends")) == 1


async def test_bad_lists_are_refused_before_a_request() -> None:
    halfnote = Scripted()
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        for wrong in ([], [ORDER] * 501):
            with pytest.raises(ValueError, match="1 to 500"):
                await producer.post_halves(wrong)
            with pytest.raises(ValueError, match="1 to 500"):
                await producer.post_ends(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a list of transactions"):
            await producer.send_plain_many(ORDER)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="an Outgoing"):
            await producer.post_halves(["order"])
        with pytest.raises(ValueError, match="no `context`"):
            await producer.send_plain_many([Half(ORDER, context=1)])
    assert halfnote.came == []


async def test_a_service_that_does_not_know_the_request_refuses_all() -> None:
    halfnote = Scripted({"/messages": [problem(404, "not-found")]})
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        found = await producer.send_plain_many([ORDER, ORDER])
    assert [type(one) for one in found] == [PlainFailed] * 2
    assert len({one.transaction_id for one in found}) == 2


async def test_the_service_stores_and_publishes_many(runtime: Runtime, db: Connection, group: str) -> None:
    with SyncTransactionProducer("http://localhost", group=group, transport=FromThreads(service(runtime))) as producer:

        def work() -> tuple[list[Any], list[Any], list[Any]]:
            begun = producer.post_halves([Outgoing("order", n) for n in range(300)])
            verdicts = [COMMIT if n % 3 else ROLLBACK for n in range(300)]
            ended = producer.post_ends(list(zip(begun, verdicts, strict=True)))  # type: ignore[arg-type]
            return begun, ended, producer.send_plain_many([Outgoing("order", -1), Half(Outgoing("order", -2))])

        begun, ended, plain = await asyncio.to_thread(work)
    assert {one.end for one in ended} == {"recorded"}
    assert await db.fetchval("select count(*) from op where verdict = 1") == 202
    assert await db.fetchval("select count(*) from outbox") == 202
    assert all(isinstance(one, PlainResult) for one in plain)
    assert [one.message_ids for one in plain] == [[f"{one.transaction_id}-0"] for one in plain]
    assert {one.transaction_id for one in begun} == set(
        await db.fetchval("select array_agg(transaction_id) from half where body <> '-1' and body <> '-2'")
    )


async def test_the_coordinator_in_memory_takes_many() -> None:
    coordinator = Coordinator("shop")
    async with TransactionProducer("http://halfnote", group="shop", transport=coordinator.transport()) as producer:
        first, second = await producer.post_halves([ORDER, ORDER])
        assert isinstance(first, Transaction)
        assert isinstance(second, Transaction)
        await producer.post_ends([(first, COMMIT), (second, ROLLBACK)])
        repeated, other = await producer.post_halves(
            [Half(ORDER, first.transaction_id), Half(Outgoing("other", 1), second.transaction_id)]
        )
        assert isinstance(repeated, Transaction)
        assert repeated.repeated
        assert isinstance(other, HalfFailed)
        assert "content-differs" in str(other)
        [sent] = await producer.send_plain_many([Half(ORDER, UUID(str(new_id())))])
        assert isinstance(sent, PlainResult)
    assert [message.transaction_id for message in coordinator.published] == [
        str(first.transaction_id),
        str(sent.transaction_id),
    ]
