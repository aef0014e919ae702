"""`halfnote consume`, and subscriptions whose messages consumers claim."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import pytest

from app.cli.api_client import call
from app.cli.consume import _UntilAnswered
from app.cli.errors import Unavailable
from app.cli.waiting import AGAIN_S
from tests.support.cli_runs import Run, run
from tests.support.processes import ROOT, Service, serving

__all__ = ["run"]


def publish(url: str, topic: str, count: int = 0, *, contents: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Publish plain messages, with contents or numbers as bodies; return their ids."""
    contents = contents or [{"body": n} for n in range(count)]
    put = {"check_urls": ["http://127.0.0.1:9/"]}
    assert httpx.put(f"{url}/producer-groups/consumed", json=put).status_code in (200, 201)
    messages = [{"topic": topic, "key": f"order-{n}", **content} for n, content in enumerate(contents)]
    answer = httpx.post(f"{url}/messages", json={"producer_group": "consumed", "messages": messages})
    return [one["message_id"] for one in answer.json()["messages"]]


def text_of(text: str) -> dict[str, Any]:
    """Return the content of a message that is plain text."""
    return {"body_base64": b64encode(text.encode()).decode(), "content_type": "text/plain; charset=utf-8"}


def test_messages_are_printed_and_acknowledged(run: Run, url: str) -> None:
    assert run("subscriptions", "put", "claimed", "--topic", "claimed.order", "--to", "pull").code == 0
    assert "pull" in run("subscriptions", "list").out
    shown = run("subscriptions", "get", "claimed").out
    assert "pull" in shown
    sent = publish(url, "claimed.order", 5)
    kept = run("consume", "claimed", "--count", "1", "--keep")
    assert (kept.code, sent[0] in kept.out) == (0, True)
    printed = run("consume", "claimed", "--count", "3", "--max", "2")
    assert printed.code == 0
    assert [one for one in sent if one in printed.out] == sent[1:4]
    assert re.search(r"topic +claimed\.order\nkey +order-1\nbody +1\n", printed.out)
    [last] = [run("consume", "claimed", "--once", "--json").json]
    assert (last["message_id"], last["body"]) == (sent[4], 4)
    assert run("consume", "claimed", "--once").out == ""
    shown = run("subscriptions", "get", "claimed", "--json").json
    assert shown["destination"] == {"type": "pull"}


# The content of a message, and what a line of a pipe ends with.
BODIES: list[tuple[dict[str, Any], str]] = [
    ({"body": {"order": 1030, "note": "a\tb\n[bold]c :x: \\ é"}}, r'{"order": 1030, "note": "a\tb\n[bold]c :x: \\ é"}'),
    ({"body": "\x1b[2J\x7f\x9b31m\u202e"}, r'"\u001b[2J\u007f\u009b31m\u202e"'),
    ({"body": ["x" * 5000]}, json.dumps(["x" * 5000])),
    ({"body": None}, "null"),
    (text_of("first\nsecond\x1b"), r'"first\nsecond\u001b"'),
    ({"body_base64": "AAH/", "content_type": "application/octet-stream"}, "base64:AAH/"),
    # Not UTF-8.
    ({"body_base64": "/w==", "content_type": "text/plain"}, "base64:/w=="),
]


def test_a_pipe_gets_a_line_of_columns_for_each_message_with_its_whole_body(run: Run, url: str) -> None:
    assert run("subscriptions", "put", "whole", "--topic", "whole.order", "--to", "pull").code == 0
    sent = publish(url, "whole.order", contents=[content for content, _ in BODIES])
    out, into = os.pipe()
    with consuming(url, "whole", into, "--count", str(len(sent))) as process:
        os.close(into)
        printed = b"".join(iter(lambda: os.read(out, 65_536), b"")).decode()
        _, errors = process.communicate(timeout=60)
    os.close(out)
    assert (process.returncode, errors) == (0, "")
    # `splitlines` also splits at other characters than the line break.
    rows = [line.split("\t") for line in printed.splitlines()]
    assert [row[0] for row in rows] == sent
    assert {tuple(row[2:4]) for row in rows} == {("1", "whole.order")}
    assert [row[4] for row in rows] == [f"order-{n}" for n in range(len(sent))]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", row[1]) for row in rows)
    assert [row[5] for row in rows] == [shown for _, shown in BODIES]


