"""Logs: JSON lines without bodies and secrets. Metrics: every family is there, also summed over processes."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import asyncpg
import httpx
import psutil
import pytest
import structlog

from app.database.connection import Connection
from app.loops import disk_usage, gauges
from app.loops.process_usage import ProcessUsage
from app.observability.logs import without_rows
from app.observability.metrics import Metrics
from app.runtime.disk_space import free_bytes
from app.runtime.state import Runtime
from tests.support.days import ORDER, post_end, post_half, post_transaction, subscribe
from tests.support.processes import ROOT, Service

BODY = "the-body-1030"
KEY = "whsec_" + "U2VjcmV0LW9mLW9yZGVyLTEwMzAtbm90LXRvLWxvZw=="
NEVER_LOGGED = (BODY, KEY, KEY.removeprefix("whsec_"))

FAMILIES = (
    "requests_total",
    "request_seconds",
    "transaction_outcomes_total",
    "flush_rows",
    "flush_seconds",
    "queue_depth",
    "requests_in_flight",
    "bodies_held_bytes",
    "halves_total",
    "verdicts_total",
    "verdicts_refused_total",
    "group_halves_total",
    "group_verdicts_total",
    "topic_messages_total",
    "key_refusals_total",
    "in_doubt",
    "oldest_in_doubt_seconds",
    "parked",
    "checks_total",
    "check_seconds",
    "check_url_up",
    "unrouted_messages",
    "deliveries_total",
    "breakers_total",
    "breaker_open",
    "oldest_due_seconds",
    "delivery_seconds",
    "commit_to_received_seconds",
    "relay_lag_seconds",
    "relay_lag_messages",
    "waiting_limit_used",
    "expired_messages_total",
    "retries_waiting",
    "oldest_retry_seconds",
    "dead_letters",
    "day_held",
    "days_ahead",
    "database_bytes",
    "day_bytes",
    "database_free_bytes",
    "database_hours_to_full",
    "left_undecided_total",
    "left_undelivered_total",
    "reconciliation_age_seconds",
    "reconciliation_proved_age_seconds",
    "reconciliation_run_seconds",
    "reconciliation_state",
    "reconciliation_findings",
    "reconciliation_days",
    "secrets_unreadable",
    "loop_age_seconds",
    "loop_late",
    "ready",
    "clock_skew_seconds",
    "cpu_seconds_total",
    "memory_bytes",
    "open_files",
    "open_files_max",
    "pool_connections_in_use",
    "pool_connections_max",
    "build_info",
    "tls_certificate_expires_timestamp_seconds",
    "tls_certificate_not_reloaded",
)


@pytest.fixture
def service(data_dir: Path, dsn: str) -> Iterator[Service]:
    """`halfnote serve` over the test's database, logging to a file."""
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn)
    yield service
    if service.process is not None:
        service.stop()


def lines_of(service: Service) -> list[dict[str, Any]]:
    """The log's lines; the greeting, which is for people, is not JSON."""
    return [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]


async def until_logged(service: Service, *events: str) -> None:
    async with asyncio.timeout(60):
        while not set(events) <= {line["event"] for line in lines_of(service)}:
            await asyncio.sleep(0.05)


async def test_log_is_json_and_holds_no_body_and_no_secret(service: Service, db: Connection) -> None:
    await db.execute("alter table half add constraint trap check (topic <> 'trap')")
    await service.start()
    async with httpx.AsyncClient(base_url=service.url) as client:
        group = {"check_urls": ["http://127.0.0.1:9/check"], "secret": KEY, "immunity_s": 1, "interval_s": 1}
        assert (await client.put("/producer-groups/shop", json=group)).status_code == 201
        billing = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/", "secret": KEY}}
        assert (await client.put("/subscriptions/billing", json=billing)).status_code == 201
        order = {"topic": "order", "key": "order-1030", "body": {"note": BODY}}
        # The first cannot be delivered and the second has none; the database refuses the third; the last is no JSON.
        await post_transaction(client, order)
        await post_half(client, order)
        trapped = {"producer_group": "shop", "messages": [{**order, "topic": "trap"}]}
        assert (await client.post("/half", json=trapped)).status_code == 422
        broken = await client.post(
            "/half", content=json.dumps(trapped)[:-2], headers={"content-type": "application/json"}
        )
        assert broken.status_code == 400
        await until_logged(service, "check", "delivery_failed", "flush_failed")
    assert service.stop() == 0
    text = service.log.read_text()
    for never in (*NEVER_LOGGED, "Failing row"):
        assert never not in text
    for line in lines_of(service):
        assert line["level"] in ("debug", "info", "warning", "error", "critical")
        assert line["timestamp"].endswith("Z")
        assert line["event"]
        assert line["logger"]
    assert "uvicorn.error" in {line["logger"] for line in lines_of(service)}
    refused = next(line for line in lines_of(service) if line["event"] == "flush_failed")
    assert "trap" in refused["error"]


