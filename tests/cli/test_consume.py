"""`halfnote consume`, and subscriptions whose messages consumers claim."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import asyncpg
import httpx

from tests.support.cli_runs import Run, run
from tests.support.processes import ROOT, serving

__all__ = ["run"]


def publish(url: str, topic: str, count: int) -> list[str]:
    """Publish plain messages; return their ids."""
    put = {"check_urls": ["http://127.0.0.1:9/"]}
    assert httpx.put(f"{url}/producer-groups/consumed", json=put).status_code in (200, 201)
    messages = [{"topic": topic, "key": f"order-{n}", "body": n} for n in range(count)]
    answer = httpx.post(f"{url}/messages", json={"producer_group": "consumed", "messages": messages})
    return [one["message_id"] for one in answer.json()["messages"]]


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
    assert "claimed.order order-1" in printed.out
    [last] = [run("consume", "claimed", "--once", "--json").json]
    assert (last["message_id"], last["body"]) == (sent[4], 4)
    assert run("consume", "claimed", "--once").out == ""
    shown = run("subscriptions", "get", "claimed", "--json").json
    assert shown["destination"] == {"type": "pull"}


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
def consuming(url: str, name: str, stdout: int) -> Iterator[subprocess.Popen[str]]:
    """Run `halfnote consume` as a process of its own; kill it at the end."""
    command = [sys.executable, "-m", "app.cli", "consume", name, "--url", url]
    # The variable would write each line at once.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
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
