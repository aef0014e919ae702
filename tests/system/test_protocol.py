"""The examples of docs/protocol.md: its calls with the real service, its SQL in each database, its signature."""

import asyncio
import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from halfnote.barrier_sql import BarrierSql
from halfnote.check import checked
from halfnote.ids import new_id
from halfnote.signatures import sign
from halfnote.testing import signed_check
from halfnote.times import instant

from app.schemas.producer_groups import GroupPut
from tests.conftest import app_of
from tests.sdk.servers import asgi_server
from tests.sdk.shop import fresh
from tests.sdk.sites import mariadb_database
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text()
LOCAL, POSTGRESQL, ON_POSTGRESQL, MYSQL, ON_MYSQL, SQLITE, ON_SQLITE = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
ORDERS = "create table orders (number int primary key)"

Connect = Callable[[], Any]


def run(connection: Any, block: str, transaction_id: UUID, number: int = 1030) -> Any:
    """Run the statements of a block on a connection; return the row of its select, if there is one."""
    found = None
    for statement in block.replace(":id", f"'{transaction_id}'").replace("(1030)", f"({number})").split(";"):
        if not statement.strip():
            continue
        with closing(connection.cursor()) as cursor:
            cursor.execute(statement)
            if cursor.description and statement.strip().startswith("select"):
                found = cursor.fetchone()
    return found


def check_after_before_and_rolled_back(connect: Connect, check: str, duplicate: type[Exception]) -> None:
    """The check runs after the local work, before it, and after a rollback of it."""
    after, before, rolled_back = new_id(), new_id(), new_id()
    with closing(connect()) as shop, closing(connect()) as checker:
        run(shop, LOCAL, after)
        assert run(checker, check, after) == ("local",)
        assert run(checker, check, before) == ("rollback",)
        with pytest.raises(duplicate):
            run(shop, LOCAL, before, 1031)
        shop.rollback()
        run(shop, LOCAL.replace("commit;", "rollback;"), rolled_back, 1032)
        for _ in range(2):
            assert run(checker, check, rolled_back) == ("rollback",)
        assert [row[0] for row in rows(shop)] == [1030]


def rows(connection: Any) -> list[Any]:
    with closing(connection.cursor()) as cursor:
        cursor.execute("select number from orders order by number")
        return list(cursor.fetchall())


# InnoDB refreshes its list of locks only for readers that have not read it for a tenth of a second.
POLL_EVERY_S = 0.2


def waits_for_local_work(connect: Connect, check: str, waiting: Callable[[Any], bool]) -> None:
    """The check runs while the local work is open, and answers with the result of that work."""
    for number, ends in ((2030, "commit"), (2031, "rollback")):
        one = new_id()
        answers: list[Any] = []
        with closing(connect()) as shop, closing(connect()) as checker, closing(connect()) as observer:
            run(shop, LOCAL.replace("commit;", ""), one, number)
            # A longer timeout than the page's, for slow machines.
            check_with_long_timeout = check.replace("3s", "100s").replace("timeout = 3;", "timeout = 100;")
            checking = threading.Thread(target=lambda: answers.append(run(checker, check_with_long_timeout, one)))  # noqa: B023
            checking.start()
            while not waiting(observer):
                assert checking.is_alive()
                time.sleep(POLL_EVERY_S)
            run(shop, ends, one)
            checking.join()
        assert answers == [("local" if ends == "commit" else "rollback",)]


def test_sql_of_postgresql() -> None:
    url = fresh(f"{ORDERS}; {POSTGRESQL}")

    def connect() -> Any:
        return psycopg.connect(url, autocommit=True)

    def waiting(observer: Any) -> bool:
        blocked = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        return observer.execute(blocked).rowcount == 1

    check_after_before_and_rolled_back(connect, ON_POSTGRESQL, psycopg.errors.UniqueViolation)
    waits_for_local_work(connect, ON_POSTGRESQL, waiting)


