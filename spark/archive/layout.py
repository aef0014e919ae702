"""An archived day, as Parquet with a manifest: `<archive>/day=YYYY-MM-DD/<attempt>/<table>/*.parquet`, manifest.json.

The day's row in Postgres points at the attempt and has the manifest too; spark/archive/removal.py says what becomes of
others. Only the files that the manifest names count. A manifest is
`{version, day, seen_at, written_at, bodies, largest_body, tables, beside, redacted, replaces}`; a table in it is that
of spark/manifest.py and its `files`, `[{path, bytes, sha256, rows, first_id, last_id, digest}]`; `beside` has the other
files, which the rules need, as `[{path, bytes, sha256}]`; `redacted` is `[{message_id, at, actor, reason}]`; `replaces`
has the names of attempts, and archives of earlier versions lack it. During a redaction the manifest, in Postgres and
in the file, also has `rubbish`, the paths that are not in use.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark import manifest, schemas
from spark.engine.filesystem import FAILURES, Files, files_for
from spark.errors import RunFailedError
from spark.frames import Frames, empty
from spark.manifest import TABLES, TableManifest
from spark.sources.failures import root_cause
from spark.sources.frames import frames_from_parquet

MANIFEST = "manifest.json"
# The files that belong to no table: frames.json and the small frames.
BESIDE = "beside"
NAMED_AT_MOST = 5
# The bytes of bodies in memory at once, in each of Spark's tasks.
BODIES_AT_ONCE = 64 * 1024 * 1024
ROWS_AT_ONCE = 4096


def rows_at_once(largest_body: int) -> int:
    """Return how many rows, with their bodies, may be in memory."""
    return max(1, min(ROWS_AT_ONCE, BODIES_AT_ONCE // max(1, largest_body)))


def read(spark: SparkSession, place: str, described: Mapping[str, Any], table: str) -> DataFrame:
    """Return a table of an archived day, with all its columns; columns that are not archived are null."""
    paths = [f"{place}/{file['path']}" for file in described["tables"][table]["files"]]
    schema = manifest.schema(table)
    if not paths:
        return empty(spark, schema)
    return spark.read.schema(schema).option("parquet.page.verify-checksum.enabled", "true").parquet(*paths)


@contextmanager
def small_batches(spark: SparkSession, largest_body: int) -> Iterator[None]:
    """Limit the rows of Parquet that Spark reads at a time, so that their bodies are at most BODIES_AT_ONCE."""
    name = "spark.sql.parquet.columnarReaderBatchSize"
    before = spark.conf.get(name)
    spark.conf.set(name, str(rows_at_once(largest_body)))
    try:
        yield
    finally:
        spark.conf.set(name, str(before))


def manifest_of(files: Files, place: str) -> dict[str, Any]:
    """Return the content of manifest.json. Raises RunFailedError if it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(files.read_text(f"{place}/{MANIFEST}"))
        manifest.tables(found)
        if found["version"] > 1:
            found["beside"]
    except (*FAILURES, ValueError, KeyError, TypeError) as error:
        raise RunFailedError(f"{place}/{MANIFEST} cannot be read: {root_cause(str(error))}") from error
    return found


def files_of(spark: SparkSession, files: Files, place: str, table: str) -> list[dict[str, Any]]:
    """Read back each file in a table's directory and return the manifest's `files`."""
    paths = [f"{table}/{name}" for name in files.names(f"{place}/{table}") if name.endswith(".parquet")]
    return entries(spark, files, place, table, paths)


