"""The nightly proof: reads what the service wrote, day by day, and says where it does not agree.

    spark-submit spark/jobs/reconcile.py [options]
    python -m spark.jobs.reconcile [options]

Exit status: 0 proved, 3 there are findings, 1 the run failed (also: another one is going on), 2 wrong usage, 128 + n it
was ended by signal n.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

if not __package__:
    # spark-submit runs this file: then modules are looked for where it is, and not in the root.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import psycopg
from pyspark.sql import SparkSession

from spark import results
from spark.database import Connection, connect, only_run
from spark.errors import RunFailedError
from spark.files import Files
from spark.interrupts import InterruptedRunError, Interrupts, apart, interruptible
from spark.jar import NoJarError
from spark.ledger_sources import LedgerError
from spark.niceness import stand_behind
from spark.output import Mark, Output
from spark.progress import Progress
from spark.proving import ProvedDay, first_findings, prove
from spark.reading import Ledgers, Read, Wish, read_days, read_ledgers, read_parquet
from spark.report import NAMED_DAYS, render
from spark.results import RunResult, Written
from spark.session import running
from spark.staging import staging

PROVED, FAILED, USAGE, FINDINGS = 0, 1, 2, 3
URL = "HALFNOTE_DATABASE_URL"
BASE_URL = "HALFNOTE_BASE_URL"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return the exit status. Says what is wrong on stderr, and the verdict on stdout."""
    options = _options(argv)
    try:
        with interruptible() as interrupts, staging(options.staging, keep=options.keep_staging) as place:
            return Run(options, interrupts, place).run()
    except KeyboardInterrupt as error:
        # Spark's own comes of a Ctrl-C while the session is made.
        ended = error if isinstance(error, InterruptedRunError) else InterruptedRunError(signal.SIGINT)
        print(f"Ended by {ended}; nothing was written.", file=sys.stderr)
        return ended.status
    except (LedgerError, NoJarError) as error:
        print(error, file=sys.stderr)
        return USAGE
    except RunFailedError as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return FAILED


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; wrong usage ends the program with 2."""
    parser = argparse.ArgumentParser(
        prog="reconcile", description="The nightly proof. Exit status: 0 proved, 3 findings"
    )
    add = parser.add_argument
    add("--database-url", default=os.environ.get(URL), help=f"the primary, where results go; default: {URL}")
    add("--read-url", help="a standby to read from instead")
    add("--day", type=date.fromisoformat, action="append", default=[], help="YYYY-MM-DD, repeatable; else by watermark")
    add("--from-parquet", metavar="DIR", help="frames or an archive, instead of a database; nothing is written to one")
    add("--producer-ledger", metavar="SPEC", help="what producers' databases say: Parquet, CSV or a jdbc: URL")
    complete = "the producer ledger lacks no commit: a committed transaction without a row is a finding"
    add("--producer-ledger-complete", action="store_true", help=complete)
    add("--consumer-ledger", metavar="SPEC", help="what consumers' databases say")
    add("--out", metavar="DIR", help="findings as Parquet by day, and report.html; a path, or a URL that Spark knows")
    add("--sla-s", type=float, default=3600.0, help="what is not delivered after this is a finding; default 3600")
    add("--margin-s", type=float, default=3600.0, help="a day is final 72 h and this after its end; default 3600")
    add("--master", help="where Spark runs; default: spark-submit's, else all cores of this machine")
    add("--staging", type=Path, metavar="DIR", help="where rows are kept during the run; every executor must reach it")
    add("--keep-staging", action="store_true", help="leave them there, to be looked at or given to --from-parquet")
    base_url = os.environ.get(BASE_URL) or None
    add(
        "--base-url",
        type=_http_url,
        default=base_url,
        help=f"of the service, for the report's links; default: {BASE_URL}",
    )
    options = parser.parse_args(argv)
    if not options.from_parquet and not options.database_url:
        parser.error(f"name a database (--database-url or {URL}) or a directory (--from-parquet)")
    if options.from_parquet and options.read_url:
        parser.error("--from-parquet reads no database, so --read-url says nothing")
    if options.producer_ledger_complete and not options.producer_ledger:
        parser.error("--producer-ledger-complete says something of a ledger: name it (--producer-ledger)")
    return options


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("an http or https URL")
    return value


class Run:
    """One run, from its options to its exit status."""

    def __init__(self, options: argparse.Namespace, interrupts: Interrupts, place: Path) -> None:
        self._options = options
        self._interrupts = interrupts
        self._place = place
        self._progress = Progress()
        self._output: Output | None = None
        self._facts = RunResult(options.master or "local[*]", "primary", datetime.now(UTC))
        self._committed = False

    def run(self) -> int:
        """Prove and write. Raises RunFailedError, LedgerError and NoJarError."""
        if self._options.from_parquet:
            return self._in_session(self._over_parquet)
        with only_run(self._options.database_url) as connection:
            try:
                return self._in_session(lambda spark: self._over_database(spark, connection))
            except (LedgerError, NoJarError):
                raise
            except Exception as error:
                self._note_failure(connection, error)
                raise

    def _in_session(self, work: Callable[[SparkSession], int]) -> int:
        with running(self._place, self._options.master) as spark:
            self._interrupts.listen()
            if self._options.out is not None:
                self._output = Output(Files(spark), self._options.out, self._place.name)
            try:
                return work(spark)
            except BaseException:
                if self._output is not None:
                    apart(self._output.discard)
                raise

    def _over_database(self, spark: SparkSession, connection: Connection) -> int:
        options = self._options
        self._facts = replace(self._facts, engine=spark.sparkContext.master or self._facts.engine)
        ledgers = self._begin(spark, lambda mark: results.is_committed(connection, mark.run_id, mark.started_at))
        wish = Wish(options.day, results.seen_days(connection), options.margin_s)
        url = options.read_url or options.database_url
        read = read_days(spark, url, wish, f"{self._place}/read", self._progress)
        self._facts = replace(
            self._facts,
            source="standby" if read.standby else "primary",
            seen_at=read.seen_at,
            days=[day.frames.day for day in read.days],
        )
        proved = self._proved(spark, read, ledgers)
        with ExitStack() as last:
            self._facts = replace(self._facts, seconds=self._progress.rounded())
            with (
                self._progress.stage("write") as stage,
                results.writing(
                    connection,
                    self._facts,
                    [day.result for day in proved],
                    first_findings(proved, results.MOST_FINDINGS),
                ) as written,
            ):
                stage.rows = sum(sum(day.result.found.values()) for day in proved)
                self._write_report(written)
                # From the commit on there is no way back.
                last.enter_context(self._interrupts.closed())
                if self._output is not None:
                    self._output.mark(Mark(written.run["run_id"], self._facts.started_at))
            self._committed = True
            self._publish()
        return self._say(written, proved)

    def _over_parquet(self, spark: SparkSession) -> int:
        ledgers = self._begin(spark, None)
        days = list(read_parquet(spark, self._options.from_parquet, self._options.day))
        if not days:
            raise RunFailedError(f"{self._options.from_parquet} has no frames of the days that were asked for.")
        read = Read(max(day.frames.seen_at for day in days), False, days)
        proved = self._proved(spark, read, ledgers)
        facts = replace(self._facts, source="archive", seen_at=read.seen_at, days=[day.frames.day for day in days])
        facts = replace(facts, seconds=self._progress.rounded())
        shown = list(first_findings(proved, results.MOST_SHOWN))
        written = results.unwritten(facts, [day.result for day in proved], shown)
        self._write_report(written)
        self._publish()
        return self._say(written, proved)

    def _begin(self, spark: SparkSession, committed: Callable[[Mark], bool] | None) -> Ledgers:
        """Do first what may show wrong usage: the output's directory, and ledgers."""
        if self._output is not None:
            self._output.begin(committed)
        options = self._options
        ledgers = read_ledgers(
            spark,
            options.producer_ledger,
            options.consumer_ledger,
            f"{self._place}/ledgers",
            options.out,
            self._progress,
        )
        return replace(ledgers, complete=options.producer_ledger_complete)

    def _proved(self, spark: SparkSession, read: Read, ledgers: Ledgers) -> list[ProvedDay]:
        proved = []
        for day in read.days:
            place = f"{self._place}/proved/{day.frames.day}"
            limits = {"sla_s": self._options.sla_s, "margin_s": self._options.margin_s}
            proved.append(prove(spark, ledgers.beside(day), place, self._progress, **limits))
            if self._output is not None:
                self._output.write_findings(day.frames.day, proved[-1].findings)
        return proved

    def _write_report(self, written: Written) -> None:
        if self._output is not None:
            url = self._options.base_url
            of_run = (written.run, written.days, written.findings, written.trend, written.elsewhere)
            html = render(*of_run, base_url=url)
            self._output.write_report(html)

    def _publish(self) -> None:
        try:
            if self._output is not None:
                self._output.publish()
        except RunFailedError as error:
            if not self._committed:
                raise
            healing = "The database has the result; the next run with this --out puts it in place."
            raise RunFailedError(f"{error} {healing}") from error

    def _note_failure(self, connection: Connection, error: Exception) -> None:
        """Write that the run failed, if the database takes it; on another connection if this one is gone.

        What failed after the commit is said, but the run is written as it is.
        """
        if self._committed:
            return
        facts = replace(self._facts, seconds=self._progress.rounded())
        with suppress(psycopg.Error, RunFailedError):
            if connection.closed:
                with connect(self._options.database_url) as another:
                    results.write_failure(another, facts, str(error))
            else:
                results.write_failure(connection, facts, str(error))

    def _say(self, written: Written, proved: Sequence[ProvedDay]) -> int:
        open_, days = written.run["open"], len(proved)
        found: dict[str, int] = {}
        for day in proved:
            for kind, count in day.result.found.items():
                found[kind] = found.get(kind, 0) + count
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found.items()))
        verdict = f"{open_} findings ({kinds})" if open_ else "proved"
        said = [verdict, f"days: {days}, new: {written.run['new']}, resolved: {written.run['resolved']}"]
        if written.elsewhere:
            others = [f"{day} ({count})" for day, count in written.elsewhere.items()]
            more = f" and {len(others) - NAMED_DAYS} more days" if len(others) > NAMED_DAYS else ""
            said.append(f"still open of days not looked at: {', '.join(others[:NAMED_DAYS])}{more}")
        print("; ".join(said))
        return FINDINGS if open_ else PROVED


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
