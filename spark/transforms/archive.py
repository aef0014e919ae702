"""The rule about a day's archive: its files match its manifest, and the tables match what was archived."""

import json
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType

from spark.manifest import differing
from spark.schemas import FINDING
from spark.transforms.joined import Joined


def archive_differs(j: Joined) -> DataFrame:
    """A table's rows, range of ids or digest differ from the archive's manifest; the detail has both. Or the
    archive's files differ from those in the manifest: the detail has `files`, a text."""
    archived, found = j.whole.archive_manifest, j.whole.found_manifest
    assert archived is not None
    assert found is not None
    differs: dict[str, dict[str, Any]] = differing(archived, found)
    for subject, words in j.whole.archive_problems.items():
        differs.setdefault(subject, {})["files"] = list(words)
    rows = [
        {"day": str(j.whole.day), "kind": "archive_differs", "subject": subject, "detail": json.dumps(detail)}
        for subject, detail in sorted(differs.items())
    ]
    # As JSON: rows made in Python would need Python on the executors.
    as_rows = F.from_json(F.lit(json.dumps(rows)), ArrayType(FINDING))
    return j.whole.op.sparkSession.range(1).select(F.inline(as_rows))
