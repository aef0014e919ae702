"""This project's images, and containers of them, by podman: on a bare Debian, as there is no registry to fetch from.

Needs root, podman, buildah, runc and debootstrap (Debian's packages), and Debian's and Python's package registries.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx

from tests.support.processes import ROOT
from tests.support.requirements import absent

BASE = "localhost/halfnote-test-base:bookworm"
NEEDED = ("podman", "buildah", "runc", "debootstrap")
RUNTIME = shutil.which("runc", path="/usr/sbin:/usr/bin") or "runc"
# Bridges and a firewall of podman's own would change the machine's: the containers share its loopback.
RUN = ["podman", "--runtime", RUNTIME, "run", "--network=host"]
HARDENED = ["--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"]
LIMITS = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
BUILDING = ["--isolation=chroot", "--format=docker", "--layers"]
WITHIN_S = 240.0
# The machine's own access to registries, if configured: certificates and pip's settings.
TRUST = ("/usr/local/share/ca-certificates", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


def call(*command: str, within_s: float = 2400) -> str:
    """Run a command and return its output. Raises AssertionError with its output if it fails."""
    done = attempt(*command, within_s=within_s)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def attempt(*command: str, within_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; the caller checks its exit status."""
    return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False, cwd=ROOT)


@cache
def base() -> str:
    """Return the name of an image of bare Debian, built once on this machine. Skips where that is impossible."""
    missing = [name for name in NEEDED if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    if missing or os.geteuid() != 0:
        lacking = ", ".join(missing) or "root"
        absent(f"images are built by root with {', '.join(NEEDED)}; not here: {lacking}", "IMAGES", "HELM")
    if attempt("podman", "image", "exists", BASE).returncode != 0:
        with tempfile.TemporaryDirectory(prefix="halfnote-test-base-") as directory:
            root = Path(directory) / "root"
            call("debootstrap", "--variant=minbase", "bookworm", str(root))
            for place in TRUST:
                if Path(place).exists():
                    (root / place.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                    call("cp", "-rT", place, str(root / place.lstrip("/")))
            archive = Path(directory) / "base.tar"
            call("tar", "-C", str(root), "-cf", str(archive), ".")
            call("podman", "import", "--quiet", str(archive), BASE)
    return BASE


@cache
def image(target: str) -> str:
    """Build a target of the Dockerfile and return its name; unchanged layers are not built again."""
    return _built(f"localhost/halfnote-test-{target}", f"--target={target}", ".")


@cache
def postgres() -> str:
    """Return the name of an image with Debian's Postgres that starts like the official one."""
    return _built("localhost/halfnote-test-postgres", str(ROOT / "tests" / "images" / "postgres"))


def _built(name: str, *what: str) -> str:
    call("podman", "build", "--quiet", *BUILDING, f"--build-arg=BASE={base()}", f"--tag={name}", *what)
    return name


def environment(**variables: str) -> list[str]:
    """Return environment variables as options of podman."""
    return [f"--env={name}={value}" for name, value in variables.items()]


@contextmanager
def names() -> Iterator[Callable[[str], str]]:
    """Yield a function that names containers; they are removed at the end."""
    named: list[str] = []

    def name(purpose: str) -> str:
        named.append(f"halfnote-test-{purpose}-{secrets.token_hex(4)}")
        return named[-1]

    try:
        yield name
    finally:
        for container in named:
            attempt("podman", "rm", "--force", "--time=0", container)


def until(happened: Callable[[], bool], what: str, container: str) -> None:
    """Wait until `happened()` is true. Raises AssertionError with the container's log if it stays false."""
    deadline = time.monotonic() + WITHIN_S
    while not happened():
        logs = attempt("podman", "logs", "--tail=40", container)
        assert time.monotonic() < deadline, f"timed out until {what}: {logs.stdout}{logs.stderr}"
        time.sleep(0.2)


def status(url: str, **headers: str) -> int:
    """Return the status of the answer to a GET; 0 if there is no answer."""
    try:
        return httpx.get(url, headers=headers, timeout=10).status_code
    except httpx.TransportError:
        return 0
