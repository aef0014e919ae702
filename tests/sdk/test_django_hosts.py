"""Django as projects have it: with ATOMIC_REQUESTS, and with threads that Django does not clean up after."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pymysql
import pytest
from django.urls import path
from halfnote import CheckEndpoint, Outgoing, SyncTransactionProducer
from halfnote.barrier import Barrier
from halfnote.barrier_mark import marked
from halfnote.databases.django import Django
from halfnote.delivery import DeliveryEndpoint
from halfnote.ids import new_id
from halfnote.inbox import Inbox
from halfnote.message import Message
from halfnote.signatures import sign
from halfnote.testing import SECRET, Coordinator

from tests.sdk.servers import django_server
from tests.sdk.sites import mariadb_database, named_by_django
from tests.sdk.test_check import AsyncListener, asked


@pytest.fixture
def atomic(tmp_path: Path) -> Iterator[Django]:
    """A database of a project with ATOMIC_REQUESTS."""
    from django.db import connections

    place = {"NAME": str(tmp_path / "shop.db"), "ATOMIC_REQUESTS": True}
    alias = named_by_django(ENGINE="django.db.backends.sqlite3", **place)
    yield Django(alias)
    connections[alias].close()
    connections.settings[alias]["ATOMIC_REQUESTS"] = False


def posted(url: str, message_id: str, body: bytes, **headers: str) -> httpx.Response:
    signed = sign(SECRET, message_id, body) | {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.Client(base_url=url) as client:
        return client.post("/hook", content=body, headers=signed)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_check_is_answered_in_spite_of_atomic_requests(atomic: Django, asynchronous: bool) -> None:
    barrier = Barrier(atomic)
    barrier.create_table()
    view = CheckEndpoint(AsyncListener() if asynchronous else barrier, group="shop", secrets=SECRET).django()
    with django_server([path("hook", view)]) as url:
        answer = posted(url, "chk_1", asked(str(new_id()), context=marked(None)))
    assert (answer.status_code, answer.text) == (200, '{"verdict": "%s"}' % ("commit" if asynchronous else "rollback"))


def test_a_delivery_is_taken_in_spite_of_atomic_requests(atomic: Django) -> None:
    inbox, taken = Inbox(atomic, "points"), list[str]()
    inbox.create_table()
    view = DeliveryEndpoint(lambda message, _: taken.append(message.message_id), secrets=SECRET, inbox=inbox).django()
    with django_server([path("hook", view)]) as url:
        for _ in range(2):
            answer = posted(url, "1-0", json.dumps({"order": 1}).encode(), ce_id="1-0", ce_type="order")
            assert answer.status_code == 200
    assert taken == ["1-0"]


@pytest.fixture
def pymysql_for_django(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Django find PyMySQL where it looks for mysqlclient, with each module only once.

    `pymysql.install_as_MySQLdb` names the package alone and for the whole process. An import of `MySQLdb.converters`
    then loads a second `err`, sets it in the package, and no `pymysql.err.IntegrityError` is the one that is raised.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "pymysql":
            monkeypatch.setitem(sys.modules, name.replace("pymysql", "MySQLdb", 1), module)


@pytest.mark.usefixtures("pymysql_for_django")
def test_pymysql_is_loaded_only_once() -> None:
    importlib.import_module("django.db.backends.mysql.base")
    assert pymysql.err.IntegrityError is pymysql.IntegrityError
    assert pymysql.err is sys.modules["pymysql.err"]


@pytest.mark.slow
@pytest.mark.usefixtures("pymysql_for_django")
@pytest.mark.parametrize("by", ["barrier", "inbox", "begin"])
def test_a_thread_goes_on_after_its_connection_was_lost(by: str) -> None:
    from django.db import OperationalError, connections

    with mariadb_database() as connect:
        place = connect()
        alias = named_by_django(
            ENGINE="django.db.backends.mysql",
            HOST=place.host,
            PORT=place.port,
            USER="root",
            NAME=place.db.decode(),
        )
        runs = _uses(by, Django(alias))
        runs()
        with connections[alias].cursor() as cursor:
            cursor.execute("select connection_id()")
            number = cursor.fetchone()[0]
        place.cursor().execute(f"kill {number}")
        place.close()
        # The first use finds that it is lost.
        with suppress(OperationalError):
            runs()
        runs()
        connections[alias].close()


def _uses(by: str, database: Django) -> Callable[[], Any]:
    barrier, inbox = Barrier(database), Inbox(database, "points")
    barrier.create_table()
    inbox.create_table()
    if by == "barrier":
        return lambda: barrier.settle(new_id())
    if by == "inbox":
        return lambda: inbox.receive(Message(f"{new_id()}-0", "order", b"1"), lambda message, _: None)
    coordinator = Coordinator("shop")
    producer = SyncTransactionProducer(
        "http://halfnote", group="shop", barrier=barrier, transport=coordinator.transport()
    )

    def begun() -> None:
        with producer.begin(Outgoing("order", 1)):
            pass

    return begun
