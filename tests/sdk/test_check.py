"""The check endpoint: in each framework over real sockets, asked by the real service, and by others."""

import asyncio
import json
import re
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import httpx
import psycopg
import pytest
from flask import Flask
from halfnote import COMMIT, CheckedTransaction, CheckEndpoint, Verdict
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.barrier_mark import marked
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.base import Dialect, Script
from halfnote.databases.dbapi import DbApi
from halfnote.delivery import DeliveryEndpoint
from halfnote.hosting import BODY_MAX_BYTES
from halfnote.ids import new_id
from halfnote.lock_limit import longest_wait_s
from halfnote.signatures import sign
from halfnote.times import instant

from tests.sdk.servers import threaded, wsgi_server
from tests.sdk.sites import postgres

T = TypeVar("T")

PATH = "/halfnote/check"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw0000"


class Listener:
    """Gives the test's answer and keeps the requests."""

    def __init__(self, answer: Any = COMMIT) -> None:
        self.answer, self.asked = answer, list[CheckedTransaction]()

    def check_local(self, transaction: CheckedTransaction) -> Any:
        self.asked.append(transaction)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class AsyncListener(Listener):
    """The same for an event loop."""

    async def check_local(self, transaction: CheckedTransaction) -> Any:
        await asyncio.sleep(0)
        return super().check_local(transaction)


def endpoint_of(listener: Any = None, **options: Any) -> CheckEndpoint:
    return CheckEndpoint(listener or Listener(), **{"group": "shop", "secrets": SECRET, **options})


def in_flask(endpoint: CheckEndpoint) -> Any:
    app = Flask(__name__)
    app.add_url_rule("/", view_func=lambda: "the shop", endpoint="shop")
    app.wsgi_app = endpoint.wsgi(app.wsgi_app)  # type: ignore[method-assign]
    return threaded(wsgi_server(app))


async def test_the_rest_of_a_flask_app_is_as_before() -> None:
    async with in_flask(endpoint_of()) as url, httpx.AsyncClient() as client:
        assert (await client.get(url)).text == "the shop"
        assert (await client.get(url + "/nowhere")).status_code == 404


def asked(transaction_id: str = "0193a7d6-a5c8-7b1e-8f00-1030a1030a10", **fields: Any) -> bytes:
    """Return a check's body."""
    known: dict[str, Any] = {
        "type": "halfnote.check",
        "transaction_id": transaction_id,
        "producer_group": "shop",
        "check": 1,
        "max_checks": 15,
        "born_at": "2026-11-21T08:00:00Z",
        "context": None,
        "messages": [],
    }
    return json.dumps({**known, **fields}).encode()


def asked_many(ids: list[UUID]) -> bytes:
    """Return the body of a check of many, whose blocks entered the barrier by themselves."""
    checks = [json.loads(asked(str(one), context=marked(None))) for one in ids]
    return json.dumps({"type": "halfnote.checks", "producer_group": "shop", "checks": checks}).encode()


async def post(endpoint: Any, body: bytes, *, method: str = "POST", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=endpoint.asgi())  # type: ignore[arg-type]
    sent = {**sign(SECRET, "chk_1", body), **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        return await client.request(method, "/", content=body, headers=sent)


async def test_an_unsigned_request_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    response = await post(endpoint_of(listener), asked(), webhook_signature="v1,AAAA")
    assert response.status_code == 401
    assert "no signature fits" in response.json()["detail"]
    assert "a check was refused: no signature fits" in caplog.text
    assert listener.asked == []


@pytest.mark.parametrize(("off_s", "word"), [(600, "behind"), (-600, "ahead of")])
@pytest.mark.parametrize("kind", ["check", "delivery"])
async def test_a_clock_that_is_off_is_named_to_the_coordinator_and_in_the_log(
    kind: str, off_s: int, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """So is a request that is old, or replayed by an eavesdropper."""
    listener, taken = Listener(), list[Any]()
    options: dict[str, Any] = {"secrets": SECRET, "clock": lambda: datetime.now(timezone.utc).timestamp() + off_s}
    endpoint = CheckEndpoint(listener, group="shop", **options)
    endpoints = {"check": endpoint, "delivery": DeliveryEndpoint(taken.append, **options)}
    response = await post(endpoints[kind], asked())
    assert response.status_code == 401
    reported = re.compile(f"by the coordinator's clock, which is (59[0-9]|6[0-9][0-9]) s {word} this machine's").search
    assert reported(response.json()["detail"])
    assert reported(caplog.text)
    assert not listener.asked
    assert not taken


async def test_a_context_may_have_a_number_that_python_does_not_parse() -> None:
    listener = Listener()
    body = asked(context={"n": 0}).replace(b'"n": 0', b'"n": ' + b"7" * 5000)
    assert (await post(endpoint_of(listener), body)).status_code == 200
    [transaction] = listener.asked
    assert transaction.context == {"n": Decimal("7" * 5000)}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"type": "halfnote.other"}',
        asked(transaction_id="1030"),
        asked(born_at="yesterday"),
        asked(messages=[{}]),
        asked(messages=None),
        b"[" * 100_000,
    ],
)
async def test_what_is_signed_but_no_check_is_refused(body: bytes) -> None:
    listener = Listener()
    assert (await post(endpoint_of(listener), body)).status_code == 400
    assert listener.asked == []


