"""Clients of brokers, OpenTelemetry, gRPC and Authlib are extras: without them every other module can be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = {
    "aio_pika": "aio-pika",
    "aiokafka": "aiokafka",
    "authlib": "authlib",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "joserfc": "joserfc",
    "nats": "nats-py",
    # FastAPI depends on its bare API.
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "redis": "redis",
}

ABSENT = """
import importlib, importlib.abc, pkgutil, sys

CLIENTS = set(sys.argv[1:])

def is_client(name):
    return any(name == client or name.startswith(client + ".") for client in CLIENTS)

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if is_client(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Absent())
"""
IMPORT_ALL = """
import app

absent = set()
for module in pkgutil.walk_packages(app.__path__, "app."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        if not is_client(missing.name):
            raise
        absent.add(module.name)
assert not [name for name in sys.modules if is_client(name)]
print(*sorted(absent))
"""

EXPORT = """
from app.cli.errors import Refusal
from app.cli.server_process import refuse_without_exporter
from app.config import Settings

settings = Settings()
try:
    refuse_without_exporter(settings)
except Refusal as refusal:
    print(refusal)
"""


SIGN_IN = """
from app.cli.errors import Refusal
from app.cli.server_process import refuse_without_openid
from app.config import Settings

try:
    refuse_without_openid(Settings())
except Refusal as refusal:
    print(refusal)
"""


def output_of(program: str, **env: str) -> str:
    """Return what a program prints where no client is installed."""
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", ABSENT + program, *CLIENTS],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def names(lock: str) -> set[str]:
    """Return the distributions that a lock names."""
    return set(re.findall(r"^([a-z0-9-]+)==", (ROOT / lock).read_text(), re.MULTILINE))


def test_every_other_module_is_imported_without_a_client() -> None:
    absent = output_of(IMPORT_ALL).split()
    own = re.compile(
        r"app\.(observability\.tracing|console\.openid\.(issuer|id_token)|rocketmq\.[a-z_.0-9]+|destinations\.(rabbitmq|nats|kafka|redis)(_[a-z]+)?)"
    ).fullmatch
    assert absent
    assert [name for name in absent if not own(name)] == []


def test_only_programs_that_export_traces_require_the_exporter() -> None:
    """The nightly programs read the same settings and have no exporter."""
    assert "halfnote-server[otel]" in output_of(EXPORT, HALFNOTE_OTLP_ENDPOINT="http://127.0.0.1:4318")
    assert output_of(EXPORT) == ""


def test_sign_in_of_people_requires_authlib() -> None:
    people = {
        "HALFNOTE_AUTH": "keys",
        "HALFNOTE_PUBLIC_URL": "https://halfnote.example.com",
        "HALFNOTE_OIDC_ISSUER": "https://sso.example.com",
        "HALFNOTE_OIDC_CLIENT_ID": "halfnote",
        "HALFNOTE_OIDC_ROLES": "staff=viewer",
    }
    assert "halfnote-server[oidc]" in output_of(SIGN_IN, **people)
    assert output_of(SIGN_IN) == ""


def test_make_run_installs_no_client_and_make_test_all() -> None:
    assert not names("requirements.lock") & set(CLIENTS.values())
    assert names("requirements-dev.lock") >= set(CLIENTS.values())
