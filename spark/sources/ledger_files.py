"""Reads a ledger from Parquet, CSV, a directory of such files, or a database with JDBC.

The result is text, column by column, with its source; spark/sources/ledgers.py interprets the text.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructField, StructType

from spark.engine.filesystem import FAILURES, files_for
from spark.errors import RunFailedError

PASSWORD = "HALFNOTE_LEDGER_PASSWORD"  # noqa: S105 -- a variable's name
CSV = (".csv", ".csv.gz")
MALFORMED = "_malformed"
# Spark's error for a file that it cannot decode, with the file's URL.
_DAMAGED = re.compile(r"\[FAILED_READ_FILE[^\]]*\] Encountered error while reading file (\S+)\.\s")
# Spark finds a driver in spark.jars only by its class name.
DRIVERS = {
    "jdbc:postgresql:": "org.postgresql.Driver",
    "jdbc:mysql:": "com.mysql.cj.jdbc.Driver",
    "jdbc:mariadb:": "org.mariadb.jdbc.Driver",
}


class LedgerError(Exception):
    """A ledger cannot be read because of wrong usage. The text names the file and, if a column is wrong, the column."""


@dataclass(frozen=True)
class Wanted:
    """A column of a ledger: its allowed types (CSV has only text), and the default of a missing `optional` column."""

    types: tuple[str, ...]
    optional: bool = False
    default: str | None = None


def read(spark: SparkSession, spec: str, columns: Mapping[str, Wanted]) -> DataFrame:
    """Return the ledger as strings: `source`, `line` and `columns`.

    `source`: the file, table or query. `line`: the text of a malformed line, else null. Raises LedgerError, and
    RunFailedError if a database does not answer.
    """
    parts = _from_jdbc(spark, spec, columns) if spec.startswith("jdbc:") else _from_files(spark, spec, columns)
    return reduce(DataFrame.unionByName, parts)


def _from_files(spark: SparkSession, place: str, columns: Mapping[str, Wanted]) -> Iterator[DataFrame]:
    """Read all files with the same columns at once: one frame per layout, not per file."""
    layouts: dict[tuple[bool, StructType], list[str]] = {}
    for path in _paths(spark, place):
        schema = _schema(spark, path)
        _check(_short(path), schema, columns)
        layouts.setdefault((path.endswith(CSV), schema), []).append(path)
    for (is_csv, schema), paths in layouts.items():
        reader = _csv(spark) if is_csv else spark.read
        with_malformed = StructType([*schema.fields, StructField(MALFORMED, StringType())]) if is_csv else schema
        # Pages of Parquet whose writer stored checksums are compared with these.
        reader = reader.option("parquet.page.verify-checksum.enabled", "true")
        frame = reader.schema(with_malformed).format("csv" if is_csv else "parquet").load(paths)
        line = F.col(MALFORMED) if is_csv else F.lit(None).cast("string")
        source = F.regexp_replace("_metadata.file_path", "^file:/*", "/")
        yield frame.select(source.alias("source"), line.alias("line"), *_columns(schema, columns))


def _paths(spark: SparkSession, place: str) -> list[str]:
    """Return the ledger's files, also in subdirectories. Files whose names begin with `_` or `.` are skipped."""
    files = files_for(spark)

    def below(directory: str) -> Iterator[str]:
        for child in files.children(directory):
            if child.rsplit("/", 1)[-1].startswith(("_", ".")):
                continue
            # For a file, Hadoop lists the file itself.
            if files.children(child) != [child]:
                yield from below(child)
            elif child.endswith((*CSV, ".parquet")):
                yield child

    try:
        found = sorted(below(place))
    except FAILURES as error:
        raise LedgerError(f"{place} cannot be read: {_reason(error)}") from error
    if not found:
        missing = "has no .parquet, .csv or .csv.gz" if files.exists(place) else "does not exist"
        raise LedgerError(f"{place} {missing}")
    return found


def _schema(spark: SparkSession, path: str) -> StructType:
    """Return the columns of a Parquet file, or those in the first line of a CSV file."""
    try:
        return _csv(spark).csv(path).schema if path.endswith(CSV) else spark.read.parquet(path).schema
    except FAILURES as error:
        raise LedgerError(f"{_short(path)} cannot be read: {_reason(error)}") from error


def _csv(spark: SparkSession) -> DataFrameReader:
    """Read CSV by RFC 4180, one row per line. A line with too many or too few values is kept as MALFORMED."""
    return spark.read.options(
        header=True, quote='"', escape='"', mode="PERMISSIVE", columnNameOfCorruptRecord=MALFORMED, columnPruning=False
    )


