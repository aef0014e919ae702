"""Orders in every state, for the console: a receiver, a shop that answers checks, and requests over HTTP.

Order 1030 has not arrived at some subscriptions, each for a cause of its own.
"""

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

import httpx

ORDER = 1030
# What `/picky` does not take. It takes enough others that its circuit breaker stays closed.
FAILING = (b"order-1030", b"order-1005")
# The element that marked text would make.
MARK = "user-mark"
NAMES = ("group", "other group", "topic", "declared topic")


def marked(field: str) -> str:
    """Return text that would make elements and run a script, if a page took it as HTML. A name has no slash."""
    code = f"window.ran='{field}'"
    closed = "" if field in NAMES else f"</script></{MARK}>"
    return f'"><{MARK}>{field}<img src=none onerror={code}><script>{code}{closed}'


class _Answers(BaseHTTPRequestHandler):
    """`/ok` takes every message, `/picky` fails for some, `/check` answers by the transaction's context.

    `/marked` fails with marked text, and `/marked-check` has it in its reason. `/broken/NAME` fails until
    `/repair/NAME` was called.
    """

    protocol_version = "HTTP/1.1"
    repaired: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        """Answer by the path."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status, answer = 204, b""
        if self.path.startswith("/picky") and any(key in body for key in FAILING):
            status, answer = 500, b'{"error": "the warehouse database is read-only"}'
        elif self.path.startswith("/repair/"):
            self.repaired.add(self.path.removeprefix("/repair/"))
        elif self.path.startswith("/broken/") and self.path.removeprefix("/broken/") not in self.repaired:
            status, answer = 500, b'{"error": "broken"}'
        elif self.path.startswith("/marked-check"):
            status, answer = 200, json.dumps({"verdict": "rollback", "reason": marked("check answer")}).encode()
        elif self.path.startswith("/wrong-check"):
            status, answer = 200, json.dumps({"verdict": marked("wrong answer")}).encode()
        elif self.path.startswith("/marked"):
            status, answer = 500, marked("receiver").encode()
        elif self.path.startswith("/check"):
            asked = json.loads(body)
            word = (asked.get("context") or {}).get("answer", "unknown") if isinstance(asked, dict) else "unknown"
            status, answer = 200, json.dumps({"verdict": word}).encode()
        self.send_response(status, marked("phrase") if self.path.startswith("/marked?") else None)
        self.send_header("content-type", "application/json")
        if status != 204:
            self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def answering() -> Iterator[str]:
    """Yield the URL of a server that plays the receivers and the shop."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class World:
    """What a console shows, made over HTTP."""

    def __init__(self, client: httpx.Client, other: str) -> None:
        self._client, self.other = client, other
        self.ids: dict[str, str] = {}

    def build(self) -> None:
        """Make groups, subscriptions and orders in every state."""
        self._groups()
        self._subscriptions()
        for number in range(1001, 1012):
            self.half(f"order-{number}", verdict="commit")
        self.half(f"order-{ORDER}", verdict="commit", headers={"region": "eu"})
        self.half("order-1031", verdict="rollback")
        self.half("order-1032", group="slow-shop")
        self.half("order-1033")
        self.half("order-1034", context={"answer": "commit"})
        self.half(
            "photo-1", topic="photo", body_base64="iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ", verdict="commit"
        )
        self.half("unheard-1", topic="unheard", verdict="commit")

    def until(self, what: str, holds: Callable[[], bool], within_s: float = 30) -> None:
        """Wait until something holds."""
        end = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end, f"not within {within_s} s: {what}"
            time.sleep(0.1)

    def settle(self) -> None:
        """Wait until the states that the console is to show are there."""
        self.until("a parked transaction", lambda: self.state("order-1033") == "parked")
        self.until("a verdict by check", lambda: self.state("order-1034") == "committed")
        self.until("a dead letter", lambda: bool(self.get("/dead-letters", subscription="warehouse")["items"]))
        self.until("an open breaker", lambda: self.get("/subscriptions/crm")["breaker"]["state"] == "open")
        self.until("a delivery", lambda: "delivered" in self.deliveries().get("mailer", ""))

    def half(
        self, key: str, *, topic: str = "order", group: str = "shop", verdict: str | None = None, **more: Any
    ) -> str:
        """Post a half message, and its end if there is a verdict."""
        context = {"context": more.pop("context")} if "context" in more else {}
        content = more if "body_base64" in more else {"body": {"order": key, "total": 12.50}, **more}
        message = {"topic": topic, "key": key, "tag": "created", **content}
        if "body_base64" in more:
            message["content_type"] = "image/png"
        made = self.call("POST", "/half", {"producer_group": group, "messages": [message], **context})
        self.ids[key] = made["transaction_id"]
        if verdict:
            self.call("POST", "/end", {"transaction_id": self.ids[key], "producer_group": group, "verdict": verdict})
        return self.ids[key]

    def state(self, key: str) -> str:
        """Return a transaction's state."""
        return str(self.get(f"/transactions/{self.ids[key]}")["state"])

    def deliveries(self, key: str = f"order-{ORDER}") -> dict[str, str]:
        """Return the states of a transaction's deliveries by subscription."""
        shown = self.get(f"/transactions/{self.ids[key]}")
        return {one["subscription"]: one["state"] for message in shown["messages"] for one in message["deliveries"]}

    def get(self, path: str, **query: str) -> Any:
        """Return the answer of a GET."""
        response = self._client.get(path, params=query)
        response.raise_for_status()
        return response.json()

    def call(self, method: str, path: str, content: Any = None) -> Any:
        """Return the answer of another request."""
        response = self._client.request(method, path, json=content)
        assert response.is_success, response.text
        return response.json() if response.content else None

    def _groups(self) -> None:
        shape = {"check_urls": [f"{self.other}/check"], "immunity_s": 1, "interval_s": 1, "max_checks": 2}
        self.call("PUT", "/producer-groups/shop", {**shape, "on_exhausted": "park"})
        self.call("PUT", "/producer-groups/slow-shop", {**shape, "interval_s": 60, "max_checks": 1000})
        self.call("PUT", "/producer-groups/gone-shop", {**shape, "check_urls": ["http://127.0.0.1:9/check"]})

    def _subscriptions(self) -> None:
        retry = {"retry": [0.2, 0.2]}
        self._subscribe("mailer", "/ok")
        self._subscribe("warehouse", "/picky", **retry)
        self._subscribe("accounting", "/ok")
        self._subscribe("us-only", "/ok", filters={"headers": {"region": "us"}})
        self._subscribe("refunds", "/ok", filters={"tags": ["refunded"]})
        self._subscribe("photos", "/ok", topics=["photo"])
        self._subscribe("crm", None)
        self.call("POST", "/subscriptions/accounting/pause")

    def _subscribe(self, name: str, path: str | None, **more: Any) -> None:
        url = "http://127.0.0.1:9/hook" if path is None else f"{self.other}{path}"
        destination = {"type": "webhook", "url": url}
        self.call("PUT", f"/subscriptions/{name}", {"topics": ["order"], "destination": destination, **more})


