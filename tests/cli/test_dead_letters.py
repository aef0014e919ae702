"""`halfnote dead-letters`: list, show, redeliver, drop."""

import io
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from app.cli import dead_letters
from app.cli.api_client import call
from app.cli.errors import Refusal
from tests.support.cli_requests import answering, group
from tests.support.cli_runs import Answering, Run, run, run_alone

__all__ = ["group", "run", "run_alone"]


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


def test_dead_letters_are_counted_by_error(run: Run, dead: tuple[str, list[str]]) -> None:
    name, ids = dead
    shown = run("dead-letters", "groups", "--subscription", name)
    heading, first, *_ = shown.out.splitlines()
    assert heading.split() == ["COUNT", "FIRST", "LAST", "SUBSCRIPTION", "WHY"]
    assert (first.split()[0], "unknown" in shown.out) == ("3", True)
    found = run("dead-letters", "groups", "--subscription", name, "--json").json
    [group] = found["items"]
    expected = {"subscription": name, "reason": "unknown customer", "error": "answered 422", "count": 3}
    assert {field: group[field] for field in expected} == expected
    filters = ("--subscription", name, "--because", group["reason"], "--error", group["error"])
    assert [one["message_id"] for one in run("dead-letters", "list", *filters, "--json").json["items"]] == ids[::-1]
    none = run("dead-letters", "drop", "--subscription", name, "--error", "answered 500", "--yes")
    assert "0 dead letters were dropped." in none.out
    dropped = run("dead-letters", "drop", *filters, "--yes")
    assert "3 dead letters were dropped." in dropped.out


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
    for answer, code in (("n\n", 1), ("", 2)):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        refused = run("dead-letters", "drop", "--subscription", name)
        assert refused.code == code
        assert "Nothing was dropped." in refused.err
        assert ("--yes" in refused.err) == (code == 2)
        assert "2 dead letters will be dropped. Go on?" in refused.err
        assert refused.out.strip() == ""
    assert len(run("dead-letters", "list", "--subscription", name, "--json").json["items"]) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    done = run("dead-letters", "drop", "--subscription", name, "--key", "order-1")
    assert (done.code, "1 dead letter was dropped." in done.out) == (0, True)
    done = run("dead-letters", "drop", "--subscription", name, "--because", "unknown customer", "--yes")
    assert "1 dead letter was dropped." in done.out
    # An act, though on nothing, and no dry run.
    assert run("dead-letters", "drop", "--subscription", name, "--yes").out == "0 dead letters were dropped.\n"
    for act, done in (("drop", "dropped"), ("redeliver", "redelivered")):
        acted = run("dead-letters", act, "--subscription", name, "--yes", "--json").json
        assert (acted["dry_run"], acted[done], acted["left"], acted["ids"]) == (False, 0, 0, [])
        assert "died_before" not in acted
    assert "would be" in run("dead-letters", "drop", "--subscription", name, "--dry-run").out


def test_what_dies_before_the_answer_is_not_dropped(
    run: Run, url: str, group: str, dead: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ids = dead
    made: list[str] = []

    def one_more_dies() -> None:
        message = {"topic": name, "body": {"order": 3}}
        answer = httpx.post(f"{url}/messages", json={"producer_group": group, "messages": [message]})
        made.append(answer.raise_for_status().json()["messages"][0]["message_id"])
        buried(url, name, 4)
        gone = {"ids": [{"subscription": name, "message_id": ids[0]}]}
        httpx.request("DELETE", f"{url}/dead-letters", json=gone).raise_for_status()

    monkeypatch.setattr("sys.stdin", Answering(one_more_dies))
    done = run("dead-letters", "drop", "--subscription", name)
    assert "3 dead letters will be dropped. Go on?" in done.err
    assert "2 dead letters were dropped." in done.out
    assert "1 dead letter still meets the filter." in done.out
    assert [
        one["message_id"] for one in run("dead-letters", "list", "--subscription", name, "--json").json["items"]
    ] == made


@pytest.mark.parametrize("act", ["redeliver", "drop"])
def test_what_was_done_before_a_call_failed_is_said(
    run: Run, dead: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    name, _ = dead
    monkeypatch.setattr(dead_letters, "MOVED_MAX", 1)
    acted = []

    def fail_third(*arguments: Any, content: dict[str, Any], **others: Any) -> Any:
        acted.append(content.get("dry_run"))
        if acted.count(False) == 3:
            raise Refusal("The service is gone.", problem={"status": 503})
        return call(*arguments, content=content, **others)

    monkeypatch.setattr(dead_letters, "call", fail_third)
    cut = run("dead-letters", act, "--subscription", name, "--yes", "--json")
    done = "redelivered" if act == "redeliver" else "dropped"
    assert (cut.code, cut.json[done], cut.json["problem"]) == (1, 2, {"status": 503})
    assert f"Not all were {done}. Repeat the command for the rest. The service is gone." in cut.err
    # Those that were redelivered may be dead again, so this may take more calls.
    monkeypatch.setattr(dead_letters, "call", call)
    assert run("dead-letters", act, "--subscription", name, "--yes").code == 0


@pytest.mark.parametrize("act", ["redeliver", "drop"])
def test_a_dry_run_of_ids_is_refused(run_alone: Run, act: str) -> None:
    refused = run_alone("dead-letters", act, "--subscription", "mailer", "--dry-run", f"{UUID(int=7)}-0")
    assert (refused.code, refused.out) == (2, "")
    assert "--dry-run goes with a filter, not with MESSAGE_IDs. Nothing was done." in refused.err
