"""Verifies a day's archive against its tables: faulty files are a finding, not a failure of the run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyspark.sql import SparkSession

from spark import schemas
from spark.archive.layout import MANIFEST, damage, digests, manifest_of
from spark.engine.filesystem import FAILURES, Files, files_for
from spark.errors import RunFailedError
from spark.frames import Frames, staged
from spark.sources.failures import root_cause


def beside(frames: Frames, spark: SparkSession, place: str, staging_dir: str) -> Frames:
    """Return a day's frames with the archive at `place` beside them, for the rules content_differs and archive_differs.

    The frames have `archive_manifest` and `found_manifest`. All files that the manifest names are read, once, by the
    driver; the digests are written below `staging_dir`, so that no rule reads the archive later.
    """
    assert frames.archive_manifest is not None
    stored = frames.archive_manifest
    problems = _problems(files_for(spark), place, stored)
    archive, here = None, frames.files
    if "half" not in problems:
        try:
            archive = staged(digests(spark, place, stored), f"{staging_dir}/archive", schemas.ARCHIVE)
            written = files_for(spark).local_files(f"{staging_dir}/archive")
            here = None if here is None or written is None else {**here, "archive": written}
        except FAILURES as error:
            problems["half"] = [f"half cannot be read: {root_cause(str(error))}"]
    return replace(frames, archive=archive, files=here, archive_problems=problems)


def _problems(files: Files, place: str, stored: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the faults of the archive's files by table, those of its other files, and those of manifest.json."""
    found = damage(files, place, stored)
    try:
        # During a redaction it may be the one before.
        if manifest_of(files, place) != stored and "rubbish" not in stored:
            found[MANIFEST] = [f"{MANIFEST} is not what the database has"]
    except RunFailedError as error:
        found[MANIFEST] = [str(error)]
    return found