def add_marked_text(world: World, other: str) -> list[str]:
    """Store marked text in every field that a person, a producer or a receiver fills; return the names of the fields.

    Ids of transactions are in `world.ids` as `marked`, `checked`, `wrongly checked` and `reissued`.
    """
    group, topic = marked("group"), marked("topic")
    shape = {"immunity_s": 1, "interval_s": 1, "max_checks": 2, "on_exhausted": "park"}
    for name, path in ((group, "marked-check"), (marked("other group"), "wrong-check")):
        urls = [f"{other}/{path}?{quote(marked('check URL'), safe='<>=')}"]
        world.call("PUT", f"/producer-groups/{quote(name, safe='')}", {"check_urls": urls, **shape})
    destination = {"type": "webhook", "url": f"{other}/marked?{quote(marked('URL'), safe='<>=')}"}
    filters = {"tags": [marked("filter tag")], "headers": {"region": marked("filter header")}}
    world.call("PUT", "/subscriptions/marked", {"topics": [topic], "destination": destination, "retry": [0.1]})
    world.call("PUT", "/subscriptions/picked", {"topics": [topic], "destination": destination, "filters": filters})
    world.call(
        "POST", f"/subscriptions/picked/pause?{urlencode({'reason': marked('pause'), 'actor': marked('actor')})}"
    )
    world.call("POST", "/api-keys", {"name": marked("key name"), "role": "metrics"})
    world.call("PUT", f"/topics/{quote(marked('declared topic'), safe='')}")
    text = {"topic": topic, "key": marked("key"), "tag": marked("tag"), "headers": {"x-marked": marked("value")}}
    bodies: list[dict[str, Any]] = [{"body": {marked("body name"): marked("body")}}]
    for content_type, body in (("text/html", "HTML body"), ("text/plain", "text body")):
        bodies.append({"content_type": content_type, "body_base64": base64.b64encode(marked(body).encode()).decode()})
    made = {}
    for name, of in (("marked", group), ("checked", group), ("wrongly checked", marked("other group"))):
        half = {"producer_group": of, "messages": [{**text, **body} for body in bodies]}
        made[name] = world.call("POST", "/half", half)["transaction_id"]
    end = {"transaction_id": made["marked"], "producer_group": group, "verdict": "commit", "reason": marked("end")}
    world.call("POST", "/end", end)
    world.ids |= made
    world.until("a check's reason", lambda: world.state("checked") == "rolled_back")
    world.until("a dead letter", lambda: bool(world.get("/dead-letters", subscription="marked")["items"]))
    reissued = world.call("POST", f"/transactions/{made['checked']}/reissue", {"reason": marked("reissue")})
    world.ids["reissued"] = reissued["transaction_id"]
    return [
        "group", "other group", "topic", "declared topic", "key", "tag", "value", "body name", "body",
        "HTML body", "text body", "end", "check answer", "wrong answer", "receiver", "pause", "actor",
        "reissue", "key name", "filter tag", "filter header",
    ]  # fmt: skip
