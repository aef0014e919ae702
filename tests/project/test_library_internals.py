"""The internals of libraries that Halfnote overrides or reads, one test each.

A name here is not promised by its library. Each test says what the name is used for and which upstream change would let
the override go. The library is bounded below its next minor version (PySpark: its next major one), so a new version is
taken on purpose, after these tests have passed with it.
"""

import ast
import inspect
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BOUNDED = ("aio-pika", "aiokafka", "nats-py", "prometheus-client", "pyspark", "redis", "uvicorn")

# Private attributes of library objects that our code reads or sets, with the library. Not listed: names that the same
# file defines as well (`_transport` of nats-py, `_connections` of SQLAlchemy, `_writer` of redis-py).
PRIVATE = {
    "_active_spark_context": "pyspark",
    "_batches": "aiokafka",
    "_closed": "aiokafka",
    "_conns": "aiokafka",
    "_drain_waiter": "aiokafka",
    "_get_conn": "aiokafka",
    "_message_accumulator": "aiokafka",
    "_pending_batches": "aiokafka",
    "_sender": "aiokafka",
    "_ssl_context": "aiokafka",
    "_transport": "asyncpg",
    "_writer": "aiokafka",
    "_ensure_initialized": "pyspark",
    "_is_autocommit_isolation": "sqlalchemy",
    "_jsc": "pyspark",
    "_jvm": "pyspark",
}
# Documented all the same: of named tuples and rows, and `os._exit`.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_mapping", "_replace"}


def source_of(value: object) -> str:
    return inspect.getsource(value)  # type: ignore[arg-type]


def test_asyncpg_introspection() -> None:
    """tests/support/type_introspection.py describes built-in types once a process; the service does not use it.

    Goes when asyncpg describes arrays of built-in types without asking the server.
    """
    from asyncpg import Connection

    assert list(inspect.signature(Connection._introspect_types).parameters) == ["self", "typeoids", "timeout"]
    assert "_introspect_types(" in source_of(Connection._get_statement)


def test_asyncpg_transport() -> None:
    """app/database/connection.py sets options on the socket of a connection.

    Goes when asyncpg has settings for keepalive.
    """
    from asyncpg import Connection, connect

    assert "self._transport = transport" in source_of(Connection.__init__)
    assert not [name for name in inspect.signature(connect).parameters if "keepalive" in name]


def test_asyncpg_arrays() -> None:
    """app/database/array_encoding.py replaces what asyncpg asks of each element of an array.

    Goes when asyncpg asks its elements by type.
    """
    from asyncpg.protocol import protocol

    from app.database.array_encoding import ARRAYS, ask_by_type

    ask_by_type()
    assert protocol.IterableABC is ARRAYS


