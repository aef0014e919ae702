"""Reads a ledger from wherever it is: Parquet, CSV, a directory of those, or a database by JDBC.

What comes out is text, column by column, with the place it came from; what the text means is spark/ledgers.py's.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from urllib.parse import parse_qsl, urlsplit

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructField, StructType

from spark.errors import RunFailedError
from spark.files import Files

PASSWORD = "HALFNOTE_LEDGER_PASSWORD"  # noqa: S105 -- a variable's name
CSV = (".csv", ".csv.gz")
MALFORMED = "_malformed"
# Spark finds a driver that came by spark.jars only by its class.
DRIVERS = {
    "jdbc:postgresql:": "org.postgresql.Driver",
    "jdbc:mysql:": "com.mysql.cj.jdbc.Driver",
    "jdbc:mariadb:": "org.mariadb.jdbc.Driver",
}


class LedgerError(Exception):
    """A ledger that cannot be taken as it is: wrong usage. The text names the file and, if it is one, the column."""


@dataclass(frozen=True)
class Wanted:
    """A column of a ledger: the types it may have where it has one (all text in CSV), and what stands for it if it is
    missing (`optional` only)."""

    types: tuple[str, ...]
    optional: bool = False
    default: str | None = None


def read(spark: SparkSession, spec: str, columns: Mapping[str, Wanted]) -> DataFrame:
    """Return `source` (file, or table or query), `line` (the text of a malformed line, else null), and `columns`, all
    of them strings. Raises LedgerError, and RunFailedError if a database does not answer.
    """
    parts = _from_jdbc(spark, spec, columns) if spec.startswith("jdbc:") else _from_files(spark, spec, columns)
    return reduce(DataFrame.unionByName, parts)


def _from_files(spark: SparkSession, place: str, columns: Mapping[str, Wanted]) -> Iterator[DataFrame]:
    """Read all that have the same columns at once: a frame for each layout, not for each file."""
    layouts: dict[tuple[bool, StructType], list[str]] = {}
    for path in _paths(spark, place):
        schema = _schema(spark, path)
        _check(_short(path), schema, columns)
        layouts.setdefault((path.endswith(CSV), schema), []).append(path)
    for (is_csv, schema), paths in layouts.items():
        reader = _csv(spark) if is_csv else spark.read
        with_malformed = StructType([*schema.fields, StructField(MALFORMED, StringType())]) if is_csv else schema
        frame = reader.schema(with_malformed).format("csv" if is_csv else "parquet").load(paths)
        line = F.col(MALFORMED) if is_csv else F.lit(None).cast("string")
        source = F.regexp_replace("_metadata.file_path", "^file:/*", "/")
        yield frame.select(source.alias("source"), line.alias("line"), *_columns(schema, columns))


def _paths(spark: SparkSession, place: str) -> list[str]:
    """Return the ledger's files; a directory may have others inside. Names that begin with `_` or `.` are not rows."""
    files = Files(spark)

    def below(directory: str) -> Iterator[str]:
        for child in files.children(directory):
            if child.rsplit("/", 1)[-1].startswith(("_", ".")):
                continue
            # Of a file, Hadoop lists the file itself.
            if files.children(child) != [child]:
                yield from below(child)
            elif child.endswith((*CSV, ".parquet")):
                yield child

    try:
        found = sorted(below(place))
    except (Py4JJavaError, PySparkException) as error:
        raise LedgerError(f"{place} cannot be read: {_reason(error)}") from error
    if not found:
        missing = "has no .parquet, .csv or .csv.gz" if files.exists(place) else "is not there"
        raise LedgerError(f"{place} {missing}")
    return found


def _schema(spark: SparkSession, path: str) -> StructType:
    """Return a Parquet file's columns, or those that the first line of a CSV file names."""
    try:
        return _csv(spark).csv(path).schema if path.endswith(CSV) else spark.read.parquet(path).schema
    except (Py4JJavaError, PySparkException) as error:
        raise LedgerError(f"{_short(path)} cannot be read: {_reason(error)}") from error


