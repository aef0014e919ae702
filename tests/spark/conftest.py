"""The Spark session that all tests of the proof share, and small frames in its schemas.

One process runs all tests here and has the one session; see tests/scheduling.py.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from spark.session import session

# Code that runs once is not worth the better compiler's time; also that of processes which tests start.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")

SMALL = {
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    # Small frames gain nothing from generated code, and each plan's takes a tenth of a second to compile.
    "spark.sql.codegen.wholeStage": "false",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The run's one Spark session: two threads, 1 GB."""
    place = tmp_path_factory.mktemp("spark")
    made = session("local[2]", **SMALL, **{"spark.local.dir": str(place), "spark.sql.warehouse.dir": str(place)})
    yield made
    made.stop()


def frame(spark: SparkSession, schema: StructType, rows: Sequence[Mapping[str, Any]] = ()) -> DataFrame:
    """Return a frame of `schema`; what a row leaves out is null."""
    return spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in rows], schema)


def write_frame(spark: SparkSession, schema: StructType, rows: Sequence[Mapping[str, Any]], directory: Path) -> None:
    """Write rows as the one Parquet file of `directory`."""
    frame(spark, schema, rows).coalesce(1).write.mode("overwrite").parquet(str(directory))
