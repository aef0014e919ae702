"""Health, versions, topics and the accept switch, over the whole ASGI app."""

import asyncio
import resource
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.event import listen
from structlog.testing import capture_logs

from app.config import Settings
from app.database.connection import Connection, Database, connect
from app.ids import uuid7
from app.lifecycle.loops import all_loops
from app.lifecycle.startup import assemble
from app.loops import accept_switch, clock_offset, gauges
from app.loops import readiness_gauge as ready_loop
from app.migrate import head
from app.runtime import worker_state
from app.runtime.loop_runner import Loop, StepResult, run
from app.runtime.state import Runtime
from app.store.admin.figures import LOOKED_UP_MOST
from tests.conftest import DAYS_AHEAD, assembled, client_of, shares
from tests.coordinator.test_races import WAITING
from tests.support.days import go_to, long_ago, park, post_half, post_transaction, subscribe
from tests.support.processes import Service


async def ready(client: httpx.AsyncClient) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The status, the checks and the warnings of `/readyz`, by name."""
    answer = await client.get("/readyz")
    body = answer.json()
    assert body["status"] == ("ready" if answer.status_code == 200 else "not_ready")
    return answer.status_code, *({check["name"]: check for check in body[part]} for part in ("checks", "warnings"))


@pytest.fixture
async def cut_off(settings: Settings, dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service whose database does not answer any more."""
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(assembled(settings, dsn))
        await runtime.database.close()
        # The discard port: nothing listens there.
        runtime.database = Database("postgresql://nobody@127.0.0.1:9/none", pool_size=2)
        stack.push_async_callback(runtime.database.close)
        yield await stack.enter_async_context(client_of(runtime))


async def test_livez_never_touches_the_database(cut_off: httpx.AsyncClient) -> None:
    answer = await cut_off.get("/livez")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_metrics_need_no_database(cut_off: httpx.AsyncClient) -> None:
    assert (await cut_off.get("/metrics")).status_code == 200


class Held(Collector):
    """A family that takes long to collect: until `released`."""

    def __init__(self) -> None:
        self.entered, self.released, self.collected = threading.Event(), threading.Event(), 0

    def collect(self) -> Iterator[Metric]:
        self.collected += 1
        self.entered.set()
        # A service that collects in its event loop would wait in vain.
        self.released.wait(60)
        yield GaugeMetricFamily("held", "", self.collected)


async def test_other_requests_are_answered_while_metrics_are_collected(
    client: httpx.AsyncClient, runtime: Runtime
) -> None:
    held = Held()
    runtime.metrics.registry.register(held)
    scrapes = [asyncio.create_task(client.get("/metrics")) for _ in range(3)]
    try:
        assert await asyncio.to_thread(held.entered.wait, 60)
        assert (await client.get("/livez")).status_code == 200
        assert not any(scrape.done() for scrape in scrapes)
    finally:
        held.released.set()
        answers = await asyncio.gather(*scrapes)
    # The three share one collection, and a later scrape has its own.
    assert {answer.text.rpartition("held ")[2] for answer in answers} == {"1.0\n"}
    assert (await client.get("/metrics")).text.endswith("held 2.0\n")


async def test_readyz_says_that_the_database_is_gone(cut_off: httpx.AsyncClient) -> None:
    status, checks, _ = await ready(cut_off)
    assert status == 503
    assert checks["database"]["ok"] is False
    assert "does not answer" in checks["database"]["detail"]
    assert checks["clock"]["ok"] is True
    assert (await cut_off.get("/version")).status_code == 503


async def test_readyz_of_a_service_that_is_well(client: httpx.AsyncClient) -> None:
    status, checks, warnings = await ready(client)
    assert status == 200
    assert set(checks) == {"database", "migrations", "partitions", "clock"}
    assert all(check["ok"] for check in checks.values())
    # The tests' server runs with fsync off.
    assert set(warnings) == {"durability"}
    assert warnings["durability"]["detail"].startswith("fsync off")


async def test_readyz_says_that_the_database_takes_no_writes(
    client: httpx.AsyncClient, dsn: str, runtime: Runtime
) -> None:
    other = await connect(dsn)
    name = await other.fetchval("select current_database()")
    await other.execute(f"alter database {name} set default_transaction_read_only = on")
    await other.close()
    await runtime.database.close()
    status, checks, _ = await ready(client)
    assert status == 503
    assert checks["database"]["ok"] is False
    assert "takes no writes" in checks["database"]["detail"]


