"""The rule about a day's archive: it holds what its manifest says, and the tables hold what was archived."""

import json

from pyspark.sql import DataFrame

from spark.manifest import differing
from spark.schemas import FINDING
from spark.transforms.joined import Joined


def archive_differs(j: Joined) -> DataFrame:
    """A table's rows, range of ids or digest are not those of the archive's manifest; the detail has both."""
    archived, found = j.whole.archive_manifest, j.whole.found_manifest
    assert archived is not None
    assert found is not None
    rows = [
        (j.whole.day, "archive_differs", table, None, None, None, None, json.dumps(both))
        for table, both in differing(archived, found).items()
    ]
    return j.whole.op.sparkSession.createDataFrame(rows, FINDING)
