"""`halfnote groups`, `subscriptions`, `transactions`, `dead-letters`, `drain`: over HTTP, for people and machines."""

import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx
import pytest
from halfnote import Verifier

from app import cli
from app.ids import uuid7
from tests.support.processes import free_port

Run = Callable[..., "Outcome"]


class Outcome:
    """What a command printed and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        """What a command with --json printed."""
        return json.loads(self.out)


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `halfnote` with arguments against the service; every line it prints for people fits 80 columns."""
    return runner(url, monkeypatch, capsys)


@pytest.fixture
def run_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `halfnote` with arguments that it refuses before it calls a service."""
    return runner("http://127.0.0.1:9", monkeypatch, capsys)


def runner(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `halfnote` in this process."""
    monkeypatch.setenv("HALFNOTE_URL", url)
    monkeypatch.setenv("USER", "dana")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr("sys.argv", ["halfnote", *arguments])
        code: object = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        if "--json" not in arguments:
            assert max(map(len, printed.out.splitlines()), default=0) <= 80, printed.out
        assert isinstance(code, int)
        return Outcome(code, printed.out, printed.err)

    return run


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


@pytest.mark.parametrize("name", ["../x", "..", "", "a/b"])
@pytest.mark.parametrize("command", ["put", "get", "delete --yes", "pause", "test"])
def test_a_bad_subscription_name_is_refused(run_alone: Run, command: str, name: str) -> None:
    """Before any call: a client would send `PUT /subscriptions/..` as `PUT /`."""
    refused = run_alone("subscriptions", *command.split(), name)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"halfnote: `{name}` is not a name: ")


def test_a_put_names_the_fields_that_it_reset(run: Run) -> None:
    name, destination = f"mailer-{uuid4().hex[:8]}", ("--to", "http://127.0.0.1:9/")
    run("subscriptions", "put", name, "--topic", "order", *destination, "--rate", "5", "--tag", "x")
    put = run("subscriptions", "put", name, "--topic", "order", *destination)
    assert "left out, so now the default  filters, rate_per_s" in put.out
    assert "left out" not in run("subscriptions", "put", name, "--topic", "order", *destination).out
    assert run("subscriptions", "put", "a b", "--topic", "order", *destination).code == 1
    run("groups", "put", name, "--check-url", "http://127.0.0.1:9/", "--immunity-s", "60")
    assert "left out, so now the default  immunity_s" in run("groups", "put", name, "--check-url", "http://x.test/").out


def test_groups_are_put_shown_listed_and_deleted(run: Run) -> None:
    put = run("groups", "put", "blue shop", "--check-url", "http://127.0.0.1:9/a", "--immunity-s", "60", "--json")
    assert put.code == 0
    assert put.json["immunity_s"] == 60
    assert put.json["secret"].startswith("whsec_")
    again = run(
        "groups", "put", "blue shop", "--check-url", "http://127.0.0.1:9/a", "--check-url", "http://127.0.0.1:9/b"
    )
    assert again.code == 0
    assert "6 s after its birth, then every 30 s" in again.out
    assert "whsec_" not in again.out
    shown = run("groups", "get", "blue shop")
    assert "http://127.0.0.1:9/b" in shown.out
    listed = run("groups", "list")
    assert "blue shop" in listed.out
    assert "blue shop" in [one["name"] for one in run("groups", "list", "--json").json]
    rotated = run("groups", "rotate-secret", "blue shop")
    assert "whsec_" in rotated.out
    assert run("groups", "delete", "blue shop").code == 0
    gone = run("groups", "get", "blue shop")
    assert gone.code == 1
    assert "/problems/group-unknown" in gone.err


def test_a_group_comes_from_a_file_with_options_over_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "group.json"
    file.write_text(json.dumps({"check_urls": ["http://127.0.0.1:9/a"], "max_checks": 3, "interval_s": 7}))
    put = run("groups", "put", "filed", "--file", str(file), "--interval-s", "9", "--json")
    assert (put.json["max_checks"], put.json["interval_s"]) == (3, 9)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"check_urls": ["http://127.0.0.1:9/z"]}'))
    assert run("groups", "put", "filed", "--file", "-", "--json").json["check_urls"] == ["http://127.0.0.1:9/z"]
    file.write_text("[1]")
    refused = run("groups", "put", "filed", "--file", str(file))
    assert (refused.code, "not a JSON object" in refused.err) == (2, True)
    file.write_text("{")
    refused = run("groups", "put", "filed", "--file", str(file))
    assert (refused.code, "cannot be read as JSON" in refused.err) == (2, True)


