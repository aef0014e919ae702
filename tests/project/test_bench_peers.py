"""The comparison with RocketMQ and DTM: its arithmetic, its drivers' protocol, and what it says of missing parts."""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from bench.__main__ import PEERS, main
from bench.arrivals import Arrival, compiled
from bench.peers import parts, run
from bench.peers.halfnote import AHEAD, BATCHES, COMMIT, WEBHOOKS, CallersDriver, as_sent, requests_of, written
from bench.peers.parts import INSTALL, MissingPartError, require
from bench.peers.run import DEFAULT_MQ, DTM, TUNED_MQ, Found, add_figures, hold_bars, in_turn, opened
from bench.peers.slices import BrokenSliceError, Measured, Peer, ProcessDriver, Sent, Slice, driving
from bench.receiver import length_of
from bench.report import Report
from bench.services import Service
from bench.stage import Stage

DRIVER = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    kind, size, seconds, within = line.split()
    if size == "13":
        sys.exit("no luck")
    figures = {"sent": int(size), "delivered": int(size), "repeated": 0, "failed": 0, "seconds": float(seconds)}
    print(json.dumps(figures | {"late_us": [1000] * int(size)}), flush=True)
"""


def measured(rate: float, *, service_us: float = 0, database_us: float = 0, late_ms: float = 0) -> Measured:
    sent = Sent(100, 100, 0, 0, 100 / rate, [int(late_ms * 1000)] * 100)
    return Measured(sent, service_us * 100 / 1e6, database_us * 100 / 1e6, 0)


def runs(**rates: list[float]) -> Found:
    names = {"ours": WEBHOOKS, "batches": BATCHES, "ahead": AHEAD, "default": DEFAULT_MQ, "tuned": TUNED_MQ, "dtm": DTM}
    return Found({(names[name], 64): [measured(rate) for rate in of] for name, of in rates.items()})


def held(found: Found) -> dict[str, tuple[float, bool]]:
    report = Report("peers", "")
    hold_bars(report, found)
    return {bar.claim: (round(bar.value, 3), bar.held) for bar in report.bars}


def test_a_ratio_is_to_the_faster_rocketmq_of_its_round() -> None:
    bars = held(
        runs(
            ours=[1000, 900, 990],
            batches=[1600, 1400, 1500],
            ahead=[1000, 1000, 1000],
            default=[500, 1000, 900],
            tuned=[800, 750, 990],
        )
    )
    assert bars["Halfnote, webhooks, 64 at once, against RocketMQ's (0.90 to 1.25 x)"] == (1.0, True)
    assert bars["Halfnote, batches, 64 at once, against RocketMQ's (1.40 to 2.00 x)"] == (1.515, True)
    assert bars["Halfnote, ends not awaited, 64 at once, against RocketMQ's (1.00 to 1.25 x)"] == (1.01, True)
    assert not any("DTM" in claim for claim in bars)


def test_a_missed_bar_is_there() -> None:
    bars = held(runs(ours=[600, 600], dtm=[100, 100]))
    assert bars["Halfnote, webhooks, 64 at once, against DTM's (6.00 to 6.00 x)"] == (6.0, False)


def test_the_cost_of_a_delivered_transaction_has_bars() -> None:
    costs = [measured(1000, service_us=us, database_us=us - 120) for us in (200, 225, 400)]
    bars = held(Found({(WEBHOOKS, 64): costs}))
    assert bars["service of a delivered transaction, 64 at once, µs CPU"] == (225, True)
    assert bars["Postgres of a delivered transaction, 64 at once, µs CPU"] == (105, False)


def test_times_are_held_against_the_better_rocketmq() -> None:
    found = Found()
    for name, late_ms in ((WEBHOOKS, 5), (DEFAULT_MQ, 9), (TUNED_MQ, 4)):
        found.paced[name, 500] = [measured(500, late_ms=late_ms)]
    assert held(found) == {
        "p50 of commit to received at 500/s, ms, against RocketMQ's": (5, False),
        "p99 of commit to received at 500/s, ms, against RocketMQ's": (5, False),
    }
    found.lost.add((TUNED_MQ, 500))
    assert all(is_held for _, is_held in held(found).values())


def test_a_rate_that_only_halfnote_does_not_hold_is_no_silent_gap() -> None:
    report = Report("peers", "")
    found = Found(paced={(TUNED_MQ, 500): [measured(500, late_ms=4)]}, lost={(WEBHOOKS, 500), (DTM, 500)})
    add_figures(report, found)
    hold_bars(report, found)
    assert "DTM: does not hold 500/s, so it has no times there" in report.notes
    assert set(report.broken) == {"Halfnote does not hold 500/s, and RocketMQ does"}


def test_figures_are_medians_with_ranges() -> None:
    report = Report("peers", "")
    add_figures(report, runs(ours=[900, 1000, 1300]))
    figure = report.figures[f"{WEBHOOKS}, 64 at once"]
    assert (figure.value, figure.between) == (1000, (900, 1300))
    assert "900 to 1,300" in str(report)
    written = report.as_json({})["figures"][f"{WEBHOOKS}, 64 at once"]
    assert written == {"value": 1000, "unit": "transactions/s", "low": 900, "high": 1300}


def test_every_other_round_runs_backwards() -> None:
    peers = [Peer(name, None, float, float, float, list) for name in "abc"]  # type: ignore[arg-type]
    assert [[peer.name for peer in in_turn(peers, number)] for number in (0, 1, 2)] == [[*"abc"], [*"cba"], [*"abc"]]


def test_a_rate_is_held_if_all_is_delivered_in_its_time() -> None:
    assert Sent(500, 500, 0, 0, 5.2).held(5)
    assert not Sent(500, 500, 0, 0, 7).held(5)
    assert not Sent(500, 499, 0, 0, 5).held(5)
    assert not Sent(500, 499, 0, 1, 5).held(5)


def test_webhooks_count_once_and_batches_by_their_events() -> None:
    ends = {b"a": 10.5, b"b": 10.6, b"c": 10.7}
    load = Slice("pace", 3, 1, 1)
    single = [Arrival(at_s, 1, 1, name) for at_s, name in ((10.6, "a"), (10.7, "a"), (10.8, "b"))]
    assert as_sent(load, 10, ends, single) == Sent(3, 2, 1, 0, pytest.approx(0.8), [99999, 200000])
    batches = [Arrival(10.6, 2, 2, ""), Arrival(11, 2, 2, "")]
    assert as_sent(load, 10, ends, batches) == Sent(3, 3, 1, 0, pytest.approx(1), [])
    with pytest.raises(BrokenSliceError, match="nothing of 3 transactions"):
        as_sent(load, 10, ends, [])


@pytest.mark.parametrize("program", sorted(INSTALL))
def test_a_missing_program_says_how_to_install_it(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else f"/usr/bin/{name}")
    with pytest.raises(MissingPartError, match=rf"^`{program}` is missing\. .*: apt install [\w-]+$"):
        require(*parts.ROCKETMQ_PROGRAMS, *parts.DTM_PROGRAMS)


async def test_a_peer_that_cannot_run_is_a_line_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def halfnote(stage: Stage) -> AsyncIterator[tuple[Peer, ...]]:
        yield ()

    monkeypatch.setattr(run, "halfnote", halfnote)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    report = Report("peers", "")
    async with opened(Stage(None, tmp_path, True, {}), report) as peers:  # type: ignore[arg-type]
        assert peers == []
    assert [note.partition(": skipped. ")[0] for note in report.notes] == [DEFAULT_MQ, TUNED_MQ, DTM]
    assert report.broken == []


async def test_a_driver_answers_a_line_with_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with driving("some", log, sys.executable, "-c", DRIVER) as driver:
        peer = Peer("some", driver, float, float, float, lambda: [driver.process])
        peer.halt()
        async with asyncio.timeout(30):
            while driver.process.status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        peer.resume()
        found = await peer.measure(Slice("pace", 5000, 2, 1))
        assert found.sent == Sent(5000, 5000, 0, 0, 2, [1000] * 5000)
        with pytest.raises(BrokenSliceError, match="nothing of 0"):
            await peer.measure(Slice("run", 0, 2, 1))
        with pytest.raises(BrokenSliceError, match="driver ended:\nno luck"):
            await peer.measure(Slice("run", 13, 2, 1))


async def test_a_halted_driver_is_ended_with_its_block(tmp_path: Path) -> None:
    async with driving("some", tmp_path / "log", sys.executable, "-c", DRIVER) as driver:
        process = driver.process
        process.suspend()
    assert not process.is_running()


def test_help_names_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert "python -m bench [name…]" in told
    assert all(name in told for name in PEERS)


def test_the_same_versions_are_pinned_everywhere() -> None:
    pom = (parts.SOURCES / "java" / "pom.xml").read_text()
    assert pom.count(f"<version>{parts.ROCKETMQ_VERSION}</version>") == pom.count("<groupId>org.apache.rocketmq<")


@asynccontextmanager
async def answering(status: bytes, bodies: list[bytes]) -> AsyncIterator[Service]:
    """Answer each POST with a status, keep its body, and each GET with no content."""
    handlers: set[asyncio.Task[None]] = set()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                posted = head.startswith(b"POST")
                body = await reader.readexactly(length_of(head[:-4]) if posted else 0)
                if posted:
                    bodies.append(body)
                line = status if posted else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n" % line)

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
        yield Service(server.sockets[0].getsockname()[1], psutil.Process())
        # The client has closed its connections. A socket that is left open would fail a later test.
        while any(not handler.done() for handler in handlers):
            await asyncio.wait(handlers)


@asynccontextmanager
async def callers_of(service: Service, place: Path) -> AsyncIterator[ProcessDriver]:
    requests = written(requests_of("order", service.port), place)
    command = [str(await compiled("callers", place)), str(service.port), *map(str, requests)]
    async with driving("Halfnote", place / "callers.log", *command) as callers:
        yield callers


async def test_a_refused_request_breaks_off_one_slice_of_halfnote(tmp_path: Path) -> None:
    """An overloaded service must not end the comparison of the others."""
    async with answering(b"503 Service Unavailable", []) as service, callers_of(service, tmp_path) as callers:
        for kind, ahead in (("run", False), ("run", True), ("pace", False)):
            with pytest.raises(BrokenSliceError, match=r"4 requests failed:\n(refused: HTTP/1.1 503[^$]*)+"):
                await CallersDriver(callers, service, ahead).send(Slice(kind, 4, 1, 5))


@pytest.mark.parametrize("kind", ["run", "ahead", "pace"])
async def test_each_half_has_its_end(tmp_path: Path, kind: str) -> None:
    bodies: list[bytes] = []
    async with answering(b"201 Created", bodies) as service, callers_of(service, tmp_path) as callers:
        # 8 at once; `pace`: 8 a second. A busy machine gets to more than one each within two seconds.
        seconds = 0.5 if kind == "pace" else 2
        committed, failed, _ = map(int, (await callers.ask(f"{kind} 8 {seconds}\n", 30)).split())
        log = await callers.read(committed * COMMIT.size)
    assert failed == 0
    assert committed == 4 if kind == "pace" else committed > 8
    sent = [json.loads(body) for body in bodies]
    halves, ends = ([one["transaction_id"] for one in sent if ("verdict" in one) is posted] for posted in (False, True))
    noted = [transaction_id[:36].decode() for _, transaction_id in COMMIT.iter_unpack(log)]
    assert sorted(halves) == sorted(ends) == sorted(noted)
    assert len(set(noted)) == committed
    assert {UUID(id_).version for id_ in noted} == {7}