def test_a_person_sees_the_whole_body(run: Run, url: str) -> None:
    assert run("subscriptions", "put", "seen", "--topic", "seen.order", "--to", "pull").code == 0
    contents = [{"body": "x" * 200 + " [bold]:x:"}, text_of("first\nsecond\x1b"), BODIES[5][0]]
    publish(url, "seen.order", contents=contents)
    first, second, third = [run("consume", "seen", "--count", "1").out for _ in contents]
    assert "".join(first.split("body")[1].split()) == '"' + "x" * 200 + '[bold]:x:"'
    assert re.search(r"body +first\n +second\\u001b\n", second)
    assert re.search(r"body \(base64\) +AAH/\n", third)


def test_a_subscription_that_workers_deliver_is_refused(run: Run) -> None:
    assert run("subscriptions", "put", "sent", "--topic", "sent", "--to", "http://127.0.0.1:9/").code == 0
    refused = run("consume", "sent", "--once")
    assert (refused.code, "pull" in refused.err) == (1, True)


def test_what_is_not_given_is_lowered_to_what_the_service_allows(
    run: Run, url: str, database: str, tmp_path: Path
) -> None:
    assert run("subscriptions", "put", "few", "--topic", "few.order", "--to", "pull").code == 0
    sent = publish(url, "few.order", 8)
    with serving(tmp_path, database, HALFNOTE_CLAIM_MAX="3", HALFNOTE_CLAIM_HELD_MAX_S="20") as limited:
        refused = run("consume", "few", "--max", "4", "--once", "--url", limited)
        assert (refused.code, "HALFNOTE_CLAIM_MAX" in refused.err) == (1, True)
        printed = run("consume", "few", "--count", "5", "--url", limited)
        assert (printed.code, [one for one in sent if one in printed.out]) == (0, sent[:5])
        printed = run("consume", "few", "--once", "--url", limited)
        assert (printed.code, [one for one in sent if one in printed.out]) == (0, sent[5:])


