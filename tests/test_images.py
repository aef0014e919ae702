"""The images: built by podman on a bare Debian, run as they would be, with order 1030 played against them and proved.

Needs root, podman, buildah, runc and debootstrap (Debian's packages), and Debian's and Python's package registries.
"""

import base64
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests import pg
from tests.processes import ROOT, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE = "localhost/halfnote-test-base:bookworm"
NEEDED = ("podman", "buildah", "runc", "debootstrap")
# Bridges and a firewall of podman's own would change the machine's: the containers share its loopback.
RUN = ["podman", "--runtime", shutil.which("runc", path="/usr/sbin:/usr/bin") or "runc", "run", "--network=host"]
HARDENED = ["--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"]
LIMITS = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
WITHIN_S = 240.0
# The machine's own way to its registries, if it has one: their certificates and pip's settings.
TRUST = ("/usr/local/share/ca-certificates", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


def call(*command: str, within_s: float = 2400) -> str:
    """Run a command and return what it prints. Raises AssertionError with what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bare Debian as an image, made once on this machine: there is no registry to fetch one from."""
    missing = [name for name in NEEDED if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    if missing or os.geteuid() != 0:
        pytest.skip(f"images are built by root with {', '.join(NEEDED)}; not here: {', '.join(missing) or 'root'}")
    if subprocess.run(["podman", "image", "exists", BASE], check=False).returncode != 0:
        root = tmp_path_factory.mktemp("base") / "root"
        call("debootstrap", "--variant=minbase", "bookworm", str(root))
        for place in TRUST:
            if Path(place).exists():
                (root / place.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                call("cp", "-rT", place, str(root / place.lstrip("/")))
        packed = root.parent / "base.tar"
        call("tar", "-C", str(root), "-cf", str(packed), ".")
        call("podman", "import", "--quiet", str(packed), BASE)
        shutil.rmtree(root.parent)
    return BASE


@pytest.fixture(scope="module")
def build(base: str) -> Callable[[str], str]:
    """Builds a target of the Dockerfile and returns the image's name; what did not change is not built again."""

    def built(target: str) -> str:
        image = f"localhost/halfnote-test-{target}"
        options = ["--isolation=chroot", "--format=docker", "--layers", f"--build-arg=BASE={base}"]
        call("podman", "build", "--quiet", *options, f"--target={target}", f"--tag={image}", ".")
        return image

    return built


@pytest.fixture
def names() -> Iterator[Callable[[str], str]]:
    """Gives names to containers, which are removed at the end of the test."""
    given: list[str] = []

    def name(of: str) -> str:
        given.append(f"halfnote-test-{of}-{secrets.token_hex(4)}")
        return given[-1]

    yield name
    for one in given:
        subprocess.run(["podman", "rm", "--force", "--time=0", one], capture_output=True, check=False)


def environment(**variables: str) -> list[str]:
    return [f"--env={name}={value}" for name, value in variables.items()]


def until_ready(url: str, container: str) -> None:
    """Wait until the service in a container is ready."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, call("podman", "logs", container)
        time.sleep(0.2)


def test_order_1030_against_the_images_and_its_proof(
    build: Callable[[str], str], names: Callable[[str], str], dsn_unmigrated: str, tmp_path: Path
) -> None:
    service, demo, spark = build("service"), build("demo"), build("spark")
    key = f"hn_{secrets.token_hex(32)}"
    sealing = tmp_path / "secrets.keys"
    sealing.write_text(f"{secrets.token_hex(4)} {base64.b64encode(secrets.token_bytes(32)).decode()}\n")
    # The container's user is another.
    sealing.chmod(0o644)
    common = environment(
        HALFNOTE_DATABASE_URL=dsn_unmigrated,
        HALFNOTE_AUTH="keys",
        HALFNOTE_ADMIN_KEY=key,
        HALFNOTE_ALLOW_NETWORKS="127.0.0.0/8",
        HALFNOTE_SECRETS_KEY_FILE="/keys/secrets.keys",
    )
    keys = [f"--volume={sealing}:/keys/secrets.keys:ro"]
    call(*RUN, *HARDENED, *LIMITS, *common, "--rm", service, "migrate")
    urls = {}
    for role in ("api", "worker"):
        port, container = free_port(), names(role)
        urls[role] = f"http://127.0.0.1:{port}"
        listen = environment(HALFNOTE_PORT=str(port))
        call(
            *RUN,
            *HARDENED,
            *LIMITS,
            *common,
            *keys,
            *listen,
            "--detach",
            f"--name={container}",
            service,
            "serve",
            "--role",
            role,
        )
        until_ready(urls[role], container)
        assert call("podman", "exec", container, "id", "--user").strip() == "10001"
        call("podman", "healthcheck", "run", container)
    told = call(
        *(*RUN, *HARDENED, *LIMITS, "--rm"),
        *environment(HALFNOTE_URL=urls["api"], HALFNOTE_API_KEY=key, DEMO_WAIT_S=str(WITHIN_S)),
        demo,
    )
    assert "Order 1030: half message" in told
    assert "All went as told." in told
    for name in call("podman", "ps", "--format={{.Names}}", "--filter=name=halfnote-test-").split():
        call("podman", "stop", "--time=60", name)
        assert call("podman", "inspect", "--format={{.State.ExitCode}}", name).strip() == "0"
    proof = call(
        *RUN, *HARDENED, *LIMITS, *common, "--volume=/staging", "--rm", spark, "reconcile", "--staging=/staging"
    )
    assert proof.startswith("proved;")


def test_what_is_in_the_images(build: Callable[[str], str]) -> None:
    service, spark = build("service"), build("spark")
    inside = [*RUN, *HARDENED, *LIMITS, "--rm"]
    assert call(*inside, service, "version").strip() == call(*inside, spark, "version").strip()
    clients = "import aio_pika, aiokafka, nats, redis, opentelemetry.exporter.otlp.proto.http"
    call(*inside, "--entrypoint=/opt/halfnote/bin/python", service, "-c", clients)
    assert call(*inside, "--entrypoint=id", spark, "--user").strip() == "10001"
    java = [*inside, "--entrypoint=java", spark, "-XshowSettings:properties", "-version"]
    said = subprocess.run(java, capture_output=True, text=True, timeout=120, check=True).stderr
    assert "java.specification.version = 17" in said
    call(*inside, "--entrypoint=test", spark, "-f", "/opt/halfnote/jars/postgresql-42.7.7.jar")
    call(*inside, "--entrypoint=test", spark, "-f", "/opt/halfnote/spark/jobs/reconcile.py")
    assert "4.3" in call(*inside, "--entrypoint=cat", spark, "/opt/spark/version.py")
    wrongly = ["reconcile", "--from-parquet=/tmp", "--nonsense"]
    wrong = subprocess.run([*inside, spark, *wrongly], capture_output=True, timeout=240, check=False)
    assert wrong.returncode == 2


@pytest.fixture
def dsn_unmigrated() -> Iterator[str]:
    """An empty database of the test's own."""
    url = pg.create_database()
    yield url
    pg.drop_database(url)
