"""`--out`: findings as Parquet by day and the report, put in place when the database has taken the run."""

from collections.abc import Iterable
from contextlib import suppress
from datetime import date

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from spark.errors import RunFailedError
from spark.files import Files
from spark.sources import root_cause

ASIDE = ".run-"


class Output:
    """`<directory>/findings/day=YYYY-MM-DD/*.parquet` and `<directory>/report.html`, of a path or any URL Spark knows.

    What is written lies aside, where no reader looks, until `publish`. Every method raises RunFailedError.
    """

    def __init__(self, files: Files, directory: str, token: str) -> None:
        self._files = files
        self._directory = directory.rstrip("/")
        self._aside = f"{self._directory}/{ASIDE}{token}"

    def begin(self) -> None:
        """Make the directory, and clear away what a run left that was killed."""
        try:
            self._files.make(self._directory)
            for left in self._files.children(self._directory):
                if left.rsplit("/", 1)[-1].startswith(ASIDE):
                    self._files.remove(left)
        except Py4JError as error:
            raise self._failure(error) from error

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

    def publish(self, days: Iterable[date]) -> None:
        """Put what was written in the place of what was there of these days."""
        try:
            self._files.make(f"{self._directory}/findings")
            for day in days:
                self._files.replace(f"{self._directory}/findings/day={day}", f"{self._aside}/findings/day={day}")
            self._files.replace(f"{self._directory}/report.html", f"{self._aside}/report.html")
            self._files.remove(self._aside)
        except (Py4JError, OSError) as error:
            raise self._failure(error) from error

    def discard(self) -> None:
        """Remove what lies aside, if that can be."""
        with suppress(Py4JError):
            self._files.remove(self._aside)

    def _failure(self, error: Exception) -> RunFailedError:
        return RunFailedError(f"{self._directory} cannot be written: {root_cause(str(error))}")
