"""`--out`: findings by day, certificates and the report, published after the database has committed the run."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Self

from pyspark.sql import DataFrame

from spark.engine.filesystem import FAILURES, Files
from spark.errors import RunFailedError
from spark.sources.failures import root_cause

ASIDE = ".run-"
MARK = "run.json"
REPORT = "report.html"
# Of the SHA-256 of a certificate that is not put in the place of another one.
DIGITS = 12
URL_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Mark:
    """The run of unpublished files, with the identity that the database records if the run was committed."""

    run_id: int
    started_at: datetime

    @classmethod
    def parsed(cls, text: str) -> Self | None:
        """Parse `text`; None if it is incomplete."""
        try:
            said = json.loads(text)
            return cls(int(said["run_id"]), datetime.fromisoformat(said["started_at"]))
        except (ValueError, KeyError, TypeError):
            return None

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps({"run_id": self.run_id, "started_at": self.started_at.isoformat()})


class Output:
    """`<directory>/findings/day=YYYY-MM-DD/*.parquet` and `<directory>/report.html`, for any path or URL of Spark.

    Files are written to a separate directory until `publish`, so that no reader finds them. After `mark`, the database
    decides whether they count: if this run ends before `publish`, the next run's `begin` publishes them. Every method
    raises RunFailedError.
    """

    def __init__(self, files: Files, directory: str, token: str) -> None:
        self._files = files
        self._directory = directory.rstrip("/")
        self._aside = f"{self._directory}/{ASIDE}{token}"
        self._marked = False
        # The certificates that were published before and stay, each with the place of the new one of the same day.
        self.contradicted: dict[str, str] = {}

    def begin(self, committed: Callable[[Mark], bool] | None) -> None:
        """Make the directory; publish the files of an earlier run whose result is `committed`, remove those of others.

        `committed` None: unknown; then marked files stay for a later run that can find out.
        """
        try:
            self._files.make(self._directory)
            for left in self._files.children(self._directory):
                if _name(left).startswith(ASIDE):
                    self._take_up(left, committed)
        except FAILURES as error:
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
        """Write a day's findings, unpublished, sorted by kind and subject."""
        try:
            ordered = findings.drop("day").coalesce(1).sortWithinPartitions("kind", "subject")
            ordered.write.option("compression", "zstd").parquet(f"{self._aside}/findings/day={day}")
        except FAILURES as error:
            raise self._failure(error) from error

    def write_certificate(self, day: date, document: str) -> None:
        """Write a day's certificate, unpublished."""
        try:
            self._files.write_text(f"{self._aside}/certificates/{day}.json", document)
        except FAILURES as error:
            raise self._failure(error) from error

    def write_report(self, html: str) -> None:
        """Write the report, unpublished."""
        try:
            self._files.write_text(f"{self._aside}/{REPORT}", html)
        except FAILURES as error:
            raise self._failure(error) from error

    def mark(self, mark: Mark) -> None:
        """Mark the files as complete, with their run. This is the last step before the commit of the run."""
        try:
            self._files.write_text(f"{self._aside}/{MARK}", mark.text())
        except FAILURES as error:
            raise self._failure(error) from error
        self._marked = True

    def publish(self) -> None:
        """Replace the published files of the same days by those that were written."""
        try:
            self._put_in_place(self._aside)
            self._files.remove(self._aside)
        except FAILURES as error:
            raise self._failure(error) from error

    def _put_in_place(self, aside: str) -> None:
        """Move the files into place; an interrupted run may have moved some of them."""
        self._files.make(f"{self._directory}/findings")
        for day in self._files.children(f"{aside}/findings"):
            self._files.replace(f"{self._directory}/findings/{_name(day)}", day)
        for certificate in self._files.children(f"{aside}/certificates"):
            self._put_certificate(certificate)
        if self._files.exists(f"{aside}/{REPORT}"):
            self._files.replace(f"{self._directory}/{REPORT}", f"{aside}/{REPORT}")

    def _put_certificate(self, certificate: str) -> None:
        """Move a certificate into place. A published one of the same day stays: it is evidence against the new one."""
        self._files.make(f"{self._directory}/certificates")
        name, digest = _name(certificate), self._files.sha256(certificate)
        place = f"{self._directory}/certificates/{name}"
        if self._files.exists(place):
            if self._files.sha256(place) == digest:
                return
            beside = f"{place.removesuffix('.json')}.{digest[:DIGITS]}.json"
            self.contradicted[place] = beside
            place = beside
        self._files.replace(place, certificate)

    def discard(self) -> None:
        """Remove the unpublished files if they are not marked; ignore failures."""
        if not self._marked:
            with suppress(*FAILURES):
                self._files.remove(self._aside)

    def _failure(self, error: Exception) -> RunFailedError:
        return RunFailedError(f"{self._directory} cannot be written: {root_cause(str(error))}")


def url_of_report(directory: str) -> str:
    """Return the URL of the report, which browsers and terminals open; a path becomes a file: URL."""
    place = f"{directory.rstrip('/')}/{REPORT}"
    return place if URL_SCHEME.match(place) else Path(place).absolute().as_uri()


def _name(place: str) -> str:
    return place.rstrip("/").rsplit("/", 1)[-1]
