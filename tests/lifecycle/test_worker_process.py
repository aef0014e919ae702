"""`halfnote serve` as API processes and a worker process beside them: kills, the order of the end, what is shown."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from app.cli.supervisor import (
    ASK_SERVING_EVERY_S,
    HANGS_AFTER_LOOKS,
    LONGEST_PAUSE_S,
    LOOK_EVERY_S,
    STEADY_AFTER_S,
    Child,
    Place,
    Supervisor,
)
from app.cli.usable_cores import usable_cores
from app.database.connection import Connection
from app.database.notifier import CHANNEL
from app.runtime import worker_state
from tests.conftest import register_group
from tests.lifecycle.test_serve import halves_held_up, until_refused, until_waiting
from tests.support.processes import Service
from tests.support.receiver import Sink
from tests.support.relay_stepping import order
from tests.support.requirements import absent

WITHIN_S = 90
HALF = {"producer_group": "shop", "messages": [order(1)]}


@pytest.fixture
def served(data_dir: Path, dsn: str) -> Iterator[Service]:
    """`halfnote serve` with an API process and its worker, the default."""
    if usable_cores() == 1:
        absent("the default is one process on one core", "MACHINE")
    # On a busy machine the default drain ends before a test has seen that the port is closed.
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_WORKERS="auto", HALFNOTE_DRAIN_S="40")
    yield service
    if service.process is not None:
        service.stop()


async def until(reached: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until the call returns something true, and return it."""
    async with asyncio.timeout(WITHIN_S):
        while not (found := await reached()):
            await asyncio.sleep(0.02)
    return found


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose connections do not outlive a killed process."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=service.url, timeout=30, limits=limits) as client:
        yield client


