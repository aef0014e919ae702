"""Runs `halfnote` in the process of the test."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from app import cli

Run = Callable[..., "Outcome"]


class Outcome:
    """What a command printed and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        """What a command with --json printed."""
        return json.loads(self.out)


class Answering(io.TextIOBase):
    """A person at the terminal: answers yes, after something happened."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = happens

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        self._happens()
        return "y\n"


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `halfnote` with arguments against the service; every line that it prints for people fits 80 columns."""
    return runner(url, monkeypatch, capsys)


@pytest.fixture
def run_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `halfnote` with arguments that it refuses before it calls a service."""
    return runner("http://127.0.0.1:9", monkeypatch, capsys)


def runner(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `halfnote` in this process."""
    monkeypatch.setenv("HALFNOTE_URL", url)
    monkeypatch.setenv("USER", "dana")
    monkeypatch.setenv("COLUMNS", "80")

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
