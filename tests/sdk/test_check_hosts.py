"""The check endpoint in each framework, asked by the real service over real sockets."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import httpx
import pytest
from django.urls import path
from fastapi import FastAPI
from halfnote import COMMIT, ROLLBACK, UNKNOWN, CheckEndpoint
from starlette.applications import Starlette

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.sdk.servers import asgi_server, configure, django_server, threaded
from tests.sdk.test_check import PATH, AsyncListener, Listener, endpoint_of, in_flask
from tests.support.check_stepping import attempts, in_doubt, turn, verdict


def in_fastapi(endpoint: CheckEndpoint) -> Any:
    app = FastAPI()
    app.add_route(PATH, endpoint.asgi())
    return asgi_server(app)


def in_starlette(endpoint: CheckEndpoint) -> Any:
    app = Starlette()
    app.add_route(PATH, endpoint.asgi())
    return asgi_server(app)


def in_django(endpoint: CheckEndpoint) -> Any:
    configure()
    return threaded(django_server([path(PATH[1:], endpoint.django())]))


HOSTS = [
    pytest.param(in_fastapi, AsyncListener, id="fastapi"),
    pytest.param(in_fastapi, Listener, id="fastapi-plain"),
    pytest.param(in_starlette, AsyncListener, id="starlette"),
    pytest.param(in_flask, Listener, id="flask"),
    pytest.param(in_django, Listener, id="django"),
    pytest.param(in_django, AsyncListener, id="django-async"),
]


@pytest.mark.parametrize(("host", "listening"), HOSTS)
async def test_the_service_asks_and_records_the_answer(
    host: Callable[[CheckEndpoint], Any],
    listening: type[Listener],
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
) -> None:
    listener = listening()
    async with host(endpoint_of(listener)) as url:
        await register_group(db, "shop", check_urls=[url + PATH])
        pinged = (await client.post("/producer-groups/shop/test")).json()
        assert [(result["ok"], result["status"]) for result in pinged["results"]] == [(True, 204)]
        assert listener.asked == []
        found: dict[UUID, tuple[int, int] | None] = {}
        checks = CheckBack()
        for answer in (COMMIT, ROLLBACK, UNKNOWN):
            listener.answer = answer
            one = await in_doubt(client, runtime, context={"order": 1030}, check={"include_body": True})
            assert await turn(runtime, checks) == 1
            found[one] = await verdict(db, one)
    assert list(found.values()) == [(1, 1), (2, 1), None]
    assert (await attempts(db, one))[0]["outcome"] == "unknown"
    asked = listener.asked[0]
    assert (asked.transaction_id, asked.group, asked.check, asked.max_checks) == (next(iter(found)), "shop", 1, 15)
    assert asked.context == {"order": 1030}
    assert 0 <= asked.age_s < 300
    [message] = asked.messages
    assert (message.topic, message.key, message.tag) == ("order", "order-1030", "created")
    assert message.body == {"order": 1030}
    assert message.message_id == f"{asked.transaction_id}-0"
