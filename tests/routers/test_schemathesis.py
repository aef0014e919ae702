"""schemathesis against the service: what the document promises is so, for generated requests of every operation.

Over real sockets and a real database. The examples are the same in each run, so a finding can be run again.
"""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.config import SchemathesisConfig
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection

from app.config import LOOPBACK, Settings
from app.database.connection import connect
from app.lifecycle.startup import assemble
from app.main import api, create_app
from tests.conftest import migrated_template, register_group
from tests.support import postgres
from tests.support.proof_runs import DAY, ID, find, reconciled

EXAMPLES = 40

# The list of each operation where a bad item fails alone: the answer is 200 with an outcome for each item.
ITEMS = {
    "POST /halves": "halves",
    "POST /ends": "ends",
    "POST /messages": "transactions",
    "POST /producer-groups/{name}/checks/answers": "answers",
}

CONFIG = SchemathesisConfig.from_dict({"generation": {"deterministic": True}})

_numbers = count()

schema = schemathesis.openapi.from_dict(api.openapi(), config=CONFIG)
# It answers without an end; tests/routers/test_events.py reads it.
schema = schema.exclude(path="/events")


@dataclass
class Served:
    """The service in a thread with a separate event loop."""

    dsn: str
    ready: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    failure: BaseException | None = None
    server: uvicorn.Server | None = None

    def run(self) -> None:
        """Serve until the stop event is set."""
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failure = error
        finally:
            self.ready.set()

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            settings_ = Settings(_env_file=None, database_url=self.dsn, allow_networks=LOOPBACK)
            runtime = await assemble(settings_, self.dsn, stack)
            app, inner = create_app()
            inner.state.runtime = runtime
            connection = await connect(self.dsn)
            await register_group(connection, "shop")
            await reconciled(connection, "findings", DAY)
            await find(connection, "parked", f"{ID}-0", transaction_id=ID, position=0, producer_group="shop")
            await connection.close()
            config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="warning")
            self.server = _Server(config, self)
            await self.server.serve()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, served: Served) -> None:
        super().__init__(config)
        self._served = served

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        self._served.url = f"http://127.0.0.1:{port}"
        self._served.ready.set()


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """The URL of a service over this module's database, where the group `shop` is registered."""
    dsn = postgres.create_database(migrated_template())
    served = Served(dsn)
    thread = threading.Thread(target=served.run)
    thread.start()
    served.ready.wait(60)
    if served.failure is not None:
        raise served.failure
    yield served.url
    assert served.server is not None
    served.server.should_exit = True
    thread.join(30)
    postgres.drop_database(dsn)
    assert served.failure is None


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
def test_the_document_is_true(case: Case[Any], service: str) -> None:
    if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
        _fit(case)
    items = ITEMS.get(f"{case.method} {case.operation.path}")
    each = items is not None and isinstance(case.body, dict) and isinstance(case.body.get(items), list)
    case.call_and_validate(base_url=service, excluded_checks=[negative_data_rejection] if each else [])


def _fit(case: Case[Any]) -> None:
    """Make a valid request acceptable where a schema cannot: use a registered group and an id of the present."""
    if case.operation.path == "/accept":
        # Nothing could be stored any more.
        case.body = {"accept": "all"}
    if case.operation.path == "/api-keys" and isinstance(case.body, dict):
        # It may lie in the past.
        case.body.pop("expires_at", None)
    if case.operation.path == "/subscriptions/{name}" and case.method == "PUT":
        # Where one begins is settled when it is made, so each is a new one.
        case.path_parameters["name"] = f"made-{next(_numbers)}"
        if isinstance(case.body, dict):
            _fit_destination(case.body["destination"])
            if isinstance(start := case.body.get("start"), dict) and "offset" in start:
                # The log is empty, and a schema cannot say where it ends.
                start["offset"] = 0
    if case.operation.path == "/producer-groups/{name}" and isinstance(case.body, dict):
        # A group needs a URL or claims, and a schema cannot say which addresses are allowed.
        case.body["check_urls"] = ["http://127.0.0.1:9/check"]
    if case.operation.path == "/subscriptions/{name}/claim" and isinstance(case.body, dict) and "max" in case.body:
        # HALFNOTE_CLAIM_MAX.
        case.body["max"] = min(case.body["max"], 1000)
    if case.operation.path in ("/subscriptions", "/producer-groups", "/topics") and case.query.get("sort") != "name":
        # A cursor is that of a page of the same order.
        case.query.pop("cursor", None)
    if case.operation.path == "/stats/series":
        # With any `from`, a step may be too short.
        case.query.pop("from", None)
    if isinstance(case.body, dict) and case.operation.path in ("/half", "/messages"):
        many = case.body.get("transactions")
        for one in [case.body] if many is None else many:
            one["producer_group"] = "shop"
            one.pop("transaction_id", None)


# A host whose last label is a number, which has to be a canonical IPv4 address.
_NUMERIC_HOST = re.compile(r'(?:(?<=//)|(?<="))([A-Za-z0-9._-]*\.)?(0[xX][0-9A-Fa-f]*|[0-9]+)(?=[:/"])')


def _fit_destination(destination: dict[str, Any]) -> None:
    """No receiver gives consent, no password was stored before, and a schema can't say which addresses are allowed.

    Nor can it derive a public key.
    """
    for name in ("url", "bootstrap"):
        if name in destination:
            text = re.sub(r"\[[0-9A-Fa-f:.]+\]", "[::1]", json.dumps(destination[name]))
            destination[name] = json.loads(_NUMERIC_HOST.sub("127.0.0.1", text))
    destination.pop("consent", None)
    if destination.get("username") is not None and destination.get("password") is None:
        destination["password"] = "a-password"
    if (destination.get("secret") or "").startswith("whsk_"):
        destination["secret"] = f"{destination['secret'][:47]}="