def _csv(spark: SparkSession) -> DataFrameReader:
    """CSV as RFC 4180 has it, but one row a line. A line with too many or too few values is kept as MALFORMED."""
    return spark.read.options(
        header=True, quote='"', escape='"', mode="PERMISSIVE", columnNameOfCorruptRecord=MALFORMED, columnPruning=False
    )


def _from_jdbc(spark: SparkSession, spec: str, columns: Mapping[str, Wanted]) -> list[DataFrame]:
    """`jdbc:<url>#<table>` or `jdbc:<url>#<query>`: what has a blank in it is a query."""
    url, _, what = spec.partition("#")
    name = url.partition("?")[0]
    what = what.strip().rstrip(";")
    if not what:
        raise LedgerError(f"{name} lacks what to read: add #table or #select …")
    if {key.lower() for key, _ in parse_qsl(urlsplit(url.removeprefix("jdbc:")).query)} & {"password", "pwd"}:
        raise LedgerError(f"{name} has a password in it, which others on this machine can see: set {PASSWORD} instead")
    options = {"url": url, "query" if any(map(str.isspace, what)) else "dbtable": what, "fetchsize": "10000"}
    if driver := next((driver for prefix, driver in DRIVERS.items() if url.startswith(prefix)), None):
        options["driver"] = driver
    if PASSWORD in os.environ:
        options["password"] = os.environ[PASSWORD]
    try:
        frame = spark.read.format("jdbc").options(**options).load()
    except (Py4JJavaError, PySparkException) as error:
        raise _of_database(name, error) from error
    source = f"{name}#{what}"
    _check(source, frame.schema, columns)
    given = [F.lit(source).alias("source"), F.lit(None).cast("string").alias("line")]
    return [frame.select(*given, *_columns(frame.schema, columns))]


def _check(source: str, schema: StructType, columns: Mapping[str, Wanted]) -> None:
    """Raises LedgerError if a column is missing or of a type that none of its values could be read from."""
    found = _by_name(schema)
    for name, wanted in columns.items():
        if name not in found:
            if not wanted.optional:
                raise LedgerError(f"{source} has no column {name}; it has {', '.join(schema.names) or 'none'}")
        elif _type(found[name].dataType) not in (*wanted.types, "void"):
            is_of = found[name].dataType.simpleString()
            raise LedgerError(f"{source}: column {name} is {is_of}, and may be {' or '.join(wanted.types)}")


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
    """Names count without case, blanks around them, and the mark that some programs begin a text with."""
    return {field.name.strip("\ufeff \t").lower(): field for field in schema.fields}


def _type(of: DataType) -> str:
    """Return the name of a type, without a string's length."""
    return of.typeName().split("(")[0] if of.typeName() not in ("char", "varchar") else "string"


def _short(path: str) -> str:
    """A local file as people write it."""
    return "/" + path.removeprefix("file:").lstrip("/") if path.startswith("file:") else path


def _reason(error: Exception) -> str:
    """The first line of what Java says."""
    said = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else str(error)
    return _first_line(said or type(error).__name__)


def _of_database(name: str, error: Exception) -> Exception:
    """A database that has no such table is asked wrongly; one that does not answer fails the run."""
    cause = error.java_exception if isinstance(error, Py4JJavaError) else getattr(error, "_origin", None)
    while cause is not None:
        # Only a java.sql.SQLException has one. 08: no connection; 53 to 58: the server's own trouble.
        with suppress(Py4JError):
            state = cause.getSQLState() or ""
            told = RunFailedError if state[:2] in ("08", "53", "54", "55", "57", "58") else LedgerError
            return told(f"{name}: {_first_line(cause.getMessage())}")
        cause = cause.getCause()
    return LedgerError(f"{name}: {_reason(error)}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
