"""The benchmarks' own parts: report files, ids, the Lua that wrk runs, intervals. No figure is judged here."""

import ast
import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args
from uuid import UUID

import msgspec
import psutil
import pytest

from app.coordinator.wire import EndRequest, HalfRequest
from app.ids import id_ms, is_uuid7
from bench import client, console, idle, scale
from bench.client import answering_at_once, sending_to
from bench.console_filling import Known
from bench.payload import BODY_BYTES, GROUP, end_body, half_body, message_of, transaction_ids
from bench.receiver import END_OF_HEAD, length_of
from bench.report import Bar, Report
from bench.scale import Cost, model
from bench.services import ROOT, Service, receiving, serving
from bench.stage import count_of, open_stage, post, put
from bench.statistic import median_interval, percentile
from bench.untraced import HOT, PARTS, without
from bench.wire import Wire
from bench.wrk import LEAD, BrokenRunError, Plan, load

needs_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed (apt install wrk)")


class Recorder(asyncio.Protocol):
    """Gives every request the same answer after a moment, and keeps its path and transaction_id."""

    def __init__(self, answer: bytes, seen: list[tuple[str, str]]) -> None:
        self._answer, self._seen, self._buffer = answer, seen, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(END_OF_HEAD)
        if found and len(rest) >= length_of(head):
            self._buffer = b""
            self._seen.append((head.split()[1].decode(), json.loads(rest)["transaction_id"]))
            # Without a pause, wrk and this process use both cores for the whole run.
            asyncio.get_running_loop().call_later(0.002, self._transport.write, self._answer)


@asynccontextmanager
async def recording(status: int) -> AsyncIterator[tuple[Service, list[tuple[str, str]]]]:
    """Serve `status` on a free port, and yield the requests as (path, transaction_id)."""
    seen: list[tuple[str, str]] = []
    answer = f"HTTP/1.1 {status} Whatever\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    server = await asyncio.get_running_loop().create_server(lambda: Recorder(answer, seen), "127.0.0.1", 0)
    async with server:
        yield Service(server.sockets[0].getsockname()[1], psutil.Process()), seen


def test_ids_are_v7_within_the_window_distinct_and_in_order() -> None:
    now_ms = 1_800_000_000_000
    ids = [UUID(id_) for id_ in transaction_ids(20_000, now_ms)]

    assert all(is_uuid7(id_) for id_ in ids)
    assert len(set(ids)) == len(ids)
    times = [id_ms(id_) for id_ in ids]
    assert times == sorted(times)
    assert now_ms - 60_000 < times[0]
    assert times[-1] <= now_ms


def test_bodies_fit_the_services_schemas() -> None:
    (id_,) = transaction_ids(1)

    half = msgspec.json.decode(half_body(id_), type=HalfRequest)
    end = msgspec.json.decode(end_body(id_), type=EndRequest)

    assert len(half_body(id_)) == BODY_BYTES
    assert half.transaction_id == end.transaction_id == UUID(id_)
    assert half.producer_group == end.producer_group
    assert bytes(cast(msgspec.Raw, half.messages[0].body)) == message_of(half_body(id_))


def test_a_report_file_has_the_documented_shape(tmp_path: Path) -> None:
    report = Report("some", "some title")
    report.add("base", 50.0, "requests/s")
    report.add("ours", 75.0, "requests/s", ratio_to="base")
    report.add("paired", 75.0, "requests/s", ratio_to="base", ratio=1.4)

    written = json.loads(report.write({"cpu": "x"}, tmp_path).read_text())

    assert written == {
        "machine": {"cpu": "x"},
        "figures": {
            "base": {"value": 50.0, "unit": "requests/s"},
            "ours": {"value": 75.0, "unit": "requests/s", "ratio_to": "base", "ratio": 1.5},
            "paired": {"value": 75.0, "unit": "requests/s", "ratio_to": "base", "ratio": 1.4},
        },
    }
    assert (tmp_path / "some.json").exists()
    assert "1.50 of base" in str(report)