@contextmanager
def consuming(url: str, name: str, stdout: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run `halfnote consume` as a process of its own; kill it at the end."""
    command = [sys.executable, "-m", "app.cli", "consume", name, "--url", url, *options]
    # One variable would write each line at once, the other print for people.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONUNBUFFERED", "COLUMNS")}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def receipts(database: str, message_ids: list[str]) -> int:
    """Return how many of these messages were acknowledged."""
    connection = await asyncpg.connect(database)
    try:
        ids = [UUID(one.rpartition("-")[0]) for one in message_ids]
        found: int = await connection.fetchval("select count(*) from receipt where transaction_id = any($1)", ids)
        return found
    finally:
        await connection.close()


def read_within(descriptor: int, wanted: str, within_s: float) -> str:
    """Read a pipe until it contains the text; fails after a time."""
    read = ""
    while wanted not in read:
        assert select.select([descriptor], [], [], within_s)[0], f"only {read!r}"
        read += os.read(descriptor, 65_536).decode()
    return read


async def test_a_message_is_in_the_pipe_before_it_is_acknowledged(run: Run, url: str, database: str) -> None:
    assert run("subscriptions", "put", "piped", "--topic", "piped.order", "--to", "pull").code == 0
    sent = publish(url, "piped.order", 2)
    out, into = os.pipe()
    with consuming(url, "piped", into) as process:
        os.close(into)
        # The command waits 20 s for the next message: a buffered one would stay in the process for so long.
        assert sent[0] in read_within(out, sent[1], 15)
        # A reader that is gone, such as `| head`.
        os.close(out)
        lost = publish(url, "piped.order", 1)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors == (
        "halfnote: The messages cannot be printed: Broken pipe. Those of the last claim were not acknowledged; they "
        "come again.\n"
    )
    assert (await receipts(database, sent), await receipts(database, lost)) == (2, 0)


async def test_a_consumer_that_is_told_to_stop_leaves_nothing_unprinted(run: Run, url: str) -> None:
    assert run("subscriptions", "put", "stopped", "--topic", "stopped.order", "--to", "pull").code == 0
    sent = publish(url, "stopped.order", 3)
    out, into = os.pipe()
    with consuming(url, "stopped", into) as process:
        os.close(into)
        printed = read_within(out, sent[2], 15)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    os.close(out)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "")
    assert [one for one in sent if one in printed] == sent


async def test_a_message_whose_time_was_over_before_its_acknowledgement_is_named_and_not_counted(
    run: Run, url: str, database: str
) -> None:
    """The reader of the pipe is slow, and meanwhile another consumer gets the message."""
    assert run("subscriptions", "put", "late", "--topic", "late.order", "--to", "pull").code == 0
    [sent] = publish(url, "late.order", contents=[{"body": "x" * 200_000}])
    out, into = os.pipe()
    with consuming(url, "late", into, "--count", "1") as process:
        os.close(into)
        printed = read_within(out, sent, 60)
        connection = await asyncpg.connect(database)
        of_it = "subscription_id = (select subscription_id from subscription where name = 'late')"
        over = "now() - interval '1 second'"
        try:
            [held_s] = await connection.fetchrow(
                "select extract(epoch from leased_until - now())::float from delivery_retry "
                f"where {of_it} union all "
                f"select extract(epoch from held_until - claimed_at)::float from pull_claim where {of_it}"
            )
            await connection.execute(f"update pull_claim set held_until = {over}, sweep_at = {over} where {of_it}")
            await connection.execute(f"update delivery_retry set leased_until = {over}, due_at = {over} where {of_it}")
        finally:
            await connection.close()
        assert 30 < held_s <= 60
        wanted = {"wait_s": 30, "invisible_s": 1}
        found = httpx.post(f"{url}/subscriptions/late/claim", json=wanted, timeout=60).json()["messages"]
        assert [(one["message_id"], one["attempt"]) for one in found] == [(sent, 2)]
        while chunk := os.read(out, 65_536):
            printed += chunk.decode()
        _, errors = process.communicate(timeout=60)
    os.close(out)
    assert process.returncode == 0
    assert errors == f"1 message was printed and not acknowledged in time; to come again:\n  {sent}\n"
    assert [line.split("\t")[2] for line in printed.splitlines()] == ["1", "3"]
    assert await receipts(database, [sent]) == 1


async def test_a_consumer_goes_on_after_its_service_restarted(dsn: str, tmp_path: Path) -> None:
    service = Service(tmp_path / "data", "serve", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    try:
        put = {"topics": ["again.order"], "destination": {"type": "pull"}}
        httpx.put(f"{service.url}/subscriptions/again", json=put).raise_for_status()
        first = publish(service.url, "again.order", 1)
        out, into = os.pipe()
        with consuming(service.url, "again", into) as process:
            os.close(into)
            assert process.stderr is not None
            read_within(out, first[0], 60)
            service.stop()
            # While it stops, it may answer 503 first.
            while "No Halfnote answers" not in (line := process.stderr.readline()):
                assert line
            assert line.endswith("Calling again every 2 s.\n")
            ended = run_once(service.url)
            assert (ended.returncode, ended.stderr.startswith("halfnote: No Halfnote answers")) == (1, True)
            await service.start()
            second = publish(service.url, "again.order", 1)
            read_within(out, second[0], 60)
            assert process.poll() is None
        os.close(out)
    finally:
        service.stop()


def run_once(url: str) -> subprocess.CompletedProcess[str]:
    """Run `halfnote consume --once` to its end."""
    command = [sys.executable, "-m", "app.cli", "consume", "again", "--once", "--url", url]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_answer_that_may_be_another_later_is_waited_for(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """As that of a proxy whose service restarts. `Retry-After` is followed, up to a minute."""
    waits: list[float] = []
    left = [httpx.Response(status, headers={"retry-after": after}) for after in ("", "30", "7200")]

    def answer(*_: object, **__: object) -> httpx.Response:
        return left.pop(0) if left else httpx.Response(200, json={"messages": []})

    monkeypatch.setattr(httpx.Client, "request", answer)
    monkeypatch.setattr("time.sleep", waits.append)
    assert _UntilAnswered()("http://127.0.0.1:9", "/subscriptions/q/claim", {}) == {"messages": []}
    assert waits == [AGAIN_S, 30, 60]


def test_a_host_without_an_address_is_an_error_before_the_first_answer_and_not_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(Unavailable) as raised:
        call("http://no-such-host.invalid", "GET", "/stats")
    assert raised.value.is_address
    results: list[object] = [{"messages": []}, raised.value, {"messages": [1]}]

    def post(*_: object) -> object:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("app.cli.consume._post", post)
    waits = _UntilAnswered()
    assert waits("", "", {}) == {"messages": []}
    assert waits("", "", {}) == {"messages": [1]}
    results.append(raised.value)
    with pytest.raises(Unavailable):
        _UntilAnswered()("", "", {})