def refused_row() -> asyncpg.PostgresError:
    error = asyncpg.CheckViolationError("new row violates check constraint")
    error.detail = f"Failing row contains ({BODY}\n\nThe above exception, {BODY})."
    return error


def test_refused_rows_are_taken_out_of_fields() -> None:
    assert BODY in str(refused_row())
    shown = without_rows(None, "warning", {"event": "x", "error": str(refused_row()), "requests": 1})
    assert shown == {"event": "x", "error": "new row violates check constraint", "requests": 1}


@pytest.mark.parametrize("given", ["error", "tuple", "current"])
def test_refused_rows_are_taken_out_of_traces(given: str) -> None:
    try:
        try:
            raise refused_row()
        except asyncpg.PostgresError as cause:
            raise ExceptionGroup("both", [RuntimeError("no"), refused_row()]) from cause
    except ExceptionGroup as error:
        exc_info = {"error": error, "tuple": (type(error), error, error.__traceback__), "current": True}[given]
        shown = without_rows(None, "error", {"event": "defect", "exc_info": exc_info})
        trace = structlog.processors.format_exc_info(None, "error", shown)["exception"]
    assert "new row violates check constraint" in trace
    assert "The above exception was the direct cause" in trace
    assert BODY not in trace


async def test_every_family_is_there_under_load(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await subscribe(db, "billing", "order")
    await asyncio.gather(*(post_transaction(client) for _ in range(20)))
    rolled_back = await post_transaction(client, ORDER, ORDER, verdict="rollback")
    assert (await post_end(client, rolled_back, "commit")).status_code == 409
    assert (await client.get("/transactions/none")).status_code in (404, 422)
    await gauges.step(runtime, runtime.clock.now())
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = answer.text.splitlines()
    families = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    assert {f"halfnote_{name}" for name in FAMILIES} <= families | {f"{name}_total" for name in families}
    shown = {series: float(value) for series, _, value in (x.rpartition(" ") for x in lines) if series[0] != "#"}
    assert shown["halfnote_halves_total"] == 21
    assert shown['halfnote_verdicts_total{source="producer",verdict="commit"}'] == 20
    assert shown['halfnote_verdicts_total{source="producer",verdict="rollback"}'] == 1
    assert shown['halfnote_verdicts_refused_total{source="producer"}'] == 1
    assert shown['halfnote_requests_total{route="/half",status="201"}'] == 21
    assert shown['halfnote_requests_total{route="/end",status="409"}'] == 1
    assert shown['halfnote_flush_rows_sum{lane="half"}'] == 21
    assert 1 <= shown['halfnote_flush_seconds_count{lane="half"}'] <= 21
    assert not any("_created" in series for series in shown)


def test_every_family_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = {word.strip("`").split("{")[0] for word in text.split() if word.startswith("`halfnote_")}
    assert documented == {f"halfnote_{name}" for name in FAMILIES}
    collected = {family.name for family in Metrics().registry.collect()}
    assert {name.removesuffix("_total") for name in documented} == collected


def value(runtime: Runtime, series: str) -> float | None:
    """Return a series of `/metrics`, such as `name{label="value"}`, or None if it is not there."""
    lines = runtime.metrics.exposition().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series), None)


async def test_the_use_of_a_process_is_measured(runtime: Runtime) -> None:
    usage = ProcessUsage()
    runtime.heartbeats["relay"] = monotonic() - 7
    async with runtime.database.connection():
        runtime.load_limits.in_flight = 3
        await usage.step(runtime, runtime.clock.now())
        assert value(runtime, "halfnote_pool_connections_in_use") == 1
    # Another process of the same service may be asked for the metrics.
    assert 7 <= (value(runtime, 'halfnote_loop_age_seconds{loop="relay"}') or 0) < 60
    assert value(runtime, 'halfnote_loop_late{loop="relay"}') == 0
    assert value(runtime, "halfnote_pool_connections_max") == runtime.settings.pool_size
    assert value(runtime, "halfnote_requests_in_flight") == 3
    used_s = value(runtime, "halfnote_cpu_seconds_total")
    # Work until the clock of the process moves, whose steps are of 10 ms.
    while (times := psutil.Process().cpu_times()).user + times.system <= (used_s or 0) + 0.05:
        pass
    await usage.step(runtime, runtime.clock.now())
    now_s = value(runtime, "halfnote_cpu_seconds_total")
    assert used_s is not None
    assert now_s is not None
    assert used_s < now_s <= sum(psutil.Process().cpu_times()[:2])
    memory = value(runtime, "halfnote_memory_bytes")
    assert memory is not None
    assert memory > 10_000_000
    files = value(runtime, "halfnote_open_files")
    assert files is not None
    assert 3 < files < (value(runtime, "halfnote_open_files_max") or 0)
    assert 'halfnote_build_info{python="' in runtime.metrics.exposition().decode()