@pytest.mark.parametrize(
    ("bar", "held"),
    [
        (Bar("a", 1.0, at_least=1.0), True),
        (Bar("a", 0.99, at_least=1.0), False),
        (Bar("a", 2.5, at_most=2.5), True),
        (Bar("a", 2.6, at_most=2.5), False),
        # It fails only if the whole interval is beyond the limit.
        (Bar("a", 0.88, at_least=0.9, interval=(0.86, 0.91)), True),
        (Bar("a", 0.88, at_least=0.9, interval=(0.86, 0.89)), False),
    ],
)
def test_a_bar_shows_whether_it_is_missed(bar: Bar, held: bool) -> None:
    assert bar.held is held
    assert ("THE BAR" in str(bar)) is not held


def test_the_interval_of_a_median_is_that_of_order_statistics() -> None:
    # 20 values: the 6th smallest and the 6th largest, 95.9 % (tables of the sign test).
    low, high, confidence = median_interval(range(1, 21))
    assert (low, high) == (6, 15)
    assert confidence == pytest.approx(0.9586, abs=1e-4)
    # Three values give only their range, with a confidence below 95 %.
    assert median_interval([3, 1, 2]) == (1, 3, 0.75)


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.99) == 99
    assert percentile(values, 0.5) == 50
    assert percentile([7.0], 0.99) == 7


