"""`--out`: findings as Parquet by day and the report, put in place when the database has taken the run."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from typing import Self

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from spark.errors import RunFailedError
from spark.files import Files
from spark.sources import root_cause

ASIDE = ".run-"
MARK = "run.json"


@dataclass(frozen=True, slots=True)
class Mark:
    """Of which run something lies aside: what the database has of it, if it was committed."""

    run_id: int
    started_at: datetime

    @classmethod
    def parsed(cls, text: str) -> Self | None:
        """Return what `text` says; None if it is not whole."""
        try:
            said = json.loads(text)
            return cls(int(said["run_id"]), datetime.fromisoformat(said["started_at"]))
        except (ValueError, KeyError, TypeError):
            return None

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps({"run_id": self.run_id, "started_at": self.started_at.isoformat()})


class Output:
    """`<directory>/findings/day=YYYY-MM-DD/*.parquet` and `<directory>/report.html`, of a path or any URL Spark knows.

    What is written lies aside, where no reader looks, until `publish`. From `mark` on only the database knows whether
    it counts: if this run does not come to `publish`, the next one's `begin` does it. Every method raises
    RunFailedError.
    """

    def __init__(self, files: Files, directory: str, token: str) -> None:
        self._files = files
        self._directory = directory.rstrip("/")
        self._aside = f"{self._directory}/{ASIDE}{token}"
        self._marked = False

    def begin(self, committed: Callable[[Mark], bool] | None) -> None:
        """Make the directory; put in place what a run left whose result is `committed`, clear away what others left.

        `committed` None: nobody knows; then what is marked is left for a run that does.
        """
        try:
            self._files.make(self._directory)
            for left in self._files.children(self._directory):
                if _name(left).startswith(ASIDE):
                    self._take_up(left, committed)
        except (Py4JError, OSError) as error:
            raise self._failure(error) from error

    def _take_up(self, left: str, committed: Callable[[Mark], bool] | None) -> None:
        place = f"{left}/{MARK}"
        mark = Mark.parsed(self._files.read_text(place)) if self._files.exists(place) else None
        if mark is not None and committed is None:
            return
        if mark is not None and committed is not None and committed(mark):
            self._put_in_place(left)
        self._files.remove(left)

    def write_findings(self, day: date, findings: DataFrame) -> None:
        """Write a day's findings aside, sorted by kind and subject."""
        try:
            ordered = findings.drop("day").coalesce(1).sortWithinPartitions("kind", "subject")
            ordered.write.option("compression", "zstd").parquet(f"{self._aside}/findings/day={day}")
        except (PySparkException, Py4JError) as error:
            raise self._failure(error) from error

    def write_report(self, html: str) -> None:
        """Write the report aside."""
        try:
            self._files.write_text(f"{self._aside}/report.html", html)
        except Py4JError as error:
            raise self._failure(error) from error

    def mark(self, mark: Mark) -> None:
        """Say that all is written, and of which run; the last thing before its commit."""
        try:
            self._files.write_text(f"{self._aside}/{MARK}", mark.text())
        except Py4JError as error:
            raise self._failure(error) from error
        self._marked = True

    def publish(self) -> None:
        """Put what was written in the place of what was there of the same days."""
        try:
            self._put_in_place(self._aside)
            self._files.remove(self._aside)
        except (Py4JError, OSError) as error:
            raise self._failure(error) from error

    def _put_in_place(self, aside: str) -> None:
        """Move what is there; whoever broke off may have moved some of it."""
        self._files.make(f"{self._directory}/findings")
        for day in self._files.children(f"{aside}/findings"):
            self._files.replace(f"{self._directory}/findings/{_name(day)}", day)
        if self._files.exists(f"{aside}/report.html"):
            self._files.replace(f"{self._directory}/report.html", f"{aside}/report.html")

    def discard(self) -> None:
        """Remove what lies aside, if that can be and it is not marked."""
        if not self._marked:
            with suppress(Py4JError):
                self._files.remove(self._aside)

    def _failure(self, error: Exception) -> RunFailedError:
        return RunFailedError(f"{self._directory} cannot be written: {root_cause(str(error))}")


def _name(place: str) -> str:
    return place.rstrip("/").rsplit("/", 1)[-1]
