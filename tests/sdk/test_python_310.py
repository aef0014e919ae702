"""The client's own tests by Python 3.10, the oldest that it is for. The service beside them runs by this Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.doc_blocks import ROOT
from tests.support import postgres
from tests.support.requirements import absent

# With every extra; and what the tests use besides. The newest that are for Python 3.10.
CLIENT = f"{ROOT / 'sdk'}[asyncpg,django,ed25519,fast,parquet,psycopg,pymysql,sqlalchemy]"
PACKAGES = [
    "mysql-connector-python",
    "psycopg[binary]",
    "psycopg2-binary",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
    "flask",
    "fastapi",
    "uvicorn",
]
# Modules of these need the service in the same process, which is for Python 3.11 and newer.
_of_the_service = re.compile(
    r"^(from (app|tests(?!\.sdk|\.support\.(ports|examples)\b))\b|import tomllib)", re.MULTILINE
).search


def modules() -> list[str]:
    """Return the client's test modules that need no more than the client."""
    found = sorted((ROOT / "tests/sdk").glob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in found if not _of_the_service(file.read_text())]


def python310() -> str | None:
    """Return a Python 3.10, by its name or as pyenv has it."""
    pyenvs = sorted(Path.home().glob(".pyenv/versions/3.10.*/bin/python"))
    for program in filter(None, [shutil.which("python3.10"), *map(str, pyenvs)]):
        asked = [program, "-c", "import sys, venv; sys.exit(sys.version_info[:2] != (3, 10))"]
        if subprocess.run(asked, capture_output=True).returncode == 0:
            return program
    return None


def test_most_modules_need_no_more_than_the_client() -> None:
    named = {
        "barrier",
        "binding",
        "check",
        "exchange",
        "inbox",
        "ledger",
        "model",
        "producer",
        "testing",
        "units",
        "wires",
    }
    assert {f"tests/sdk/test_{name}.py" for name in named} <= set(modules())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_client_s_tests_pass(tmp_path: Path) -> None:
    program = python310()
    if program is None:
        absent("python3.10 is not installed here, the oldest that the client is for", "MACHINE")
    subprocess.run([program, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    # The client alone by the pip that it comes with, which does not read what all packages say of themselves.
    for wanted in ([str(ROOT / "sdk")], ["--upgrade", "pip"], [CLIENT, *PACKAGES]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True, cwd=tmp_path)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")},
        "HALFNOTE_TESTS_SHOP": postgres.create_database(),
        "HALFNOTE_TESTS_PYTHON": sys.executable,
    }
    # Below tests/sdk alone: what is above belongs to the service.
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--confcutdir", "tests/sdk"]
    completed = subprocess.run(
        [python, "-m", "pytest", *options, *modules()], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert completed.returncode == 0, completed.stdout[-8000:]
    passed = re.search(r"(\d+) passed", completed.stdout)
    assert passed is not None
    assert int(passed[1]) > 300
