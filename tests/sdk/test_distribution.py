"""The client as its own distribution."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_installs_alone_into_an_empty_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT / "sdk")], check=True, cwd=tmp_path)
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, stdout=subprocess.PIPE)
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert names <= {"halfnote", "httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi"} | {
        "typing_extensions",
        "exceptiongroup",
        "pip",
        "setuptools",
    }
    program = (
        "import halfnote, importlib.util, pathlib;"
        "assert importlib.util.find_spec('app') is None;"
        "assert (pathlib.Path(halfnote.__file__).parent / 'py.typed').exists();"
        "halfnote.SyncTransactionProducer('http://127.0.0.1:9', group='shop').close()"
    )
    subprocess.run([python, "-W", "error", "-c", program], check=True, cwd=tmp_path)


def test_the_core_needs_nothing_but_httpx() -> None:
    """Nor does importing it: extras are imported where they are used."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import halfnote;"
        "print([name for name in ('sqlalchemy', 'asyncpg', 'psycopg', 'django', 'flask', 'fastapi', 'cryptography',"
        " 'aiohttp', 'app') if name in sys.modules])"
    )
    came = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "sdk")], check=True, stdout=subprocess.PIPE, text=True
    )
    assert came.stdout.strip() == "[]"
