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
    # A service that uses it is checked by its types, strictly.
    (tmp_path / "service.py").write_text(SERVICE)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "service.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert [line.split(": ", 1)[1] for line in checked.stdout.splitlines()[:-1]] == [
        'error: Incompatible types in assignment (expression has type "TransactionResult", variable has type "int")  '
        "[assignment]",
        'error: Incompatible return value type (got "str", expected "Verdict")  [return-value]',
    ]


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
    came = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "sdk")], check=True, stdout=subprocess.PIPE, text=True
    )
    assert came.stdout.strip() == "[]"
