"""Run docker-compose.yml unchanged with podman-compose: order 1030 and its proof, on a separate network.

The network is in a network namespace of the test, so the machine's bridges and firewall do not change.
Postgres is Debian's, because no registry with the official image can be reached.
"""

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helm.programs import program
from tests.support.containers import BUILDING, RUNTIME, attempt, base, call, image, postgres, until
from tests.support.processes import ROOT
from tests.support.requirements import absent

pytestmark = pytest.mark.timeout(3000)

SUBNET = "172.30.77.0/24"
# Podman with explicit settings: without them it would create CNI's bridges beside the machine's.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[network]
network_backend = "netavark"
network_config_dir = "{directory}/networks"
[engine]
runtime = "{runtime}"
"""
# Features of podman that Debian 12 lacks: to wait for health (without systemd nothing repeats the health checks),
# and to start a container that requires a completed one.
PODMAN = """#!/bin/bash
case "$*" in
  --version*) echo podman version 4.6.0 ;;
  "wait --condition=healthy "*)
    for container in "${@:3}"; do
      for _ in {1..300}; do podman healthcheck run "$container" >&2 && continue 2; sleep 0.5; done
      podman logs --tail=30 "$container" >&2
      exit 1
    done
    ;;
  *)
    arguments=()
    for argument in "$@"; do [[ $argument == --requires=* ]] || arguments+=("$argument"); done
    exec podman "${arguments[@]}"
    ;;
esac
"""


@dataclass(frozen=True)
class Project:
    """The compose file's project: `inside` is the prefix of a command that runs in its network namespace."""

    name: str
    directory: Path
    inside: list[str]

    def compose(self, *arguments: str) -> str:
        """Run podman-compose on the file and return what it prints. Raises AssertionError if it fails."""
        return call(*self.inside, *self._command(), *arguments)

    def build(self, *services: str) -> None:
        """Build the images of services, outside of the namespace because registries are needed."""
        configured = f"CONTAINERS_CONF={self.directory}/containers.conf"
        call("env", configured, *self._command(f"--podman-build-args={' '.join(BUILDING)}"), "build", *services)

    def podman(self, *arguments: str) -> str:
        """Run podman in the project's network namespace and return what it prints."""
        return call(*self.inside, "podman", *arguments)

    def start(self) -> None:
        """Start the service, and wait until it is healthy."""
        self.compose("up", "--detach", "api", "worker")
        containers = [f"{self.name}_{service}_1" for service in ("api", "worker")]
        call(*self.inside, str(self.directory / "podman"), "wait", "--condition=healthy", *containers)

    def _command(self, *options: str) -> list[str]:
        profiles = ["--profile", "demo", "--profile", "nightly"]
        files = ["--file", str(ROOT / "docker-compose.yml"), "--env-file", str(self.directory / ".env")]
        podman = ["--podman-path", str(self.directory / "podman"), "--in-pod=false"]
        return [program("podman-compose"), "--project-name", self.name, *podman, *files, *profiles, *options]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Yield a project of the compose file without running containers."""
    program("podman-compose")
    installed = [Path("/usr/lib/podman", name).exists() for name in ("netavark", "aardvark-dns")]
    # netavark sets its rules with it; without it, containers stay in the state `created` without an error.
    if not all([*installed, shutil.which("iptables")]):
        needed = "netavark aardvark-dns iptables"
        absent(f"containers find each other by netavark, aardvark-dns and iptables: apt install {needed}", "IMAGES")
    variables = {
        "POSTGRES_PASSWORD": secrets.token_hex(24),
        "ADMIN_KEY": f"hn_{secrets.token_hex(32)}",
        "SUBNET": SUBNET,
        "BASE": base(),
        "POSTGRES_IMAGE": postgres(),
    }
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    (tmp_path / "networks").mkdir()
    (tmp_path / "podman").write_text(PODMAN)
    (tmp_path / "podman").chmod(0o755)
    (tmp_path / "containers.conf").write_text(CONFIGURATION.format(directory=tmp_path, runtime=RUNTIME))
    namespace = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    configured = ["env", f"CONTAINERS_CONF={tmp_path}/containers.conf"]
    inside = ["nsenter", f"--net=/proc/{namespace.pid}/ns/net", *configured]
    project = Project(f"halfnote-test-{secrets.token_hex(4)}", tmp_path, inside)
    try:
        until(lambda: own_network(namespace.pid), "there is a network namespace", "")
        call(*inside, "ip", "link", "set", "lo", "up")
        yield project
    finally:
        attempt(*inside, *project._command("down", "--volumes", "--timeout", "30"))
        namespace.kill()
        namespace.wait()


def own_network(pid: int) -> bool:
    """Return whether a process is in another network namespace than this one."""
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def test_order_1030_by_the_compose_file(project: Project) -> None:
    for target in ("service", "demo", "spark"):
        image(target)
    project.build("api", "demo", "reconcile")
    project.start()
    assert project.podman("exec", f"{project.name}_api_1", "sh", "-c", "stat -c '%a %u' /keys/*") == "600 10001\n"
    listed = project.podman("exec", f"{project.name}_api_1", "halfnote", "keys", "list", "--json")
    assert json.loads(listed) == []
    output = project.compose("run", "--no-deps", "--rm", "-e", "DEMO_WAIT_S=240", "demo")
    assert "All steps succeeded." in output
    append_key = "umask 077; halfnote new-secrets-key >> /keys/secrets.keys"
    project.compose("run", "--no-deps", "--rm", "keys", append_key)
    sealed = project.podman("exec", f"{project.name}_api_1", "halfnote", "rotate-keys")
    assert "Could not be opened: 0." in sealed
    proof = project.compose("run", "--no-deps", "--rm", "reconcile", "reconcile", "--staging", "/staging")
    assert "proved;" in proof
    # The second start creates nothing again, and sealed secrets can be opened.
    before = project.podman("exec", f"{project.name}_api_1", "cat", "/keys/secrets.keys")
    project.compose("down", "--timeout", "60")
    project.start()
    assert project.podman("exec", f"{project.name}_api_1", "cat", "/keys/secrets.keys") == before
