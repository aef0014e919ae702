"""The nightly proof: reads the service's rows day by day and reports where they disagree.

    spark-submit spark/jobs/reconcile.py [options]
    python -m spark.jobs.reconcile [options]

Exit status: 0: proved; 3: findings; 1: the run failed, or another run is active; 2: wrong usage; 128 + n: signal n
ended the run.
"""

import signal
import sys
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

if not __package__:
    # spark-submit runs this file, so Python searches for modules in its directory and not in the root.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import psycopg
from pyspark.sql import SparkSession

from spark.certificate.document import digest_of
from spark.certificate.signing import SigningError
from spark.engine.filesystem import Files
from spark.engine.jdbc_driver import NoJarError
from spark.engine.niceness import stand_behind
from spark.engine.progress import Progress
from spark.engine.session import running
from spark.engine.signals import InterruptedRunError, Interrupts, apart, interruptible
from spark.engine.staging import staging
from spark.errors import RunFailedError
from spark.options.reconcile import parsed, signer_of
from spark.postgres.connections import Connection, connect, only_run
from spark.postgres.size import is_small
from spark.proof import certify, store_results, usual_counts
from spark.proof.parquet_output import Mark, Output
from spark.proof.prove_day import ProvedDay, ReadDay, first_findings, prove
from spark.proof.read_days import Ledgers, Read, Wish, read_days, read_ledgers, read_parquet
from spark.proof.store_results import RunResult, Written
from spark.report.page import NAMED_DAYS, render
from spark.schemas import FINDING
from spark.sources.ledger_files import LedgerError
from spark.transforms.figures import names_of
from spark.usual import Expected

