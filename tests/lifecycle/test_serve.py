"""`halfnote serve` and plain uvicorn as processes: start, refuse to start, drain, stop."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from time import monotonic

import httpx
import pytest

from app.database.connection import Connection, connect
from app.embedded_postgres.paths import find_paths
from app.embedded_postgres.shutdown import kill_server
from app.embedded_postgres.stale_processes import postmasters_of
from tests.conftest import register_group
from tests.support import postgres
from tests.support.processes import ROOT, Service, external_database_options, free_port

ORDER = {"producer_group": "shop", "messages": [{"topic": "order", "key": "order-1030", "body": {"order": 1030}}]}
DRAINS_WITHIN_S = 10


@pytest.fixture
def service(data_dir: Path) -> Iterator[Callable[..., Service]]:
    """Makes services over the test's data directory; each is stopped at the end."""
    services: list[Service] = []

    def make(*arguments: str, **env: str) -> Service:
        services.append(Service(data_dir, *arguments, **env))
        return services[-1]

    yield make
    for made in services:
        if made.process is not None:
            made.stop()


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `halfnote` to its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    command = [sys.executable, "-m", "app.cli", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | external_database_options() | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@contextlib.asynccontextmanager
async def halves_held_up(dsn: str) -> AsyncIterator[None]:
    """Keep every half waiting until the block ends: no other session can write to the table."""
    holder = await connect(dsn)
    try:
        async with holder.transaction():
            await holder.execute("lock table half in share mode")
            yield
    finally:
        await holder.close()


async def until_waiting(db: Connection, what: str) -> None:
    """Wait until a statement with this text waits for a lock."""
    async with asyncio.timeout(20):
        while not await db.fetchval(
            "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and query ilike $1)", what
        ):
            await asyncio.sleep(0.02)


async def test_order_1030_on_plain_uvicorn_with_the_embedded_postgres(
    service: Callable[..., Service], data_dir: Path
) -> None:
    plain = service()
    await plain.start()
    async with httpx.AsyncClient(base_url=plain.url) as client:
        group = await client.put("/producer-groups/shop", json={"check_urls": ["http://127.0.0.1:9/check"]})
        assert group.status_code == 201
        half = (await client.post("/half", json=ORDER)).json()
        end = {"producer_group": "shop", "transaction_id": half["transaction_id"], "verdict": "commit"}
        assert (await client.post("/end", json=end)).status_code == 200
        shown = (await client.get(f"/transactions/{half['transaction_id']}")).json()
        assert shown["state"] == "committed"
        for path in ("/openapi.json", "/docs", "/livez", "/readyz", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200, path
    assert plain.stop() in (0, -15)
    keys = data_dir / "secrets.keys"
    assert keys.stat().st_mode & 0o777 == 0o600
    assert group.json()["secret"] not in plain.log.read_text()
    assert "callbacks_may_go_to_loopback" in plain.log.read_text()


async def test_sigterm_answers_requests_in_flight_and_ends_within_ten_seconds(
    service: Callable[..., Service], dsn: str, db: Connection
) -> None:
    await register_group(db, "shop")
    served = service("serve", HALFNOTE_DATABASE_URL=dsn)
    await served.start()
    async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
        async with halves_held_up(dsn):
            halves = [asyncio.create_task(client.post("/half", json=ORDER)) for _ in range(20)]
            await until_waiting(db, "%insert into half%")
            for _ in range(5):
                # Connections are taken in order: once these are answered, the halves before them are in.
                await client.get("/livez", headers={"connection": "close"})
            began = monotonic()
            stopped = asyncio.create_task(asyncio.to_thread(served.stop))
            await until_refused(served)
        answers = await asyncio.gather(*halves)
        assert {answer.status_code for answer in answers} == {201}
        assert await db.fetchval("select count(*) from half") == 20
        assert await stopped == 0
    assert monotonic() - began < DRAINS_WITHIN_S


async def test_a_second_ctrl_c_ends_at_once_and_quietly(
    service: Callable[..., Service], dsn: str, db: Connection
) -> None:
    await register_group(db, "shop")
    served = service("serve", HALFNOTE_DATABASE_URL=dsn)
    await served.start()
    assert served.process is not None
    async with httpx.AsyncClient(base_url=served.url, timeout=30) as client, halves_held_up(dsn):
        half = asyncio.create_task(client.post("/half", json=ORDER))
        await until_waiting(db, "%insert into half%")
        served.process.send_signal(signal.SIGINT)
        await until_refused(served)
        served.process.send_signal(signal.SIGINT)
        # The half still waits: the process did not wait for it. The web server answers requests that it cuts off.
        status = await asyncio.to_thread(served.process.wait, 60)
        assert status == 130, served.log.read_text()[-2000:]
        assert (await half).status_code == 500
    assert "Traceback" not in served.log.read_text()


async def until_refused(served: Service) -> None:
    """Wait until the service takes no new connections: it has heard the signal."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.02)


async def test_a_database_that_hangs_does_not_hold_up_the_end(
    service: Callable[..., Service], dsn: str, db: Connection
) -> None:
    await register_group(db, "shop")
    served = service("serve", HALFNOTE_DATABASE_URL=dsn)
    await served.start()
    async with httpx.AsyncClient(base_url=served.url, timeout=30) as client, halves_held_up(dsn):
        half = asyncio.create_task(client.post("/half", json=ORDER))
        await until_waiting(db, "%insert into half%")
        began = monotonic()
        await asyncio.to_thread(served.stop)
        assert monotonic() - began < DRAINS_WITHIN_S
        answer = await half
    assert answer.status_code == 503
    assert answer.json()["type"] == "/problems/outcome-unknown"
    assert answer.json()["transaction_id"]


def test_a_database_that_is_behind_is_refused_by_one_line() -> None:
    url = postgres.create_database()
    try:
        refused = run("serve", "--port", str(free_port()), HALFNOTE_DATABASE_URL=url)
        assert refused.returncode == 1
        assert "`halfnote migrate`" in refused.stderr
        assert refused.stderr.count("\n") == 1
        assert refused.stdout == ""
        migrated = run("migrate", HALFNOTE_DATABASE_URL=url)
        assert migrated.returncode == 0, migrated.stderr
    finally:
        postgres.drop_database(url)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_of_another_encoding_is_refused_by_one_line(encoding: str) -> None:
    url = postgres.create_database(encoding=encoding)
    try:
        for command in (("serve", "--port", str(free_port())), ("migrate",), ("rotate-keys",)):
            refused = run(*command, HALFNOTE_DATABASE_URL=url)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert f"The database's encoding is {encoding}; Halfnote needs UTF8" in refused.stderr
            assert "`create database halfnote encoding 'UTF8'" in refused.stderr
            assert refused.stderr.count("\n") == 1
    finally:
        postgres.drop_database(url)


async def test_a_migrated_database_is_served(service: Callable[..., Service]) -> None:
    url = postgres.create_database()
    try:
        assert run("migrate", HALFNOTE_DATABASE_URL=url).returncode == 0
        served = service("serve", HALFNOTE_DATABASE_URL=url)
        await served.start()
        assert served.stop() == 0
    finally:
        postgres.drop_database(url)


async def test_two_services_on_one_data_directory(service: Callable[..., Service], data_dir: Path) -> None:
    first = service("serve")
    await first.start()
    second = run("serve", "--port", str(free_port()), "--data-dir", str(data_dir))
    assert second.returncode == 1
    assert "in use by another Halfnote service" in second.stderr
    assert "Traceback" not in second.stderr
    assert httpx.get(f"{first.url}/problems/internal").status_code == 200


async def test_a_taken_port_is_refused_before_a_database_is_made(
    service: Callable[..., Service], dsn: str, tmp_path: Path
) -> None:
    served = service("serve", HALFNOTE_DATABASE_URL=dsn)
    await served.start()
    second = run("serve", "--port", str(served.port), "--data-dir", str(tmp_path / "other"))
    assert second.returncode == 1
    assert f"127.0.0.1:{served.port}" in second.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "fe80::1%none"])
def test_a_host_that_is_not_of_this_machine_is_named(host: str) -> None:
    refused = run("serve", "--host", host, "--port", str(free_port()), HALFNOTE_AUTH="keys")
    assert (refused.returncode, refused.stdout) == (1, "")
    line = refused.stderr.splitlines()[-1]
    assert line.startswith(f"halfnote: Cannot listen on {host}:")
    assert "With --host or HALFNOTE_HOST, name an address of this machine" in line
    assert "HALFNOTE_PORT" not in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_start_that_fails_ends_with_1(dsn: str, tmp_path: Path, workers: str) -> None:
    certificate = tmp_path / "client.pem"
    certificate.write_text("none")
    env = {"HALFNOTE_TLS_CERT_FILE": str(certificate), "HALFNOTE_WORKERS": workers}
    failed = run("serve", "--port", str(free_port()), HALFNOTE_DATABASE_URL=dsn, **env)
    assert failed.returncode == 1
    assert failed.stderr.endswith("halfnote: The service could not start; the log says why.\n")


async def test_accept_ends_refuses_halves_and_takes_ends(
    service: Callable[..., Service], dsn: str, db: Connection
) -> None:
    await register_group(db, "shop")
    taking = service("serve", HALFNOTE_DATABASE_URL=dsn)
    draining = service("serve", "--accept", "ends", HALFNOTE_DATABASE_URL=dsn)
    await taking.start()
    await draining.start()
    half = httpx.post(f"{taking.url}/half", json=ORDER).json()
    refused = httpx.post(f"{draining.url}/half", json=ORDER)
    assert refused.status_code == 503
    assert refused.json()["type"] == "/problems/draining"
    assert "retry-after" in refused.headers
    end = {"producer_group": "shop", "transaction_id": half["transaction_id"], "verdict": "commit"}
    assert httpx.post(f"{draining.url}/end", json=end).status_code == 200


async def test_several_workers_over_the_embedded_postgres_sum_their_metrics(service: Callable[..., Service]) -> None:
    served = service("serve", "--workers", "2")
    await served.start()
    group = httpx.put(f"{served.url}/producer-groups/shop", json={"check_urls": ["http://127.0.0.1:9/check"]})
    assert group.status_code == 201
    # Any of the processes may accept a connection.
    for _ in range(40):
        assert httpx.post(f"{served.url}/half", json=ORDER).status_code == 201
    async with asyncio.timeout(10):
        # A process publishes what it counted a moment later, so the process that is asked may not see all of it yet.
        while halves_in(httpx.get(f"{served.url}/metrics").text) != 40.0:
            await asyncio.sleep(0.05)
    counted = {halves_in(httpx.get(f"{served.url}/metrics").text) for _ in range(10)}
    assert counted == {40.0}
    assert served.stop() == 0


async def test_the_parent_of_several_workers_starts_a_dead_postgres_again(
    service: Callable[..., Service], data_dir: Path
) -> None:
    served = service("serve", "--workers", "2")
    await served.start()
    # Without Postgres a process that is still starting fails, and with it the service.
    await served.until_ready()
    async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
        await client.put("/producer-groups/shop", json={"check_urls": ["http://127.0.0.1:9/check"]})
        before = (await client.post("/half", json=ORDER)).json()["transaction_id"]
        [postmaster] = postmasters_of(find_paths(data_dir))
        kill_server(postmaster)
        async with asyncio.timeout(60):
            while (await client.post("/half", json=ORDER)).status_code != 201:
                await asyncio.sleep(0.05)
        assert (await client.get(f"/transactions/{before}")).status_code == 200


def halves_in(metrics: str) -> float:
    """Return the count of stored halves in an exposition."""
    found = re.search(r"^halfnote_halves_total (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_other_machines_are_not_served_while_auth_is_off(host: str) -> None:
    refused = run("serve", "--host", host)
    assert refused.returncode == 2
    assert "HALFNOTE_AUTH: auth is off" in refused.stderr
    assert "HALFNOTE_AUTH=keys" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
async def test_every_address_of_ipv6_takes_ipv4_as_well(service: Callable[..., Service], dsn: str) -> None:
    served = service("serve", "--host", "::", HALFNOTE_AUTH="keys", HALFNOTE_DATABASE_URL=dsn)
    await served.start()
    async with httpx.AsyncClient(timeout=30) as client:
        for address in ("127.0.0.1", "[::1]"):
            assert (await client.get(f"http://{address}:{served.port}/livez")).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "env", "named"),
    [
        (("--role", "nope"), {}, "--role"),
        (("--port", "99999"), {}, "HALFNOTE_PORT"),
        ((), {"HALFNOTE_WORKERS": "many"}, "HALFNOTE_WORKERS"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_2(arguments: tuple[str, ...], env: dict[str, str], named: str) -> None:
    refused = run("serve", *arguments, **env)
    assert refused.returncode == 2
    assert named in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_database_that_is_not_there_is_named() -> None:
    refused = run(
        "serve", "--port", str(free_port()), HALFNOTE_DATABASE_URL=f"postgresql://127.0.0.1:{free_port()}/none"
    )
    assert refused.returncode == 1
    assert "HALFNOTE_DATABASE_URL" in refused.stderr
    assert "Traceback" not in refused.stderr


async def test_the_greeting_says_where_to_go(service: Callable[..., Service], dsn: str) -> None:
    served = service("serve", HALFNOTE_DATABASE_URL=dsn)
    await served.start()
    async with asyncio.timeout(20):
        while served.url not in (said := served.log.read_text()):
            await asyncio.sleep(0.02)
    for text in ("make demo", "/docs", "/readyz", "Order 1030"):
        assert text.lower() in said.lower()


@pytest.mark.parametrize(
    ("command", "number", "status"),
    [
        ("serve", signal.SIGTERM, 0),
        ("serve", signal.SIGHUP, 0),
        ("migrate", signal.SIGTERM, 128 + signal.SIGTERM),
        ("migrate", signal.SIGHUP, 128 + signal.SIGTERM),
    ],
)
def test_a_signal_while_postgres_starts_leaves_no_postgres_behind(
    data_dir: Path, command: str, number: signal.Signals, status: int
) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", command, "--data-dir", str(data_dir)],
        cwd=ROOT,
        env=inherited | {"HALFNOTE_PORT": str(free_port())},
    )
    while not data_dir.exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    assert process.wait(60) == status
    assert postmasters_of(find_paths(data_dir)) == []


@pytest.mark.parametrize(("role", "works"), [("api", False), ("worker", True), ("all", True)])
async def test_each_role_answers_health_and_runs_its_loops(
    service: Callable[..., Service], dsn: str, role: str, works: bool
) -> None:
    served = service("serve", "--role", role, HALFNOTE_DATABASE_URL=dsn)
    await served.start()
    async with httpx.AsyncClient(base_url=served.url) as client:
        assert (await client.get("/livez")).status_code == 200
        async with asyncio.timeout(30):
            while (ready := await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)
    checks = {check["name"] for check in ready.json()["checks"]}
    assert ("loop:relay" in checks) is works
    assert ("loop:checks" in checks) is works


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_greeting_that_cannot_be_printed_does_not_end_the_service(
    service: Callable[..., Service], dsn: str, workers: str
) -> None:
    served = service("serve", "--workers", workers, HALFNOTE_DATABASE_URL=dsn)
    reader, writer = os.pipe()
    os.close(reader)
    await served.start(stdout=writer)
    os.close(writer)
    async with asyncio.timeout(60):
        while "greeting_not_printed" not in served.log.read_text():
            assert served.process is not None
            assert served.process.poll() is None, served.log.read_text()
            await asyncio.sleep(0.02)
    assert httpx.get(f"{served.url}/livez").status_code == 200
    assert served.stop() == 0
    assert "Traceback" not in served.log.read_text()