async def test_the_sizes_of_database_and_days_are_measured(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    now = runtime.clock.now()
    today, tomorrow = (f'halfnote_day_bytes{{day="{now.date() + timedelta(days=n)}"}}' for n in range(2))
    usage = disk_usage.DiskUsage()
    await usage.step(runtime, now)
    before, empty = value(runtime, today), value(runtime, tomorrow)
    assert before == empty
    await asyncio.gather(*(post_transaction(client) for _ in range(20)))
    await usage.step(runtime, now)
    after = value(runtime, today)
    assert before is not None
    assert after is not None
    assert after > before
    assert (value(runtime, "halfnote_database_bytes") or 0) > after
    ahead = value(runtime, "halfnote_days_ahead")
    assert ahead == await db.fetchval("select count(*) from day where day > $1", now.date())
    await db.execute("update day set state = 'gone' where day = $1", now.date())
    await usage.step(runtime, now)
    assert value(runtime, today) is None


async def test_the_hours_until_the_disk_is_full_are_shown_where_they_are_known(
    runtime: Runtime, db: Connection
) -> None:
    free, hours = (f'halfnote_database_{name}{{source="setting"}}' for name in ("free_bytes", "hours_to_full"))
    usage, now = disk_usage.DiskUsage(), runtime.clock.now()

    def size() -> float:
        found = value(runtime, "halfnote_database_bytes")
        assert found is not None
        return found

    await usage.step(runtime, now)
    assert (value(runtime, free), value(runtime, hours)) == (None, None)
    disk = int(size()) + 10**8
    runtime.settings = runtime.settings.model_copy(update={"database_disk_bytes": disk})
    await usage.step(runtime, now)
    before = size()
    assert value(runtime, free) == disk - before
    assert value(runtime, hours) is None
    # More than Postgres's own work, such as a vacuum, can make the database smaller.
    await db.execute("create table grown as select repeat('x', 900) from generate_series(1, 10000)")
    await usage.step(runtime, now + timedelta(hours=1))
    grown = size() - before
    assert grown > 0
    assert value(runtime, free) == disk - size()
    assert value(runtime, hours) == pytest.approx((disk - size()) / grown, rel=0.05)


def test_the_embedded_database_grows_into_its_file_system(tmp_path: Path) -> None:
    free = free_bytes(None, tmp_path, 10**6)
    assert free is not None
    assert free > 0
    assert free_bytes(None, None, 10**6) is None
    assert free_bytes(10**5, tmp_path, 10**6) == 0


@pytest.mark.parametrize("workers", ["1", "auto"])
async def test_serve_shows_the_free_disk_of_its_embedded_postgres(data_dir: Path, workers: str) -> None:
    service = Service(data_dir, "serve", HALFNOTE_WORKERS=workers)
    try:
        await service.start()
        series = 'halfnote_database_free_bytes{source="data_dir"} '
        async with httpx.AsyncClient(base_url=service.url) as client, asyncio.timeout(150):
            while series not in (text := (await client.get("/metrics")).text):
                await asyncio.sleep(0.1)
            assert float(text.partition(series)[2].split()[0]) > 0
            assert (await client.get("/stats")).json()["disk"]["free_bytes"] > 0
        assert "unknown_setting" not in service.log.read_text()
    finally:
        service.stop()


# What only workers measure, without labels.
MEASURED = (
    *("in_doubt", "oldest_in_doubt_seconds", "parked", "unrouted_messages", "days_ahead", "database_bytes"),
    *("reconciliation_age_seconds", "reconciliation_proved_age_seconds", "secrets_unreadable"),
)


async def shown_measures(client: httpx.AsyncClient) -> set[str]:
    """Return which of MEASURED, or the duration of a proof, `/metrics` shows."""
    names = {line.split()[0] for line in (await client.get("/metrics")).text.splitlines() if line[:1] != "#"}
    return {name for name in (*MEASURED, "reconciliation_run_seconds") if f"halfnote_{name}" in names}


async def test_a_process_without_a_worker_shows_no_0_for_what_only_workers_measure(data_dir: Path, dsn: str) -> None:
    api, worker = (
        Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_ROLE=one) for one in ("api", "worker")
    )
    try:
        await asyncio.gather(api.start(), worker.start())
        async with (
            httpx.AsyncClient(base_url=api.url) as of_api,
            httpx.AsyncClient(base_url=worker.url) as of_worker,
            asyncio.timeout(150),
        ):
            # No proof has run.
            while await shown_measures(of_worker) != set(MEASURED):
                await asyncio.sleep(0.1)
            assert await shown_measures(of_api) == set()
            # It shows what each process measures, and 0 of it.
            assert "\nhalfnote_halves_total 0.0\n" in (await of_api.get("/metrics")).text
    finally:
        for service in (api, worker):
            if service.process is not None:
                service.stop()


