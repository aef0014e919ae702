"""A run over one installation: its days are read, proved and written."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime

import psycopg
from pyspark.sql import SparkSession

from spark.certificate.document import digest_of
from spark.certificate.signing import Signer
from spark.engine.filesystem import files_for
from spark.engine.progress import Progress
from spark.engine.session import engine_of
from spark.engine.signals import Interrupts
from spark.errors import RunFailedError
from spark.installations import Installation
from spark.postgres.connections import Connection, connect
from spark.proof import certify, store_results, usual_counts
from spark.proof.parquet_output import Mark, Output
from spark.proof.prove_day import ProvedDay, ReadDay, first_findings, prove
from spark.proof.read_days import Ledgers, Read, Wish, choose_days, read_days
from spark.proof.store_results import RunResult, Written
from spark.report.page import NAMED_DAYS, render
from spark.usual import Expected


@dataclass(frozen=True)
class Outcome:
    """What a run wrote, and what it says: the verdict in words, and whether the examined days have open findings.

    `open` is also true if a published certificate is not the one that the run wrote for its day.
    """

    written: Written
    said: str
    open: bool


class Run:
    """One run, in steps. `installation` None: over Parquet, which has no database."""

    def __init__(
        self,
        options: Namespace,
        interrupts: Interrupts,
        place: str,
        *,
        installation: Installation | None = None,
        out: str | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.installation = installation
        self.progress = Progress()
        self.connection: Connection | None = None
        self.committed = False
        self.output: Output | None = None
        self._options = options
        self._interrupts = interrupts
        self._place = place
        self._out = out
        self._signer = signer
        self._facts = RunResult(options.master or "local[*]", "primary", datetime.now(UTC))
        self._made: list[certify.Made] = []

    @property
    def database(self) -> Connection:
        """The connection that writes."""
        assert self.connection is not None
        return self.connection

    def begin(self, spark: SparkSession, token: str) -> None:
        """Prepare the output directory; publish what an earlier run has committed and not published."""
        self._facts = replace(self._facts, engine=engine_of(spark, self._options.master))
        if self._out is None:
            return
        self.output = Output(files_for(spark), self._out, token)
        database = self.connection
        self.output.begin(
            None
            if database is None
            else lambda mark: store_results.is_committed(database, mark.run_id, mark.started_at)
        )

    def choose(self) -> list[date]:
        """Return the days that this installation alone would prove."""
        assert self.installation is not None
        return choose_days(self.installation.source, replace(self._wish(), if_stored=True), self.progress)

    def read(self, spark: SparkSession, days: Sequence[date] | None = None) -> Read:
        """Read the days in one snapshot. `days`: those to read if they are stored; None: by this run's own choice."""
        assert self.installation is not None
        wish = self._wish() if days is None else replace(self._wish(), asked=days, if_stored=True)
        read = read_days(spark, self.installation.source, wish, f"{self._place}/read", self.progress)
        self._facts = replace(
            self._facts,
            source="standby" if read.standby else "primary",
            seen_at=read.seen_at,
            days=[day.frames.day for day in read.days],
        )
        return read

    @property
    def audit_keep_s(self) -> int:
        """How long the installation keeps rows of its audit, in seconds."""
        of_one: dict[str, int] = dict(self._options.audit_keep_s_of)
        name = self.installation.name if self.installation is not None else ""
        return of_one.get(name, int(self._options.audit_keep_s))

    def _wish(self) -> Wish:
        options = self._options
        return Wish(
            options.day,
            store_results.seen_days(self.database),
            options.margin_s,
            sla_s=options.sla_s,
            ledgers=any(one is not None for one in (options.producer_ledger, options.consumer_ledger)),
            audit_keep_s=self.audit_keep_s,
        )

    def prove(self, spark: SparkSession, read: Read, ledgers: Ledgers) -> list[ProvedDay]:
        """Prove the days, oldest first, and write their findings beside the output."""
        earlier, documents = Expected(), None
        if self.connection is not None:
            earlier = usual_counts.stored(self.connection, [day.frames.day for day in read.days])
            documents = certify.stored(self.connection)
        proved: list[ProvedDay] = []
        expected = replace(earlier, share=self._options.usual_share, shares=dict(self._options.usual_share_of))
        for one in read.days:
            day = one if documents is None else certify.compared(one, documents.get(one.frames.day), self.progress)
            place = f"{self._place}/proved/{day.frames.day}"
            limits = {"sla_s": self._options.sla_s, "margin_s": self._options.margin_s}
            proved.append(prove(spark, ledgers.beside(day), place, self.progress, **limits, expected=expected))
            counted = {day.frames.day: proved[-1].result.volumes}
            expected = replace(expected, history={**expected.history, **counted})
            if documents is not None:
                self._certify(day, proved[-1])
            if self.output is not None:
                self.output.write_findings(day.frames.day, proved[-1].findings)
        return proved

    def _certify(self, day: ReadDay, proved: ProvedDay) -> None:
        assert self.installation is not None
        made = certify.certified(day, proved, self.progress, self.installation.name)
        self._made += [] if made is None else [made]

    def write(self, proved: Sequence[ProvedDay]) -> Outcome:
        """Write the result to the database, in one database transaction, and publish the output."""
        with ExitStack() as last:
            self._facts = replace(self._facts, seconds=self.progress.rounded())
            with (
                self.progress.stage("write") as stage,
                store_results.writing(
                    self.database,
                    self._facts,
                    [day.result for day in proved],
                    first_findings(proved, store_results.MOST_FINDINGS),
                ) as written,
            ):
                stage.rows = sum(sum(day.result.found.values()) for day in proved)
                self._write_certificates(written.run["run_id"])
                self._write_report(written)
                # After the commit the run must be published.
                last.enter_context(self._interrupts.closed())
                if self.output is not None:
                    self.output.mark(Mark(written.run["run_id"], self._facts.started_at))
            self.committed = True
            self._publish()
        return self._outcome(written, proved)

    def write_alone(self, read: Read, proved: Sequence[ProvedDay], names: Mapping[int, str]) -> Outcome:
        """Write the output of a run over Parquet. `names`: of subscriptions, by number."""
        facts = replace(self._facts, source="archive", seen_at=read.seen_at)
        facts = replace(facts, days=[day.frames.day for day in read.days], seconds=self.progress.rounded())
        shown = list(first_findings(proved, store_results.MOST_SHOWN))
        written = store_results.unwritten(facts, [day.result for day in proved], shown, names)
        self._write_report(written)
        self._publish()
        return self._outcome(written, proved)

    def _outcome(self, written: Written, proved: Sequence[ProvedDay]) -> Outcome:
        """Return what the run says, also of published certificates that differ from those it wrote."""
        made = outcome_of(written, proved)
        contradicted = self.output.contradicted if self.output is not None else {}
        for place, beside in contradicted.items():
            text = f"{place} is another certificate of the same day and stays. The new one is {beside}. Compare them."
            self.progress.say("certificate_contradicted", text, place=place, beside=beside)
        if not contradicted:
            return made
        named = ", ".join(sorted(place.rpartition("/")[2] for place in contradicted))
        return replace(made, said=f"{made.said}; contradicted certificates in --out: {named}", open=True)

    def _write_certificates(self, run_id: int) -> None:
        documents = certify.write(self.database, run_id, self._made, self._signer, self.audit_keep_s)
        for day, document in documents.items():
            if self.output is not None:
                self.output.write_certificate(day, document)
            kind = "certified" if self._signer else "certified, unsigned"
            self.progress.say("certified", f"{day}: {kind}: SHA-256 {digest_of(document)}", day=day)

    def _write_report(self, written: Written) -> None:
        if self.output is not None:
            url = self._options.base_url if self.installation is None else self.installation.base_url
            of_run = (written.run, written.days, written.findings, written.trend, written.elsewhere)
            self.output.write_report(render(*of_run, base_url=url))

    def _publish(self) -> None:
        try:
            if self.output is not None:
                self.output.publish()
        except RunFailedError as error:
            if not self.committed:
                raise
            healing = "The database has the result; the next run with this --out writes the files."
            raise RunFailedError(f"{error} {healing}") from error

    def note_failure(self, error: Exception) -> None:
        """Record that the run failed, if the database allows it; on another connection if this one is closed.

        A failure after the commit is reported, but the recorded run stays unchanged.
        """
        if self.committed or self.connection is None or self.installation is None:
            return
        facts = replace(self._facts, seconds=self.progress.rounded())
        with suppress(psycopg.Error, RunFailedError):
            if self.connection.closed:
                with connect(self.installation.database_url) as another:
                    store_results.write_failure(another, facts, str(error))
            else:
                store_results.write_failure(self.connection, facts, str(error))

    def discard(self) -> None:
        """Remove the unpublished files."""
        if self.output is not None:
            self.output.discard()


def outcome_of(written: Written, proved: Sequence[ProvedDay]) -> Outcome:
    """Return what a run says of what it wrote."""
    said = [verdict_of(written, [day.result.found for day in proved]), f"days: {len(proved)}"]
    if written.elsewhere:
        others = [f"{day} ({count})" for day, count in written.elsewhere.items()]
        more = f" and {len(others) - NAMED_DAYS} more days" if len(others) > NAMED_DAYS else ""
        said.append(f"open findings of other days: {', '.join(others[:NAMED_DAYS])}{more}")
    return Outcome(written, "; ".join(said), bool(written.run["open"]))


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
