"""The images' own programs, without a container: the health check and the nightly runs."""

import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.certificates import Authority
from tests.support.processes import ROOT

IMAGES = ROOT / "images"


class Service(BaseHTTPRequestHandler):
    """Answers /livez, and nothing else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/livez" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(certificate: tuple[Path, Path] | None) -> Iterator[int]:
    """Yield the port of a service that speaks TLS with a certificate and its key, or plain HTTP."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    # A client that speaks another protocol ends its connection with an error here.
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def health(port: int, **variables: str) -> int:
    """Run the health check as the image does; return its exit status."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    command = [sys.executable, str(IMAGES / "healthcheck")]
    environment = {**kept, "HALFNOTE_PORT": str(port), **variables}
    return subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False).returncode


def test_a_service_that_speaks_tls_is_healthy(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "ca").issue("halfnote.example.com").write(tmp_path / "tls")
    with serving((certificate, key)) as port:
        assert health(port, HALFNOTE_TLS_CERT=str(certificate), HALFNOTE_TLS_KEY=str(key)) == 0
        assert health(port) != 0


def test_a_service_without_tls_is_healthy() -> None:
    with serving(None) as port:
        assert health(port) == 0
        assert health(port, HALFNOTE_TLS_CERT="") == 0
        assert health(port, HALFNOTE_TLS_CERT="/tls.crt") != 0
    assert health(port) != 0


# Plays `halfnote`: it writes what it does, and takes a while to stop.
PROGRAM = """#!/bin/bash
trap 'sleep 0.5; echo "$1 stopped" >> "$LOG"; exit 143' TERM
echo "$1 began" >> "$LOG"
for _ in {1..600}; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_the_nightly_runs_end_after_the_program_that_they_stop(tmp_path: Path, number: signal.Signals) -> None:
    log, program = tmp_path / "log", tmp_path / "halfnote"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    log.touch()
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    # The time until the night is whole seconds, and passes at once here.
    slept = tmp_path / "sleep"
    slept.write_text('#!/bin/bash\n[[ $1 == *.* ]] || set -- 1\nexec /bin/sleep "$1"\n')
    slept.chmod(0o755)
    environment = {**os.environ, "PATH": path, "LOG": str(log), "NIGHTLY_AT": "01:17", "HALFNOTE_ARCHIVE": ""}
    nightly = subprocess.Popen([str(IMAGES / "nightly")], env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        nightly.send_signal(number)
        assert nightly.wait(timeout=30) == 143
        assert log.read_text().splitlines() == ["reconcile began", "reconcile stopped"]
    finally:
        nightly.kill()
        nightly.wait()


# Plays the proof, which ends at once, and an archive, whose Spark has files while the archive runs.
SPILLS = """#!/bin/bash
[[ $1 == archive ]] || exit 0
mkdir "$SPARK_LOCAL_DIRS/blockmgr-1"
echo spilled > "$SPARK_LOCAL_DIRS/blockmgr-1/file"
echo "$SPARK_LOCAL_DIRS" >> "$LOG"
while [[ ! -e $LOG.end ]]; do sleep 0.05; done
"""


def test_the_nightly_runs_remove_what_a_killed_archive_left_and_nothing_else(tmp_path: Path) -> None:
    staging, log = tmp_path / "staging", tmp_path / "log"
    programs = {
        "nightly": (IMAGES / "nightly").read_text().replace("/staging", str(staging)),
        "halfnote": SPILLS,
        # Of the time until the night only one second passes.
        "sleep": '#!/bin/bash\n[[ $1 == *.* || -n ${LATER:-} ]] || set -- 1\nexec /bin/sleep "$1"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log.touch()
    # What earlier versions left, and what one may still use; and rows that a person wants to keep.
    old, young, kept = (staging / name for name in ("blockmgr-old", "spark-young", "halfnote-proof-kept"))
    for made in (old, young, kept):
        made.mkdir(parents=True)
    for made in (old, kept):
        os.utime(made, times=(time.time() - 3 * 86400,) * 2)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LOG": str(log), "NIGHTLY_AT": "01:17", "HALFNOTE_ARCHIVE": "/archive"}
    started: list[subprocess.Popen[bytes]] = []

    def start(**more: str) -> None:
        command = [str(tmp_path / "nightly")]
        started.append(subprocess.Popen(command, env={**environment, **more}, start_new_session=True))

    def archive(number: int) -> Path:
        wait_until(lambda: len(log.read_text().splitlines()) >= number)
        return Path(log.read_text().splitlines()[number - 1])

    try:
        start()
        killed = archive(1)
        os.killpg(started[0].pid, signal.SIGKILL)
        started[0].wait()
        assert (killed / "blockmgr-1" / "file").exists()
        start()
        active = archive(2)
        assert {old.exists(), killed.exists()} == {False}
        # Another container with the same volume starts meanwhile, and waits for its night.
        start(LATER="1")
        children = Path(f"/proc/{started[2].pid}/task/{started[2].pid}/children")
        wait_until(lambda: any(map(is_sleep, children.read_text().split())))
        assert (active / "blockmgr-1" / "file").exists()
        assert young.exists()
        assert kept.exists()
        (tmp_path / "log.end").touch()
        wait_until(lambda: not active.exists())
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("at", ["25:00", "01.17", "tomorrow", "3 seconds", "01:17 ", "midnight"])
def test_a_wrong_time_of_the_nightly_runs_is_said_before_the_first(tmp_path: Path, at: str) -> None:
    program, log = tmp_path / "halfnote", tmp_path / "log"
    program.write_text('#!/bin/bash\necho "$1" >> "$LOG"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LOG": str(log), "NIGHTLY_AT": at, "HALFNOTE_ARCHIVE": ""}
    ran = subprocess.run([str(IMAGES / "nightly")], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, "NIGHTLY_AT is a time of the day" in ran.stderr) == (2, True)
    assert not log.exists()


def test_the_nightly_runs_end_at_once_between_two_nights(tmp_path: Path) -> None:
    later = f"{datetime.fromtimestamp(time.time() + 7200, UTC):%H:%M}"
    nightly = subprocess.Popen([str(IMAGES / "nightly")], env={**os.environ, "NIGHTLY_AT": later})
    try:
        # It sleeps as soon as it has computed until when.
        children = Path(f"/proc/{nightly.pid}/task/{nightly.pid}/children")
        deadline = time.monotonic() + 30
        while not (waiting := [pid for pid in children.read_text().split() if is_sleep(pid)]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        nightly.send_signal(signal.SIGTERM)
        assert nightly.wait(timeout=10) == 143
        # The shell has waited for it, so it is gone.
        assert not Path(f"/proc/{waiting[0]}").exists()
    finally:
        nightly.kill()
        nightly.wait()


def is_sleep(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except OSError:
        return False