def test_a_measure_is_not_shown_by_processes_that_do_not_take_it(tmp_path: Path) -> None:
    children = [Child(tmp_path) for _ in range(2)]
    measures = ("halfnote_unrouted_messages", "halfnote_in_doubt")
    try:
        assert shown_by(children[0], measures) == {}
        children[1].run("metrics.relay.unrouted.set(3)")
        children[1].run("metrics.checkback.in_doubt.set(0)")
        assert shown_by(children[0], measures) == {"halfnote_unrouted_messages": 3, "halfnote_in_doubt": 0}
        children[1].kill()
        assert shown_by(children[0], measures) == {}
    finally:
        for child in children:
            child.kill()


def test_files_that_another_process_has_only_opened_are_left_out(tmp_path: Path) -> None:
    """A process makes a file, then gives it its size, then writes: all of them may be seen in between."""
    children = [Child(tmp_path) for _ in range(2)]
    measure = "halfnote_in_doubt"
    try:
        children[1].run("metrics.checkback.in_doubt.set(3)")
        pid = children[1].process.pid
        for kind in ("counter", "histogram", "gauge_livemostrecent", "gauge_all"):
            (tmp_path / f"{kind}_{pid}0.db").touch()
            (tmp_path / f"{kind}_{pid}1.db").write_bytes(bytes(65_536))
        # Of a process that is there, so that the file is not removed.
        (tmp_path / f"gauge_livemin_{os.getpid()}.db").touch()
        assert shown_by(children[0], measure) == {measure: 3}
    finally:
        for child in children:
            child.kill()


def test_files_of_dead_processes_may_be_removed_by_several_at_once(tmp_path: Path) -> None:
    children = [Child(tmp_path) for _ in range(3)]
    measure = "halfnote_in_doubt"
    try:
        [ended, *present] = children
        ended.kill()
        for child in present:
            # It has begun.
            child.run("")
        # No process has an id as high as these.
        names = [f"gauge_livemin_{2**30 + n}.db" for n in range(500)]
        for name in names:
            (tmp_path / name).write_bytes(bytes(65_536))
        for child in present:
            assert child.process.stdin is not None
            child.process.stdin.write("_ = metrics.exposition()\n")
            child.process.stdin.flush()
        for child in present:
            assert child.process.stdout is not None
            assert child.process.stdout.readline() == "done\n"
        assert not any((tmp_path / name).exists() for name in names)
        assert shown_by(present[0], measure) == {}
    finally:
        for child in children:
            child.kill()


async def test_an_open_breaker_is_shown(runtime: Runtime, db: Connection) -> None:
    name = "billing"
    await subscribe(db, name, "order")
    series = f'halfnote_breaker_open{{subscription="{name}"}}'
    await gauges.step(runtime, runtime.clock.now())
    assert value(runtime, series) == 0
    await db.execute(
        "update checkpoint set opened_at = now(), opened_because = 'down' where subscription_id = "
        "(select subscription_id from subscription where name = $1)",
        name,
    )
    await gauges.step(runtime, runtime.clock.now())
    assert value(runtime, series) == 1
    await db.execute("update subscription set deleted_at = now() where name = $1", name)
    await gauges.step(runtime, runtime.clock.now())
    assert value(runtime, series) is None


