"""`halfnote watch`, `messages show`, `proof list`, `--since`, confirmation, and sorted help."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import ClassVar

import psycopg
import pytest

from app.cli.errors import Refusal
from app.cli.since import time_of
from tests.support.cli_requests import group, post_end, post_half
from tests.support.cli_runs import Run, run, run_alone

__all__ = ["group", "run", "run_alone"]

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)


@pytest.fixture
def committed(url: str, group: str) -> str:
    """The id of a committed transaction, on a topic of its own."""
    transaction_id = post_half(url, group, "watched")
    post_end(url, group, transaction_id, "commit")
    return transaction_id


def test_a_watch_shows_the_screen_whenever_the_state_changes(run: Run, url: str, group: str) -> None:
    stopped = Event()

    def change() -> None:
        while not stopped.wait(0.5):
            post_half(url, group, "watched")

    changing = Thread(target=change)
    changing.start()
    try:
        shown = run("watch", "--times", "2")
    finally:
        stopped.set()
        changing.join()
    assert shown.code == 0
    assert shown.out.count("transactions list --state parked") == 2
    # Without a terminal it writes no control characters.
    assert "\x1b" not in shown.out


def test_a_table_in_a_pipe_has_a_line_for_each_row(run: Run, url: str) -> None:
    urls = [f"http://127.0.0.1:9/{number}/{'x' * 90}" for number in range(2)]
    assert run("groups", "put", "wide", "--check-url", urls[0], "--check-url", urls[1]).code == 0
    for command, in_a_row in ((("groups", "list"), True), (("groups", "get", "wide"), False)):
        [line] = [line for line in piped(url, *command) if urls[0] in line]
        assert (urls[1] in line) == in_a_row


def piped(url: str, *command: str) -> list[str]:
    """Run a command as a process of its own whose output is a pipe; return its lines."""
    env = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    program = [sys.executable, "-m", "app.cli", *command]
    printed = subprocess.run(program, env={**env, "HALFNOTE_URL": url}, capture_output=True, text=True, timeout=60)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.splitlines()


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("first\nsecond\r\n", r'"first\nsecond\r\n"'),
        ("\u2028\x85", '"\\u2028\\u0085"'),
        ("1030", '"1030"'),
        (1030, "1030"),
        ("null", '"null"'),
        (None, "null"),
        ({"a": "b\nc"}, r'{"a": "b\nc"}'),
    ],
)
def test_a_body_in_a_pipe_is_one_line_of_json(run: Run, url: str, group: str, body: object, shown: str) -> None:
    one = post_half(url, group, messages=[{"topic": "piped", "key": "order-1030", "body": body}])
    lines = piped(url, "messages", "show", f"{one}-0")
    [line] = [line for line in lines if line.startswith("body ")]
    assert line.split(maxsplit=1)[1] == shown
    assert json.loads(shown) == body
    assert [line.split()[0] for line in lines] == ["message", "transaction", "group", "state", "born", *LAST]
    assert f"\nbody          {shown[:9]}" in run("messages", "show", f"{one}-0").out


LAST = ("topic", "key", "content", "body")


def test_a_field_of_several_lines_is_one_line_in_a_pipe(run: Run, url: str, group: str) -> None:
    one = post_half(url, group, context="first\r\nsecond\x85\n")
    [line] = [line for line in piped(url, "transactions", "show", one) if line.startswith("context ")]
    assert line.endswith(r"  first, second\u0085")


def test_a_watch_goes_on_while_no_service_answers(run_alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            # Ctrl-C.
            raise KeyboardInterrupt

    monkeypatch.setattr("app.cli.waiting.time", SimpleNamespace(sleep=wait))
    shown = run_alone("watch")
    assert shown.code == 0
    assert shown.err.count("No Halfnote answers") == 1
    assert shown.err.endswith("Calling again every 2 s.\n")


class BusyHandler(BaseHTTPRequestHandler):
    """Answers with a problem and the next `Retry-After`, and when none is left that the key is wrong."""

    status = 503
    afters: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        status = self.status if self.afters else 401
        problem = {"type": "/problems/busy", "title": "Busy", "status": status, "detail": "Ask later."}
        self.send_response(status)
        self.send_header("content-type", "application/problem+json")
        if self.afters:
            self.send_header("retry-after", self.afters.pop(0))
        self.end_headers()
        self.wfile.write(json.dumps(problem).encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_watch_waits_for_a_service_that_is_busy(run: Run, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """As `consume` does. `Retry-After` is followed, up to a minute."""
    waits: list[float] = []
    monkeypatch.setattr("app.cli.waiting.time", SimpleNamespace(sleep=waits.append))
    handler = type("Handler", (BusyHandler,), {"status": status, "afters": ["", "30", "7200"]})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            shown = run("watch", "--url", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
    assert waits == [2, 30, 60]
    assert shown.code == 1
    assert shown.err.splitlines()[0] == f"Busy ({status}) Calling again every 2 s."
    assert "(401)" in shown.err


def test_a_message_with_its_body_and_deliveries(run: Run, group: str, committed: str) -> None:
    shown = run("messages", "show", f"{committed}-0")
    assert shown.code == 0
    for words in ("order-1030", "committed", group, "1030"):
        assert words in shown.out
    assert run("messages", "show", f"{committed}-0", "--json").json["transaction_id"] == committed
    unknown = run("messages", "show", f"{committed}-7")
    assert unknown.code == 1
    assert "1 messages" in unknown.err


def test_the_days_of_the_proof(run: Run) -> None:
    shown = run("proof", "list")
    assert shown.code == 0
    assert "last run" in shown.out
    assert "DAY" in shown.out
    assert run("proof", "list", "--json").json.keys() >= {"verdict", "days", "runs"}


def test_lists_have_states(run: Run, url: str, group: str, committed: str) -> None:
    assert run("subscriptions", "put", "lister", "--topic", "listed", "--to", "pull").code == 0
    post_end(url, group, post_half(url, group, "listed"), "commit")
    shown = run("subscriptions", "list", "--sort", "lag")
    assert shown.code == 0
    for words in ("LAG", "OLDEST", "DEAD", "LAST ERROR", "lister"):
        assert words in shown.out
    found = run("subscriptions", "list", "--sort", "lag", "--json").json
    assert next(one for one in found if one["name"] == "lister")["standing"]["messages"] == 1
    seconds = [one["standing"]["seconds"] for one in found]
    assert seconds == sorted(seconds, reverse=True)
    for order in ("name", "state", "dead", "changed"):
        assert "lister" in run("subscriptions", "list", "--sort", order).out
    for order in ("name", "messages", "first_seen"):
        assert "listed" in run("topics", "list", "--sort", order).out
    for order in ("name", "undecided", "oldest"):
        assert run("groups", "list", "--sort", order).code == 0
        assert group in [one["name"] for one in run("groups", "list", "--sort", order, "--json").json]
    topics = run("topics", "list")
    for words in ("PER S", "LAST MESSAGE", "UNROUTED", "ago"):
        assert words in topics.out
    assert "IN DOUBT" in run("groups", "list").out
    assert "in doubt" in run("groups", "get", group).out


def test_lists_say_how_many_there_are(run: Run, url: str, group: str, committed: str) -> None:
    post_half(url, group, "listed")
    shown = run("transactions", "list", "--group", group, "--limit", "1")
    assert "1 of 2. There may be more: --cursor" in shown.out
    assert committed not in shown.out
    oldest = run("transactions", "list", "--group", group, "--limit", "1", "--sort", "oldest")
    assert committed in oldest.out
    assert "of 2" not in run("transactions", "list", "--group", group).out
    page = run("transactions", "list", "--group", group, "--limit", "1", "--json").json
    assert page["total"] == {"count": 2, "exact": True}
    assert run("dead-letters", "list", "--json").json["total"]["exact"]
    assert run("dead-letters", "groups", "--sort", "last").code == 0


def test_the_audit_says_that_there_is_more_and_continues(run: Run, database: str) -> None:
    made = """insert into audit (at, actor, key_id, role, what, target, detail)
        select now(), 'ann', 7, 'admin', 'topic.declare', 'many-acts', '{}' from generate_series(1, 1100)"""
    with psycopg.connect(database) as db:
        db.execute(made)
    of_target = ("audit", "--target", "many-acts")
    listed = run(*of_target, "--limit", "2")
    assert "\n2 of 1,100. There may be more: --cursor " in listed.out
    first = run(*of_target, "--limit", "1050", "--json").json
    assert (len(first["items"]), first["total"]) == (1050, {"count": 1100, "exact": True})
    rest = run(*of_target, "--cursor", first["next_cursor"], "--json").json
    assert (len(rest["items"]), rest["next_cursor"]) == (50, None)
    ids = [one["audit_id"] for one in (*first["items"], *rest["items"])]
    assert ids == sorted(set(ids), reverse=True)
    whole = run(*of_target, "--sort", "oldest", "--limit", "1100")
    assert "more" not in whole.out
    assert whole.out.count("many-acts") == 1100


def test_since_is_a_distance_from_now(run: Run, group: str, committed: str) -> None:
    recent = run("transactions", "list", "--group", group, "--since", "1h")
    assert committed in recent.out
    assert "ago" in recent.out
    exact = run("transactions", "list", "--group", group, "--since", "1h", "--json").json["items"]
    assert [one["transaction_id"] for one in exact] == [committed]
    assert datetime.fromisoformat(exact[0]["born_at"]).tzinfo is not None
    for arguments in (
        ("transactions", "list", "--since", "an hour"),
        ("dead-letters", "list", "--since", "1h", "--died-after", AT.isoformat()),
        ("audit", "--since", "9x"),
    ):
        assert run(*arguments).code == 2, arguments
    assert run("dead-letters", "list", "--since", "2d").code == 0
    assert run("audit", "--since", "15m").code == 0


def test_a_length_of_time_has_one_form() -> None:
    for since, wanted in (
        ("30s", "2026-11-21T07:59:30+00:00"),
        ("15m", "2026-11-21T07:45:00+00:00"),
        ("1h", "2026-11-21T07:00:00+00:00"),
        ("2d", "2026-11-19T08:00:00+00:00"),
    ):
        assert time_of(since, None, "--after", AT) == wanted
    assert time_of(None, "x", "--after", AT) == "x"
    for since in ("", "1", "h", "1 h", "1.5h", "-1h", "1w", "999999d", "9999999s"):
        with pytest.raises(Refusal):
            time_of(since, None, "--after", AT)


def test_a_delete_asks_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("groups", "put", "red shop", "--check-url", "http://127.0.0.1:9/check")
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    declined = run("groups", "delete", "red shop")
    assert declined.code == 1
    assert "Nothing was deleted" in declined.err
    assert run("groups", "get", "red shop").code == 0
    assert run("keys", "revoke", "1").err.endswith("Nothing was revoked.\n")
    assert run("groups", "delete", "red shop", "--yes").code == 0
    assert run("groups", "get", "red shop").code == 1


@pytest.mark.parametrize("command", [(), ("transactions",), ("keys",), ("subscriptions",)])
def test_help_is_sorted(run_alone: Run, command: tuple[str, ...]) -> None:
    listed = run_alone(*command, "--help").out.partition("Commands:\n")[2]
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]
    assert len(names) > 3
    assert names == sorted(names)
