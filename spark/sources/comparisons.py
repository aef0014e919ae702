"""Compares a day's rows while they are read: most of it in Postgres, several comparisons at a time."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

from pyspark.sql import DataFrame, SparkSession

from spark.engine.parallel import ABREAST
from spark.engine.progress import Progress
from spark.engine.session import cores
from spark.frames import Frames
from spark.postgres import copy
from spark.postgres.connections import Day, Snapshot
from spark.sources import (
    audit_chain,
    deliveries,
    half_digests,
    key_order,
    published,
    received,
    replays,
    retries,
    subscriptions,
    verdicts,
)
from spark.sources.failures import read_failure

# By the names of comparisons, the ids, sorted, of the transactions that may be found. A comparison that it leaves out
# looks at all.
Among: TypeAlias = Mapping[str, Sequence[str]]
Writes: TypeAlias = Callable[..., int]
# What Postgres or this process finds while it reads, by the names of schemas.FOUND: the stage, and what writes it.
FOUND: dict[str, tuple[str, Writes]] = {
    "altered": ("compute digests", half_digests.write_altered),
    "differing": ("compare outbox", published.write_differing),
    "wrong_receipt": ("compare receipts", received.write_wrong_receipts),
    "wrong_delivery": ("compare deliveries", deliveries.write_wrong_deliveries),
    "differing_subscription": ("compare subscriptions", subscriptions.write_differing_subscriptions),
    "never_due": ("compare retries", retries.write_never_due),
    "ready_retry": ("look for the next retries of keys", retries.write_ready),
    "without_evidence": ("compare verdicts", verdicts.write_without_evidence),
    "audit_broken": ("compare the audit", audit_chain.write_broken),
    "replay_incomplete": ("compare replays", replays.write_incomplete),
    "replaying": ("look for running replays", replays.write_running),
    "out_of_order": ("compare the order of keys", key_order.write_out_of_order),
}

# Those that may be restricted to some transactions, by the parameter `among`.
_NAMED = frozenset({"differing", "wrong_receipt"})
# Compared also for a day without any row. The audit may have acts on transactions of the day.
OF_NO_DAY = frozenset({"audit_broken", "differing_subscription", "without_evidence"})


class Search(Protocol):
    """What is done with a day's rows while comparisons run: its three methods are called in this order."""

    def prepare(self, versions: DataFrame, checkpoint: DataFrame) -> None:
        """Begin with what needs the subscriptions only. It may be left out."""

    def look(self, frames: Frames) -> Among:
        """Return which transactions comparisons must look at."""

    def go_on(self) -> None:
        """Do what no comparison waits for."""


class Comparisons:
    """What the read finds beside the rows. Some is computed by Postgres, some by this process."""

    def __init__(self, spark: SparkSession, snapshot: Snapshot, day: Day, staging_dir: str, progress: Progress) -> None:
        self._spark, self._snapshot, self._day = spark, snapshot, day
        self._staging_dir, self._progress = staging_dir, progress

    def run(
        self, names: Sequence[str], rows: Callable[[], Frames], search: Search | None
    ) -> tuple[Frames, dict[str, int]]:
        """Write what each comparison finds (`names` of FOUND), several at a time; return the frames of the rows, and
        the numbers of found rows by name. All have ended when this returns or raises."""

        looked: Future[Among] = Future()

        def searched() -> Frames:
            try:
                read = rows()
                among: Among = {}
                if search is not None:
                    with self._progress.stage("search", self._day.day):
                        among = search.look(read)
            except BaseException as error:
                looked.set_exception(error)
                raise
            looked.set_result(among)
            if search is not None:
                with self._progress.stage("early join", self._day.day):
                    search.go_on()
            return read

        # The digests take the longest. What waits for the search comes last.
        order = sorted(names, key=lambda name: (name in _NAMED, name != "altered"))
        with ThreadPoolExecutor(min(ABREAST, cores(self._spark))) as pool:
            try:
                early = pool.submit(searched)
                running = {name: pool.submit(self._compare, name, looked) for name in order}
                # An error of the search is raised first: comparisons that wait for it have the same.
                looked.result()
                return early.result(), {name: one.result() for name, one in running.items()}
            except BaseException:
                self._snapshot.ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _compare(self, name: str, looked: "Future[Among]") -> int:
        what, write = FOUND[name]
        given = {"among": looked.result().get(name)} if name in _NAMED else {}
        with self._progress.stage(what, self._day.day) as stage:
            directory = f"{self._staging_dir}/{name}"
            try:
                stage.rows = write(self._spark, self._snapshot, self._day, directory, **given)
            except copy.FAILURES as error:
                raise read_failure(error, standby=self._snapshot.standby) from error
        return stage.rows