def children(service: Service, role: str) -> list[psutil.Process]:
    """Return the running processes of a role."""
    assert service.process is not None
    found = []
    for child in psutil.Process(service.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            # The parent has a helper of its own as well.
            serves = "spawn_main" in " ".join(child.cmdline())
            if serves and child.environ().get("HALFNOTE_ROLE") == role:
                found.append(child)
    return found


async def checks(client: httpx.AsyncClient) -> dict[str, bool]:
    """Return the checks of `/readyz`; none while no process answers."""
    try:
        return {check["name"]: check["ok"] for check in (await client.get("/readyz")).json()["checks"]}
    except httpx.TransportError:
        return {}


async def until_ready(client: httpx.AsyncClient) -> dict[str, bool]:
    """Wait until all checks are ok, and return them."""

    async def ready() -> dict[str, bool]:
        found = await checks(client)
        return found if found and all(found.values()) else {}

    return await until(ready)


async def commit(client: httpx.AsyncClient) -> int | None:
    """Publish a message; return its offset if it was acknowledged."""
    try:
        answer = await client.post("/messages", json=HALF)
    except httpx.TransportError:
        return None
    assert answer.status_code in (201, 503)
    return int(answer.json()["messages"][0]["offset"]) if answer.is_success else None


def subscription(sink: Sink) -> dict[str, Any]:
    return {"topics": ["order"], "destination": {"type": "webhook", "url": sink.url}}


async def fails(client: httpx.AsyncClient, check: str) -> bool:
    return (await checks(client)).get(check) is False


async def answered(db: Connection, notified: list[str]) -> bool:
    """Return whether the session, which receives notifications with an answer, has received any."""
    await db.execute("select 1")
    return bool(notified)


async def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def relay_ages(client: httpx.AsyncClient) -> list[str]:
    """Return the lines of `/metrics` with the age of the relay's loop; none while no process answers."""
    try:
        lines = (await client.get("/metrics")).text.splitlines()
    except httpx.TransportError:
        return []
    return [line for line in lines if line.startswith('halfnote_loop_age_seconds{loop="relay"}')]


async def test_each_process_is_replaced_when_it_is_killed_and_all_end_in_order(
    served: Service, dsn: str, db: Connection
) -> None:
    await register_group(db, "shop")
    await served.start()
    async with client_of(served) as client, Sink() as sink:
        assert {"worker", "loop:relay", "loop:accept"} <= set(await until_ready(client))
        assert (await client.put("/subscriptions/s", json=subscription(sink))).is_success
        acknowledged = set[int]()

        async def publish(at_least: int) -> None:
            while len(acknowledged) < at_least:
                offset = await commit(client)
                if offset is not None:
                    acknowledged.add(offset)

        async def arrived() -> bool:
            return acknowledged <= set(sink.counts)

        # The worker is woken by its socket. While it has not taken the new subscription, another process may take it,
        # and is notified.
        notified = list[str]()
        await db.add_listener(CHANNEL, lambda connection, pid, channel, payload: notified.append(payload))

        async def wakes_by_socket_alone() -> bool:
            notified.clear()
            await publish(len(acknowledged) + 10)
            await until(arrived)
            return not await answered(db, notified)

        await until(wakes_by_socket_alone)
        # Each process shows the age of its loops, whichever of them is asked for the metrics.
        await until(lambda: relay_ages(client))
        [worker] = children(served, "worker")
        # Frozen first: its successor delivers what is published now.
        worker.suspend()
        killed = [row[0] for row in await db.fetch("select distinct owner from lease")]
        assert killed
        await publish(len(acknowledged) + 10)
        worker.kill()
        # Until there is a successor, other relays are notified.

        async def notifies() -> bool:
            await publish(len(acknowledged) + 1)
            return await answered(db, notified)

        await until(notifies)
        await until(lambda: fails(client, "worker"))
        assert await relay_ages(client) == []
        await until(arrived)
        assert len(await until(lambda: relay_ages(client))) == 1

        [api] = children(served, "api")
        publishing = asyncio.create_task(publish(len(acknowledged) + 40))
        api.kill()
        async with asyncio.timeout(WITHIN_S):
            await publishing
        await until(arrived)
        await until_ready(client)

        processes = [*children(served, "api"), *children(served, "worker")]
        assert {worker.pid, api.pid}.isdisjoint(process.pid for process in processes)
        assert len(processes) == 2
        async with halves_held_up(dsn):
            half = asyncio.create_task(client.post("/half", json=HALF))
            await until_waiting(db, "%insert into half%")
            stopped = asyncio.create_task(asyncio.to_thread(served.stop))
            await until_refused(served)
        assert (await half).status_code == 201
        assert await stopped == 0
    assert all([await gone(process) for process in processes])
    # No lease is left to expire, but those of the killed worker: another process may deliver at once.
    left = await db.fetch("select name from lease where expires_at > now() and owner <> all($1)", killed)
    assert left == []


async def test_a_second_ctrl_c_drops_what_is_in_flight_in_every_process(
    served: Service, dsn: str, db: Connection
) -> None:
    await register_group(db, "shop")
    await served.start()
    assert served.process is not None
    async with client_of(served) as client, halves_held_up(dsn):
        await until_ready(client)
        half = asyncio.create_task(client.post("/half", json=HALF))
        await until_waiting(db, "%insert into half%")
        served.process.send_signal(signal.SIGINT)
        await until_refused(served)
        served.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(served.process.wait, WITHIN_S) == 130, served.log.read_text()[-2000:]
        # The process that had the request did not wait for it.
        assert (await half).status_code == 500
    assert "Traceback" not in served.log.read_text()


async def test_the_processes_end_when_their_parent_is_killed(served: Service) -> None:
    await served.start()
    processes = [*children(served, "api"), *children(served, "worker")]
    assert len(processes) == 2
    served.kill()
    for process in processes:
        await until(lambda process=process: gone(process))
    await until_refused(served)


def test_processes_that_cannot_start_are_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFNOTE_ROLE", "all")
    # The parent sets it in its own environment. What was there before, nothing, comes back after the test.
    monkeypatch.setenv(worker_state.VARIABLE, "")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config("app.no_such_module:app", log_config=None, timeout_graceful_shutdown=1)
        state_file = tmp_path / "worker.json"
        supervisor = Supervisor(config, listener, ["api", "worker"], state_file, api_niceness=0)
        assert supervisor.run(lambda: pytest.fail("nothing is ready")) == "not started"
        assert worker_state.read(state_file) is None


def test_a_process_that_does_not_answer_hangs_and_a_parent_that_was_stopped_does_not_mind() -> None:
    sent: list[bytes] = []
    child = Child.__new__(Child)
    child.parent_conn = SimpleNamespace(send=sent.append, recv=lambda: True)  # type: ignore[assignment]
    child.serves, child.unanswered, child.looked_at = True, None, 0.0
    now = ASK_SERVING_EVERY_S
    child.ask(now)
    assert sent == [b"ping"]
    # An hour passes in one look: Ctrl-Z, or a machine that sleeps.
    for _ in range(HANGS_AFTER_LOOKS - 1):
        now += 3600
        child.ask(now)
    assert not child.hangs
    child.ask(now)
    assert not child.hangs
    child.ask(now + LOOK_EVERY_S)
    assert child.hangs
    child.hear()
    assert not child.hangs
    assert sent == [b"ping"]


class DeadChild:
    """A child that ends as soon as it has served, by SIGKILL."""

    pid, exitcode, serves, hangs = 1, None, True, False
    process = parent_conn = child_conn = SimpleNamespace(close=lambda: None)

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at

    def ask(self, now: float) -> None:
        self.exitcode = -9


def test_a_process_that_dies_again_and_again_is_started_less_and_less_often() -> None:
    now, starts = 1000.0, []

    def start(role: str) -> Any:
        starts.append(now)
        return DeadChild(now)

    place = Place("worker", start, None)
    while now < 1060:
        assert place.turn(now)
        now += 0.25
    pauses = [round(later - former, 2) for former, later in pairwise(starts)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 2
    assert pauses[-1] >= LONGEST_PAUSE_S


def test_a_process_that_ran_for_long_is_started_again_at_once() -> None:
    starts: list[float] = []

    def start(role: str) -> Any:
        starts.append(now)
        return DeadChild(now)

    now = 0.0
    place = Place("api", start, None)
    for now in (0.0, STEADY_AFTER_S, STEADY_AFTER_S, STEADY_AFTER_S):
        assert place.turn(now)
    assert starts == [0.0, STEADY_AFTER_S]
