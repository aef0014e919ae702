"""The images: built by podman on a bare Debian, run as they would be; order 1030 played against them, and proved."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import postgres
from tests.support.containers import (
    HARDENED,
    LIMITS,
    RUN,
    WITHIN_S,
    attempt,
    call,
    environment,
    image,
    names,
    status,
    until,
)
from tests.support.processes import free_port

pytestmark = pytest.mark.timeout(3000)

INSIDE = [*RUN, *HARDENED, *LIMITS]
# The only name that the worker answers, as behind a proxy.
OWN_NAME = "halfnote.example.com"


@pytest.fixture
def name() -> Iterator[Callable[[str], str]]:
    """Gives names to containers, which are removed at the end of the test."""
    with names() as given:
        yield given


@pytest.fixture
def empty() -> Iterator[str]:
    """An empty database of the test's own."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def options(empty: str, tmp_path: Path) -> list[str]:
    """What every container is given: the database, keys to seal by, and traces without a collector."""
    sealing = tmp_path / "secrets.keys"
    sealing.write_text(call(*INSIDE, "--rm", image("service"), "new-secrets-key"))
    # The container's user is another.
    sealing.chmod(0o644)
    return [
        f"--volume={sealing}:/keys/secrets.keys:ro",
        *environment(
            HALFNOTE_DATABASE_URL=empty,
            HALFNOTE_AUTH="keys",
            HALFNOTE_ALLOW_NETWORKS="127.0.0.0/8",
            HALFNOTE_SECRETS_KEY_FILE="/keys/secrets.keys",
            HALFNOTE_OTLP_ENDPOINT="http://127.0.0.1:9",
        ),
    ]


def served(options: list[str], container: str, role: str, host: str, **more: str) -> str:
    """Start the service and return its URL, once it is ready and found healthy."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    listen = environment(HALFNOTE_PORT=str(port), **more)
    started = ["--detach", f"--name={container}", image("service"), "serve", "--role", role]
    call(*INSIDE, *options, *listen, *started)
    until(lambda: status(f"{url}/readyz", host=host) == 200, "it is ready", container)
    assert call("podman", "exec", container, "id", "--user").strip() == "10001"
    call("podman", "healthcheck", "run", container)
    return url


def new_key(container: str, role: str) -> str:
    """Make a key where the database is, as the first one is made."""
    made = call("podman", "exec", container, "halfnote", "keys", "create", "--role", role, "--name", role, "--json")
    answer: dict[str, Any] = json.loads(made)
    return str(answer["key"])


def test_order_1030_against_the_images_and_its_proof(options: list[str], name: Callable[[str], str]) -> None:
    call(*INSIDE, *options, "--rm", image("service"), "migrate")
    api, worker = name("api"), name("worker")
    url = served(options, api, "api", "localhost", HALFNOTE_HOST="0.0.0.0")
    served(options, worker, "worker", OWN_NAME, HALFNOTE_ALLOWED_HOSTS=OWN_NAME)
    assert status(f"{url}/topics") == 401
    assert status(f"{url}/metrics") == 401
    admin, metrics = (f"Bearer {new_key(api, role)}" for role in ("admin", "metrics"))
    until(lambda: status(f"{url}/topics", authorization=admin) == 200, "the admin's key is known", api)
    until(lambda: status(f"{url}/metrics", authorization=metrics) == 200, "the key for metrics is known", api)
    assert status(f"{url}/topics", authorization=metrics) == 403
    key = environment(HALFNOTE_URL=url, HALFNOTE_API_KEY=admin.removeprefix("Bearer "), DEMO_WAIT_S=str(WITHIN_S))
    told = call(*INSIDE, "--rm", *key, image("demo"))
    assert "Order 1030: half message" in told
    assert "All steps succeeded." in told
    for container in (api, worker):
        call("podman", "stop", "--time=60", container)
        assert call("podman", "inspect", "--format={{.State.ExitCode}}", container).strip() == "0"
    proof = call(*INSIDE, *options, "--volume=/staging", "--rm", image("spark"), "reconcile", "--staging=/staging")
    assert proof.startswith("proved;")


@pytest.mark.parametrize(
    ("target", "more", "ends_with", "says"),
    [
        ("service", {"HALFNOTE_HOST": "0.0.0.0", "HALFNOTE_AUTH": "off"}, 2, "auth is off"),
        ("service", {"HALFNOTE_SECRETS_KEY_FILE": ""}, 1, "HALFNOTE_SECRETS_KEY_FILE is not set"),
        ("service", {"HALFNOTE_ADMIN_KEY": "hn_short"}, 2, "HALFNOTE_ADMIN_KEY"),
        ("spark", {}, 2, "traces need OpenTelemetry"),
    ],
)
def test_it_does_not_serve_without(
    options: list[str], target: str, more: dict[str, str], ends_with: int, says: str
) -> None:
    call(*INSIDE, *options, "--rm", image("service"), "migrate")
    port = environment(HALFNOTE_PORT=str(free_port()), **more)
    refused = attempt(*INSIDE, *options, *port, "--rm", image(target), "serve")
    assert refused.returncode == ends_with, refused.stdout + refused.stderr
    assert says in refused.stderr


def test_what_is_in_the_images() -> None:
    service, spark = image("service"), image("spark")
    inside = [*INSIDE, "--rm"]
    assert call(*inside, service, "version").strip() == call(*inside, spark, "version").strip()
    clients = "import aio_pika, aiokafka, nats, redis, opentelemetry.exporter.otlp.proto.http"
    call(*inside, "--entrypoint=/opt/halfnote/bin/python", service, "-c", clients)
    assert call(*inside, "--entrypoint=id", spark, "--user").strip() == "10001"
    java = attempt(*inside, "--entrypoint=java", spark, "-XshowSettings:properties", "-version")
    assert "java.specification.version = 17" in java.stderr
    call(*inside, "--entrypoint=test", spark, "-f", "/opt/halfnote/jars/postgresql-42.7.7.jar")
    call(*inside, "--entrypoint=test", spark, "-f", "/opt/halfnote/spark/jobs/reconcile.py")
    assert "4.3" in call(*inside, "--entrypoint=cat", spark, "/opt/spark/version.py")
    assert attempt(*inside, spark, "reconcile", "--from-parquet=/tmp", "--nonsense").returncode == 2
