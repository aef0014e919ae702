"""`halfnote groups` and `halfnote subscriptions`: put, show, list, test, pause, replay, delete."""

import io
import json
import time
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from tests.support.cli_requests import group, taker
from tests.support.cli_runs import Run, run, run_alone

__all__ = ["group", "run", "run_alone", "taker"]


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
    dry = run("groups", "patch", "blue shop", "interval_s=45", "--dry-run", "--json")
    assert (dry.code, dry.json["interval_s"], dry.json["changed"]) == (0, 45, ["interval_s"])
    assert run("groups", "get", "blue shop", "--json").json["interval_s"] == 30
    patched = run("groups", "patch", "blue shop", "interval_s=45", "on_exhausted=park")
    assert (patched.code, "then every 45 s" in patched.out) == (0, True)
    kept = run("groups", "get", "blue shop", "--json").json
    assert (kept["check_urls"], kept["on_exhausted"]) == (["http://127.0.0.1:9/a", "http://127.0.0.1:9/b"], "park")
    # As docs/runbooks/HalfnoteCheckUrlDown.md says: other URLs, and the policy stays.
    moved = run("groups", "patch", "blue shop", 'check_urls=["http://127.0.0.1:9/c"]', "--json").json
    assert (moved["check_urls"], moved["interval_s"], moved["on_exhausted"]) == (["http://127.0.0.1:9/c"], 45, "park")
    assert run("groups", "patch", "blue shop", "interval_s").code == 2
    rotated = run("groups", "rotate-secret", "blue shop")
    assert "whsec_" in rotated.out
    assert run("groups", "delete", "blue shop", "--yes").code == 0
    claimed = run("groups", "put", "nat", "--checks", "claim")
    assert (claimed.code, "by claims of its producers (last: never)" in claimed.out) == (0, True)
    assert "CHECK URL" not in claimed.out
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
    assert "its waiting retries and its dead letters (0)" in " ".join(declined.err.split())
    # Without an answer, as in a script.
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    unanswered = run("subscriptions", "delete", "points")
    said = "Nothing was deleted. There was no answer: add --yes to go on without one.\n"
    assert (unanswered.code, unanswered.err.endswith(f"halfnote: {said}")) == (2, True)
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
        # With 80 columns the list folds a long address in its last column.
        assert address in "".join(run("subscriptions", "list").out.split())
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
    counted = run("subscriptions", "replay", name, "--from", str(offsets[0]), "--key", "k1", "--dry-run")
    assert (counted.code, f"have 1 messages for {name}. Nothing was sent." in counted.out) == (0, True)
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
    twice = run("subscriptions", "replay", name, "--from", "earliest", "--until", str(offsets[1]))
    assert (twice.code, twice.out) == (1, "")
    assert f"Replay {again['replay_id']} of `{name}` sends the same messages" in twice.err
    assert run("subscriptions", "cancel-replay", name, str(again["replay_id"])).code == 0
    listed = run("subscriptions", "replays", name).out
    assert "cancelled" in listed
    assert "done" in listed
    assert run("subscriptions", "replay", name).code == 2
    assert run("subscriptions", "replay", name, "--from", "yesterday").code == 2
    assert run("subscriptions", "replay", name, "--from", "2020-01-01T00:00:00Z", "--json").code == 0
    run("subscriptions", "delete", name, "--yes")
