"""Servers of other containers and users that name the path of our cluster are left alone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.embedded_postgres.stale_processes import backends_of, clear, postmasters_of

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SERVICE = """
import sys
from pathlib import Path
from app.embedded_postgres import EmbeddedPostgres
server = EmbeddedPostgres.start(Path(sys.argv[1]))
print(server.pid, flush=True)
sys.stdin.read()
server.stop()
"""


def may_unshare() -> bool:
    """Return whether this user can make a mount namespace with a mount of its own."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "sh", "-c", "mount --bind /tmp /tmp"]
    return subprocess.run(command, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not may_unshare(), reason="mount namespaces need root")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")


@contextmanager
def service_with_mounts(mounts: str, data_dir: Path, *arguments: str) -> Iterator[int]:
    """Run a service in a mount namespace of its own; yield the pid of its postmaster as this process sees it."""
    script = f'{mounts}; exec "$0" -c "$1" "$2"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, SERVICE, str(data_dir), *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            yield int(next(line for line in service.stdout if line.strip().isdigit()))
        finally:
            service.kill()


@needs_namespaces
def test_a_server_of_another_container_at_the_same_path_is_left_running(data_dir: Path, tmp_path: Path) -> None:
    data_dir.mkdir(exist_ok=True)
    volume = data_dir.with_name(f"{data_dir.name}-volume")
    volume.mkdir()
    volume.chmod(0o755)
    with service_with_mounts('mount --bind "$3" "$2"', data_dir, str(volume)) as pid:
        theirs = psutil.Process(pid)
        try:
            server = EmbeddedPostgres.start(data_dir)
            try:
                assert theirs.is_running()
                assert theirs.status() != psutil.STATUS_ZOMBIE
                paths = find_paths(data_dir)
                assert [process.pid for process in postmasters_of(paths)] == [server.pid]
                assert theirs.pid not in {process.ppid() for process in backends_of(paths)}
            finally:
                server.stop()
        finally:
            theirs.kill()
            shutil.rmtree(volume, ignore_errors=True)


@needs_namespaces
def test_a_survivor_with_other_mounts_on_the_same_directory_is_stopped(data_dir: Path) -> None:
    """As of a systemd unit with PrivateTmp, of which each start has mounts of its own."""
    with service_with_mounts("true", data_dir) as pid:
        theirs = psutil.Process(pid)
    server = EmbeddedPostgres.start(data_dir)
    try:
        assert server.pid != pid
        assert not theirs.is_running() or theirs.status() == psutil.STATUS_ZOMBIE
    finally:
        server.stop()


@needs_root
def test_another_users_server_that_names_our_path_is_left_running(data_dir: Path, tmp_path: Path) -> None:
    paths = find_paths(data_dir)
    program = tmp_path / "postgres"
    shutil.copy("/bin/sh", program)
    other = subprocess.Popen([program, "-c", "read line; :", str(paths.pgdata)], stdin=subprocess.PIPE)
    try:
        assert [process.pid for process in postmasters_of(paths)] == [other.pid]
        os.setresuid(NOBODY, NOBODY, 0)
        try:
            clear(paths)
        finally:
            os.setresuid(0, 0, 0)
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()