def entries(spark: SparkSession, files: Files, place: str, table: str, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Read back some files of a table and return the manifest's `files`."""
    listed = {"tables": {table: {"files": [{"path": path} for path in paths]}}}
    found = _by_path(read(spark, place, listed, table), table)
    nothing = TableManifest(0, None, None, "0")
    return [
        {"path": path, "bytes": files.size(f"{place}/{path}"), "sha256": files.sha256(f"{place}/{path}")}
        | asdict(found.get(path, nothing))
        for path in paths
    ]


def beside_of(files: Files, place: str) -> list[dict[str, Any]]:
    """Read the files of an archived day that belong to no table, and return the manifest's `beside`."""
    paths = [path for path in _present(files, place) if path.partition("/")[0] not in TABLES]
    return [
        {"path": path, "bytes": files.size(f"{place}/{path}"), "sha256": files.sha256(f"{place}/{path}")}
        for path in paths
    ]


def unlisted(files: Files, place: str, described: Mapping[str, Any]) -> list[str]:
    """Return the files that a manifest does not name, as texts. A redaction's `rubbish` is named."""
    listed = {file["path"] for held in described["tables"].values() for file in held["files"]}
    listed |= {file["path"] for file in described["beside"]} | set(described.get("rubbish", ()))
    return [
        f"{path} is not in the manifest"
        for path in _present(files, place)
        if path not in listed and path.partition("/")[0] not in listed
    ]


def _present(files: Files, place: str, above: str = "") -> list[str]:
    """Return the paths of the files below a place, except the manifest, and those that Spark and Hadoop hide."""
    found: list[str] = []
    for name in files.names(f"{place}/{above}".rstrip("/")):
        path = f"{above}{name}"
        if path == MANIFEST or name.startswith((".", "_")):
            continue
        found += _present(files, place, f"{path}/") if files.is_directory(f"{place}/{path}") else [path]
    return found


def _by_path(frame: DataFrame, table: str) -> dict[str, TableManifest]:
    return {"/".join(url.split("/")[-2:]): held for url, held in manifest.by_file(frame, table).items()}


def problems(spark: SparkSession, files: Files, place: str, described: Mapping[str, Any]) -> list[str]:
    """Read a whole archived day and return its differences from the manifest as texts; none if it is intact."""
    found = [word for words in damage(files, place, described, [BESIDE]).values() for word in words]
    for table in TABLES:
        try:
            damaged = damaged_files(files, place, described["tables"][table]["files"])
            found += damaged or _wrong_rows(spark, place, described, table)
        except FAILURES as error:
            found.append(f"{table} cannot be read: {root_cause(str(error))}")
    return found or body_problems(spark, place, described)


def damage(
    files: Files, place: str, described: Mapping[str, Any], parts: Sequence[str] = (*TABLES, BESIDE)
) -> dict[str, list[str]]:
    """Return the files that are missing, have other bytes, or are not in the manifest, as texts by part: a table, or
    BESIDE for all other files. Reads the files completely, but no rows."""
    found = {}
    for part in parts:
        if part == BESIDE and BESIDE not in described:
            continue  # The archive is of version 1.
        listed = described[BESIDE] if part == BESIDE else described["tables"][part]["files"]
        try:
            found[part] = damaged_files(files, place, listed)
            if part == BESIDE:
                found[part] += unlisted(files, place, described)
            elif manifest.total(map(TableManifest.of, listed)) != TableManifest.of(described["tables"][part]):
                found[part].append(f"{MANIFEST} contradicts itself about {part}")
        except FAILURES as error:
            found[part] = [f"{part} cannot be read: {root_cause(str(error))}"]
    return {part: words for part, words in found.items() if words}


def damaged_files(files: Files, place: str, listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which of a manifest's `files` are missing or have other bytes, as texts; reads them completely."""
    found = []
    for file in listed:
        wrong = wrong_lengths(files, place, [file])
        if not wrong and files.sha256(f"{place}/{file['path']}") != file["sha256"]:
            wrong = [f"{file['path']} has other bytes than were written (SHA-256)"]
        found += wrong
    return found


def wrong_lengths(files: Files, place: str, listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which of a manifest's `files` are missing or have another length, as texts; one request a file."""
    found = []
    for file in listed:
        length = files.length(f"{place}/{file['path']}")
        if length is None:
            found.append(f"{file['path']} is missing")
        elif length != file["bytes"]:
            found.append(f"{file['path']} has {length} bytes instead of {file['bytes']}")
    return found


def _wrong_rows(spark: SparkSession, place: str, described: Mapping[str, Any], table: str) -> list[str]:
    listed = described["tables"][table]["files"]
    found = _by_path(read(spark, place, described, table), table)
    nothing = TableManifest(0, None, None, "0")
    wrong = [file["path"] for file in listed if found.get(file["path"], nothing) != TableManifest.of(file)]
    if manifest.total(found.values()) != TableManifest.of(described["tables"][table]):
        wrong.append(table)
    return [f"{name} has other rows than the manifest says" for name in wrong]


def body_problems(spark: SparkSession, place: str, described: Mapping[str, Any]) -> list[str]:
    """Compute every body's SHA-256 again, and return the bodies that differ from body_digest or are missing."""
    if not described["bodies"]:
        return []
    redacted = [one["message_id"] for one in described["redacted"]]
    message_id = F.concat_ws("-", "transaction_id", "position")
    missing = F.col("body").isNull() & ~message_id.isin(redacted)
    # sha2 is lower-case hex; of a null body it is null, and `differs` then false.
    differs = F.coalesce(F.sha2("body", 256) != F.lower(F.hex("body_digest")), F.lit(False))
    try:
        with small_batches(spark, described["largest_body"]):
            half = read(spark, place, described, "half")
            wrong = half.where(missing | differs).select(message_id.alias("id"), F.col("body").isNull().alias("gone"))
            # One row more than the text names shows that there are more.
            rows = wrong.orderBy("id").limit(NAMED_AT_MOST + 1).collect()
    except FAILURES as error:
        return [f"bodies cannot be read: {root_cause(str(error))}"]
    words = [f"the body of {row['id']} {'is missing' if row['gone'] else 'is not of its digest'}" for row in rows]
    return words[:NAMED_AT_MOST] + ["and more"] * (len(words) > NAMED_AT_MOST)


def digests(spark: SparkSession, place: str, described: Mapping[str, Any]) -> DataFrame:
    """Return ARCHIVE, what the rule content_differs compares. Reads no bodies: `problems` does."""
    return read(spark, place, described, "half").select(*schemas.ARCHIVE.names)


def frames_from_archive(spark: SparkSession, place: str) -> Frames:
    """Return an archived day's frames as of the time of its archive, with the input of every rule except ledgers.

    The present content of the files is compared with the manifest. Raises RunFailedError.
    """
    files = files_for(spark)
    described = manifest_of(files, place)
    frames = frames_from_parquet(spark, place)
    beside: dict[str, Any] = {"archive": digests(spark, place, described), "archive_manifest": described}
    tables: dict[str, Any] = {
        table: read(spark, place, described, table).select(*schemas.BIG[table].names) for table in TABLES
    }
    try:
        found = {table: asdict(manifest.of_frame(read(spark, place, described, table), table)) for table in TABLES}
    except FAILURES as error:
        raise RunFailedError(f"{place} cannot be read: {root_cause(str(error))}") from error
    if frames.files is not None:
        beside["files"] = {**frames.files, "archive": frames.files["half"]}
    return replace(frames, **tables, **beside, found_manifest={"tables": found})