def _from_jdbc(spark: SparkSession, spec: str, columns: Mapping[str, Wanted]) -> list[DataFrame]:
    """Read `jdbc:<url>#<table>` or `jdbc:<url>#<query>`; a text with a blank is a query."""
    url, _, what = spec.partition("#")
    name = url.partition("?")[0]
    what = what.strip().rstrip(";")
    if not what:
        raise LedgerError(f"{name} lacks a table or query: add #table or #select …")
    if {key.lower() for key, _ in parse_qsl(urlsplit(url.removeprefix("jdbc:")).query)} & {"password", "pwd"}:
        raise LedgerError(f"{name} has a password, which other users of this machine can see: set {PASSWORD} instead")
    options = {"url": url, "query" if any(map(str.isspace, what)) else "dbtable": what, "fetchsize": "10000"}
    if driver := next((driver for prefix, driver in DRIVERS.items() if url.startswith(prefix)), None):
        options["driver"] = driver
    if PASSWORD in os.environ:
        options["password"] = os.environ[PASSWORD]
    try:
        frame = spark.read.format("jdbc").options(**options).load()
    except FAILURES as error:
        raise _of_database(name, error) from error
    source = f"{name}#{what}"
    _check(source, frame.schema, columns)
    given = [F.lit(source).alias("source"), F.lit(None).cast("string").alias("line")]
    return [frame.select(*given, *_columns(frame.schema, columns))]


def _check(source: str, schema: StructType, columns: Mapping[str, Wanted]) -> None:
    """Raise LedgerError if a column is missing or has a type that cannot be read."""
    found = _by_name(schema)
    for name, wanted in columns.items():
        if name not in found:
            if not wanted.optional:
                raise LedgerError(f"{source} has no column {name}; it has {', '.join(schema.names) or 'none'}")
        elif _type(found[name].dataType) not in (*wanted.types, "void"):
            is_of = found[name].dataType.simpleString()
            raise LedgerError(f"{source}: column {name} is {is_of}, but must be {' or '.join(wanted.types)}")


def _columns(schema: StructType, columns: Mapping[str, Wanted]) -> list[Column]:
    """Return the wanted columns as text: binary as hex."""
    found = _by_name(schema)
    made = []
    for name, wanted in columns.items():
        if name in found:
            value = F.col(f"`{found[name].name.replace('`', '``')}`")
            text = F.hex(value) if _type(found[name].dataType) == "binary" else value.cast("string")
        else:
            text = F.lit(wanted.default).cast("string")
        made.append(text.alias(name))
    return made


def _by_name(schema: StructType) -> dict[str, StructField]:
    """Return the fields by lower-case name, without surrounding blanks and a byte order mark."""
    return {field.name.strip("\ufeff \t").lower(): field for field in schema.fields}


def _type(of: DataType) -> str:
    """Return the name of a type, without a string's length."""
    return of.typeName().split("(")[0] if of.typeName() not in ("char", "varchar") else "string"


def _short(path: str) -> str:
    """Return a local file's path without the URL's scheme."""
    return "/" + path.removeprefix("file:").lstrip("/") if path.startswith("file:") else path


def failure_of_read(error: Py4JJavaError | PySparkException, spec: str) -> Exception:
    """Return the error of a read that failed after it began: LedgerError, which names the file, if a file is damaged.

    Otherwise a database or the staging directory failed: RunFailedError, or LedgerError for a wrong query.
    """
    damaged = _DAMAGED.search(str(error))
    if damaged:
        reason = f"{_short(damaged[1])} cannot be read to its end: {_reason(error)}"
        return LedgerError(f"{reason}. The file is truncated or damaged: write it again.")
    if spec.startswith("jdbc:"):
        return _of_database(spec.partition("?")[0], error)
    return RunFailedError(f"{spec}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Return the first line of Java's innermost error."""
    cause = _java(error)
    while cause is not None and (inner := cause.getCause()) is not None:
        cause = inner
    said = str(error) if cause is None else cause.getMessage() or cause.getClass().getSimpleName()
    return _first_line(said or type(error).__name__).rstrip(".")


def _java(error: Exception) -> Any:
    """Return Java's exception, or None if the error comes from Python alone."""
    return error.java_exception if isinstance(error, Py4JJavaError) else getattr(error, "_origin", None)


def _of_database(name: str, error: Exception) -> Exception:
    """Return LedgerError if the query is wrong, as for a missing table; RunFailedError if no answer comes."""
    cause = _java(error)
    while cause is not None:
        # Only a java.sql.SQLException has an SQLSTATE. 08: no connection; 53 to 58: a fault of the server.
        with suppress(Py4JError):
            state = cause.getSQLState() or ""
            error_class = RunFailedError if state[:2] in ("08", "53", "54", "55", "57", "58") else LedgerError
            return error_class(f"{name}: {_first_line(cause.getMessage())}")
        cause = cause.getCause()
    return LedgerError(f"{name}: {_reason(error)}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
