"""What a run says of its stages: to a person at a terminal, and to programs."""

import io
import json
from datetime import date

import pytest

from spark.engine.progress import Progress

DAY = date(2026, 11, 20)


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        return True


def shown(said: str) -> list[str]:
    """The lines as a terminal shows them: what follows a `\\r` is written over what was there."""
    lines = []
    for line in said.split("\n"):
        seen = ""
        for part in line.split("\r"):
            seen = part + seen[len(part) :]
        lines.append(seen.rstrip())
    return lines


def test_a_terminal_shows_a_stage_while_it_goes_on_and_what_it_took_at_its_end() -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    with progress.stage("snapshot"), progress.stage("read half", DAY) as stage:
        assert shown(terminal.getvalue())[-1].endswith("2026-11-20 read half …")
        stage.rows = 3_000_000
    progress.say("snapshot_lost", "Beginning again.", snapshots=1)
    with progress.stage("join", DAY):
        pass
    half, snapshot, note, join, rest = shown(terminal.getvalue())
    assert half.split() == ["2026-11-20", "read", "half", "3,000,000", "rows", "0.0", "s"]
    # What a stage is within is said once that is over, of itself alone.
    assert snapshot.split() == ["snapshot", "0.0", "s"]
    assert note == "Beginning again."
    assert join.split() == ["2026-11-20", "join", "0.0", "s"]
    assert rest == ""
    assert len({line.rindex(" s") for line in (half, snapshot, join)}) == 1
    assert set(progress.seconds) == {"snapshot", "read half", "join"}


def test_a_stage_that_fails_is_left_as_it_was() -> None:
    terminal = Terminal()
    with pytest.raises(ZeroDivisionError), Progress(terminal).stage("join", DAY):
        raise ZeroDivisionError
    assert shown(terminal.getvalue()) == ["  2026-11-20 join …"]


def test_programs_get_a_json_line_each() -> None:
    lines = io.StringIO()
    progress = Progress(lines)
    with progress.stage("read half", DAY) as stage:
        stage.rows = 20
    with progress.stage("write"):
        pass
    progress.say("snapshot_lost", "Beginning again.", snapshots=1)
    half, write, note = map(json.loads, lines.getvalue().splitlines())
    assert half.pop("seconds") >= 0
    assert half == {"stage": "read half", "day": "2026-11-20", "rows": 20}
    assert set(write) == {"stage", "seconds"}
    assert note == {"note": "snapshot_lost", "text": "Beginning again.", "snapshots": 1}
