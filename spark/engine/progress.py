"""Reports a run's progress: one line for each stage, with rows and seconds; text on a terminal, JSON otherwise."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import TextIO


@dataclass
class Stage:
    """A stage that is running; its code sets `rows` if there are rows to count."""

    name: str
    day: date | None = None
    rows: int | None = None


@dataclass
class Progress:
    """Reports each stage. `seconds`: the time of each, summed over all days, by the stage's name.

    `installation`: whose stages these are, if a run has several.
    """

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    seconds: dict[str, float] = field(default_factory=dict)
    installation: str = ""

    @contextmanager
    def stage(self, name: str, day: date | None = None) -> Iterator[Stage]:
        """Time the block and report it at its end; a stage that fails is not reported."""
        stage, began = Stage(name, day), time.monotonic()
        if self.stream.isatty():
            self._write(f"  {self._title(stage)} …")
        yield stage
        took = time.monotonic() - began
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        if self.stream.isatty():
            rows = "" if stage.rows is None else f"{stage.rows:>14,} rows"
            self._write(f"\r  {self._title(stage):<44}{rows:<20}{took:>8.1f} s\n")
        else:
            self._line(stage=name, day=day, rows=stage.rows, seconds=round(took, 3))

    def say(self, note: str, text: str, **details: object) -> None:
        """Report a note: `text` on a terminal, otherwise also the note's name and details, for programs."""
        if self.stream.isatty():
            self._write(f"{self.installation}: {text}\n" if self.installation else f"{text}\n")
        else:
            self._line(note=note, text=text, **details)

    def rounded(self) -> dict[str, float]:
        """Return the seconds by stage, to the millisecond."""
        return {name: round(seconds, 3) for name, seconds in self.seconds.items()}

    def _line(self, **said: object) -> None:
        kept = {"installation": self.installation or None, **said}
        kept = {name: value for name, value in kept.items() if value is not None}
        self._write(json.dumps(kept, default=str) + "\n")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()

    def _title(self, stage: Stage) -> str:
        words = [self.installation, "" if stage.day is None else str(stage.day), stage.name]
        return " ".join(word for word in words if word)
