"""Traces: a context goes along from the request to check-back and delivery, and spans go to a real collector."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from app.checkback.loop import CheckBack
from app.config import Settings
from app.database.connection import Connection
from app.lifecycle.startup import assemble
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.conftest import client_of, register_group
from tests.support.check_responder import Responder, Silent
from tests.support.check_stepping import COMMIT, in_doubt, turn
from tests.support.otlp_collector import Collector, Seen
from tests.support.processes import Service
from tests.support.relay_stepping import order, subscribe, turn_until

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{CALLER}-01", f"00-{TRACE_ID}-{CALLER}-00"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector, and a service that does not keep it waiting."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as made:
        yield made


@asynccontextmanager
async def tracing(settings: Settings, endpoint: str, ratio: float = 0.0) -> AsyncIterator[Runtime]:
    """A runtime that exports its spans."""
    with_tracing = Settings.model_validate({**settings.model_dump(), "otlp_endpoint": endpoint, "trace_ratio": ratio})
    async with AsyncExitStack() as stack:
        yield await assemble(with_tracing, with_tracing.database_url or "", stack)


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> Any:
    answer = await client.post(path, json={"producer_group": "shop", **body}, headers=headers)
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def one(spans: list[Seen]) -> Seen:
    [span] = spans
    return span


def parent_of(header: str) -> tuple[str, str]:
    """Return the trace and the span that a traceparent names."""
    version, trace_id, span_id, flags = header.split("-")
    assert (version, int(flags, 16) & 1) == ("00", 1)
    return trace_id, span_id


@pytest.mark.parametrize("path", ["/half", "/messages"])
async def test_a_context_passes_through_a_service_that_does_not_trace(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, path: str
) -> None:
    relay = Relay(runtime)
    async with Responder() as receiver:
        await subscribe(client, receiver)
        two = {"messages": [order(1), order(2)]}
        made = await post(client, path, two, traceparent=UNSAMPLED, tracestate='shop=a "b" 50%,of=2')
        if path == "/half":
            end = {"transaction_id": made["transaction_id"], "verdict": "commit"}
            await post(client, "/end", end, traceparent=SAMPLED)
        # Neither has a context: the header is malformed or missing.
        await post(client, "/messages", {"messages": [order(3)]}, traceparent=SAMPLED.upper(), tracestate="a=1")
        await post(client, "/messages", {"messages": [order(4)]})
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 4)
        await relay.drain(runtime)
    found = {call.headers["ce-subject"]: call.headers for call in receiver.calls}
    for key in ("order-1", "order-2"):
        assert found[key]["traceparent"] == UNSAMPLED
        assert found[key]["tracestate"] == 'shop=a "b" 50%,of=2'
    for key in ("order-3", "order-4"):
        assert not {"traceparent", "tracestate"} & found[key].keys()


async def test_a_context_is_no_part_of_the_content(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    for path in ("/half", "/messages"):
        first = await post(client, path, {"messages": [order(1)]}, traceparent=SAMPLED)
        again = {"messages": [order(1)], "transaction_id": first["transaction_id"]}
        for headers in ({"traceparent": SAMPLED.replace("7", "8")}, {}):
            assert (await post(client, path, again, **headers))["replayed"] is True
    assert {row[0] for row in await db.fetch("select traceparent from half")} == {SAMPLED}


async def test_a_check_and_a_failed_and_a_reissued_delivery_carry_the_context(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    relay = Relay(runtime)
    async with Responder(content={"verdict": "rollback"}) as producer, Responder(status=500) as receiver:
        await register_group(db, "shop", check_urls=[producer.url])
        await subscribe(client, receiver, retry=[1])
        client.headers["traceparent"] = SAMPLED
        transaction_id = await in_doubt(client, runtime)
        del client.headers["traceparent"]
        assert await turn(runtime, CheckBack()) == 1
        answer = await client.post(f"/transactions/{transaction_id}/reissue", json={"reason": "it was paid"})
        assert answer.status_code == 201
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2, within_s=60)
        await relay.drain(runtime)
    assert [call.headers["traceparent"] for call in (*producer.calls, *receiver.calls)] == [SAMPLED] * 3


async def test_a_transaction_s_spans(settings: Settings, db: Connection, group: str, collector: Collector) -> None:
    async with Responder() as receiver, tracing(settings, collector.url) as runtime, client_of(runtime) as client:
        relay = Relay(runtime)
        await subscribe(client, receiver)
        sent = {"messages": [order(1), order(2)]}
        made = await post(client, "/half", sent, traceparent=SAMPLED, tracestate="shop=1")
        transaction_id = made["transaction_id"]
        end = {"transaction_id": transaction_id, "verdict": "commit"}
        await post(client, "/end", end, traceparent=SAMPLED)
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2)
        await relay.drain(runtime)
        await collector.until(POST__half=1, POST__end=1, flush_half=1, flush_end=1, deliver_order=2)
    half, flush = one(collector.named("POST /half")), one(collector.named("flush half"))
    assert (half.trace_id, half.parent, half.state, half.kind) == (TRACE_ID, CALLER, "shop=1", "SERVER")
    assert half.attributes == {
        "http.request.method": "POST",
        "url.path": "/half",
        "http.route": "/half",
        "http.response.status_code": 201,
        "halfnote.transaction_id": transaction_id,
        "halfnote.producer_group": "shop",
    }
    assert half.resource["service.name"] == "halfnote"
    # The flush is in a trace of its own, and each names the other.
    assert (flush.parent, flush.attributes) == ("", {"halfnote.lane": "half", "halfnote.requests": 1})
    assert flush.trace_id != TRACE_ID
    assert list(flush.links) == [(TRACE_ID, half.span_id)]
    assert list(half.links) == [(flush.trace_id, flush.span_id)]
    ended = one(collector.named("POST /end"))
    assert (ended.trace_id, ended.parent) == (TRACE_ID, CALLER)
    assert list(one(collector.named("flush end")).links) == [(TRACE_ID, ended.span_id)]
    deliveries = {span.attributes["messaging.message.id"]: span for span in collector.named("deliver order")}
    for call in receiver.calls:
        span = deliveries[call.headers["ce-id"]]
        assert (span.trace_id, span.parent, span.state, span.kind) == (TRACE_ID, half.span_id, "shop=1", "PRODUCER")
        assert parent_of(call.headers["traceparent"]) == (TRACE_ID, span.span_id)
        assert call.headers["tracestate"] == "shop=1"
        assert span.attributes["halfnote.outcome"] == "delivered"
        assert span.attributes["http.response.status_code"] == 200
        assert span.attributes["halfnote.attempt"] == 1
        assert not span.failed


async def test_a_tracestate_with_a_key_that_begins_with_a_digit_passes_whole(
    settings: Settings, db: Connection, group: str, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    state = "34f2@dt=fw4;a b,3x=1,shop=2"
    async with Responder() as receiver, tracing(settings, collector.url) as runtime, client_of(runtime) as client:
        relay = Relay(runtime)
        await subscribe(client, receiver)
        await post(client, "/messages", {"messages": [order(1)]}, traceparent=SAMPLED, tracestate=state)
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 1)
        await relay.drain(runtime)
        await collector.until(POST__messages=1, deliver_order=1)
    assert [call.headers["tracestate"] for call in receiver.calls] == [state]
    assert one(collector.named("POST /messages")).state == one(collector.named("deliver order")).state == state
    assert not [line for line in caplog.records if line.name.startswith("opentelemetry")]


async def test_each_attempt_has_a_span(settings: Settings, group: str, collector: Collector) -> None:
    async with Responder(status=503) as receiver, tracing(settings, collector.url) as runtime:
        relay = Relay(runtime)
        async with client_of(runtime) as client:
            await subscribe(client, receiver, retry=[1, 1])
            await post(client, "/messages", {"messages": [order(1)]}, traceparent=SAMPLED)
            await turn_until(relay, runtime, lambda: receiver.calls, within_s=60)
            receiver.status = 200
            await turn_until(relay, runtime, lambda: len(receiver.calls) == 2, within_s=60)
            await relay.drain(runtime)
        await collector.until(deliver_order=2)
    first, second = collector.named("deliver order")
    assert (first.failed, first.message, first.attributes["halfnote.outcome"]) == (True, "answered 503", "failed")
    assert (second.failed, second.attributes["halfnote.attempt"]) == (False, 2)
    assert first.parent == second.parent
    assert [parent_of(call.headers["traceparent"])[1] for call in receiver.calls] == [first.span_id, second.span_id]


async def test_a_check_has_a_span(settings: Settings, db: Connection, collector: Collector) -> None:
    async with Responder(content=COMMIT) as producer, tracing(settings, collector.url) as runtime:
        await register_group(
            db,
            "shop",
            check_urls=["http://127.0.0.1:9/check", producer.url],
        )
        async with client_of(runtime) as client:
            client.headers["traceparent"] = SAMPLED
            transaction_id = await in_doubt(client, runtime)
            checks = CheckBack()
            assert await turn(runtime, checks) == 1
        await collector.until(check=1, POST__half=1)
    span, half = one(collector.named("check")), one(collector.named("POST /half"))
    assert (span.trace_id, span.parent, span.kind, span.failed) == (TRACE_ID, half.span_id, "CLIENT", False)
    assert parent_of(producer.calls[0].headers["traceparent"]) == (TRACE_ID, span.span_id)
    assert span.attributes == {
        "halfnote.transaction_id": str(transaction_id),
        "halfnote.producer_group": "shop",
        "halfnote.check": 1,
        "halfnote.outcome": "commit",
        "halfnote.urls_tried": 2,
        "server.address": "127.0.0.1",
        "http.response.status_code": 200,
    }


@pytest.mark.parametrize("others", [0, 3])
async def test_an_end_outside_the_trace_of_its_half_links_to_it(
    settings: Settings, db: Connection, group: str, collector: Collector, others: int
) -> None:
    async with tracing(settings, collector.url, ratio=1) as runtime, client_of(runtime) as client:

        async def half_of(key: int, **headers: str) -> dict[str, str]:
            made = await post(client, "/half", {"messages": [order(key)]}, **headers)
            return {"transaction_id": made["transaction_id"], "verdict": "commit"}

        traced = await half_of(1, traceparent=SAMPLED)
        beside = [await half_of(2 + number, traceparent=UNSAMPLED) for number in range(others)]
        end, *_ = await asyncio.gather(
            post(client, "/end", traced), *(post(client, "/end", one, traceparent=UNSAMPLED) for one in beside)
        )
        assert end["replayed"] is False
        await post(client, "/end", traced)
        await post(client, "/end", traced, traceparent=SAMPLED)
        opposite = {"producer_group": "shop", **traced, "verdict": "rollback"}
        assert (await client.post("/end", json=opposite)).status_code == 409
        await collector.until(POST__half=1, POST__end=4)
    half = one(collector.named("POST /half"))
    decided, repeated, inside, refused = collector.named("POST /end")
    for span in (decided, repeated, refused):
        assert span.trace_id != half.trace_id
        assert (half.trace_id, half.span_id) in span.links
    assert inside.trace_id == half.trace_id
    assert (half.trace_id, half.span_id) not in inside.links


async def test_who_is_traced(settings: Settings, db: Connection, group: str, collector: Collector) -> None:
    async with tracing(settings, collector.url, ratio=0) as runtime, client_of(runtime) as client:
        await post(client, "/messages", {"messages": [order(1)]})
        await post(client, "/messages", {"messages": [order(2)]}, traceparent=UNSAMPLED)
        await post(client, "/messages", {"messages": [order(3)]}, traceparent=SAMPLED)
    assert [span.attributes["http.response.status_code"] for span in collector.named("POST /messages")] == [201]
    # An unsampled context is passed on unchanged.
    traceparents = [row[0] for row in await db.fetch("select traceparent from half order by key")]
    assert traceparents[:2] == [None, UNSAMPLED]
    assert parent_of(traceparents[2]) == (TRACE_ID, one(collector.named("POST /messages")).span_id)
    async with tracing(settings, collector.url, ratio=1) as runtime, client_of(runtime) as client:
        for path in ("/livez", "/readyz", "/metrics", "/topics"):
            await client.get(path)
        await post(client, "/messages", {"messages": [order(4)]})
        await post(client, "/messages", {"messages": [order(5)]}, traceparent=UNSAMPLED)
    assert one(collector.named("GET /topics")).attributes["http.route"] == "/topics"
    [_, traced] = collector.named("POST /messages")
    assert traced.parent == ""
    assert {span.name for span in collector.spans} == {"POST /messages", "flush plain", "GET /topics"}


async def test_a_refused_request_and_one_flush_of_many(
    settings: Settings, db: Connection, group: str, collector: Collector
) -> None:
    async with tracing(settings, collector.url, ratio=1) as runtime, client_of(runtime) as client:
        assert (await client.post("/half", json={})).status_code == 422
        await asyncio.gather(*(post(client, "/messages", {"messages": [order(n)]}) for n in range(20)))
        # While the table is locked away, more come together than before.
        await db.execute("alter table half rename to elsewhere")
        assert (await client.post("/half", json={"producer_group": "shop", "messages": [order(1)]})).status_code == 503
    refused, unavailable = collector.named("POST /half")
    assert (refused.failed, refused.attributes["http.response.status_code"]) == (False, 422)
    assert (unavailable.failed, unavailable.message) == (True, "answered 503")
    assert one(collector.named("flush half")).failed
    flushes, requests = collector.named("flush plain"), collector.named("POST /messages")
    assert sum(flush.attributes["halfnote.requests"] for flush in flushes) == 20
    linked = [link for flush in flushes for link in flush.links]
    assert sorted(linked) == sorted((span.trace_id, span.span_id) for span in requests)


async def test_a_collector_that_never_answers_delays_no_request(
    settings: Settings, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    async with Silent() as silent:
        async with (
            asyncio.timeout(120),
            tracing(settings, silent.url.removesuffix("/check"), ratio=1) as runtime,
            client_of(runtime) as client,
        ):
            for number in range(50):
                await post(client, "/messages", {"messages": [order(number)]})
            while not silent.connections:
                await asyncio.sleep(0.02)
        # It closed while the collector still had the first export.
        assert silent.connections == 1


async def test_an_export_is_tried_again(settings: Settings, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector(503) as collector:
        async with tracing(settings, collector.url, ratio=1) as runtime, client_of(runtime) as client:
            await post(client, "/messages", {"messages": [order(1)]})
            await collector.until(POST__messages=1, flush_plain=1)


async def test_spans_take_no_proxy_from_the_environment(
    settings: Settings, group: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Collector() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        async with tracing(settings, collector.url, ratio=1) as runtime, client_of(runtime) as client:
            await post(client, "/messages", {"messages": [order(1)]})
            await collector.until(POST__messages=1, flush_plain=1)
    assert (proxy.spans, proxy.faults) == ([], [])


async def test_the_service_says_its_traces_in_its_log_and_sends_the_last_spans(
    data_dir: Path, dsn: str, db: Connection, group: str, collector: Collector
) -> None:
    service = Service(
        data_dir,
        "serve",
        HALFNOTE_DATABASE_URL=dsn,
        HALFNOTE_OTLP_ENDPOINT=collector.url,
        HALFNOTE_TRACE_RATIO="0",
        OTEL_SERVICE_NAME="coordinator",
        OTEL_BSP_SCHEDULE_DELAY="3600000",
    )
    await service.start()
    async with Responder(status=500) as receiver, httpx.AsyncClient(base_url=service.url) as client:
        await subscribe(client, receiver, retry=[3600])
        await post(client, "/messages", {"messages": [order(1)]}, traceparent=SAMPLED)
        async with asyncio.timeout(60):
            while "delivery_failed" not in service.log.read_text():
                await asyncio.sleep(0.05)
    assert collector.spans == []
    assert service.stop() == 0
    deliver = one(collector.named("deliver order"))
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    [failed] = [line for line in lines if line["event"] == "delivery_failed"]
    assert (failed["trace_id"], failed["span_id"]) == (TRACE_ID, deliver.span_id)
    assert deliver.resource["service.name"] == "coordinator"
    assert not any("trace_id" in line for line in lines if line is not failed)


@pytest.mark.parametrize("wrong", ["collector:4318", "ftp://collector", "http://", "http://collector?x=1"])
def test_an_endpoint_that_is_no_url_is_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match="must be a URL"):
        Settings(_env_file=None, otlp_endpoint=wrong)  # type: ignore[call-arg]


def test_an_empty_endpoint_is_none() -> None:
    assert Settings(_env_file=None, otlp_endpoint="").otlp_endpoint is None  # type: ignore[call-arg]
