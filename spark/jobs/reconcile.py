"""The nightly proof: reads the service's rows day by day and reports where they disagree.

    spark-submit spark/jobs/reconcile.py [options]
    python -m spark.jobs.reconcile [options]

Exit status: 0: proved; 3: findings; 1: the run failed, or another run is active; 2: wrong usage; 128 + n: signal n
ended the run. Over several installations: 1 if one of them failed, else 3 if one of them has findings.
"""

import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if not __package__:
    # spark-submit runs this file, so Python searches for modules in its directory and not in the root.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from pyspark.sql import SparkSession

from spark.certificate.signing import SigningError
from spark.engine.jdbc_driver import NoJarError
from spark.engine.kept_files import write_lists
from spark.engine.niceness import stand_behind
from spark.engine.progress import Progress
from spark.engine.session import JAVA_OPTIONS, JAVA_OPTIONS_PLANNING, JAVA_OPTIONS_SMALL, running
from spark.engine.signals import InterruptedRunError, Interrupts, apart, interruptible
from spark.engine.staging import staging
from spark.errors import DamagedError, RunFailedError
from spark.options.reconcile import parsed, signer_of
from spark.postgres.connections import only_run
from spark.postgres.size import is_small
from spark.proof import store_results
from spark.proof.parquet_output import url_of_report
from spark.proof.prove_day import ReadDay, first_findings
from spark.proof.read_days import Ledgers, Read, read_ledgers, read_parquet
from spark.proof.run import Run, verdict_of
from spark.proof.several import Several
from spark.schemas import FINDING
from spark.sources.ledger_files import LedgerError
from spark.transforms.figures import names_of

__all__ = ["main", "names_in", "verdict_of"]

PROVED, FAILED, USAGE, FINDINGS = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return the exit status. Errors go to stderr, the result to stdout."""
    options = parsed(argv)
    try:
        with interruptible() as interrupts, staging(options.staging, keep=options.keep_staging) as place:
            status = Program(options, interrupts, place).run()
            if options.keep_staging:
                write_lists(place, "frames.json")
            return status
    except KeyboardInterrupt as error:
        # During the start of the session, Spark raises its own error for a Ctrl-C.
        ended = error if isinstance(error, InterruptedRunError) else InterruptedRunError(signal.SIGINT)
        nothing = "; nothing was written" if len(options.installations) < 2 else ""
        print(f"Ended by {ended}{nothing}.", file=sys.stderr)
        return ended.status
    except (LedgerError, NoJarError, SigningError, DamagedError) as error:
        print(error, file=sys.stderr)
        return USAGE
    except RunFailedError as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return FAILED


class Program:
    """The program, from its options to its exit status."""

    def __init__(self, options: Namespace, interrupts: Interrupts, place: Path) -> None:
        self._options = options
        self._interrupts = interrupts
        self._place = place
        self._signer = signer_of(options)

    def run(self) -> int:
        """Prove and write. Raises RunFailedError, LedgerError and NoJarError."""
        if self._options.from_parquet:
            return self._over_parquet()
        return self._over_several() if len(self._options.installations) > 1 else self._over_one()

    def _over_one(self) -> int:
        [installation] = self._options.installations
        out, signer = self._options.out, self._signer
        run = Run(self._options, self._interrupts, str(self._place), installation=installation, out=out, signer=signer)
        with only_run(installation.database_url) as connection:
            run.connection = connection
            try:
                with self._session(run.discard, small=is_small(connection)) as spark:
                    run.begin(spark, self._place.name)
                    ledgers = self._ledgers(spark, run.progress)
                    ended = run.write(run.prove(spark, run.read(spark), ledgers))
            except (LedgerError, NoJarError):
                raise
            except Exception as error:
                run.note_failure(error)
                raise
        self._say_report()
        print(ended.said)
        return FINDINGS if ended.open else PROVED

    def _over_several(self) -> int:
        out = self._options.out
        runs = [
            Run(
                self._options,
                self._interrupts,
                f"{self._place}/{one.name}",
                installation=one,
                out=None if out is None else f"{out.rstrip('/')}/{one.name}",
                signer=self._signer,
            )
            for one in self._options.installations
        ]
        several = Several(runs, str(self._place), out, self._options.day)
        with several.taken():
            small = all(is_small(one.run.database) for one in several.left)
            with self._session(several.discard, small=small) as spark:
                several.prove(spark, self._place.name, lambda: self._ledgers(spark, Progress()))
        for one in several.all:
            print(f"{one.name}: {one.outcome.said if one.outcome else f'failed: {one.error}'}")
        self._say_report()
        failed = [one.name for one in several.all if one.error is not None]
        found = [one.name for one in several.all if one.outcome is not None and one.outcome.open]
        said = [f"findings in {', '.join(found)}"] if found else []
        said += [f"failed: {', '.join(failed)}"] if failed else []
        print("; ".join(said) or f"proved: {len(several.all)} installations")
        if failed:
            return FAILED
        return FINDINGS if found else PROVED

    def _over_parquet(self) -> int:
        run = Run(self._options, self._interrupts, str(self._place), out=self._options.out)
        with self._session(run.discard) as spark:
            run.begin(spark, self._place.name)
            ledgers = self._ledgers(spark, run.progress)
            days = list(read_parquet(spark, self._options.from_parquet, self._options.day))
            if not days:
                raise RunFailedError(f"{self._options.from_parquet} has no frames of the requested days.")
            read = Read(max(day.frames.seen_at for day in days), False, days)
            proved = run.prove(spark, read, ledgers)
            shown = list(first_findings(proved, store_results.MOST_SHOWN))
            ended = run.write_alone(read, proved, names_in(days, shown))
        self._say_report()
        print(ended.said)
        return FINDINGS if ended.open else PROVED

    @contextmanager
    def _session(self, discard: Callable[[], None], *, small: bool | None = None) -> Iterator[SparkSession]:
        """Yield the session; remove the unpublished files by `discard` if the block raises.

        `small`: whether Postgres has few rows; None: Parquet is read.
        """
        ledgers = (self._options.producer_ledger, self._options.consumer_ledger)
        jdbc = any(ledger is not None and ledger.startswith("jdbc:") for ledger in ledgers)
        # Ledgers are compared by Java.
        plans = small is not None and not any(ledgers)
        java = JAVA_OPTIONS_SMALL if small else JAVA_OPTIONS_PLANNING if plans else JAVA_OPTIONS
        with running(self._place, self._options.master, jdbc=jdbc, java=java) as spark:
            self._interrupts.listen()
            try:
                yield spark
            except BaseException:
                apart(discard)
                raise

    def _ledgers(self, spark: SparkSession, progress: Progress) -> Ledgers:
        """Read the ledgers before the days, because they may show wrong usage."""
        options = self._options
        declared = {"producer": options.producer_ledger_complete, "consumer": options.consumer_ledger_complete}
        return read_ledgers(
            spark,
            options.producer_ledger,
            options.consumer_ledger,
            f"{self._place}/ledgers",
            options.out,
            progress,
            complete=[name for name, complete in declared.items() if complete],
        )

    def _say_report(self) -> None:
        if self._options.out is not None:
            print(f"report: {url_of_report(self._options.out)}")


def names_in(days: Iterable[ReadDay], findings: Iterable[tuple[Any, ...]]) -> dict[int, str]:
    """Return the names of the findings' subscriptions, by number."""
    place = FINDING.names.index("subscription_id")
    wanted = {finding[place] for finding in findings if finding[place] is not None}
    return {number: name for day in days for number, name in names_of(day.frames, wanted).items()} if wanted else {}


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
