"""After `close` a producer for threads has no thread left, and says which ends it has left to check-back."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from halfnote import Outgoing, SyncTransactionProducer

ORDER = Outgoing("order", {"order": 1030})
ATTEMPT_S = 1.0


class Service:
    """Takes halves over real connections, and gives ends no answer, until `answers`."""

    def __init__(self) -> None:
        self.answers, self.ended, self.asked = threading.Event(), threading.Event(), list[str]()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["content-length"])))
                service.asked.append(self.path)
                if self.path == "/half":
                    self._answer(201, b'{"created": true}')
                    return
                while not (service.answers.is_set() or service.ended.wait(0.01)):
                    pass
                outcomes = [{"status": 200} for _ in content.get("ends", [])]
                # The client may be gone.
                with suppress(OSError):
                    self._answer(200, json.dumps({"outcomes": outcomes}).encode())

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def ends(self) -> int:
        """Return how many requests with ends have come."""
        return sum(path in ("/end", "/ends") for path in self.asked)

    def stop(self) -> None:
        """Stop serving."""
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.stop()


def ending(service: Service, count: int, **options: Any) -> SyncTransactionProducer:
    """Return a producer with so many ends in the background, of which the first is under way."""
    producer = SyncTransactionProducer(service.url, group="shop", attempt_s=ATTEMPT_S, wait_for_end=False, **options)
    for number in range(count):
        with producer.transaction(ORDER):
            pass
        while number == 0 and not service.ends():
            time.sleep(0.01)
    return producer


@pytest.fixture
def before() -> set[threading.Thread]:
    """The threads that other tests left."""
    return {*threading.enumerate()}


def of_producers(before: set[threading.Thread]) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("halfnote") and one not in before]


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("grace_s", [0.0, 0.2, 2 * ATTEMPT_S])
def test_no_thread_is_left_while_the_service_gives_no_answer(
    service: Service, caplog: pytest.LogCaptureFixture, before: set[threading.Thread], grace_s: float, batching: bool
) -> None:
    producer = ending(service, 3, batching=batching)
    began = time.monotonic()
    producer.close(grace_s)
    # For a busy machine.
    assert time.monotonic() - began < max(grace_s, ATTEMPT_S) + 1
    assert of_producers(before) == []
    asked = service.ends()
    time.sleep(ATTEMPT_S)
    assert service.ends() == asked
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert sum(int(text.split()[0]) for text in warnings if "left to check-back" in text) == 3


def test_what_waits_is_sent_in_one_request_before_the_close_ends(
    service: Service, caplog: pytest.LogCaptureFixture, before: set[threading.Thread]
) -> None:
    producer = ending(service, 20)
    service.answers.set()
    producer.close()
    assert of_producers(before) == []
    assert [path for path in service.asked if path != "/half"] == ["/end", "/ends"]
    assert "left to check-back" not in caplog.text
