"""Refusals of the fast path over a socket, compared with what the service's OpenAPI document says of their status."""

import json
from typing import Any

import httpx
import jsonschema_rs
import pytest

from app.clock import Clock
from app.database.connection import Connection
from app.ids import uuid7
from app.main import ENDPOINTS
from app.server.connection_limits import HttpLimits
from tests.server.raw_http import last_words
from tests.server.test_connection_limits import Start, connected, served
from tests.support.processes import Service

__all__ = ["served"]


async def answer_to(service: Service, sent: bytes) -> tuple[str, dict[str, str], bytes]:
    """Send bytes on a connection of their own; return status, headers and body of what comes before it closes."""
    async with connected(service) as (reader, writer):
        writer.write(sent)
        head, _, body = (await last_words(reader)).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return first.split(" ")[1], headers, body


def agree(document: dict[str, Any], path: str, answered: tuple[str, dict[str, str], bytes]) -> None:
    """Assert that an answer is one that the document describes for this path."""
    status, headers, body = answered
    described = document["paths"][path]["post"]["responses"][status]
    assert {name.lower() for name in described.get("headers", {})} <= set(headers)
    shown = described["content"][headers["content-type"]]
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **shown["schema"]}
    problem = json.loads(body)
    jsonschema_rs.validator_for(schema | {"components": document["components"]}).validate(problem)
    assert problem["status"] == int(status)
    assert problem["type"] in {example["value"]["type"] for example in shown["examples"].values()}


async def documented(service: Service) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
    return document


def request(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_the_web_servers_refusals_are_documented(served: Start) -> None:
    service = await served(request_timeout_s=1)
    document = await documented(service)
    for path in ENDPOINTS:
        line = f"POST {path} HTTP/1.1\r\n".encode()
        sent = {
            "405": request("PUT", path, b"{}"),
            "408": line + b"Host: localhost\r\n",
            "431": line + b"x-a: " + b"a" * (HttpLimits().head_limit_bytes - len(line)),
        }
        for status, bytes_ in sent.items():
            answered = await answer_to(service, bytes_)
            assert answered[0] == status
            agree(document, path, answered)
        described = document["paths"][path]["post"]["responses"]["431"]["content"]["application/problem+json"]
        assert (
            f"{HttpLimits().head_limit_bytes // 1024} KiB" in described["examples"]["head-too-large"]["value"]["detail"]
        )


@pytest.mark.parametrize("path", ["/end", "/messages"])
async def test_a_defect_is_documented(served: Start, db: Connection, path: str) -> None:
    """The defect is a verdict in the database that no version of Halfnote writes."""
    service = await served()
    document = await documented(service)
    one = {"transaction_id": str(uuid7(Clock().now())), "producer_group": "shop"}
    message = one | {"messages": [{"topic": "order", "body": {"order": 1030}}]}
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        assert (await client.post("/messages", json=message)).status_code == 201
    await db.execute("alter table op drop constraint op_verdict")
    await db.execute("update op set verdict = 9")
    body = one | {"verdict": "commit"} if path == "/end" else message
    answered = await answer_to(service, request("POST", path, json.dumps(body).encode()))
    assert answered[0] == "500"
    agree(document, path, answered)