async def test_the_receiver_counts_posts_and_answers_checks() -> None:
    async with receiving() as receiver:
        wire = await Wire.to(receiver.port)
        for path in ("/hook", "/check"):
            await wire.ask(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc".encode())
        wire.close()

        assert await count_of(receiver) == 2


@needs_wrk
@pytest.mark.parametrize("plan", get_args(Plan))
async def test_wrk_walks_the_ids_by_its_plan(tmp_path: Path, plan: Plan) -> None:
    stored: list[str] = []

    async def fill(ids: list[str]) -> None:
        stored.extend(ids)

    async with recording(201) as (service, seen):
        done = await load(tmp_path, service, plan, 1, fill=fill, connections=2, ids_a_second=20_000)

    halves = [id_ for path, id_ in seen if path == "/half"]
    ends = [id_ for path, id_ in seen if path == "/end"]
    # Requests in flight when wrk stopped were sent but not counted.
    assert 0 < done.requests <= len(seen) <= done.requests + 2
    assert len(set(halves)) == len(halves)
    assert len(set(ends)) == len(ends)
    known = (tmp_path / "ids").read_text().split()
    if plan == "half":
        assert set(halves) == set(known[: len(halves)])
        assert not ends
    if plan == "end":
        assert stored == known
        assert set(ends) == set(known[: len(ends)])
        assert not halves
    if plan == "whole":
        assert stored == known[: 2 * LEAD]
        assert set(ends) == set(known[: len(ends)])
        assert set(halves) == set(known[2 * LEAD : 2 * LEAD + len(halves)])
        assert abs(len(ends) - len(halves)) <= 2


@needs_wrk
async def test_a_refused_request_breaks_the_run(tmp_path: Path) -> None:
    async with recording(409) as (service, _):
        with pytest.raises(BrokenRunError, match="refused"):
            await load(tmp_path, service, "half", 1, connections=2, ids_a_second=20_000)


def named(tree: ast.Module) -> set[str]:
    """Return the names in statements, without imports and arguments."""
    nodes = list(ast.walk(tree))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("module", HOT)
def test_what_tracing_is_compared_with_has_none_of_it(module: str) -> None:
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert named(ast.parse(source)) & PARTS
    assert not named(without(source)) & PARTS


def test_what_tracing_is_compared_with_is_what_is_imported() -> None:
    program = (
        "import bench.untraced_app; from app.server.request_pipeline import PipelineRequest; "
        "print('incoming' in PipelineRequest.__init__.__code__.co_names)"
    )
    for imported, has in ((program, "False"), (program.replace("import bench.untraced_app; ", ""), "True")):
        ran = subprocess.run([sys.executable, "-c", imported], cwd=ROOT, capture_output=True, text=True)
        assert (ran.stdout.strip(), ran.stderr) == (has, "")


async def test_what_tracing_is_compared_with_serves(dsn: str, tmp_path: Path) -> None:
    one = json.loads(half_body())
    plain = {name: one[name] for name in ("producer_group", "messages")}
    async with serving("bench.untraced_app:app", tmp_path, {"HALFNOTE_DATABASE_URL": dsn}) as service:
        await put(service, f"/producer-groups/{GROUP}", {"check_urls": [], "checks": "claim"})
        for path, body in (
            ("/halves", {"halves": [plain]}),
            ("/half", plain | {"transaction_id": transaction_ids(1)[0]}),
            ("/messages", plain),
        ):
            await post(service, path, body)


async def test_the_client_and_bare_calls_send_to_a_coordinator_that_answers_at_once() -> None:
    async with answering_at_once() as coordinator, sending_to(coordinator) as one:
        for who in ("client", "bare", "client-sync", "bare-sync"):
            sent = await one.send(who, 0.1)
            assert sent.transactions > 0
            assert 0 < sent.cpu_s <= sent.wall_s * 1.5
            assert sent.rate > 0
            assert sent.cpu_us > 0
        with pytest.raises(RuntimeError, match="ended"):
            await one.send("nobody", 0.1)


@pytest.mark.slow
async def test_the_client_s_row_from_end_to_end() -> None:
    async with open_stage(quick=True) as stage:
        report = await client.bench(stage)
    assert len(report.bars) == 4
    assert len(report.figures) == 12
    assert "one async process to Halfnote" in str(report)
    assert "the same with shared requests" in str(report)


@pytest.mark.slow
async def test_the_idle_row_from_end_to_end() -> None:
    async with open_stage(quick=True) as stage:
        before_s = idle.postgres_cpu_s(stage.server)
        report = await idle.bench(stage)
        assert idle.postgres_cpu_s(stage.server) > before_s
    assert len(report.bars) == 3
    assert all(figure.value > 0 for name, figure in report.figures.items() if "transactions" in name)


def test_the_console_row_asks_for_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    one = UUID(int=1)
    known = Known(order=one, stored=one, doubted=one, rolled_back=one, dead=("mailer", f"{one}-0"), finding=1)
    asked = console.pages(known)
    assert all(paths for paths in asked.values())
    # A page that is added to the site is missing here until the row asks for it.
    monkeypatch.setattr(console, "PAGES", [*console.PAGES, replace(console.PAGES[0], path="/console/new")])
    with pytest.raises(RuntimeError, match="/console/new"):
        console.pages(known)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_console_row_from_end_to_end() -> None:
    async with open_stage(quick=True) as stage:
        report = await console.bench(stage)
    assert len(report.bars) == 3
    assert report.figures["/console/dead-letters/groups"].value > 0
    assert report.figures["GET /stats"].value > 0
    assert any("loaded itself" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_scale_row_from_end_to_end() -> None:
    async with open_stage(quick=True) as stage:
        report = await scale.bench(stage)
    assert len(report.bars) == 2
    assert len(report.notes) == 6
    assert all(figure.value > 0 for figure in report.figures.values())


def test_the_model_of_more_cores_is_limited_by_cpu_and_then_by_the_offset_lock() -> None:
    """1,000 µs of CPU and 100 µs of serial time: 700 transactions a second for each core, 10,000 at most."""
    first, *lines = model(1000, 100)
    assert "at most 10,000/s" in first
    found = [re.search(r"(\d+) cores: +([\d,]+) .* limited by (.*)", line) for line in lines]
    assert [one.groups() for one in found if one] == [
        ("2", "1,400", "CPU"),
        ("4", "2,800", "CPU"),
        ("8", "5,600", "CPU"),
        ("16", "10,000", "the offset lock"),
        ("32", "10,000", "the offset lock"),
    ]


def test_the_cost_of_a_round_is_divided_by_its_transactions() -> None:
    cost = Cost(transactions=1000, seconds=2, api_s=0.2, worker_s=0.1, postgres_s=0.15)
    assert (cost.rate, cost.us(cost.api_s), round(cost.all_us)) == (500, 200, 450)