async def test_readyz_says_that_migrations_are_behind(client: httpx.AsyncClient, db: Connection) -> None:
    await db.execute("update alembic_version set version_num = '0001'")
    status, checks, _ = await ready(client)
    assert status == 503
    assert "halfnote migrate" in checks["migrations"]["detail"]


async def test_readyz_of_a_service_beside_a_later_version(client: httpx.AsyncClient, db: Connection) -> None:
    await db.execute("update alembic_version set version_num = '9999'")
    status, checks, _ = await ready(client)
    assert status == 200
    assert f"later than this version's {head()}, which it still serves" in checks["migrations"]["detail"]
    await db.execute("update shared_rule set value = 9999 where name = 'oldest_served_revision'")
    status, checks, _ = await ready(client)
    assert status == 503
    assert not checks["migrations"]["ok"]


async def test_readyz_asks_for_the_partitions_of_today_and_tomorrow(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    runtime.clock.fixed = long_ago(1 - DAYS_AHEAD)
    assert (await ready(client))[0] == 200
    runtime.clock.fixed = long_ago(-DAYS_AHEAD)
    status, checks, _ = await ready(client)
    assert status == 503
    assert long_ago(-DAYS_AHEAD - 1).date().isoformat() in checks["partitions"]["detail"]
    assert long_ago(-DAYS_AHEAD).date().isoformat() not in checks["partitions"]["detail"]


@pytest.mark.parametrize(
    ("skew_s", "ok", "said"), [(4.9, True, "behind"), (5.1, False, "behind"), (-5.1, False, "ahead")]
)
async def test_readyz_judges_the_clock(
    client: httpx.AsyncClient, runtime: Runtime, skew_s: float, ok: bool, said: str
) -> None:
    runtime.clock.skew_s = skew_s
    status, checks, _ = await ready(client)
    assert status == (200 if ok else 503)
    assert checks["clock"]["ok"] is ok
    assert said in checks["clock"]["detail"]


async def test_readyz_and_the_metrics_name_a_stalled_loop(client: httpx.AsyncClient, runtime: Runtime) -> None:
    # The loop of the certificate has the pause of HALFNOTE_TLS_RELOAD_S, up to a day.
    ago = {"upkeep": 200, "relay": 200, "certificate": 20_000}
    runtime.heartbeats.update({name: time.monotonic() - age_s for name, age_s in ago.items()})
    runtime.every_s.update(upkeep=60.0, relay=1.0, certificate=86_400.0)
    status, checks, _ = await ready(client)
    assert status == 503
    assert {name: checks[f"loop:{name}"]["ok"] for name in ago} == {"upkeep": True, "relay": False, "certificate": True}
    shown = (await client.get("/metrics")).text.splitlines()
    for name, late in (("upkeep", 0), ("relay", 1), ("certificate", 0)):
        assert f'halfnote_loop_late{{loop="{name}"}} {late}.0' in shown


async def test_readyz_of_an_api_process_tells_of_the_worker_process_beside_it(
    client: httpx.AsyncClient, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "worker.json"
    monkeypatch.setenv(worker_state.VARIABLE, str(file))
    runtime.settings = runtime.settings.model_copy(update={"role": "api"})
    runtime.heartbeats.update(clock=time.monotonic())

    async def found() -> tuple[int, dict[str, Any]]:
        status, checks, _ = await ready(client)
        return status, {name: checks[name]["ok"] for name in checks if name in ("worker", "loop:relay", "loop:clock")}

    # It did not start yet.
    assert await found() == (503, {"worker": False, "loop:clock": True})
    worker_state.write(file, {"relay": time.monotonic(), "clock": time.monotonic()}, {"relay": 1.0, "clock": 60.0})
    assert await found() == (200, {"worker": True, "loop:relay": True, "loop:clock": True})
    # Of a loop that both have, the later one counts.
    worker_state.write(
        file, {"relay": time.monotonic() - 200, "clock": time.monotonic() - 500}, {"relay": 1.0, "clock": 60.0}
    )
    assert await found() == (503, {"worker": True, "loop:relay": False, "loop:clock": False})
    worker_state.write(file, {"relay": time.monotonic()}, {"relay": 1.0})
    monkeypatch.setattr(worker_state, "monotonic", lambda: time.monotonic() - 2 * worker_state.SILENT_AFTER_S)
    worker_state.write(file, {"relay": time.monotonic()}, {"relay": 1.0})
    # It hangs, or is stopped.
    assert await found() == (503, {"worker": False, "loop:relay": True, "loop:clock": True})
    # It died.
    worker_state.clear(file)
    assert await found() == (503, {"worker": False, "loop:clock": True})


async def test_a_worker_beside_api_processes_writes_its_state(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "worker_state" not in {loop.name for loop in all_loops(runtime)}
    file = tmp_path / "worker.json"
    monkeypatch.setenv(worker_state.VARIABLE, str(file))
    [writer] = [loop for loop in all_loops(runtime) if loop.name == "worker_state"]
    runtime.heartbeats.update(relay=12.5)
    await writer.step(runtime, runtime.clock.now())
    written = worker_state.read(file)
    assert written is not None
    assert written.heartbeats["relay"] == 12.5
    assert [one.name for one in tmp_path.iterdir()] == ["worker.json"]


async def test_loop_that_never_ends_a_turn_has_an_age(runtime: Runtime) -> None:
    entered = asyncio.Event()

    async def hang(runtime: Runtime, now: object) -> StepResult:
        entered.set()
        await asyncio.Event().wait()
        return StepResult()

    before = time.monotonic()
    running = asyncio.create_task(run(Loop("stuck", hang, 3.0), runtime, asyncio.Event()))
    await entered.wait()
    running.cancel()
    assert before <= runtime.heartbeats["stuck"] <= time.monotonic()
    assert runtime.every_s["stuck"] == 3.0


async def test_readyz_warns_of_held_days_and_dead_check_urls(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await db.execute("update day set held = '{parked,undelivered:billing}' where day = $1", long_ago(0).date())
    urls = [f"http://127.0.0.1:9/{name}" for name in "abc"]
    await db.execute("update producer_group set check_urls = $1 where name = 'shop'", urls)
    await db.execute(
        "insert into check_url values ('shop', 'http://127.0.0.1:9/a', now() - interval '1 min', now(), 'refused'), "
        "('shop', 'http://127.0.0.1:9/b', now(), now() - interval '1 min', 'refused'), "
        "('shop', 'http://127.0.0.1:9/c', null, now(), 'refused')"
    )
    status, _, warnings = await ready(client)
    assert status == 200
    assert f"{long_ago(0).date().isoformat()} by parked, undelivered:billing" in warnings["days_held"]["detail"]
    detail = warnings["check_urls"]["detail"]
    assert "/a" in detail
    assert "/b" not in detail
    assert "/c" in detail


async def test_stopping_process_is_not_ready(client: httpx.AsyncClient, runtime: Runtime) -> None:
    runtime.stopping = runtime.refusing_halves = True
    status, checks, warnings = await ready(client)
    assert status == 503
    assert checks["stopping"]["ok"] is False
    assert "accept" not in warnings


async def test_a_process_that_drains_says_so_at_once(settings: Settings, dsn: str, db: Connection) -> None:
    async with AsyncExitStack() as stack:
        runtime = await assemble(settings, dsn, stack)
        client = await stack.enter_async_context(client_of(runtime))
        runtime.found.for_s = 0.0
        assert (await ready(client))[0] == 200
        # A look that hangs: it waits for a table.
        async with db.transaction():
            await db.execute("lock table day")
            looking = asyncio.create_task(ready(client))
            async with asyncio.timeout(20):
                while not await db.fetchval(WAITING):
                    await asyncio.sleep(0.01)
            runtime.stopping = runtime.refusing_halves = True
            async with asyncio.timeout(1):
                status, checks, _ = await ready(client)
            assert not looking.done()
        assert (status, checks["stopping"]["ok"]) == (503, False)
        # An earlier caller gets the result that arrived in the meantime.
        assert (await looking)[0] == 503


def lent_by(runtime: Runtime) -> list[int]:
    """How many connections the pool has out, noted each time that it lends one."""
    pool, lent = runtime.database.engine.sync_engine.pool, []
    listen(pool, "checkout", lambda *_: lent.append(pool.checkedout()))  # type: ignore[attr-defined]
    return lent


@pytest.mark.parametrize("path", ["/readyz", "/version"])
async def test_concurrent_probes_query_the_database_once_a_second(settings: Settings, dsn: str, path: str) -> None:
    async with AsyncExitStack() as stack:
        runtime = await assemble(settings.model_copy(update={"auth": "keys"}), dsn, stack)
        client = await stack.enter_async_context(client_of(runtime))
        lent, began, answered = lent_by(runtime), time.monotonic(), 0
        while time.monotonic() < began + 2.5:
            answers = await asyncio.gather(*(client.get(path) for _ in range(200)))
            assert {answer.status_code for answer in answers} == {200}
            answered += len(answers)
        assert answered >= 400
        assert 2 <= len(lent) <= time.monotonic() - began + 1
        assert max(lent) == 1


async def test_health_results_expire(settings: Settings, dsn: str) -> None:
    async with AsyncExitStack() as stack:
        runtime = await assemble(settings, dsn, stack)
        client = await stack.enter_async_context(client_of(runtime))
        assert ((await ready(client))[0], (await client.get("/version")).status_code) == (200, 200)
        await runtime.database.close()
        runtime.database = Database("postgresql://nobody@127.0.0.1:9/none", pool_size=2)
        stack.push_async_callback(runtime.database.close)
        gone = time.monotonic()
        while (await ready(client))[0] == 200 or (await client.get("/version")).status_code == 200:
            assert time.monotonic() < gone + 3
            await asyncio.sleep(0.05)
        assert (await ready(client))[1]["database"]["ok"] is False


async def test_a_canceled_probe_does_not_cancel_the_shared_query(client: httpx.AsyncClient, db: Connection) -> None:
    async with db.transaction():
        await db.execute("lock table day")
        first, second = (asyncio.create_task(ready(client)) for _ in range(2))
        async with asyncio.timeout(20):
            while not await db.fetchval(WAITING):
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert (await second)[0] == 200


FLOOD, FLOOD_S = 1000, 4.0


async def test_a_service_that_is_well_stays_ready_in_a_flood_of_probes(data_dir: Path, dsn: str) -> None:
    """Callers without a key probe over real sockets, each again as soon as it is answered."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files[1], max(files[0], FLOOD + 512)), files[1]))
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_AUTH="keys")
    statuses: Counter[bytes] = Counter()
    await service.start()

    async def probe(until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        while time.monotonic() < until:
            writer.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            statuses[head.split(b" ", 2)[1]] += 1
            [length] = [line[16:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
            await reader.readexactly(int(length))
        writer.transport.abort()

    try:
        until = time.monotonic() + FLOOD_S
        await asyncio.gather(*(probe(until) for _ in range(FLOOD)))
    finally:
        service.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    assert statuses.total() >= FLOOD
    assert set(statuses) == {b"200"}


@shares
async def test_version(shared_client: httpx.AsyncClient) -> None:
    answer = (await shared_client.get("/version")).json()
    assert set(answer) == {"version", "schema_revision", "python", "postgres"}
    assert answer["schema_revision"] == head()
    assert int(answer["postgres"].split(".")[0].split()[0]) >= 15


async def test_topics_name_their_subscriptions(
    client: httpx.AsyncClient, db: Connection, group: str, runtime: Runtime
) -> None:
    for topic in ("billing.paid", "billing", "ordr", "order"):
        await post_half(client, {"topic": topic, "body": 1})
    await subscribe(db, "b-all", "billing.*", "order")
    await subscribe(db, "a-orders", "order", state="paused")
    answer = (await client.get("/topics")).json()
    assert {row["topic"]: row["subscriptions"] for row in answer["items"]} == {
        "billing": [],
        "billing.paid": ["b-all"],
        "order": ["a-orders", "b-all"],
        "ordr": [],
    }
    assert answer["next_cursor"] is None


async def test_topics_come_in_pages(client: httpx.AsyncClient, group: str) -> None:
    await post_half(client, *({"topic": f"t{n}", "body": 1} for n in range(5)))
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await client.get("/topics", params={"limit": 2, **cursor})).json()
        assert len(page["items"]) <= 2
        seen += [row["topic"] for row in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert seen == [f"t{n}" for n in range(5)]


@shares
@pytest.mark.parametrize("params", [{"limit": "0"}, {"limit": "1001"}, {"cursor": "a\0"}, {"page": "2"}])
async def test_topics_refuse_bad_parameters(shared_client: httpx.AsyncClient, params: dict[str, str]) -> None:
    answer = await shared_client.get("/topics", params=params)
    assert (answer.status_code, answer.json()["field"]) == (422, next(iter(params)))


@pytest.mark.parametrize("path", ["/half", "/messages"])
async def test_what_is_stored_can_be_repeated_while_the_service_drains(
    client: httpx.AsyncClient, runtime: Runtime, group: str, path: str
) -> None:
    message = {"topic": "order", "body": {"order": 1030}}
    stored = {"transaction_id": str(uuid7(runtime.clock.now())), "producer_group": group, "messages": [message]}
    assert (await client.post(path, json=stored)).status_code == 201
    assert (await client.put("/accept", json={"accept": "ends"})).status_code == 200
    again = await client.post(path, json=stored)
    assert (again.status_code, again.json()["transaction_id"]) == (200, stored["transaction_id"])
    other = {**stored, "messages": [{**message, "body": {"order": 1031}}]}
    assert (await client.post(path, json=other)).json()["type"] == "/problems/content-differs"
    # Few are looked up at once; the others come again.
    async with runtime.repeat_looks, runtime.repeat_looks:
        assert (await client.post(path, json=stored)).json()["type"] == "/problems/draining"
    for new in (
        {**stored, "transaction_id": str(uuid7(runtime.clock.now()))},
        {"producer_group": group, "messages": [message]},
    ):
        assert (await client.post(path, json=new)).json()["type"] == "/problems/draining"


async def test_accept_switch_reaches_every_replica(
    client: httpx.AsyncClient, runtime: Runtime, settings: Settings, dsn: str, group: str
) -> None:
    undecided = await post_half(client)
    assert (await client.get("/accept")).json() == {"accept": "all", "changed_at": None, "here": "all"}
    answer = await client.put("/accept", json={"accept": "ends"})
    assert answer.status_code == 200
    assert (answer.json()["accept"], answer.json()["here"]) == ("ends", "ends")
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(assembled(settings, dsn))
        there = await stack.enter_async_context(client_of(other))
        assert not other.refusing_halves
        await accept_switch.step(other, other.clock.now())
        for replica in (client, there):
            refused = await replica.post(
                "/half", json={"producer_group": group, "messages": [{"topic": "t", "body": 1}]}
            )
            assert refused.status_code == 503
            assert refused.json()["type"] == "/problems/draining"
            assert "accept" in (await ready(replica))[2]
        end = {"transaction_id": undecided, "producer_group": group, "verdict": "commit"}
        assert (await there.post("/end", json=end)).status_code == 200
        assert (await there.put("/accept", json={"accept": "all"})).status_code == 200
        await accept_switch.step(runtime, runtime.clock.now())
        await post_half(client)
        await post_half(there)


@pytest.mark.parametrize("reason", ["setting", "stopping"])
async def test_switch_does_not_override_settings_or_a_stop(
    settings: Settings, dsn: str, group: str, reason: str
) -> None:
    async with AsyncExitStack() as stack:
        changed = settings.model_copy(update={"accept": "ends"} if reason == "setting" else {})
        runtime = await stack.enter_async_context(assembled(changed, dsn))
        runtime.stopping = reason == "stopping"
        client = await stack.enter_async_context(client_of(runtime))
        assert (await client.put("/accept", json={"accept": "all"})).json()["here"] == "ends"
        await accept_switch.step(runtime, runtime.clock.now())
        assert runtime.refusing_halves


async def test_a_repeated_switch_changes_nothing(client: httpx.AsyncClient, runtime: Runtime) -> None:
    async def acts() -> int:
        async with runtime.request_pool.connection() as connection:
            count: int = await connection.fetchval("select count(*) from audit where what = 'accept.put'")
        return count

    first = (await client.get("/accept")).json()["accept"]
    other = "ends" if first == "all" else "all"
    before = await acts()
    assert (await client.put("/accept", json={"accept": first})).json()["accept"] == first
    assert await acts() == before
    turned = (await client.put("/accept", json={"accept": other})).json()
    repeated = (await client.put("/accept", json={"accept": other})).json()
    assert (repeated, await acts()) == (turned, before + 1)
    back = (await client.put("/accept", json={"accept": first})).json()
    assert (back["accept"], await acts()) == (first, before + 2)
    assert back["changed_at"] > turned["changed_at"]


@shares
@pytest.mark.parametrize("body", [{"accept": "none"}, {}, {"accept": "all", "more": 1}])
async def test_accept_refuses_other_words(shared_client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await shared_client.put("/accept", json=body)).status_code == 422


async def test_a_step_may_ask_for_the_next_one_before_its_time(runtime: Runtime) -> None:
    stopping, taken = asyncio.Event(), list[object]()

    async def step(_: Runtime, now: object) -> StepResult:
        taken.append(now)
        if len(taken) == 3:
            stopping.set()
        return StepResult(within_s=0.0)

    async with asyncio.timeout(10):
        await run(Loop("soon", step, 3600.0), runtime, stopping)
    assert len(taken) == 3


async def test_every_role_follows_and_only_workers_work(runtime: Runtime, settings: Settings) -> None:
    everything = {loop.name for loop in all_loops(runtime)}
    runtime.settings = settings.model_copy(update={"role": "api"})
    following = {loop.name for loop in all_loops(runtime)}
    assert {"accept", "clock", "ready"} <= following
    assert {"upkeep", "gauges"} <= everything - following


async def test_a_database_that_goes_away_and_comes_back_is_seen_in_the_metrics(runtime: Runtime) -> None:
    there, away = runtime.database, Database("postgresql://nobody@127.0.0.1:9/none", pool_size=2)
    for database, ready in ((there, 1), (away, 0), (there, 1)):
        runtime.database = database
        await ready_loop.step(runtime, runtime.clock.now())
        assert exposed(runtime)["halfnote_ready"] == ready
    await away.close()


async def test_clock_loop_measures_and_says_so(runtime: Runtime) -> None:
    runtime.clock.offset_s = 99.0
    with capture_logs() as lines:
        await clock_offset.step(runtime, runtime.clock.now())
    assert abs(runtime.clock.offset_s) < 1
    assert lines == []
    assert exposed(runtime)["halfnote_clock_skew_seconds"] == runtime.clock.skew_s


async def test_a_skew_of_the_clock_is_logged_at_most_once_a_minute_and_when_it_has_ended(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, machine_time = runtime.clock.now(), time.time

    async def said(after_s: float, ahead_s: float) -> list[str]:
        """Take a step while the machine's clock is ahead; return what it logs."""
        monkeypatch.setattr(time, "time", lambda: machine_time() + ahead_s)
        with capture_logs() as lines:
            await clock_offset.step(runtime, began + timedelta(seconds=after_s))
        return [line["event"] for line in lines]

    assert await said(0, 20) == ["clock_skew"]
    assert [await said(after_s, 20) for after_s in range(5, 60, 5)] == [[]] * 11
    assert await said(60, 20) == ["clock_skew"]
    # A skew that ends and begins again has one line a minute, too.
    assert [await said(after_s, ahead_s) for after_s, ahead_s in ((65, 0), (70, 20), (115, 0))] == [[]] * 3
    assert await said(120, 0) == ["clock_skew_ended"]
    assert await said(180, 0) == []
    assert await said(185, -20) == ["clock_skew"]


async def test_gauges_look_at_the_verdict_first(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    then = long_ago(0) - timedelta(hours=1)
    await go_to(runtime, db, then)
    in_doubt = [await post_half(client), await post_half(client), await post_transaction(client)]
    for transaction_id in in_doubt:
        await park(db, transaction_id)
    await db.execute("update check_back set state = 1")
    for transaction_id in (await post_half(client), await post_transaction(client)):
        await park(db, transaction_id)
    await gauges.step(runtime, then + timedelta(seconds=90))
    shown = exposed(runtime)
    assert shown["halfnote_in_doubt"] == 2
    assert shown["halfnote_parked"] == 1
    assert shown["halfnote_oldest_in_doubt_seconds"] == 90
    await db.execute("delete from check_back")
    await gauges.step(runtime, then)
    shown = exposed(runtime)
    assert (shown["halfnote_in_doubt"], shown["halfnote_oldest_in_doubt_seconds"]) == (0, 0)


async def test_gauges_look_at_no_verdict_past_a_thousand_rows(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Each look at a verdict reads a few pages, and the gauges are set every 5 seconds."""
    await park(db, await post_transaction(client))
    await db.execute("update check_back set state = 1")
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at) "
        "select gen_random_uuid(), $1, 1, now() from generate_series(1, $2::int)",
        group,
        LOOKED_UP_MOST,
    )
    await gauges.step(runtime, runtime.clock.now())
    assert exposed(runtime)["halfnote_in_doubt"] == LOOKED_UP_MOST + 1


async def test_gauges_show_what_holds_days_and_what_no_longer_does(runtime: Runtime, db: Connection) -> None:
    day = long_ago(0).date()
    await db.execute("update day set held = '{parked}' where day = $1", day)
    await gauges.step(runtime, runtime.clock.now())
    series = f'halfnote_day_held{{cause="parked",day="{day.isoformat()}"}}'
    assert exposed(runtime)[series] == 1
    await db.execute("update day set held = '{}'")
    await gauges.step(runtime, runtime.clock.now())
    assert exposed(runtime)[series] == 0


def exposed(runtime: Runtime) -> dict[str, float]:
    """The values that `/metrics` shows, by series."""
    lines = runtime.metrics.exposition().decode().splitlines()
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines) if series[0] != "#"}
