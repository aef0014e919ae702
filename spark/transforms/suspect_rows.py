"""Reduce a day's frames to the rows of suspect transactions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.engine.parallel import at_once
from spark.frames import Frames, empty
from spark.schemas import BIG, OF_DAY

# The frames with rows of transactions; subscription, checkpoint and producer_group stay whole.
OF_TRANSACTIONS = (*BIG, *OF_DAY, "archive", "producer_ledger", "consumer_ledger")


def narrowed(f: Frames, found: DataFrame, keep: Callable[[DataFrame], DataFrame]) -> Frames:
    """Return the frames with the suspects' rows only, each passed to `keep`; a frame known to be empty stays empty."""
    frames = {name: getattr(f, name) for name in OF_TRANSACTIONS if f.rows.get(name) != 0}
    theirs = {name: _among(found, one) for name, one in frames.items() if one is not None}
    kept: list[Any] = at_once([partial(keep, one) for one in theirs.values()])
    return replace(f, **dict(zip(theirs, kept, strict=True)))


def nothing_of(f: Frames) -> Frames:
    """Return what `narrowed` returns for a day without suspects, without reading the day again."""
    frames = {name: getattr(f, name) for name in OF_TRANSACTIONS}
    empties: dict[str, Any] = {
        name: empty(one.sparkSession, one.schema) for name, one in frames.items() if one is not None
    }
    return replace(f, **empties)


def _among(found: DataFrame, frame: DataFrame) -> DataFrame:
    return frame.join(found, F.xxhash64(frame["transaction_id"]) == found["suspect"], "left_semi")
