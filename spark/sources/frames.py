"""Reads frames from Postgres, in one snapshot, or from Parquet.

While the snapshot is open, the run only reads Postgres: it writes the rows as narrow Parquet to a staging directory,
and all later steps read that. No bodies are read. If Spark runs on this machine, this process reads with COPY
(spark/postgres/copy.py). If Spark runs on other machines, its executors read with JDBC, all at once. With JDBC a
million halves take 4.2 s of CPU time, half of it for Parquet. Times as whole microseconds cost less than JDBC's time
type, ids as text cost no more than as bytes, and dictionaries of columns that hardly repeat would double the time.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from spark import schemas
from spark.engine.filesystem import FAILURES, Files, files_for
from spark.engine.progress import Progress
from spark.engine.session import cores, is_local
from spark.errors import RunFailedError
from spark.frames import Frames, empty
from spark.postgres import copy, readers
from spark.postgres.connections import Connection, Day, Snapshot, partition_name
from spark.sources.comparisons import FOUND, OF_NO_DAY, Comparisons, Search
from spark.sources.failures import read_failure
from spark.sources.id_ranges import id_ranges
from spark.sources.scan import receipts_since

FETCH_ROWS = 10_000
# The pages of one range, which a connection reads in some hundred milliseconds.
PAGES_AT_ONCE = 4096
# These columns are jsonb; all other string columns are text or uuid, which JDBC returns as text.
JSON = frozenset({"headers", "policy", "filters"})
# Types with different names in Spark and Postgres.
SQL_TYPES = {
    "string": "text",
    "double": "double precision",
    "binary": "bytea",
    "timestamp": "timestamptz",
    "array<string>": "text[]",
}
# Columns with nearly unique values, for which a dictionary is useless.
UNLIKE = ("transaction_id", "body_digest", "digest", "offset")

# The frames that a search is prepared with, in the order of its parameters.
PREPARED = ("subscription_version", "checkpoint")

# For sessionInitStatement: because a fetch size is set, JDBC has turned autocommit off by then. So these statements
# begin the database transaction that reads the rows, before any read.
IN_SNAPSHOT = "; ".join(readers.IN_SNAPSHOT)


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one frame: a query and, for several connections, the ranges that divide it."""

    query: str
    ranges: tuple[str, ...]


def frames_from_postgres(
    spark: SparkSession,
    snapshot: Snapshot,
    day: date,
    staging_dir: str,
    progress: Progress,
    search: Search | None = None,
) -> Frames:
    """Read a day in the snapshot, write it below `staging_dir` in the layout of `frames_from_parquet`, and return it.

    `search` names the transactions that some comparisons must look at, while others run; it is prepared while the rows
    of messages are read, if there are many. The caller has locked the day.
    Raises SnapshotLostError if the server ended the snapshot, and RunFailedError if the read failed otherwise; then the
    files below `staging_dir` are useless.
    """
    found = snapshot.day(day)
    files = files_for(spark)
    counts = snapshot.small_counts(found)
    rows: dict[str, int] = {}
    ids = id_ranges(snapshot, found) if is_local(spark) else None

    def write(names: Iterable[str]) -> None:
        for name in names:
            with progress.stage(f"read {name}", day) as stage:
                rows[name] = 0
                if counts.get(name) != 0:
                    rows[name] = _write_frame(spark, snapshot, found, name, f"{staging_dir}/{name}", ids)
                stage.rows = rows[name]

    write(name for name in schemas.FRAMES if name not in schemas.BIG)
    if search is not None and ids is not None and len(ids) > 1:
        search.prepare(*(_read_frame(spark, staging_dir, name, rows[name]) for name in PREPARED))
    write(schemas.BIG)
    description = described(snapshot, found, rows)
    any_row = any(rows[name] for name in schemas.BIG | schemas.OF_DAY)
    names = [name for name in FOUND if any_row or name in OF_NO_DAY]
    comparisons = Comparisons(spark, snapshot, found, staging_dir, progress)
    read, counted = comparisons.run(names, lambda: _rows_of(spark, files, staging_dir, description), search)
    description |= dict.fromkeys(FOUND, 0) | counted
    files.write_text(f"{staging_dir}/frames.json", json.dumps(description))
    return _with_found(spark, read, staging_dir, description)