PROVED, FAILED, USAGE, FINDINGS = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return the exit status. Errors go to stderr, the result to stdout."""
    options = parsed(argv)
    try:
        with interruptible() as interrupts, staging(options.staging, keep=options.keep_staging) as place:
            return Run(options, interrupts, place).run()
    except KeyboardInterrupt as error:
        # During the start of the session, Spark raises its own error for a Ctrl-C.
        ended = error if isinstance(error, InterruptedRunError) else InterruptedRunError(signal.SIGINT)
        print(f"Ended by {ended}; nothing was written.", file=sys.stderr)
        return ended.status
    except (LedgerError, NoJarError, SigningError) as error:
        print(error, file=sys.stderr)
        return USAGE
    except RunFailedError as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return FAILED


class Run:
    """One run, from its options to its exit status."""

    def __init__(self, options: Namespace, interrupts: Interrupts, place: Path) -> None:
        self._options = options
        self._interrupts = interrupts
        self._place = place
        self._progress = Progress()
        self._output: Output | None = None
        self._facts = RunResult(options.master or "local[*]", "primary", datetime.now(UTC))
        self._committed = False
        self._signer = signer_of(options)
        self._made: list[certify.Made] = []

    def run(self) -> int:
        """Prove and write. Raises RunFailedError, LedgerError and NoJarError."""
        if self._options.from_parquet:
            return self._in_session(self._over_parquet)
        with only_run(self._options.database_url) as connection:
            try:
                return self._in_session(lambda spark: self._over_database(spark, connection), is_small(connection))
            except (LedgerError, NoJarError):
                raise
            except Exception as error:
                self._note_failure(connection, error)
                raise

    def _in_session(self, work: Callable[[SparkSession], int], small: bool = False) -> int:
        ledgers = (self._options.producer_ledger, self._options.consumer_ledger)
        jdbc = any(ledger is not None and ledger.startswith("jdbc:") for ledger in ledgers)
        with running(self._place, self._options.master, jdbc=jdbc, small=small) as spark:
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
        ledgers = self._begin(spark, lambda mark: store_results.is_committed(connection, mark.run_id, mark.started_at))
        wish = Wish(options.day, store_results.seen_days(connection), options.margin_s)
        url = options.read_url or options.database_url
        read = read_days(spark, url, wish, f"{self._place}/read", self._progress)
        self._facts = replace(
            self._facts,
            source="standby" if read.standby else "primary",
            seen_at=read.seen_at,
            days=[day.frames.day for day in read.days],
        )
        earlier = usual_counts.stored(connection, [day.frames.day for day in read.days])
        proved = self._proved(spark, read, ledgers, earlier, certify.stored(connection))
        with ExitStack() as last:
            self._facts = replace(self._facts, seconds=self._progress.rounded())
            with (
                self._progress.stage("write") as stage,
                store_results.writing(
                    connection,
                    self._facts,
                    [day.result for day in proved],
                    first_findings(proved, store_results.MOST_FINDINGS),
                ) as written,
            ):
                stage.rows = sum(sum(day.result.found.values()) for day in proved)
                self._write_certificates(connection, written.run["run_id"])
                self._write_report(written)
                # After the commit the run must be published.
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
            raise RunFailedError(f"{self._options.from_parquet} has no frames of the requested days.")
        read = Read(max(day.frames.seen_at for day in days), False, days)
        proved = self._proved(spark, read, ledgers, Expected())
        facts = replace(self._facts, source="archive", seen_at=read.seen_at, days=[day.frames.day for day in days])
        facts = replace(facts, seconds=self._progress.rounded())
        shown = list(first_findings(proved, store_results.MOST_SHOWN))
        written = store_results.unwritten(facts, [day.result for day in proved], shown, names_in(days, shown))
        self._write_report(written)
        self._publish()
        return self._say(written, proved)

    def _begin(self, spark: SparkSession, committed: Callable[[Mark], bool] | None) -> Ledgers:
        """Prepare the output directory and the ledgers first, because they may show wrong usage."""
        if self._output is not None:
            self._output.begin(committed)
        options = self._options
        declared = {"producer": options.producer_ledger_complete, "consumer": options.consumer_ledger_complete}
        return read_ledgers(
            spark,
            options.producer_ledger,
            options.consumer_ledger,
            f"{self._place}/ledgers",
            options.out,
            self._progress,
            complete=[name for name, complete in declared.items() if complete],
        )

    def _proved(
        self,
        spark: SparkSession,
        read: Read,
        ledgers: Ledgers,
        earlier: Expected,
        documents: Mapping[date, str] | None = None,
    ) -> list[ProvedDay]:
        """Prove the days, oldest first. `earlier`: what the database has of earlier days.

        `documents`: their certificates; None: no database, so no day is certified.
        """
        proved: list[ProvedDay] = []
        expected = replace(earlier, share=self._options.usual_share, shares=dict(self._options.usual_share_of))
        for one in read.days:
            day = one if documents is None else certify.compared(one, documents.get(one.frames.day), self._progress)
            place = f"{self._place}/proved/{day.frames.day}"
            limits = {"sla_s": self._options.sla_s, "margin_s": self._options.margin_s}
            proved.append(prove(spark, ledgers.beside(day), place, self._progress, **limits, expected=expected))
            counted = {day.frames.day: proved[-1].result.volumes}
            expected = replace(expected, history={**expected.history, **counted})
            made = None if documents is None else certify.certified(day, proved[-1], self._progress)
            self._made += [] if made is None else [made]
            if self._output is not None:
                self._output.write_findings(day.frames.day, proved[-1].findings)
        return proved

    def _write_certificates(self, connection: Connection, run_id: int) -> None:
        documents = certify.write(connection, run_id, self._made, self._signer)
        for day, document in documents.items():
            if self._output is not None:
                self._output.write_certificate(day, document)
            kind = "certified" if self._signer else "certified, unsigned"
            self._progress.say("certified", f"{day}: {kind}: SHA-256 {digest_of(document)}", day=day)

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
            healing = "The database has the result; the next run with this --out writes the files."
            raise RunFailedError(f"{error} {healing}") from error

    def _note_failure(self, connection: Connection, error: Exception) -> None:
        """Record that the run failed, if the database allows it; on another connection if this one is closed.

        A failure after the commit is reported, but the recorded run stays unchanged.
        """
        if self._committed:
            return
        facts = replace(self._facts, seconds=self._progress.rounded())
        with suppress(psycopg.Error, RunFailedError):
            if connection.closed:
                with connect(self._options.database_url) as another:
                    store_results.write_failure(another, facts, str(error))
            else:
                store_results.write_failure(connection, facts, str(error))

    def _say(self, written: Written, proved: Sequence[ProvedDay]) -> int:
        open_ = written.run["open"]
        said = [verdict_of(written, [day.result.found for day in proved]), f"days: {len(proved)}"]
        if written.elsewhere:
            others = [f"{day} ({count})" for day, count in written.elsewhere.items()]
            more = f" and {len(others) - NAMED_DAYS} more days" if len(others) > NAMED_DAYS else ""
            said.append(f"open findings of other days: {', '.join(others[:NAMED_DAYS])}{more}")
        if self._output is not None:
            print(f"report: {self._output.report}")
        print("; ".join(said))
        return FINDINGS if open_ else PROVED


def names_in(days: Iterable[ReadDay], findings: Iterable[tuple[Any, ...]]) -> dict[int, str]:
    """Return the names of the findings' subscriptions, by number."""
    place = FINDING.names.index("subscription_id")
    wanted = {finding[place] for finding in findings if finding[place] is not None}
    return {number: name for day in days for number, name in names_of(day.frames, wanted).items()} if wanted else {}


def verdict_of(written: Written, found: Iterable[Mapping[str, int]]) -> str:
    """Return the verdict in words: the open findings, by kind and by age, whose numbers add up, and the resolved ones.

    Of a kind, the database may have more than this run found (from a ledger that an earlier run had), or fewer, because
    it stores a limited number.
    """
    kinds = dict(written.open_kinds)
    counted = Counter[str]()
    for of_day in found:
        counted.update(of_day)
    kinds |= {kind: count for kind, count in counted.items() if count > kinds.get(kind, 0)}
    total, new, resolved = sum(kinds.values()), written.run["new"], written.run["resolved"]
    if not total:
        return f"proved; resolved: {resolved}"
    named = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()) if count)
    return f"{total} findings ({named}); new: {new}, from earlier runs: {total - new}, resolved: {resolved}"


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
