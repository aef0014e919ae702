"""The relay's benchmark: its receiver, its arithmetic, its backlogs, and one small row from end to end."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from app.database.connection import Connection
from app.ids import id_ms, is_uuid7
from bench import relay
from bench.__main__ import BENCHMARKS, RELAY, main, print_summary
from bench.arrivals import Arrival, came, noting, now_s, parts_of, rate, rates_in_windows, sample, take
from bench.filling import fill_committed
from bench.payload import message_of
from bench.publishing import BROKERS, deliveries
from bench.relay_backlog import Look, cpu_between
from bench.relay_isolation import slowest_rate
from bench.relay_latency import taken
from bench.report import Report
from bench.services import Service
from bench.stage import open_stage
from bench.wire import Wire
from bench.wrk import BrokenRunError
from tests.support import brokers

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (apt install gcc)")


@pytest.fixture
async def receiver(tmp_path: Path) -> AsyncIterator[Service]:
    async with noting(tmp_path) as service:
        yield service


def arrivals(*times_s: float, messages: int = 1) -> list[Arrival]:
    return [Arrival(at_s, 1, messages, "") for at_s in times_s]


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers, f"content-LENGTH: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_the_first_arrival_starts_the_clock_and_is_not_counted() -> None:
    assert rate(arrivals(10, 11, 12)) == 1
    assert rate(arrivals(10, 10.5, 11, messages=100)) == 200


def test_equal_parts_of_a_run_that_slows_down_have_its_rates() -> None:
    fast = [n / 10 for n in range(51)]
    slow = [5 + n / 5 for n in range(1, 51)]
    parts = parts_of(arrivals(*fast, *slow), 2)
    assert [rate(part) for part in parts] == pytest.approx([10, 5])


def test_cpu_time_is_spread_evenly_between_looks() -> None:
    looks = [Look(10, 1, 0.0), Look(12, 1, 1.0), Look(13, 1, 1.0)]
    assert cpu_between(looks, 10.5, 11.5) == pytest.approx(0.5)
    assert cpu_between(looks, 11, 13) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no sample"):
        cpu_between(looks, 9, 11)


def test_every_window_within_the_run_is_looked_at() -> None:
    # 100 a second, but for a gap of half a second in the middle.
    times = [n / 100 for n in range(300)] + [3.5 + n / 100 for n in range(300)]
    windows = rates_in_windows(times, 1.0)
    assert max(windows) == pytest.approx(100, abs=1)
    assert min(windows) == pytest.approx(50, abs=1)
    # From 0 to 6.49 s, a window begins every 0.1 s and ends within.
    assert len(windows) == 55


def test_the_slowest_subscription_is_the_one_that_ends_last() -> None:
    both = [Arrival(1, 1, 1, ""), Arrival(2, 1, 1, ""), Arrival(2.5, 2, 1, ""), Arrival(5, 2, 1, "")]
    assert slowest_rate(both) == pytest.approx(2 / 4)


def test_a_message_may_arrive_before_its_commit_is_heard_of() -> None:
    found = taken({"a": 5.0, "b": 6.0}, [Arrival(5.25, 1, 1, "a"), Arrival(5.5, 1, 1, "b")])
    assert found == pytest.approx([0.25, -0.5])


@needs_cc
async def test_the_receiver_notes_who_got_what_and_when(receiver: Service) -> None:
    began = now_s()
    wire = await Wire.to(receiver.port)
    id_ = "0198c1d2-0000-7000-8000-000000000001"
    await wire.ask(post("/hook/7", b'{"a":1}', f"Halfnote-Transaction: {id_}", "ce-type: order"))
    await wire.ask(post("/batch/8", b'[{"specversion":"1.0"},{"specversion":"1.0"}]'))
    await wire.ask(post("/check", b"{}"))

    headers, body = await sample(receiver)
    noted = await came(receiver, 3, within_s=5)
    wire.close()

    assert [(arrival.subscription, arrival.messages) for arrival in noted] == [(7, 1), (8, 2)]
    assert [arrival.transaction_id for arrival in noted] == [id_, ""]
    assert began < noted[0].at_s < noted[1].at_s < now_s()
    assert headers == {}
    assert body == b'[{"specversion":"1.0"},{"specversion":"1.0"}]'
    # Taken is taken.
    assert await take(receiver) == []


@needs_cc
async def test_the_receiver_takes_requests_in_pieces_and_several_at_once(receiver: Service) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
    both = post("/hook/1", b"x" * 100_000) + post("/hook/2", b"")
    for at in (0, 10, 70_000):
        writer.write(both[at : {0: 10, 10: 70_000}.get(at)])
        await writer.drain()
    for _ in range(2):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 204 No Content\r\n\r\n"
    # The one that hangs has no answer; the one after it does.
    writer.write(post("/hang/3", b"{}") + post("/hook/4", b"{}"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 204 No Content\r\n\r\n"
    writer.close()
    await writer.wait_closed()

    assert [arrival.subscription for arrival in await take(receiver)] == [1, 2, 4]


@needs_cc
async def test_a_message_too_many_or_too_few_breaks_the_run(receiver: Service) -> None:
    wire = await Wire.to(receiver.port)
    await wire.ask(post("/hook/1", b""))
    with pytest.raises(BrokenRunError, match="1 of 2 messages arrived"):
        await came(receiver, 2, within_s=0.2)
    await wire.ask(post("/hook/1", b""))
    with pytest.raises(BrokenRunError, match="2 messages arrived, and 1 were sent"):
        await came(receiver, 1, within_s=5)
    wire.close()


async def test_a_backlog_is_stored_as_committed_messages(dsn: str, db: Connection) -> None:
    await fill_committed(dsn, "order", 2_500)
    await fill_committed(dsn, "order", 10)

    rows = await db.fetch(
        """
        select o.transaction_id, o."offset", o.topic, o.key, h.body, h.key as half_key, p.verdict
        from outbox o join half h using (transaction_id, position) join op p using (transaction_id) order by o."offset"
        """
    )
    assert len(rows) == 2_510
    assert len({row["transaction_id"] for row in rows}) == 2_510
    assert all(is_uuid7(row["transaction_id"]) for row in rows)
    times = [id_ms(row["transaction_id"]) for row in rows[:2_500]]
    assert times == sorted(times)
    assert len({row["key"] for row in rows}) == 1_000
    assert all(row["key"] == row["half_key"] and row["verdict"] == 1 and row["topic"] == "order" for row in rows)
    assert message_of(b'"body":' + rows[0]["body"] + b"}]}") == rows[0]["body"]


def test_a_part_that_broke_off_is_reported_and_ends_in_1(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("relay", "some title")
    report.hold("something", 2, at_least=1)
    assert print_summary([report]) == 0
    report.break_off("webhook: no answer")
    assert "NOT FINISHED: webhook: no answer" in str(report)
    assert print_summary([report]) == 1
    assert "NOT FINISHED: webhook: no answer" in capsys.readouterr().out


def test_every_row_can_be_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert not set(BENCHMARKS) & set(RELAY)
    assert set(RELAY) == {"relay", *(f"relay:{row}" for row in relay.ROWS)}
    assert main(["relay:nothing"]) == 2
    assert "relay:webhook" in capsys.readouterr().err
    # A quarter of an hour, with starts and stops in between.
    assert sum(row.budget_s for row in relay.ROWS.values()) < 1.8 * 900


@needs_cc
async def test_a_row_measures_a_real_relay(tmp_path: Path) -> None:
    async with open_stage(quick=True) as stage:
        report = await relay.bench(stage, ["rate"])
        path = report.write(stage.machine, tmp_path)

    assert report.broken == []
    # No figure is judged here, but 5,000 messages at 1,000 a second take about five seconds wherever they are sent.
    assert 0 < report.figures["a burst of 5,000 at rate_per_s"].value < 1_500
    assert path.name == "relay-rate.json"


@pytest.mark.parametrize("kind", list(BROKERS))
async def test_a_client_alone_publishes_to_the_broker(kind: str) -> None:
    server, topic, broker = getattr(brokers, kind)(), f"bench-{uuid4()}", BROKERS[kind]
    await broker.prepare(server, topic)

    assert await broker.publish(server, topic, deliveries(topic, 600)) > 0

    assert await broker.count(server, topic) == 600