def test_sql_of_sqlite(tmp_path: Path) -> None:
    def connect() -> Any:
        return sqlite3.connect(tmp_path / "shop.db", isolation_level=None)

    with closing(connect()) as connection:
        connection.executescript(f"{ORDERS}; {SQLITE}")
    check_after_before_and_rolled_back(connect, ON_SQLITE, sqlite3.IntegrityError)
    with closing(connect()) as shop, closing(connect()) as checker:
        run(shop, LOCAL.replace("commit;", ""), new_id(), 2030)
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            run(checker, ON_SQLITE.replace("3000", "50"), new_id())


@pytest.mark.slow
def test_sql_of_mariadb() -> None:
    import pymysql

    with mariadb_database() as connect_to:

        def connect() -> Any:
            connection = connect_to()
            connection.autocommit(True)
            return connection

        def waiting(observer: Any) -> bool:
            return bool(run(observer, "select count(*) from information_schema.innodb_lock_waits", UUID(int=0))[0])

        with closing(connect()) as connection:
            run(connection, MYSQL, UUID(int=0))
        check_after_before_and_rolled_back(connect, ON_MYSQL, pymysql.err.IntegrityError)
        waits_for_local_work(connect, ON_MYSQL, waiting)


def test_the_tables_of_the_page_are_those_of_the_client() -> None:
    for dialect, block in (("postgresql", POSTGRESQL), ("mysql", MYSQL), ("sqlite", SQLITE)):
        assert block.strip() == BarrierSql(dialect, "halfnote_barrier", 3).create + ";"  # type: ignore[arg-type]


def test_the_signature_of_the_page() -> None:
    [example] = re.findall(r"^secret +(\S+)\nid +(\S+)\ntimestamp +(\d+)\nbody +(.+)\nsignature +(\S+)$", PAGE, re.M)
    secret, message_id, timestamp, body, signature = example
    assert sign(secret, message_id, body.encode(), int(timestamp))["webhook-signature"] == signature


def test_the_check_of_the_page() -> None:
    """The documented check is one that the service sends (see tests/sdk/test_contract.py) and the client accepts."""
    [block] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    shown = json.loads(block)
    one = UUID(shown["transaction_id"])
    message = {"tag": None, "headers": {}, **shown["messages"][0]}
    _, body = signed_check(
        one,
        "shop",
        check=1,
        born_at=instant(shown["born_at"]),
        context=shown["context"],
        messages=[message],
    )
    sent = json.loads(body)
    # What a message does not have may be left out.
    sent["messages"] = [{name: value for name, value in message.items() if value}]
    assert sent == shown
    assert checked(shown, instant(shown["born_at"]).timestamp() + 7).age_s == 7


def test_the_defaults_of_the_page() -> None:
    for name, unit in (("immunity_s", " s"), ("interval_s", " s"), ("check_timeout_s", " s")):
        assert f"`{name}` ({GroupPut.model_fields[name].default}{unit})" in PAGE


async def test_the_calls_of_the_page(client: httpx.AsyncClient) -> None:
    async with asgi_server(app_of(client)) as url:
        script = "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))
        script = script.replace("http://127.0.0.1:8080", url) + "curl -sf $halfnote/transactions/$id"
        shell = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", script, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await shell.communicate()
        assert shell.returncode == 0
        group, end, *many, refused, batch, claimed, shown = map(
            json.loads, printed.decode().replace("}{", "}\n{").splitlines()
        )
    assert group["check_urls"] == ["http://127.0.0.1:9030/halfnote/check"]
    assert (batch["checks"], claimed["checks"]) == ("claim", [])
    assert (end["verdict"], end["source"]) == ("commit", "producer")
    assert [[one["status"] for one in answer["outcomes"]] for answer in many] == [[201, 201], [200], [201]]
    assert refused["type"].endswith("/already-decided")
    assert (shown["state"], shown["context"]) == ("committed", {"order": 1030})
