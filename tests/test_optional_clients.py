"""The clients of brokers are extras: everything but their own destinations is imported without them."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLIENTS = {"aio_pika": "aio-pika", "aiokafka": "aiokafka", "nats": "nats-py", "redis": "redis"}

IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

CLIENTS = set(sys.argv[1:])

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in CLIENTS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Absent())
import app

absent = set()
for module in pkgutil.walk_packages(app.__path__, "app."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        if missing.name.partition(".")[0] not in CLIENTS:
            raise
        absent.add(module.name)
assert not CLIENTS & set(sys.modules)
print(*sorted(absent))
"""


def names(lock: str) -> set[str]:
    """The distributions that a lock names."""
    return set(re.findall(r"^([a-z0-9-]+)==", (ROOT / lock).read_text(), re.MULTILINE))


def test_everything_but_a_brokers_own_modules_is_imported_without_its_client() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL, *CLIENTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    absent = ran.stdout.split()
    brokers = re.compile(r"app\.destinations\.(rabbitmq|nats|kafka|redis)(_[a-z]+)?").fullmatch
    assert absent
    assert [name for name in absent if not brokers(name)] == []


def test_make_run_installs_no_client_and_make_test_all() -> None:
    assert not names("requirements.lock") & set(CLIENTS.values())
    assert names("requirements-dev.lock") >= set(CLIENTS.values())