PROCESS = """
import os, sys
from app.observability.metrics import Metrics
metrics = Metrics()
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Child:
    """A process with metrics of its own in a directory that several share; runs the lines it is sent."""

    def __init__(self, directory: Path) -> None:
        env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, line: str) -> list[str]:
        """Run a line; return what it printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        printed = []
        while (one := self.process.stdout.readline()) != "done\n":
            assert one, "the process ended"
            printed.append(one.rstrip())
        return printed

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory is short."""
        self.process.kill()
        self.process.communicate()


def test_metrics_of_several_processes_add_up(tmp_path: Path) -> None:
    children = [Child(tmp_path) for _ in range(3)]
    try:
        for n, child in enumerate(children):
            child.run(f"metrics.http.halves.inc({n + 1})")
            child.run(f"metrics.http.queue_depth.labels('half').set({10 * (n + 1)})")
            child.run(f"metrics.process.loop_age_s.labels('relay').set({n + 1})")
            child.run(f"metrics.checkback.in_doubt.set({n + 1})")
            child.run(f"metrics.process.ready.set({min(n, 1)})")
        assert shown_by(children[0]) == {
            "halfnote_halves_total": 6,
            'halfnote_queue_depth{lane="half"}': 60,
            'halfnote_loop_age_seconds{loop="relay"}': 3,
            "halfnote_in_doubt": 3,
            "halfnote_ready": 0,
        }
        # Its counters stay; its gauges are removed.
        children[2].kill()
        assert shown_by(children[0]) == {
            "halfnote_halves_total": 6,
            'halfnote_queue_depth{lane="half"}': 30,
            'halfnote_loop_age_seconds{loop="relay"}': 2,
            "halfnote_in_doubt": 2,
            "halfnote_ready": 0,
        }
    finally:
        for child in children:
            child.kill()


def test_series_that_one_of_several_processes_removes_are_not_shown(tmp_path: Path) -> None:
    children = [Child(tmp_path) for _ in range(2)]
    held = {
        'halfnote_relay_lag_seconds{subscription="mailer"}': 9,
        'halfnote_relay_lag_messages{subscription="mailer"}': 2,
    }
    try:
        children[0].run("metrics.relay.show_lags('relay', {'mailer': (7.0, 1)})")
        children[1].run("metrics.relay.show_lags('relay', {'mailer': (9.0, 2)})")
        assert shown_by(children[0], LAGS) == held
        # Another holds its lease now.
        children[0].run("metrics.relay.show_lags('relay', {})")
        children[1].run("metrics.relay.show_lags('relay', {'mailer': (9.0, 2)})")
        assert shown_by(children[0], LAGS) == held
        # It was deleted.
        children[1].run("metrics.relay.show_lags('relay', {})")
        assert shown_by(children[0], LAGS) == {}
        children[0].run("metrics.relay.show_lags('relay', {'mailer': (9.0, 2)})")
        assert shown_by(children[1], LAGS) == held
    finally:
        for child in children:
            child.kill()


LAGS = "halfnote_relay_lag_"
NAMES = (
    *("halfnote_halves_total", "halfnote_queue_depth", "halfnote_loop_age", "halfnote_in_doubt"),
    "halfnote_ready",
)


def test_a_series_that_comes_back_with_the_same_value_is_shown_again() -> None:
    metrics, mailer = Metrics(), {"subscription": "mailer"}

    def lags() -> list[float | None]:
        return [metrics.registry.get_sample_value(f"{LAGS}{unit}", mailer) for unit in ("seconds", "messages")]

    for shown in ({"mailer": (0.0, 0)}, {"mailer": (0.0, 0)}, {}, {"mailer": (0.0, 0)}, {"mailer": (4.0, 1)}):
        metrics.relay.show_lags("relay", shown)
        assert lags() == list(shown.get("mailer", (None, None)))


def shown_by(child: Child, names: str | tuple[str, ...] = NAMES) -> dict[str, float]:
    lines = child.run("print(metrics.exposition().decode())")
    pairs = (line.rpartition(" ") for line in lines if line.startswith(names))
    return {series: float(value) for series, _, value in pairs}


def test_access_lines_that_are_not_logged_are_not_formatted() -> None:
    # A separate process, because logs are set up for a whole process.
    script = (
        "import logging, uvicorn; uvicorn.Config('app.main:app'); "
        "from app.observability.logs import set_up_logs; set_up_logs();"
        "print(logging.getLogger('uvicorn.access').hasHandlers(), logging.getLogger('uvicorn.error').hasHandlers())"
    )
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "True"]


def test_a_logger_that_was_used_follows_logs_that_are_set_up_again() -> None:
    """A command and the service may both set up logs in one process."""
    script = (
        "import structlog; from structlog.testing import capture_logs;"
        "from app.observability.logs import set_up_logs; set_up_logs(); log = structlog.get_logger(); log.info('one');"
        "set_up_logs()\n"
        "with capture_logs() as lines: log.info('two')\n"
        "print([line['event'] for line in lines])"
    )
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout == "['two']\n"
