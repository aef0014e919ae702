"""Searches a day's rows while Postgres computes digests, so that other comparisons look at a few transactions only."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame

from spark.engine.filesystem import FAILURES
from spark.errors import RunFailedError
from spark.frames import Frames
from spark.postgres.connections import Snapshot
from spark.sources.comparisons import Among
from spark.sources.failures import root_cause
from spark.sources.published import FLUSHED_WITHIN_S, LONGEST_IMMUNITY_H
from spark.sources.received import LONGEST_MS, webhooks
from spark.sources.scan import CLOCKS_DIFFER_S
from spark.transforms.joined import FEW_SUSPECTS, Joined
from spark.transforms.rules import joined_by_search, may_search, routes_of, search_day, with_routes
from spark.transforms.screen.compared import Compared
from spark.transforms.screen.day_files import Searched

# A comparison of more transactions than this looks at all: that takes no longer.
MOST_NAMED = 100_000


class EarlySearch:
    """The search of one day. It replaces the one before the joins: `found` has what that would find, once `look` was
    called with a day that can be searched, and `joined` has the joins if the suspects are few."""

    def __init__(self, snapshot: Snapshot, sla_s: float, place: str) -> None:
        self._sla_s = sla_s
        self._place = Path(place)
        self._webhooks = webhooks(snapshot)
        self._ended = snapshot.ended
        self._routes: Future[DataFrame] | None = None
        self._routed: Frames | None = None
        self.found: Searched | None = None
        self.joined: Joined | None = None

    def prepare(self, versions: DataFrame, checkpoint: DataFrame) -> None:
        """Begin to compute the routes. Java is idle while rows are copied, and loads much of what the joins need."""
        pool = ThreadPoolExecutor(1)
        self._routes = pool.submit(routes_of, versions, checkpoint)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for what `prepare` has begun: meanwhile the session has settings that another search must not keep."""
        if self._routes is not None:
            wait([self._routes])

    def look(self, frames: Frames) -> Among:
        """Search, and return which transactions comparisons must look at. Raises RunFailedError."""
        if not may_search(frames):
            return {}
        try:
            prepared = None if self._routes is None else self._routes.result()
            self._routed = with_routes(replace(frames, routes=prepared))
            found = search_day(self._routed, self._sla_s, self._place, self._compared(frames))
        except FAILURES as error:
            raise _failed(frames, error) from error
        # The ids are needed only here; a run may have many days.
        self.found = replace(found, among={})
        return {name: ids.astype(str).tolist() for name, ids in found.among.items() if len(ids) <= MOST_NAMED}

    def go_on(self) -> None:
        """Join the suspects' rows if they are few, while Postgres still compares. Raises RunFailedError.

        The joins of many would keep the snapshot open, which holds up vacuum.
        """
        if self._routed is None or self.found is None or self.found.suspects > FEW_SUSPECTS:
            return
        try:
            self.joined = joined_by_search(self._routed, self._sla_s, self.found)
        except FAILURES as error:
            raise _failed(self._routed, error) from error

    def _compared(self, frames: Frames) -> Compared:
        skew_s = frames.rules.get("longest_id_skew_s")
        return Compared(
            seen_at=frames.seen_at,
            clocks_differ_s=CLOCKS_DIFFER_S,
            ids_differ_s=None if skew_s is None else skew_s + CLOCKS_DIFFER_S + FLUSHED_WITHIN_S,
            longest_immunity_h=LONGEST_IMMUNITY_H,
            longest_ms=LONGEST_MS,
            webhooks=self._webhooks,
            ended=self._ended,
        )

    def beside(self, frames: Frames) -> Frames:
        """Return the frames with the routes that the search has computed."""
        return frames if self._routed is None else replace(frames, routes=self._routed.routes)


def _failed(frames: Frames, error: Exception) -> RunFailedError:
    return RunFailedError(f"The day {frames.day} cannot be searched: {root_cause(str(error))}")
