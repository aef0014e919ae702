"""Standard output that is closed, full, without a reader, or lacks a character; and Ctrl-C during the imports."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support.processes import ROOT

BLOCKING_TYPER = """
import os, signal
os.write(2, b"importing")
while True:
    signal.pause()
"""


def halfnote(url: str, *arguments: str, closed: int | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as a process of its own; `closed`: a file descriptor that it does not have."""
    command = [sys.executable, "-m", "app.cli", *arguments]
    if closed is not None:
        command = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"HALFNOTE_URL": url, **options.pop("env", {})}
    taken = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=60, **taken)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_secret_is_shown_in_every_encoding(url: str, encoding: str) -> None:
    name = f"Zoë \U0001f600 {uuid4().hex[:8]}"
    env = {"PYTHONIOENCODING": encoding}
    made = halfnote(url, "keys", "create", "--role", "viewer", "--name", name, env=env, encoding=encoding)
    assert (made.returncode, made.stderr, "hn_" in made.stdout) == (0, "", True)
    printed = halfnote(url, "keys", "create", "--role", "viewer", "--name", name, "--json", env=env, encoding=encoding)
    assert (printed.returncode, json.loads(printed.stdout)["name"]) == (0, name)
    listed = halfnote(url, "keys", "list", env=env, encoding=encoding)
    assert (listed.returncode, listed.stderr) == (0, "")
    dots = "..." if encoding in ("ascii", "latin-1") else "…"
    assert f"{json.loads(printed.stdout)['prefix']}{dots}" in listed.stdout


def test_differences_are_shown_in_every_encoding(url: str, tmp_path: Path) -> None:
    group, file = f"shop-{uuid4().hex[:8]}", tmp_path / "groups.json"
    for interval_s in (60, 61):
        file.write_text(json.dumps({"groups": {group: {"checks": "claim", "interval_s": interval_s}}}))
        env = {"PYTHONIOENCODING": "cp1252"}
        applied = halfnote(url, "apply", "-f", str(file), "--secrets-out", "-", env=env, encoding="cp1252")
        assert (applied.returncode, applied.stderr) == (0, "")
    assert "interval_s: 60 -> 61" in applied.stdout


@pytest.mark.parametrize("arguments", [("groups", "list"), ("keys", "list", "--json"), ("version",)])
def test_a_full_output_is_told(url: str, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ended = halfnote(url, *arguments, stdout=full)
    said = "The answer cannot be printed: No space left on device. What was asked may have been done."
    assert (ended.returncode, ended.stderr) == (1, f"halfnote: {said}\n")


def test_a_full_output_is_told_of_a_long_answer(url: str) -> None:
    """A text longer than the buffer is written at once, and is not kept if that fails."""
    name = f"long-{uuid4().hex[:8]}"
    urls = [f"http://127.0.0.1:9/{n}{'x' * 1900}" for n in range(10)]
    httpx.put(f"{url}/producer-groups/{name}", json={"check_urls": urls}).raise_for_status()
    with open("/dev/full", "w") as full:
        ended = halfnote(url, "groups", "get", name, "--json", stdout=full)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("halfnote: The answer cannot be printed: ")


def test_a_full_output_that_does_not_block_is_told(url: str) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        os.write(writer, b" " * fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ))
        found = halfnote(url, "keys", "list", "--json", stdout=writer)
    finally:
        os.close(reader)
        os.close(writer)
    said = (
        "halfnote: The answer cannot be printed: Resource temporarily unavailable. What was asked may have been done.\n"
    )
    assert (found.returncode, found.stderr) == (1, said)


def test_a_closed_output_is_told_only_of_an_answer(url: str) -> None:
    name = f"shop-{uuid4().hex[:8]}"
    put = halfnote(url, "groups", "put", name, "--check-url", "http://127.0.0.1:9/", closed=1)
    said = "The answer cannot be printed: Bad file descriptor. What was asked may have been done."
    assert (put.returncode, put.stderr) == (1, f"halfnote: {said}\n")
    deleted = halfnote(url, "groups", "delete", name, "--yes", closed=1)
    assert (deleted.returncode, deleted.stderr) == (0, "")


def test_closed_errors_and_input_change_nothing(url: str) -> None:
    refused = halfnote(url, "groups", "get", "none", closed=2)
    assert (refused.returncode, refused.stdout) == (1, "")
    asked = halfnote(url, "groups", "delete", "none", closed=0)
    assert asked.returncode != 0
    assert "Traceback" not in asked.stderr


def test_a_reader_that_is_gone_is_no_news(url: str) -> None:
    out, into = os.pipe()
    os.close(out)
    ended = halfnote(url, "version", stdout=into)
    os.close(into)
    assert (ended.returncode, ended.stderr) == (1, "")


FAILING_COMMAND = """
import sys
from app.cli.commands import app, run

@app.command("fail")
def fail() -> None:
    print("begun")
    raise {error}

run()
"""


@pytest.mark.parametrize(
    "error", ['PermissionError(13, "Permission denied", "some.file")', 'BrokenPipeError(32, "Broken pipe")']
)
def test_an_error_of_another_cause_is_shown_as_it_is(error: str) -> None:
    command = [sys.executable, "-c", FAILING_COMMAND.format(error=error), "fail"]
    # With a buffer, stdout refuses the text only at the end.
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "begun\n")
    with open("/dev/full", "w") as full:
        hidden = subprocess.run(command, cwd=ROOT, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    for errors in (ended.stderr, hidden.stderr):
        assert errors.splitlines()[-1].startswith(error.partition("(")[0])
    assert (hidden.returncode, "cannot be printed" in hidden.stderr) == (1, False)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_without_a_buffer_is_the_same(url: str, unbuffered: str) -> None:
    env = {"PYTHONUNBUFFERED": unbuffered}
    printed = halfnote(url, "version", env=env)
    assert (printed.returncode, printed.stderr, printed.stdout.count("\n")) == (0, "", 1)
    with open("/dev/full", "w") as full:
        ended = halfnote(url, "version", env=env, stdout=full)
    said = "The answer cannot be printed: No space left on device. What was asked may have been done."
    assert (ended.returncode, ended.stderr) == (1, f"halfnote: {said}\n")


def test_ctrl_c_during_the_imports_ends_in_silence(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(BLOCKING_TYPER)
    command = [sys.executable, "-m", "app.cli", "version"]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.read(9) == b"importing"
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr.read()) == (130, b"")