def _write_frame(
    spark: SparkSession, snapshot: Snapshot, day: Day, name: str, directory: str, ids: Sequence[str] | None
) -> int:
    """Write a frame's rows as Parquet; return their number. `ids`: the ranges of ids that this process reads; None: the
    executors read."""
    if ids is None:
        return write_source(spark, snapshot, source_of(snapshot, day, name), name, directory)
    schema, queries = schemas.FRAMES[name], copy_queries(snapshot, day, name, ids)
    try:
        return copy.write_copied(snapshot, queries, directory, unlike=_unlike(schema), abreast=cores(spark))
    except copy.FAILURES as error:
        raise read_failure(error, standby=snapshot.standby) from error


def described(snapshot: Snapshot, day: Day, rows: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of a day's frames.json."""
    since = receipts_since(day)
    return {
        "day": str(day.day),
        "seen_at": snapshot.seen_at.isoformat(),
        "rules": snapshot.rules(),
        "receipts_since": None if since is None else since.isoformat(),
        "rows": dict(rows),
    }


def source_of(
    snapshot: Snapshot, day: Day, name: str, expression: Callable[[StructField], str] | None = None
) -> Source:
    """Return the source of a day's frame. `expression`: the SQL of a column; by default in the form for JDBC."""
    columns = ", ".join(map(expression or _brought, schemas.FRAMES[name].fields))
    if name in schemas.BIG:
        relation = partition_name(name, day.day)
        return Source(f"select {columns}, ctid from {relation}", page_ranges(snapshot.pages(relation)))  # noqa: S608
    query = f"select {columns} from {name}"  # noqa: S608 -- names of ours
    if name in schemas.OF_DAY:
        query += f" where transaction_id >= '{day.low}' and transaction_id < '{day.high}'"
    return Source(query, ("true",))


def copy_queries(snapshot: Snapshot, day: Day, name: str, ids: Sequence[str]) -> list[str]:
    """Return the queries whose rows COPY brings, one a file: of a day's own table, one for each range of `ids`."""
    columns = ", ".join(map(_copied, _fields(name)))
    if name not in schemas.BIG:
        return [source_of(snapshot, day, name, _copied).query]
    relation = partition_name(name, day.day)
    ranges = ids if snapshot.pages(relation) else ()
    return [f"select {columns} from {relation} where {one}" for one in ranges]  # noqa: S608 -- names of ours


def _fields(name: str) -> list[StructField]:
    """Return the columns of a frame's files."""
    return [*schemas.FRAMES[name].fields, *(schemas.ALSO[name].fields if name in schemas.ALSO else [])]


def page_ranges(pages: int) -> tuple[str, ...]:
    """Return conditions that divide a relation into ranges of pages; each is a TID range scan."""
    firsts = range(0, pages, PAGES_AT_ONCE)
    return tuple(f"ctid >= '({first},0)'::tid and ctid < '({first + PAGES_AT_ONCE},0)'::tid" for first in firsts)


def _brought(field: StructField) -> str:
    """Return the SQL of a column for JDBC: a time is microseconds since 1970, exact beyond the year 2200."""
    if isinstance(field.dataType, TimestampType):
        return f"(date_part('epoch', {field.name}) * 1000000)::bigint as {field.name}"
    if field.name == "policy" or (field.name in JSON and isinstance(field.dataType, StringType)):
        return _copied(field)
    return f'"{field.name}"'


def _copied(field: StructField) -> str:
    """Return the SQL of a column for COPY, with the type of the Parquet column."""
    kind = field.dataType.simpleString()
    shown = f'"{field.name}"::{SQL_TYPES.get(kind, kind)}'
    if field.name == "policy":
        shown = f"case when position = 0 then {shown} end"
    return f'{shown} as "{field.name}"'


def _column(field: StructField) -> Column:
    """Return the column of a schema from JDBC's column."""
    brought = F.col(f"`{field.name}`")
    if isinstance(field.dataType, TimestampType):
        return F.timestamp_micros(brought).alias(field.name)
    return brought.cast(field.dataType).alias(field.name)


def write_source(spark: SparkSession, snapshot: Snapshot, source: Source, name: str, directory: str) -> int:
    """Write a query's rows as Parquet; return their number."""
    if not source.ranges:
        return 0
    schema = schemas.FRAMES[name]
    counted = Observation(f"rows of {name}")
    try:
        read = spark.read.jdbc(**jdbc_in(snapshot), table=f"({source.query}) source", predicates=list(source.ranges))
        frame = read.select([_column(field) for field in schema.fields]).observe(counted, F.count("*").alias("rows"))
        frame.write.options(**_parquet_options(schema)).parquet(directory)
        rows: int = counted.get["rows"]
    except FAILURES as error:
        raise read_failure(error, standby=snapshot.standby) from error
    return rows


def jdbc_in(snapshot: Snapshot) -> dict[str, Any]:
    """Return the JDBC settings that reach the snapshot's server, in the snapshot."""
    reach = jdbc_to(snapshot.connection)
    reach["properties"] |= {"fetchsize": str(FETCH_ROWS), "sessionInitStatement": IN_SNAPSHOT.format(snapshot.name)}
    return reach


def jdbc_to(connection: Connection) -> dict[str, Any]:
    """Return the JDBC url and properties of a connection's server and database."""
    info = connection.info
    if info.host.startswith("/"):
        raise RunFailedError("Spark reads over TCP: use a host in the database's URL, not the directory of a socket.")
    host = f"[{info.host}]" if ":" in info.host else info.host
    names = {"sslmode": "sslmode", "sslrootcert": "sslrootcert", "sslcert": "sslcert", "sslkey": "sslkey"}
    given = info.get_parameters()
    return {
        "url": f"jdbc:postgresql://{host}:{info.port}/{info.dbname}",
        "properties": {
            "driver": "org.postgresql.Driver",
            "user": info.user,
            "password": info.password,
            "ApplicationName": "halfnote proof",
            "tcpKeepAlive": "true",
            **{ours: given[theirs] for theirs, ours in names.items() if theirs in given},
            **readers.session_options(connection),
        },
    }


def _parquet_options(schema: StructType) -> dict[str, str]:
    # Frames are read several times within a minute. LZ4 needs a third more space than zstd, but far less time to read.
    return {"compression": "lz4_raw"} | {f"parquet.enable.dictionary#{name}": "false" for name in _unlike(schema)}


def _unlike(schema: StructType) -> list[str]:
    return [f.name for f in schema.fields if f.name in UNLIKE or isinstance(f.dataType, TimestampType)]


def frames_from_parquet(spark: SparkSession, directory: str, day: date | None = None) -> Frames:
    """Return the frames that are in a directory: `<frame>/*.parquet`, and frames.json with day, seen_at and rules.

    A frame without rows in frames.json, and any small frame, may be missing; it is empty. Raises RunFailedError if the
    directory has no frames, or frames of another day.
    """
    files = files_for(spark)
    description = _described(files, directory, day)
    return _with_found(spark, _rows_of(spark, files, directory, description), directory, description)


def _rows_of(spark: SparkSession, files: Files, directory: str, description: Mapping[str, Any]) -> Frames:
    """Return the frames without what the read found beside the rows."""
    rows: dict[str, int] = dict(description.get("rows", {}))
    since = description.get("receipts_since")
    frames: dict[str, Any] = {"files": _files_here(spark, files, directory)}
    nothing: set[str] = set()
    for name, schema in schemas.FRAMES.items():
        place = f"{directory}/{name}"
        if files.exists(place):
            frames[name] = _read_frame(spark, directory, name)
        elif rows.get(name, 1 if name in schemas.BIG else 0):
            raise RunFailedError(f"{place} is missing.")
        elif name == "subscription_version" and name not in rows:
            # Written before there was a history.
            frames[name] = _versions_of(frames["subscription"])
        else:
            frames[name] = empty(spark, schema)
            nothing.add(name)
        if name in schemas.BIG and name not in rows:
            # Parquet's footers have the counts.
            here = (frames["files"] or {}).get(name)
            rows[name] = sum(map(rows_in, here)) if here else frames[name].count()
    if files.exists(place := f"{directory}/same_offset"):
        frames["same_offset"] = spark.read.schema(schemas.SAME_OFFSET).parquet(place)
    return Frames(
        day=date.fromisoformat(description["day"]),
        seen_at=datetime.fromisoformat(description["seen_at"]),
        rules=description.get("rules", {}),
        receipts_since=None if since is None else datetime.fromisoformat(since),
        rows=rows,
        nothing=frozenset(nothing),
        **frames,
    )


def _read_frame(spark: SparkSession, directory: str, name: str, count: int | None = None) -> DataFrame:
    """Return a frame that is in a directory. Without rows it has no files there. `count`: None: it has files."""
    schema = schemas.FRAMES[name]
    return empty(spark, schema) if count == 0 else spark.read.schema(schema).parquet(f"{directory}/{name}")


def _with_found(spark: SparkSession, frames: Frames, directory: str, description: Mapping[str, Any]) -> Frames:
    """Return the frames with what the read found, by the numbers in the description."""
    found: dict[str, Any] = {}
    nothing: set[str] = set()
    for name, schema in schemas.FOUND.items():
        if (count := description.get(name)) is None:
            continue
        found[name] = spark.read.schema(schema).json(f"{directory}/{name}") if count else empty(spark, schema)
        if not count:
            nothing.add(name)
    return replace(frames, nothing=frames.nothing | nothing, **found)


def _files_here(spark: SparkSession, files: Files, directory: str) -> dict[str, list[str]] | None:
    """Return the files of each frame; None unless both this process and Spark have them on this machine."""
    if not is_local(spark):
        return None
    found = {name: files.local_files(f"{directory}/{name}") for name in schemas.FRAMES}
    here = {name: paths for name, paths in found.items() if paths is not None}
    return here if len(here) == len(found) else None


def rows_in(file: str) -> int:
    """Return the number of rows of a Parquet file on this machine. Raises RunFailedError."""
    try:
        return int(pq.read_metadata(file).num_rows)
    except copy.FAILURES as error:
        raise RunFailedError(f"{file} cannot be read: {error}") from error


def _described(files: Files, directory: str, day: date | None) -> dict[str, Any]:
    place = f"{directory}/frames.json"
    if not files.exists(place):
        raise RunFailedError(f"{place} is missing, so {directory} is not a directory of frames.")
    try:
        description: dict[str, Any] = json.loads(files.read_text(place))
        found = date.fromisoformat(description["day"])
        datetime.fromisoformat(description["seen_at"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunFailedError(f"{place} cannot be read: {type(error).__name__} {error}.") from error
    if description.get("archived") and not files.exists(f"{directory}/manifest.json"):
        raise RunFailedError(f"{directory}/manifest.json is missing, so nothing shows whether the archive is intact.")
    if day is not None and found != day:
        raise RunFailedError(f"{place} is of {found}, not of {day}.")
    return description


def _versions_of(subscription: DataFrame) -> DataFrame:
    """Return a history of one version each, from the rows themselves: for days that were written without a history."""
    return subscription.select(
        F.lit(0).cast("long").alias("version_id"),
        "subscription_id",
        F.col("matches_since").alias("at"),
        "name",
        "topics",
        "filters",
        "state",
        F.lit("none").alias("ordered"),
        F.lit(None).cast("int").alias("shards"),
        "started_after",
        "deleted_at",
    )


def days_of_parquet(spark: SparkSession, directory: str) -> Iterator[str]:
    """Return the directories of frames: the given one, or those in it, by name."""
    files = files_for(spark)

    def is_day(place: str) -> bool:
        return any(files.exists(f"{place}/{name}") for name in ("frames.json", "manifest.json"))

    if is_day(directory):
        yield directory
        return
    yield from sorted(filter(is_day, files.children(directory)))
