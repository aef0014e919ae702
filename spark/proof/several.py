"""A run over several installations: each is read and written on its own, and some of it is compared across them.

A failure of one does not hide the results of the others. What cannot be known without the failed one is not judged.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date

from pyspark.sql import DataFrame, SparkSession

from spark import schemas
from spark.certificate.signing import SigningError
from spark.engine.filesystem import files_for
from spark.engine.jdbc_driver import NoJarError
from spark.engine.progress import Progress
from spark.engine.signals import InterruptedRunError
from spark.errors import RunFailedError
from spark.frames import Across, empty, staged
from spark.postgres.connections import only_run
from spark.proof.prove_day import ReadDay
from spark.proof.read_days import Ledgers, Read
from spark.proof.run import Outcome, Run
from spark.report.installations import Part, render_all
from spark.sources.ledger_files import LedgerError
from spark.transforms.installations import ids, shared

REPORT = "report.html"


@dataclass
class One:
    """An installation in the run: its run, what was read, and how it ended."""

    name: str
    run: Run
    read: Read | None = None
    outcome: Outcome | None = None
    error: str | None = None
    halves: dict[date, DataFrame] = field(default_factory=dict)


class Several:
    """The runs of several installations in one Spark session."""

    def __init__(self, runs: Sequence[Run], place: str, out: str | None, asked: Sequence[date]) -> None:
        self.all = [One(run.installation.name, run) for run in runs if run.installation is not None]
        self._place = place
        self._out = out
        self._asked = asked
        self._progress = Progress()
        for one in self.all:
            one.run.progress.installation = one.name

    @property
    def left(self) -> list[One]:
        """The installations that have not failed."""
        return [one for one in self.all if one.error is None]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock of each installation. Raises RunFailedError if none can be reached."""
        with ExitStack() as stack:
            for one in self.all:
                with self._apart(one):
                    assert one.run.installation is not None
                    one.run.connection = stack.enter_context(only_run(one.run.installation.database_url))
            if not self.left:
                raise RunFailedError("No installation can be read.")
            try:
                yield
            except (InterruptedRunError, KeyboardInterrupt):
                written = ", ".join(one.name for one in self.all if one.run.committed)
                print(f"Results were written of: {written or 'no installation'}.", file=sys.stderr)
                raise
            except (LedgerError, NoJarError):
                raise
            except Exception as error:
                for one in self.left:
                    one.run.note_failure(error)
                raise

    def prove(self, spark: SparkSession, token: str, ledgers_of: Callable[[], Ledgers]) -> None:
        """Read all installations, then prove and write each. `ledgers_of` reads the ledgers, once."""
        for one in self.left:
            with self._apart(one):
                one.run.begin(spark, token)
        ledgers = ledgers_of()
        days = self._days()
        for one in self.left:
            with self._apart(one):
                one.read = one.run.read(spark, days)
                one.halves = {day.frames.day: day.frames.half for day in one.read.days}
        doubled = {day: self._shared(spark, day) for day in days}
        for one in self.left:
            with self._apart(one):
                assert one.read is not None
                read = replace(one.read, days=[self._beside(spark, one, day, doubled) for day in one.read.days])
                one.outcome = one.run.write(one.run.prove(spark, read, ledgers))
        self._write_report(spark)

    def discard(self) -> None:
        """Remove the unpublished files of all."""
        for one in self.all:
            one.run.discard()

    def _days(self) -> list[date]:
        """Return the days that any installation would prove: all of them read these, so that they can be compared."""
        chosen: set[date] = set()
        for one in self.left:
            with self._apart(one):
                chosen |= set(one.run.choose())
        missing = sorted(set(self._asked) - chosen)
        if missing and not any(one.error for one in self.all):
            raise RunFailedError(f"The day {missing[0]} is stored in none of the installations.")
        return sorted(chosen)

    def _has(self, day: date) -> list[One]:
        return [one for one in self.all if day in one.halves]

    def _shared(self, spark: SparkSession, day: date) -> DataFrame:
        """Return SHARED of a day."""
        halves = {one.name: one.halves[day] for one in self._has(day)}
        if len(halves) < 2:
            return empty(spark, schemas.SHARED)
        with self._progress.stage("compare installations", day):
            return staged(shared(halves), f"{self._place}/shared/{day}", schemas.SHARED)

    def _beside(self, spark: SparkSession, one: One, day: ReadDay, doubled: dict[date, DataFrame]) -> ReadDay:
        of_day = day.frames.day
        having = self._has(of_day)
        elsewhere = empty(spark, schemas.HALF).select("transaction_id")
        for other in having:
            elsewhere = elsewhere if other is one else elsewhere.unionByName(ids(other.halves[of_day]))
        across = Across(
            one.name, doubled[of_day], elsewhere, complete=len(having) == len(self.all), speaks=having[0] is one
        )
        return replace(day, frames=replace(day.frames, across=across))

    def _write_report(self, spark: SparkSession) -> None:
        if self._out is None:
            return
        parts = [
            Part(
                one.name,
                one.outcome.written if one.outcome else None,
                one.error,
                one.run.installation.base_url if one.run.installation else None,
            )
            for one in self.all
        ]
        files = files_for(spark)
        files.make(self._out)
        files.write_text(f"{self._out}/.{REPORT}", render_all(parts))
        files.replace(f"{self._out}/{REPORT}", f"{self._out}/.{REPORT}")

    @contextmanager
    def _apart(self, one: One) -> Iterator[None]:
        """Note a failure of one installation, and go on with the others. Wrong usage ends all of them."""
        try:
            yield
        except (LedgerError, NoJarError, SigningError):
            raise
        except Exception as error:
            if not isinstance(error, RunFailedError):
                traceback.print_exc()
            one.error = str(error) or type(error).__name__
            print(f"{one.name}: {one.error}", file=sys.stderr)
            one.run.note_failure(error)
            if not one.run.committed:
                one.run.discard()
