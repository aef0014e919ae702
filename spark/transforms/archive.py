"""The rule about a day's archive: it holds what its manifest says, and the tables hold what was archived."""

import json

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType

from spark.manifest import differing
from spark.schemas import FINDING
from spark.transforms.joined import Joined


def archive_differs(j: Joined) -> DataFrame:
    """A table's rows, range of ids or digest are not those of the archive's manifest; the detail has both."""
    archived, found = j.whole.archive_manifest, j.whole.found_manifest
    assert archived is not None
    assert found is not None
    rows = [
        {"day": str(j.whole.day), "kind": "archive_differs", "subject": table, "detail": json.dumps(both)}
        for table, both in differing(archived, found).items()
    ]
    # As JSON, and not as Python's rows, for which executors would need Python.
    told = F.from_json(F.lit(json.dumps(rows)), ArrayType(FINDING))
    return j.whole.op.sparkSession.range(1).select(F.inline(told))
