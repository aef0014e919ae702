"""The client as its own distribution."""

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.requirements import absent

ROOT = Path(__file__).parent.parent.parent


PYRIGHT = Path.home() / ".cache" / "halfnote" / "pyright-1.1.414" / "node_modules" / "pyright" / "index.js"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an empty environment into which the client was installed, and nothing else."""
    place = tmp_path_factory.mktemp("empty")
    venv.create(place / "venv", with_pip=True)
    python = str(place / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT / "sdk")], check=True, cwd=place)
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_installs_alone_into_an_empty_environment(installed: str, tmp_path: Path) -> None:
    listed = subprocess.run([installed, "-m", "pip", "list", "--format=json"], check=True, stdout=subprocess.PIPE)
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
    subprocess.run([installed, "-W", "error", "-c", program], check=True, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_sees_its_types_from_a_user_s_project(installed: str, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed, "service.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert [line.split(": ", 1)[1] for line in checked.stdout.splitlines()[:-1]] == [
        'error: Incompatible types in assignment (expression has type "TransactionResult", variable has type "int")  '
        "[assignment]",
        'error: Incompatible return value type (got "str", expected "Verdict")  [return-value]',
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pyright_sees_its_types_from_a_user_s_project(installed: str, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        absent("node is not installed here, so pyright cannot run", "MACHINE")
    if not PYRIGHT.exists():
        absent("pyright is not fetched yet: make test-deps", "DEPS")
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = ["node", str(PYRIGHT), "--pythonpath", installed, "--outputjson", "service.py"]
    checked = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    found = [
        (problem["rule"], problem["range"]["start"]["line"])
        for problem in json.loads(checked.stdout)["generalDiagnostics"]
    ]
    lines = SERVICE.splitlines()
    wrong = next(number for number, line in enumerate(lines) if line.startswith("wrong: int"))
    assert found == [("reportAssignmentType", wrong), ("reportReturnType", len(lines) - 1)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("project", "packages"), [("sdk", {"halfnote"}), (".", {"app", "migrations", "spark"})], ids=["client", "server"]
)
def test_wheels_build(installed: str, tmp_path: Path, project: str, packages: set[str]) -> None:
    command = [installed, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(ROOT / project)], check=True, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == packages
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


SERVICE = """
from halfnote import COMMIT, CheckedTransaction, CheckEndpoint, Outgoing, SyncTransactionProducer, Transaction, Verdict
from halfnote.barrier import Barrier
from halfnote.databases.dbapi import DbApi
from halfnote.delivery import DeliveryEndpoint
from halfnote.inbox import Inbox
from halfnote.message import Message


class Shop:
    def execute_local(self, transaction: Transaction, arg: int) -> Verdict:
        return COMMIT

    def check_local(self, transaction: CheckedTransaction) -> Verdict:
        return COMMIT if transaction.age_s < 6 else Verdict.UNKNOWN


producer = SyncTransactionProducer("http://127.0.0.1:8080", group="shop", listener=Shop())
wrong: int = producer.send(Outgoing("order", {"order": 1030}), 1030)

with producer.transaction([Outgoing("order", 1)]) as tx:
    ids: list[str] = tx.message_ids


def connect() -> object: ...


def give_points(message: Message, connection: object) -> None: ...


database = DbApi(connect, "sqlite")
CheckEndpoint(Barrier(database), group="shop", secrets=["whsec_x"])
CheckEndpoint(Shop(), group="shop", secrets=lambda: "whsec_x")
DeliveryEndpoint(give_points, secrets="whsec_x", inbox=Inbox(database, "points"))


def verdict() -> Verdict:
    return "commit"
"""


def test_the_core_needs_nothing_but_httpx() -> None:
    """Nor does importing it: extras are imported where they are used."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import halfnote;"
        "print([name for name in ('sqlalchemy', 'asyncpg', 'psycopg', 'django', 'flask', 'fastapi', 'cryptography',"
        " 'aiohttp', 'app') if name in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "sdk")], check=True, stdout=subprocess.PIPE, text=True
    )
    assert completed.stdout.strip() == "[]"
