"""Producers with `wait_for_end=False`: a block ends while its end is on its way."""

import json
import threading
from typing import Any

import httpx
import pytest
from halfnote import COMMIT, ROLLBACK, Outgoing, SyncTransactionProducer, TransactionProducer
from halfnote import async_driver as asynchronous
from halfnote import sync_driver as synchronous

from tests.sdk.coordinators import Scripted, answer, problem

ORDER = Outgoing("order", {"order": 1030})
LIMIT_S = 20


def options(halfnote: Scripted) -> dict[str, Any]:
    return {"group": "shop", "transport": halfnote.transport(), "wait_for_end": False}


async def test_a_block_does_not_wait_for_the_answer_to_its_end() -> None:
    halfnote = Scripted()
    async with TransactionProducer("http://halfnote", **options(halfnote)) as producer:
        async with producer.transaction(ORDER) as tx:
            pass
        assert tx.result is not None
        assert (tx.result.local_verdict, tx.result.end, tx.result.error) == (COMMIT, "posted", None)
        assert halfnote.asked("/end") == []
    # Closing the producer waits for it.
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit"]


def test_a_thread_does_not_wait_for_the_answer_to_its_end() -> None:
    goes_on = threading.Event()

    def slow(_: httpx.Request) -> httpx.Response:
        assert goes_on.wait(LIMIT_S)
        return answer(200)

    halfnote = Scripted({"/end": [slow]})
    with SyncTransactionProducer("http://halfnote", **options(halfnote)) as producer:
        with pytest.raises(RuntimeError, match="no stock"), producer.transaction(ORDER) as tx:
            raise RuntimeError("no stock")
        assert tx.result is not None
        assert (tx.result.local_verdict, tx.result.end) == (ROLLBACK, "posted")
        goes_on.set()
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["rollback"]


def test_ends_that_wait_in_the_background_of_threads_are_one_request() -> None:
    goes_on = threading.Event()
    came: list[int] = []

    def answers(request: httpx.Request) -> httpx.Response:
        if request.url.path not in ("/end", "/ends"):
            return halfnote.transport().handle_request(request)
        content = json.loads(request.content)
        came.append(len(content.get("ends", [content])))
        assert goes_on.wait(LIMIT_S)
        return answer(200, {"outcomes": [{"status": 200}] * came[-1]} if "ends" in content else {})

    halfnote = Scripted()
    transport = httpx.MockTransport(answers)
    with SyncTransactionProducer("http://halfnote", group="shop", transport=transport, wait_for_end=False) as producer:
        for _ in range(30):
            with producer.transaction(ORDER):
                pass
        goes_on.set()
    assert sum(came) == 30
    assert len(came) <= 2


async def test_an_end_in_the_background_is_repeated_and_a_conflict_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    halfnote = Scripted({"/end": [httpx.ReadError("reset"), problem(409, "verdict-conflict", "reissue it")]})
    async with TransactionProducer("http://halfnote", **options(halfnote)) as producer:
        async with producer.transaction(ORDER):
            pass
    assert len(halfnote.asked("/end")) == 2
    assert "reissue it" in caplog.text


async def test_a_caller_waits_while_too_many_ends_are_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver in (asynchronous, synchronous):
        monkeypatch.setattr(driver, "BACKGROUND_MAX", 0)
    halfnote = Scripted()
    async with TransactionProducer("http://halfnote", **options(halfnote)) as producer:
        async with producer.transaction(ORDER) as tx:
            pass
    assert tx.result is not None
    assert tx.result.end == "recorded"
    with SyncTransactionProducer("http://halfnote", **options(halfnote)) as threads:
        with threads.transaction(ORDER) as also:
            pass
    assert also.result is not None
    assert also.result.end == "recorded"