def test_uvicorn_http_protocol() -> None:
    """app/server/http_protocol.py joins a response's writes, limits a request's time and size, and checks framing.

    Goes when uvicorn writes head and body at once, has a request timeout and a limit on the size of a head, drops
    trailers, ignores upgrades, and answers in order when a later request is not HTTP.
    """
    from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
    from uvicorn import Config
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

    assert STATUS_LINE[200].startswith(b"HTTP/1.1 200")
    for method in (
        "_should_upgrade",
        "_start_asgi_task",
        "_unset_keepalive_if_required",
        "connection_made",
        "data_received",
        "on_header",
        "on_headers_complete",
        "on_message_begin",
        "on_message_complete",
        "on_response_complete",
        "pause_writing",
        "resume_writing",
    ):
        assert callable(getattr(HttpToolsProtocol, method))
    made = source_of(HttpToolsProtocol)
    for name in (
        *("app_state", "connections", "cycle", "expect_100_continue", "flow", "headers", "parser", "pipeline"),
        *("server_state", "timeout_keep_alive_task", "url"),
    ):
        assert f"self.{name}" in made, name
    # The newest request of the pipeline is the first entry.
    assert "self.pipeline.appendleft((self.cycle, app))" in made
    for name in ("disconnected", "keep_alive", "message_event", "response_complete", "response_started"):
        assert f"self.{name} = " in source_of(RequestResponseCycle), name
    # One write for the head and one for the body, which the transport joins.
    assert source_of(RequestResponseCycle.send).count("self.transport.write(") >= 2
    assert "timeout_request" not in inspect.signature(Config).parameters
    # A parser stops behind a head with `Upgrade`; the exception has the offset. A callback's exception is the context.
    head = b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 1\r\n\r\n"
    with pytest.raises(HttpParserUpgrade) as stop:
        HttpRequestParser(SimpleNamespace(on_message_begin=lambda: None)).feed_data(head + b"a")
    assert stop.value.args == (len(head),)
    refusing = SimpleNamespace(on_message_begin=lambda: None, on_headers_complete=lambda: 1 // 0)
    with pytest.raises(HttpParserError) as error:
        HttpRequestParser(refusing).feed_data(head)
    assert isinstance(error.value.__context__, ZeroDivisionError)


def test_uvicorn_cycle() -> None:
    """app/server/fast_cycle.py takes the place of a request's cycle and inherits `run_asgi` from it.

    Goes when uvicorn writes head and body at once and makes a scope in a few microseconds.
    """
    from uvicorn import Server
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

    run = source_of(RequestResponseCycle.run_asgi)
    # All that it reads is what FastCycle sets.
    assert set(re.findall(r"self\.(\w+)", run)) == {
        *("disconnected", "logger", "on_response", "receive", "response_complete", "response_started", "scope", "send"),
        *("send_500_response", "transport"),
    }
    assert set(re.findall(r"self\.(\w+)", source_of(RequestResponseCycle.send_500_response))) == {"send"}
    # `_start_asgi_task` starts the request whose turn has come; a future can stand among the tasks.
    assert "cycle, app = self.pipeline.pop()" in source_of(HttpToolsProtocol.on_response_complete)
    assert list(inspect.signature(HttpToolsProtocol._start_asgi_task).parameters) == ["self", "cycle", "app"]
    assert set(re.findall(r"\bt\.(\w+)", source_of(Server.shutdown))) == {"cancel"}
    # And all that the protocol sets or reads.
    assert set(re.findall(r"self\.cycle\.(\w+)", source_of(HttpToolsProtocol))) == {
        *("body", "disconnected", "keep_alive", "message_event", "more_body", "response_complete"),
    }


def test_uvicorn_child_processes() -> None:
    """app/cli/supervisor.py starts, asks and ends uvicorn's child processes, and ends quietly on a second Ctrl-C.

    Goes when uvicorn's parent gives each child its own environment and sockets, and restarts them with pauses.
    """
    from multiprocessing import resource_tracker
    from multiprocessing.context import SpawnProcess

    import uvicorn
    from uvicorn._subprocess import get_subprocess
    from uvicorn.supervisors.multiprocess import Process

    assert list(inspect.signature(Process.__init__).parameters) == ["self", "config", "sockets"]
    assert list(inspect.signature(Process.target).parameters) == ["self", "sockets"]
    assert "self.server.run(sockets)" in source_of(Process.target)
    assert "self._server" in source_of(Process.server.fget)
    # A thread of the child calls `pong` for each question; the answer, whether it serves, comes to `parent_conn`.
    assert "target=self.always_pong" in source_of(Process.target)
    assert "self.pong()" in source_of(Process.always_pong)
    assert "self.child_conn.send(self.server.started)" in source_of(Process.pong)
    assert "self.parent_conn" in source_of(Process.__init__)
    assert isinstance(Process.exitcode, property)
    assert isinstance(Process.pid, property)
    assert inspect.signature(get_subprocess).return_annotation == SpawnProcess.__name__
    assert "except KeyboardInterrupt" in source_of(inspect.getmodule(get_subprocess))
    assert callable(resource_tracker.ensure_running)
    assert "self.force_exit" in source_of(uvicorn.Server)
    for method in (uvicorn.Server.startup, uvicorn.Server.shutdown):
        assert list(inspect.signature(method).parameters) == ["self", "sockets"]


def test_aiokafka_producer() -> None:
    """app/destinations/kafka_producer.py dials judged addresses only, and ends a producer without waiting for brokers.

    Goes when aiokafka takes a socket factory (or resolver), and has a close that gives up what is unsent.
    """
    pytest.importorskip("aiokafka")
    from aiokafka import AIOKafkaProducer
    from aiokafka.client import AIOKafkaClient
    from aiokafka.conn import AIOKafkaConnection
    from aiokafka.producer.message_accumulator import MessageAccumulator, MessageBatch

    for owner, names in {
        AIOKafkaProducer: ("_sender", "_closed", "_message_accumulator"),
        AIOKafkaClient: ("_get_conn", "_conns", "_ssl_context"),
        AIOKafkaConnection: ("_writer",),
        MessageAccumulator: ("_batches", "_pending_batches", "fail_all"),
        MessageBatch: ("_drain_waiter",),
    }.items():
        for name in names:
            assert name in source_of(owner), (owner, name)
    assert list(inspect.signature(AIOKafkaClient._get_conn).parameters)[:2] == ["self", "node_id"]


def test_nats_transport() -> None:
    """app/destinations/nats_connection.py gives the client a socket that is connected to a judged address already.

    Goes when nats-py takes a transport, or a connected socket, as an option.
    """
    pytest.importorskip("nats")
    from nats.aio.client import Client
    from nats.aio.transport import TcpTransport

    for name in ("_bare_io_reader", "_bare_io_writer", "_io_reader", "_io_writer"):
        assert f"self.{name}" in source_of(TcpTransport), name
    assert "self._transport" in source_of(Client)
    for method in ("connect", "connect_tls", "drain", "wait_closed", "write"):
        assert callable(getattr(TcpTransport, method))


def test_aio_pika_transport_factory() -> None:
    """app/destinations/rabbitmq_connection.py hands aiormq a transport factory, for which aio-pika has no option.

    Goes when aio-pika passes `transport_factory` on.
    """
    pytest.importorskip("aio_pika")
    from aio_pika import Connection
    from aiormq.connection import Connection as Below

    assert "transport_factory" in inspect.signature(Below.__init__).parameters
    assert all(parameter.name != "transport_factory" for parameter in Connection.PARAMETERS)
    assert "PARAMETERS" in source_of(Connection)


def test_redis_connection() -> None:
    """app/destinations/redis.py connects to a judged address and keeps the TLS name of the URL's host.

    Goes when redis-py takes a connected socket, or an address apart from the TLS server name.
    """
    pytest.importorskip("redis")
    from redis.asyncio import Connection

    assert callable(Connection._connection_arguments)
    assert inspect.iscoroutinefunction(Connection._connect)
    assert "self._writer" in source_of(Connection)
    assert "server_hostname" not in inspect.signature(Connection.__init__).parameters


def test_prometheus_histogram() -> None:
    """app/observability/metric_families.py adds many values to the buckets of a histogram in one call.

    Goes when `Histogram.observe` takes a count, or several values.
    """
    from prometheus_client import Histogram

    made = source_of(Histogram)
    # The buckets are not cumulative: a value counts in the first whose bound is not below it.
    assert "if amount <= bound:\n                self._buckets[i].inc(1)" in made
    assert "self._sum.inc(amount)" in made
    assert list(inspect.signature(Histogram.observe).parameters) == ["self", "amount", "exemplar"]


def test_pyspark_java() -> None:
    """spark/engine reaches Hadoop's file systems and the class loader of the JVM.

    Goes when the proof needs no file system of Hadoop's and no jar after the JVM has started, as over Spark Connect.
    """
    pytest.importorskip("pyspark")
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.classic import column
    from pyspark.sql.functions import builtin

    # The classes that session.py imports by their full names.
    assert "_jvm.PythonUtils.toSeq(" in source_of(column)
    assert ".PythonSQLUtils.fn(" in source_of(builtin)
    assert callable(SparkContext._ensure_initialized)
    assert "self._jvm" in source_of(SparkSession)
    assert "_jsc" in source_of(SparkContext)


def test_sqlalchemy_session() -> None:
    """The client's binding (sdk/halfnote) looks which connections a session's database transaction uses.

    Goes when SQLAlchemy has a public list of a SessionTransaction's connections, and tells of AUTOCOMMIT.
    """
    from sqlalchemy import Connection
    from sqlalchemy.orm import SessionTransaction

    assert "self._connections" in source_of(SessionTransaction)
    assert callable(Connection._is_autocommit_isolation)


def test_every_private_name_of_a_library_is_named_here() -> None:
    files = [
        path for folder in ("app", "spark", "sdk/halfnote", "migrations") for path in (ROOT / folder).rglob("*.py")
    ]
    # Generated code uses protobuf's own names and checks the version of protobuf itself.
    written = [path for path in files if not path.name.endswith("_pb2.py")]
    assert {name for path in written for name in _foreign_names(path)} == set(PRIVATE)


def test_libraries_whose_internals_are_overridden_have_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    bounds = {one.name: str(one.specifier) for one in map(Requirement, stated)}
    assert [name for name in BOUNDED if "<" not in bounds[name]] == []


def _foreign_names(path: Path) -> set[str]:
    """Return the private attributes that a file uses of objects whose class it does not define."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if of_self else used).add(node.attr)
    return used - own - DOCUMENTED