async def test_another_group_is_not_answered_for() -> None:
    listener = Listener()
    response = await post(endpoint_of(listener), asked(producer_group="bank"))
    assert response.status_code == 403
    assert listener.asked == []


@pytest.mark.parametrize("answer", [None, True, "commit", {"verdict": "commit"}])
@pytest.mark.parametrize("listening", [Listener, AsyncListener])
async def test_a_listener_that_returns_no_verdict_is_named(
    answer: Any, listening: type[Listener], caplog: pytest.LogCaptureFixture
) -> None:
    response = await post(endpoint_of(listening(answer)), asked())
    assert response.status_code == 500
    assert f"check_local returned {answer!r} for transaction 0193a7d6" in caplog.text
    assert "it must return COMMIT, ROLLBACK or UNKNOWN" in caplog.text


@pytest.mark.parametrize("listening", [Listener, AsyncListener])
async def test_a_listener_that_raises_has_not_answered(
    listening: type[Listener], caplog: pytest.LogCaptureFixture
) -> None:
    response = await post(endpoint_of(listening(ConnectionError("the shop's database is away"))), asked())
    assert response.status_code == 500
    assert "the shop's database is away" in caplog.text
    assert "the shop's database is away" not in response.text


async def test_only_posts_of_a_bounded_size_are_looked_at() -> None:
    response = await post(endpoint_of(), asked(), method="GET")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert (await post(endpoint_of(), b" " * (BODY_MAX_BYTES + 1))).status_code == 413


def test_an_async_listener_is_not_for_wsgi() -> None:
    with pytest.raises(TypeError, match="use the ASGI app"):
        endpoint_of(AsyncListener()).wsgi()


def test_an_asgi_app_is_no_websocket() -> None:
    async def never() -> Any:
        raise AssertionError

    with pytest.raises(ValueError, match="not for websocket"):
        asyncio.run(endpoint_of().asgi()({"type": "websocket"}, never, never))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["2026-11-21T08:00:00Z", "2026-11-21T09:00:00+01:00", "2026-11-21T08:00:00.000000Z", "2026-11-21t08:00:00z"]
)
def test_times_as_rfc_3339_has_them(text: str) -> None:
    assert instant(text) == datetime(2026, 11, 21, 8, tzinfo=timezone.utc)


def test_decimals_of_a_time() -> None:
    assert instant("2026-11-21T08:00:00.1Z").microsecond == 100_000
    assert instant("2026-11-21T08:00:00.123456789Z").microsecond == 123_456


def test_verdicts_are_what_the_service_reads() -> None:
    assert [known.value for known in Verdict] == ["commit", "rollback", "unknown"]


async def test_one_of_many_that_must_wait_keeps_no_answers_back() -> None:
    """The coordinator waits for 5 s, a barrier for 3 s."""
    async with postgres() as url:
        barrier = Barrier(DbApi(lambda: psycopg.connect(url), "postgresql"))
        barrier.create_table()
        ids = [new_id() for _ in range(4)]
        with psycopg.connect(url) as connection:
            barrier.enter(connection, ids[0])
            barrier.enter(connection, ids[2])
            answer = await post(endpoint_of(barrier), asked_many(ids))
    verdicts = [(one["transaction_id"], one["verdict"]) for one in answer.json()["answers"]]
    assert verdicts == [(str(one), "unknown" if n in (0, 2) else "rollback") for n, one in enumerate(ids)]


async def test_one_of_many_that_gets_no_connection_keeps_no_answers_back() -> None:
    """A single check may wait for as long as `wait_s`; this one takes a second."""

    class Exhausted(Asyncpg):
        """Has no connection for the second check."""

        asked = 0

        async def run(self, script: Script[T]) -> T:
            self.asked += 1
            return await (super().run(script) if self.asked != 2 else asyncio.Future[T]())

    ids = [new_id() for _ in range(3)]
    async with postgres() as url, asyncpg.create_pool(url, min_size=0) as pool:
        await AsyncBarrier(Asyncpg(pool)).create_table()
        endpoint = endpoint_of(AsyncBarrier(Exhausted(pool), wait_s=600))
        answer = await asyncio.wait_for(post(endpoint, asked_many(ids)), 60)
    verdicts = [(one["transaction_id"], one["verdict"]) for one in answer.json()["answers"]]
    assert verdicts == [(str(one), "rollback") for one in (ids[0], ids[2])]


@pytest.mark.parametrize(("dialect", "wait_s", "longest_s"), [("mysql", 0.5, 1), ("mysql", 3, 3), ("sqlite", 0.5, 0.5)])
def test_a_wait_for_a_lock_in_mysql_is_of_whole_seconds(dialect: Dialect, wait_s: float, longest_s: float) -> None:
    assert longest_wait_s(dialect, wait_s) == longest_s
