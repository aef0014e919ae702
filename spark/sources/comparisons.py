"""Compares a day's rows while they are read: most of it in Postgres, several comparisons at a time."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from pyspark.sql import SparkSession

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
Search: TypeAlias = Callable[[Frames], Among]
Writes: TypeAlias = Callable[..., int]
# What Postgres or this process finds while it reads, by the names of schemas.FOUND: the stage, and what writes it.
FOUND: dict[str, tuple[str, Writes]] = {
    "altered": ("compute digests", half_digests.write_altered),
    "differing": ("compare outbox", published.write_differing),
    "wrong_receipt": ("compare receipts", received.write_wrong_receipts),
    "wrong_delivery": ("compare deliveries", deliveries.write_wrong_deliveries),
    "differing_subscription": ("compare subscriptions", subscriptions.write_differing_subscriptions),
    "never_due": ("compare retries", retries.write_never_due),
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

        def frames_and_among() -> tuple[Frames, Among]:
            read = rows()
            if search is None:
                return read, {}
            with self._progress.stage("search", self._day.day):
                return read, search(read)

        # The digests take the longest. What waits for the search comes last.
        order = sorted(names, key=lambda name: (name in _NAMED, name != "altered"))
        with ThreadPoolExecutor(min(ABREAST, cores(self._spark))) as pool:
            try:
                early = pool.submit(frames_and_among)
                running = {name: pool.submit(self._compare, name, early) for name in order}
                return early.result()[0], {name: one.result() for name, one in running.items()}
            except BaseException:
                self._snapshot.ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _compare(self, name: str, early: "Future[tuple[Frames, Among]]") -> int:
        what, write = FOUND[name]
        given = {"among": early.result()[1].get(name)} if name in _NAMED else {}
        with self._progress.stage(what, self._day.day) as stage:
            directory = f"{self._staging_dir}/{name}"
            try:
                stage.rows = write(self._spark, self._snapshot, self._day, directory, **given)
            except copy.FAILURES as error:
                raise read_failure(error, standby=self._snapshot.standby) from error
        return stage.rows
