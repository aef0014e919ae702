"""Which content types are JSON: one rule for all readers of a body, over a table of content types and bodies."""

import json
from base64 import b64encode
from typing import Any

import httpx
import pytest

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.destinations.cloudevents import event
from app.field_rules import is_json_type, json_of, may_send_as_json
from app.runtime.state import Runtime
from tests.support.check_responder import Responder
from tests.support.check_stepping import COMMIT, in_doubt, turn
from tests.support.webhooks import message

JSON_TYPES = [
    "application/json",
    "Application/JSON",
    "application/json; charset=utf-8",
    "application/json;charset=iso-8859-1",
    "application/json; profile=x",
    'application/json; profile="https://example.com/a;b"',
    "application/vnd.shop.order+json",
    "application/vnd.shop+JSON; v=2",
    'application/ld+json; profile="a/b"; charset=utf-8',
    "model/gltf+json",
    "text/json",
]
OTHER_TYPES = [
    "application/jsonp",
    "application/json-seq",
    "application/json5",
    "application/x-json",
    "application/json+xml",
    "application/xml; note=json",
    'text/plain; as="application/json"',
    "application/octet-stream",
    "json/text",
]
# Under a JSON content type: bodies that are one JSON value in UTF-8, and bodies that are not.
JSON_BODIES = [b"null", b'{ "z":1.0,  "a":[ ] }', b"1e400", b' "x"\n', '"ä"'.encode(), b'{"a":1,"a":2}']
OTHER_BODIES = [b"", b"{broken", b"1 2", b'"\xff"', "[1]".encode("utf-16"), b"[" * 100_000 + b"]" * 100_000, b"NaN"]

CASES = [
    *((kind, b'{"order":1030}', True) for kind in JSON_TYPES),
    *((kind, b'{"order":1030}', False) for kind in OTHER_TYPES),
    *(("application/json; profile=x", body, True) for body in JSON_BODIES),
    *(("application/json; profile=x", body, False) for body in OTHER_BODIES),
]


@pytest.mark.parametrize(
    ("content_type", "is_json", "may_send"),
    [
        *((kind, True, kind.lower().partition(";")[0].startswith("application/")) for kind in JSON_TYPES[:3]),
        *((kind, True, False) for kind in JSON_TYPES[3:6]),
        ("application/vnd.shop.order+json", True, True),
        ("application/vnd.shop+JSON; v=2", True, False),
        ("model/gltf+json", True, False),
        ("text/json", True, False),
        *((kind, False, False) for kind in OTHER_TYPES),
        ("json", False, False),
        ("", False, False),
    ],
)
def test_what_is_read_as_json_is_more_than_what_may_be_sent_so(
    content_type: str, is_json: bool, may_send: bool
) -> None:
    assert (is_json_type(content_type), may_send_as_json(content_type)) == (is_json, may_send)


@pytest.mark.parametrize(("content_type", "body", "is_json"), CASES)
def test_a_body_is_json_by_its_type_and_its_bytes(content_type: str, body: bytes, is_json: bool) -> None:
    found = json_of(body, content_type)
    assert (None if found is None else bytes(found)) == (body if is_json else None)


async def test_every_reader_shows_the_same_bodies_as_json(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    destination = {"type": "webhook", "url": "http://127.0.0.1:9/in"}
    await client.put("/subscriptions/mailer", json={"topics": ["order"], "destination": destination})
    sent = [
        {"topic": "order", "content_type": content_type, "body_base64": b64encode(body).decode()}
        for content_type, body, _ in CASES
    ]
    async with Responder(content=COMMIT) as shop:
        await db.execute("update producer_group set check_urls = $1", [shop.url])
        one = await in_doubt(client, runtime, messages=sent, check={"include_body": True})
        await turn(runtime, CheckBack())
    await db.execute(
        """insert into dead_letter (subscription_id, replay, transaction_id, position, "offset", topic, attempts,
             reason, died_at)
           select s.subscription_id, 0, o.transaction_id, o.position, o."offset", o.topic, 1, 'x', now()
           from outbox o, subscription s"""
    )
    [check] = shop.calls
    for position, (content_type, body, is_json) in enumerate(CASES):
        shown = [
            (check.body, check.json()["messages"][position], "body"),
            *[
                (answer.content, answer.json(), "body")
                for path in (f"/messages/{one}-{position}", f"/dead-letters/mailer/{one}-{position}")
                for answer in [await client.get(path)]
            ],
        ]
        structured = event(message(content_type=content_type, body=body))
        shown.append((structured, json.loads(structured), "data"))
        for document, fields, name in shown:
            if is_json:
                assert b'"%s":%s' % (name.encode(), body) in document, (content_type, body)
            value: Any = {name: json.loads(body)} if is_json else {f"{name}_base64": b64encode(body).decode()}
            found = {key: fields[key] for key in (name, f"{name}_base64") if key in fields}
            assert found == value, (content_type, body)
