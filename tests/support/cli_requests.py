"""Groups, halves and receivers for tests of the command line."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import httpx
import pytest

from tests.support.cli_runs import Run


@pytest.fixture
def group(run: Run) -> str:
    """A registered group of the test's own."""
    name = f"shop-{uuid4().hex[:8]}"
    assert run("groups", "put", name, "--check-url", "http://127.0.0.1:9/check").code == 0
    return name


@contextmanager
def answering(status: int, headers: Mapping[str, str], body: bytes = b"") -> Iterator[str]:
    """Answer every POST and PUT alike; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def taker() -> Iterator[str]:
    """The URL of a receiver that takes every message."""
    with answering(204, {}) as url:
        yield url


def post_half(url: str, group: str, topic: str = "order", **fields: object) -> str:
    """Store a half; return its transaction_id."""
    messages = [{"topic": topic, "key": "order-1030", "tag": "created", "body": {"order": 1030}}]
    answer = httpx.post(f"{url}/half", json={"producer_group": group, "messages": messages, **fields})
    return str(answer.raise_for_status().json()["transaction_id"])


def post_end(url: str, group: str, transaction_id: str, verdict: str) -> None:
    """End a transaction."""
    end = {"producer_group": group, "transaction_id": transaction_id, "verdict": verdict}
    httpx.post(f"{url}/end", json=end).raise_for_status()