def test_a_group_is_tested_and_the_exit_code_shows_the_result(run: Run, group: str, taker: str) -> None:
    dead = run("groups", "test", group)
    assert dead.code == 1
    assert "http://127.0.0.1:9/check" in dead.out
    run("groups", "put", group, "--check-url", taker)
    assert run("groups", "test", group).code == 0
    tested = run("groups", "test", group, "--json")
    assert (tested.code, tested.json["results"][0]["ok"]) == (0, True)


def test_subscriptions_are_put_tested_paused_and_deleted(run: Run, taker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put = run("subscriptions", "put", "points", "--topic", "order", "--topic", "paid.*", "--to", taker, "--tag", "x")
    assert put.code == 0
    assert "whsec_" in put.out
    shown = run("subscriptions", "get", "points")
    assert "order, paid.*" in shown.out
    assert "nothing waits" in shown.out
    assert run("subscriptions", "test", "points").code == 0
    assert "paused" in run("subscriptions", "pause", "points").out
    assert run("subscriptions", "get", "points", "--json").json["state"] == "paused"
    assert "active" in run("subscriptions", "resume", "points").out
    assert "points" in run("subscriptions", "list").out
    assert "whsec_" in run("subscriptions", "rotate-secret", "points").out
    run("subscriptions", "put", "points", "--topic", "order", "--to", "http://127.0.0.1:9/")
    assert run("subscriptions", "test", "points").code == 1
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    declined = run("subscriptions", "delete", "points")
    assert (declined.code, "Go on?" in declined.err, "Nothing was deleted." in declined.err) == (1, True, True)
    # Without an answer, as in a script.
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run("subscriptions", "delete", "points").code == 1
    assert run("subscriptions", "get", "points").code == 0
    assert run("subscriptions", "delete", "points", "--yes").code == 0
    assert run("subscriptions", "get", "points").code == 1


def test_subscriptions_go_to_brokers_by_their_addresses(run: Run, tmp_path: Path) -> None:
    asked = (
        ("rabbitmq", "amqp://127.0.0.1:5/shop", {"exchange": "orders", "routing_key": "{topic}.{tag}"}),
        ("nats", "tls://127.0.0.1:6", {"subject": "shop.{topic}"}),
        ("kafka", "kafka+tls://127.0.0.1:2,127.0.0.1:3", {"topic": "shop-{topic}", "sasl": "PLAIN"}),
        ("redis", "redis://127.0.0.1:1/0", {"stream": "shop:{topic}", "maxlen": 1000}),
    )
    for kind, address, fields in asked:
        given = {**fields, "username": "me", "password": "98765432109"}
        options = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
        put = run("subscriptions", "put", f"to-{kind}", "--topic", "none", "--to", address, *options, "--json")
        assert put.code == 0, put.err
        shown = put.json["destination"]
        assert {name: shown[name] for name in ("type", *fields, "username")} == {
            **fields,
            "type": kind,
            "username": "me",
        }
        printed = run("subscriptions", "get", f"to-{kind}").out
        assert address in printed
        assert all(str(fields[name]) in printed for name in fields)
        assert "98765432109" not in printed
        assert address in run("subscriptions", "list").out
    assert run("subscriptions", "get", "to-kafka", "--json").json["destination"]["tls"] is True
    refused = run("subscriptions", "put", "to-ftp", "--topic", "none", "--to", "ftp://127.0.0.1/")
    assert (refused.code, "kafka+tls://" in refused.err) == (2, True)
    unset = run("subscriptions", "put", "to-ftp", "--topic", "none", "--to", "redis://127.0.0.1/", "--set", "stream")
    assert (unset.code, "FIELD=VALUE" in unset.err) == (2, True)
    file = tmp_path / "subscription.json"
    filed = {
        "topics": ["none"],
        "shards": 2,
        "destination": {"type": "redis", "url": "redis://127.0.0.1:1", "maxlen": 5},
    }
    file.write_text(json.dumps(filed))
    put = run("subscriptions", "put", "filed", "--file", str(file), "--to", "redis://127.0.0.1:2", "--json")
    assert (put.json["shards"], put.json["destination"]["url"], put.json["destination"]["maxlen"]) == (
        2,
        "redis://127.0.0.1:2",
        5,
    )
    for name in ("to-rabbitmq", "to-nats", "to-kafka", "to-redis", "filed"):
        assert run("subscriptions", "delete", name, "--yes").code == 0


def test_a_subscription_shows_its_order_shards_and_rate(run: Run) -> None:
    how = ("--ordered", "key", "--on-dead", "hold", "--shards", "3", "--rate", "12.5", "--set", "signing=v1a")
    put = run("subscriptions", "put", "paced", "--topic", "none", "--to", "http://127.0.0.1:9/", *how)
    assert put.code == 0, put.err
    assert "whsk_" in put.out
    shown = run("subscriptions", "get", "paced").out
    for text in ("by key; a dead letter holds its key", "12.5 a second at most", "whpk_", "shards", "holders"):
        assert text in shown
    loose = run("subscriptions", "put", "paced", "--topic", "none", "--to", "http://127.0.0.1:9/", "--on-dead", "hold")
    assert (loose.code, "field: on_dead" in loose.err) == (1, True)
    run("subscriptions", "delete", "paced", "--yes")


def test_replays_are_begun_shown_and_cancelled(run: Run, url: str, group: str, taker: str) -> None:
    name = f"replayed-{uuid4().hex[:8]}"
    run("subscriptions", "put", name, "--topic", name, "--to", taker)
    offsets = []
    for number in range(3):
        message = {"topic": name, "key": f"k{number}", "body": number}
        answer = httpx.post(f"{url}/messages", json={"producer_group": group, "messages": [message]})
        offsets.append(answer.raise_for_status().json()["messages"][0]["offset"])
    begun = run("subscriptions", "replay", name, "--from", str(offsets[0]), "--key", "k1", "--reason", "it was down")
    assert begun.code == 0, begun.err
    [number] = [one["replay_id"] for one in run("subscriptions", "replays", name, "--json").json]
    assert f"Replay {number} of offsets {offsets[0]} to" in begun.out
    deadline = time.monotonic() + 30
    while run("subscriptions", "replays", name, str(number), "--json").json["state"] != "done":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shown = run("subscriptions", "replays", name, str(number)).out
    for text in (f"{number} of {name}", "keys k1", "dana", "it was down", "delivered"):
        assert text in shown
    assert run("subscriptions", "replays", name, str(number), "--json").json["delivered"] == 1
    over = run("subscriptions", "cancel-replay", name, str(number))
    assert (over.code, "/problems/replay-over" in over.err) == (1, True)
    run("subscriptions", "pause", name)
    again = run("subscriptions", "replay", name, "--from", "earliest", "--until", str(offsets[1]), "--json").json
    assert (again["until"], again["actor"]) == (offsets[1], "dana")
    assert run("subscriptions", "cancel-replay", name, str(again["replay_id"])).code == 0
    listed = run("subscriptions", "replays", name).out
    assert "cancelled" in listed
    assert "done" in listed
    assert run("subscriptions", "replay", name).code == 2
    assert run("subscriptions", "replay", name, "--from", "yesterday").code == 2
    assert run("subscriptions", "replay", name, "--from", "2020-01-01T00:00:00Z", "--json").code == 0
    run("subscriptions", "delete", name, "--yes")


def test_a_list_of_transactions_is_filtered_and_paged(run: Run, url: str, group: str) -> None:
    ids = [post_half(url, group, topic) for topic in ("order", "order", "invoice")]
    post_end(url, group, ids[0], "commit")
    listed = run("transactions", "list", "--group", group)
    assert [transaction_id for transaction_id in ids if transaction_id in listed.out] == ids
    assert "committed" in listed.out
    found = run("transactions", "list", "--group", group, "--state", "committed", "--json").json
    assert [one["transaction_id"] for one in found["items"]] == [ids[0]]
    found = run("transactions", "list", "--group", group, "--topic", "invoice", "--key", "order-1030", "--json").json
    assert [one["transaction_id"] for one in found["items"]] == [ids[2]]
    page = run("transactions", "list", "--group", group, "--limit", "2", "--json").json
    assert len(page["items"]) == 2
    rest = run("transactions", "list", "--group", group, "--cursor", page["next_cursor"], "--json").json
    assert len(rest["items"]) == 1
    assert "--cursor" in run("transactions", "list", "--group", group, "--limit", "2").out


def test_a_transaction_is_shown_with_its_timeline(run: Run, url: str, group: str) -> None:
    # A topic of its own: other tests subscribe to `order`, and their attempts would be on the timeline.
    transaction_id = post_half(url, group, "shown", context={"order": 1030})
    post_end(url, group, transaction_id, "commit")
    shown = run("transactions", "show", transaction_id)
    assert shown.code == 0
    for expected in (
        transaction_id,
        "committed",
        "commit by producer",
        '{"order": 1030}',
        "shown (created)",
        "order-1030",
    ):
        assert expected in shown.out
    lines = [line.split() for line in shown.out.splitlines()]
    whats = [line[2] for line in lines if len(line) > 2 and line[1] == "s"]
    as_json = run("transactions", "show", transaction_id, "--json").json
    assert whats == [entry["what"] for entry in as_json["timeline"]] == ["born", "verdict", "published"]


async def test_a_long_timeline_is_shown_whole(run: Run, url: str, group: str, database: str) -> None:
    transaction_id = post_half(url, group)
    connection = await asyncpg.connect(database)
    await connection.execute(
        "insert into attempt (transaction_id, kind, at, outcome, number) "
        "select $1, 'check', now() + n * interval '1 ms', 'unanswered', n from generate_series(1, 2100) n order by n",
        UUID(transaction_id),
    )
    await connection.close()
    shown = run("transactions", "show", transaction_id, "--json").json
    numbers = [entry["check"] for entry in shown["timeline"] if entry["what"] == "check"]
    assert (numbers, shown["attempts_cursor"]) == (list(range(1, 2101)), None)
    assert shown["timeline"][0]["what"] == "born"
    assert "no. 2100" in run("transactions", "show", transaction_id).out


def test_a_person_asks_decides_and_reissues(run: Run, url: str, group: str) -> None:
    transaction_id = post_half(url, group)
    early = run("transactions", "verdict", "rollback", transaction_id, "--reason", "no")
    assert early.code == 1
    assert "/problems/too-early" in early.err
    asked = run("transactions", "check", transaction_id)
    assert (asked.code, "asks its producer now" in asked.out) == (0, True)
    decided = run("transactions", "verdict", "rollback", transaction_id, "--reason", "told by phone", "--force")
    assert decided.code == 0
    verdict = run("transactions", "show", transaction_id, "--json").json["verdict"]
    assert (verdict["source"], verdict["actor"], verdict["reason"]) == ("operator", "dana", "told by phone")
    again = run("transactions", "verdict", "rollback", transaction_id, "--reason", "told by phone", "--force")
    assert "recorded before" in again.out
    reissued = run("transactions", "reissue", transaction_id, "--reason", "it was paid", "--actor", "kim", "--json")
    assert reissued.code == 0
    assert reissued.json["reissued_from"] == transaction_id
    twice = run("transactions", "reissue", transaction_id, "--reason", "again")
    assert twice.code == 1
    assert reissued.json["transaction_id"] in twice.err


def test_a_filter_decides_only_without_dry_run(run: Run, url: str, group: str) -> None:
    ids = {post_half(url, group) for _ in range(3)}
    asked = run("transactions", "check", "--group", group, "--state", "half", "--no-dry-run", "--json").json
    assert asked["changed"] == 3
    chosen = ("--group", group, "--state", "in_doubt", "--reason", "flood")
    preview = run("transactions", "verdict", "rollback", *chosen)
    assert "3 would be decided" in preview.out
    assert ids == set(preview.out.split()[:3])
    done = run("transactions", "verdict", "rollback", *chosen, "--no-dry-run")
    assert "3 of 3 were decided" in done.out
    assert run("transactions", "list", "--group", group, "--state", "rolled_back", "--json").json["items"]


@pytest.fixture
def refuser() -> Iterator[str]:
    """The URL of a receiver that refuses every message."""
    with answering(422, {"webhook-delivery": "abort-message", "halfnote-reason": "unknown customer"}) as url:
        yield url


@pytest.fixture
def dead(run: Run, url: str, group: str, refuser: str) -> Iterator[tuple[str, list[str]]]:
    """A subscription and the ids of three messages that are dead letters of it, oldest first."""
    name = f"mailer-{uuid4().hex[:8]}"
    run("subscriptions", "put", name, "--topic", name, "--to", refuser)
    ids = []
    for number in range(3):
        message = {"topic": name, "key": f"order-{number}", "body": {"order": number}}
        answer = httpx.post(f"{url}/messages", json={"producer_group": group, "messages": [message]})
        ids.append(answer.raise_for_status().json()["messages"][0]["message_id"])
        buried(url, name, number + 1)
    yield name, ids
    run("subscriptions", "delete", name, "--yes")


def buried(url: str, name: str, count: int) -> None:
    """Wait until a subscription has so many dead letters; fails after 30 s."""
    until = time.monotonic() + 30
    while httpx.get(f"{url}/subscriptions/{name}").raise_for_status().json()["dead_letters"] != count:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_dead_letters_are_listed_and_shown(run: Run, dead: tuple[str, list[str]]) -> None:
    name, ids = dead
    listed = run("dead-letters", "list", "--subscription", name)
    assert [line.split()[0] for line in listed.out.splitlines()[1:] if line[:1] not in ("", " ")] == ids[::-1]
    assert "customer (answered 422)" in listed.out
    page = run("dead-letters", "list", "--subscription", name, "--limit", "2", "--json").json
    assert [one["message_id"] for one in page["items"]] == ids[:0:-1]
    rest = run("dead-letters", "list", "--subscription", name, "--cursor", page["next_cursor"], "--json").json
    assert ([one["message_id"] for one in rest["items"]], rest["next_cursor"]) == (ids[:1], None)
    assert "--cursor" in run("dead-letters", "list", "--subscription", name, "--limit", "1").out
    assert (
        run("dead-letters", "list", "--topic", name, "--key", "order-1", "--json").json["items"][0]["key"] == "order-1"
    )
    shown = run("dead-letters", "show", name, ids[0])
    for expected in (ids[0], name, "unknown customer", '{"order": 0}', "order-0"):
        assert expected in shown.out
    assert run("dead-letters", "show", name, ids[0], "--json").json["body"] == {"order": 0}
    gone = run("dead-letters", "show", name, f"{ids[0][:-1]}7")
    assert (gone.code, "/problems/dead-letter-unknown" in gone.err) == (1, True)


def test_dead_letters_are_redelivered_by_id_and_by_filter(run: Run, url: str, dead: tuple[str, list[str]]) -> None:
    name, ids = dead
    preview = run("dead-letters", "redeliver", "--subscription", name, "--dry-run")
    assert [line.split()[0] for line in preview.out.splitlines()] == [*ids[::-1], "3"]
    assert "3 dead letters would be redelivered." in preview.out
    run("subscriptions", "pause", name)
    done = run("dead-letters", "redeliver", ids[0], "--subscription", name, "--reason", "mended")
    assert done.code == 0
    assert "1 dead letter was redelivered." in done.out
    assert "is paused" in done.out
    run("subscriptions", "resume", name)
    # The receiver wants them no more than before.
    buried(url, name, 3)
    acted = run("dead-letters", "redeliver", "--subscription", name, "--yes", "--json").json
    assert (acted["redelivered"], {one["message_id"] for one in acted["ids"]}) == (3, set(ids))
    timeline = run("transactions", "show", ids[0][:36])
    assert "redelivered" in timeline.out
    assert "actor dana" in " ".join(timeline.out.split())
    buried(url, name, 3)
    never = run("dead-letters", "redeliver", f"{ids[0][:-1]}7", "--subscription", name)
    assert (never.code, "1 not found" in never.out) == (0, True)


def test_dropping_by_a_filter_asks_first(
    run: Run, dead: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ids = dead
    gone = run("dead-letters", "drop", ids[0], "--subscription", name, "--json")
    assert (gone.code, gone.json["dropped"]) == (0, 1)
    for answer in ("n\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        refused = run("dead-letters", "drop", "--subscription", name)
        assert refused.code == 1
        assert "2 dead letters will be dropped. Go on?" in refused.err
        assert refused.out.strip() == ""
    assert len(run("dead-letters", "list", "--subscription", name, "--json").json["items"]) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    done = run("dead-letters", "drop", "--subscription", name, "--key", "order-1")
    assert (done.code, "1 dead letter was dropped." in done.out) == (0, True)
    done = run("dead-letters", "drop", "--subscription", name, "--because", "unknown customer", "--yes")
    assert "1 dead letter was dropped." in done.out
    assert "0 dead letters would be dropped." in run("dead-letters", "drop", "--subscription", name, "--yes").out


@pytest.mark.parametrize(
    "arguments",
    [
        ("transactions", "check"),
        ("transactions", "check", "--group", "shop"),
        ("transactions", "verdict", "commit", "--reason", "r"),
        ("transactions", "verdict", "commit", "--reason", "r", "--force", "--group", "g", "--state", "parked"),
        ("transactions", "verdict", "commit"),
        ("transactions", "show"),
        ("dead-letters", "redeliver"),
        ("dead-letters", "drop", "--yes"),
        ("dead-letters", "drop", "id"),
        ("dead-letters", "drop", "id", "--subscription", "mailer", "--topic", "order"),
        ("dead-letters", "redeliver", "--subscription", "mailer", "--replay", "1"),
        ("groups", "list", "--bogus"),
        ("bogus",),
    ],
)
def test_wrong_usage_ends_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    wrong = run(*arguments)
    assert wrong.code == 2
    assert wrong.err
    assert "Traceback" not in wrong.err


def test_a_problem_is_told_in_words_and_as_json(run: Run) -> None:
    transaction_id = str(uuid7(datetime.now(UTC) - timedelta(seconds=9)))
    refused = run("transactions", "show", transaction_id)
    assert (refused.code, refused.out) == (1, "")
    for expected in ("Unknown transaction (404)", "No half with this", "/problems/transaction-unknown"):
        assert expected in refused.err
    as_json = run("transactions", "show", transaction_id, "--json")
    assert (as_json.code, as_json.json["status"]) == (1, 404)


def test_a_missing_service_and_another_service_are_named(run: Run, taker: str) -> None:
    nobody = run("groups", "list", "--url", f"http://127.0.0.1:{free_port()}")
    assert nobody.code == 1
    assert "make run" in nobody.err
    assert "--url" in nobody.err
    somebody = run("groups", "list", "--url", taker)
    assert somebody.code == 1
    assert "not as Halfnote does" in somebody.err
    nonsense = run("groups", "list", "--url", "localhost:8080")
    assert nonsense.code == 1
    assert "Traceback" not in nonsense.err


def test_a_redirect_is_no_success(run: Run) -> None:
    """As of an ingress that answers plain HTTP: the change did not reach the service."""
    with answering(308, {"location": "https://halfnote.example.com/"}) as url:
        refused = run("topics", "declare", "order", "--url", url)
    assert (refused.code, refused.out) == (1, "")
    assert "answered 308 and redirects to https://halfnote.example.com/" in refused.err
    with answering(200, {"content-type": "text/html"}, b"<html>") as url:
        assert "not as Halfnote does" in run("topics", "declare", "order", "--url", url).err


def test_drain_refuses_halves_until_it_is_off(run: Run, url: str, group: str) -> None:
    transaction_id = post_half(url, group)
    assert "refused" in run("drain").out
    try:
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            post_half(url, group)
        post_end(url, group, transaction_id, "commit")
    finally:
        on = run("drain", "--off")
    assert "New halves are taken." in on.out
    post_half(url, group)


def test_version_and_help(run: Run) -> None:
    assert run("version").out.strip() == "0.1.0"
    assert run("--version").out == run("version").out
    commands = ("groups", "transactions", "subscriptions", "dead-letters", "serve", "migrate", "drain")
    for arguments in ((), *((command,) for command in commands)):
        shown = run(*arguments, "--help")
        assert shown.code == 0
        assert "Usage: halfnote" in shown.out


def test_keys_are_those_of_the_named_service(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a key in the environment, too: the embedded database of this directory is not the service's."""
    monkeypatch.chdir(tmp_path)
    created = run("keys", "create", "--role", "admin", "--name", "of-the-service", "--json")
    assert created.code == 0, created.err
    assert "of-the-service" in run("keys", "list").out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["mysql://u:s3cret@db/halfnote", "db:5432/halfnote", "postgres", "postgresql://u:s3/cret@db/halfnote"]
)
def test_a_database_url_of_another_kind_is_refused(run_alone: Run, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", url)
    refused = run_alone("migrate")
    assert refused.code == 2
    expected = "HALFNOTE_DATABASE_URL: must be a URL like postgresql://user:password@host:5432/halfnote"
    assert refused.err == f"halfnote: {expected} (percent-encode special characters of the password)\n"


def test_an_unknown_sslmode_is_refused(run_alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", "postgresql://u:s3cret@127.0.0.1:1/halfnote?sslmode=maybe")
    refused = run_alone("migrate")
    assert refused.code == 1
    assert refused.err.startswith("halfnote: The database cannot be used: `sslmode` parameter must be one of")
    assert "s3cret" not in refused.err


def test_a_new_signing_secret_is_one_that_groups_and_clients_take(run: Run) -> None:
    first, second = (run("new-signing-secret").out.strip() for _ in range(2))
    assert first.startswith("whsec_")
    assert first != second
    Verifier([first, second])
    name = f"shop-{uuid4().hex[:8]}"
    assert run("groups", "put", name, "--check-url", "http://127.0.0.1:9/check", "--secret", first).code == 0
