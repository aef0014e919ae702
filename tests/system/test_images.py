"""The images: built by podman on a bare Debian and run as in production; order 1030 with them, and its proof."""

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
# The only host name that the worker accepts, as behind a proxy.
OWN_NAME = "halfnote.example.com"


@pytest.fixture
def name() -> Iterator[Callable[[str], str]]:
    """Yield a function that names containers; they are removed at the end of the test."""
    with names() as make_name:
        yield make_name


@pytest.fixture
def empty_database() -> Iterator[str]:
    """Yield an empty database that only this test uses."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def options(empty_database: str, tmp_path: Path) -> list[str]:
    """Return the options of every container: the database, keys that seal secrets, and traces without a collector."""
    key_file = tmp_path / "secrets.keys"
    key_file.write_text(call(*INSIDE, "--rm", image("service"), "new-secrets-key"))
    # The container runs as another user.
    key_file.chmod(0o644)
    return [
        f"--volume={key_file}:/keys/secrets.keys:ro",
        *environment(
            HALFNOTE_DATABASE_URL=empty_database,
            HALFNOTE_AUTH="keys",
            HALFNOTE_ALLOW_NETWORKS="127.0.0.0/8",
            HALFNOTE_SECRETS_KEY_FILE="/keys/secrets.keys",
            HALFNOTE_OTLP_ENDPOINT="http://127.0.0.1:9",
        ),
    ]


def start_service(options: list[str], container: str, role: str, host: str, **settings: str) -> str:
    """Start the service, wait until it is ready and healthy, and return its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    listen = environment(HALFNOTE_PORT=str(port), **settings)
    started = ["--detach", f"--name={container}", image("service"), "serve", "--role", role]
    call(*INSIDE, *options, *listen, *started)
    until(lambda: status(f"{url}/readyz", host=host) == 200, "it is ready", container)
    assert call("podman", "exec", container, "id", "--user").strip() == "10001"
    call("podman", "healthcheck", "run", container)
    return url


def new_key(container: str, role: str) -> str:
    """Create a key by a command in the container, as the first key is created."""
    output = call("podman", "exec", container, "halfnote", "keys", "create", "--role", role, "--name", role, "--json")
    answer: dict[str, Any] = json.loads(output)
    return str(answer["key"])


def test_order_1030_against_the_images_and_its_proof(options: list[str], name: Callable[[str], str]) -> None:
    call(*INSIDE, *options, "--rm", image("service"), "migrate")
    api, worker = name("api"), name("worker")
    url = start_service(options, api, "api", "localhost", HALFNOTE_HOST="0.0.0.0")
    start_service(options, worker, "worker", OWN_NAME, HALFNOTE_ALLOWED_HOSTS=OWN_NAME)
    assert status(f"{url}/topics") == 401
    assert status(f"{url}/metrics") == 401
    admin, metrics = (f"Bearer {new_key(api, role)}" for role in ("admin", "metrics"))
    until(lambda: status(f"{url}/topics", authorization=admin) == 200, "the admin's key is known", api)
    until(lambda: status(f"{url}/metrics", authorization=metrics) == 200, "the key for metrics is known", api)
    assert status(f"{url}/topics", authorization=metrics) == 403
    key = environment(HALFNOTE_URL=url, HALFNOTE_API_KEY=admin.removeprefix("Bearer "), DEMO_WAIT_S=str(WITHIN_S))
    output = call(*INSIDE, "--rm", *key, image("demo"))
    assert "Order 1030: half message" in output
    assert "All steps succeeded." in output
    for container in (api, worker):
        call("podman", "stop", "--time=60", container)
        assert call("podman", "inspect", "--format={{.State.ExitCode}}", container).strip() == "0"
    proof = call(*INSIDE, *options, "--volume=/staging", "--rm", image("spark"), "reconcile", "--staging=/staging")
    assert proof.startswith("proved;")


@pytest.mark.parametrize(
    ("target", "settings", "ends_with", "says"),
    [
        ("service", {"HALFNOTE_HOST": "0.0.0.0", "HALFNOTE_AUTH": "off"}, 2, "auth is off"),
        ("service", {"HALFNOTE_SECRETS_KEY_FILE": ""}, 1, "HALFNOTE_SECRETS_KEY_FILE is not set"),
        ("service", {"HALFNOTE_ADMIN_KEY": "hn_short"}, 2, "HALFNOTE_ADMIN_KEY"),
        ("spark", {}, 2, "traces need OpenTelemetry"),
    ],
)
def test_an_image_does_not_serve_with_unsafe_settings(
    options: list[str], target: str, settings: dict[str, str], ends_with: int, says: str
) -> None:
    call(*INSIDE, *options, "--rm", image("service"), "migrate")
    port = environment(HALFNOTE_PORT=str(free_port()), **settings)
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
