"""The Spark session that all tests of the proof share, and small frames in its schemas.

One process runs all tests here and has the one session; see tests/support/xdist_scheduling.py.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from spark.engine.session import session
from tests.spark import archives
from tests.spark import proved_twice as twice

# Code that runs once is not worth the better compiler's time; also that of processes which tests start.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")

# A heap that never grows, one collector thread, no check of Spark's own bytecode: a third less CPU than the defaults.
# The first compiler alone would have 48 MB for its code, which a few tests fill; after that nothing is compiled.
JAVA_OPTIONS = (
    "-XX:+UseSerialGC -Xms1g -Xmn500m -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:-UsePerfData "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
SMALL = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "2",
    # Small frames gain nothing from generated code, and each plan's takes a tenth of a second to compile.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.subexpressionElimination.enabled": "false",
    # Plans are small already; planning again at each stage costs more than it saves.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.optimizer.runtime.bloomFilter.enabled": "false",
    "spark.sql.optimizer.dynamicPartitionPruning.enabled": "false",
    # Spark writes each query's plan as text for listeners, and there are no listeners.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "1000",
    # What listeners keep of finished queries fills the small heap.
    "spark.sql.ui.retainedExecutions": "10",
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
}
# How a run of a large day is planned.
LARGE = {"spark.sql.adaptive.enabled": "true", "spark.sql.shuffle.partitions": "2"}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The run's one Spark session: two threads, 1 GB."""
    place = tmp_path_factory.mktemp("spark")
    made = session("local[2]", **SMALL, **{"spark.local.dir": str(place), "spark.sql.warehouse.dir": str(place)})
    yield made
    made.stop()


@pytest.fixture
def adaptive(spark: SparkSession) -> Iterator[SparkSession]:
    """The session, which plans as it does for a large day while the test runs."""
    before = {name: spark.conf.get(name) for name in LARGE}
    for name, value in LARGE.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in before.items():
        assert value is not None
        spark.conf.set(name, value)


@pytest.fixture(scope="session")
def settled_day_made() -> Iterator[archives.MadeDay]:
    """The settled day of tests/spark/archives.py, made once; tests work on copies."""
    with archives.made_settled() as made:
        yield made


@pytest.fixture(scope="session")
def archived_day_made(
    spark: SparkSession, settled_day_made: archives.MadeDay, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[archives.MadeDay]:
    """That day, archived once; tests work on copies."""
    with archives.made_archived(settled_day_made, tmp_path_factory.mktemp("made") / "the archive") as made:
        yield made


@pytest.fixture(scope="session")
def proved_twice(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[twice.ProvedTwice]:
    """The day of tests/spark/proved_twice.py, proved once; tests change nothing of it."""
    with twice.proved_twice(tmp_path_factory.mktemp("twice")) as made:
        yield made


def frame(spark: SparkSession, schema: StructType, rows: Sequence[Mapping[str, Any]] = ()) -> DataFrame:
    """Return a frame of `schema`; a column that a row leaves out is null."""
    return spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in rows], schema)


def write_frame(spark: SparkSession, schema: StructType, rows: Sequence[Mapping[str, Any]], directory: Path) -> None:
    """Write rows as the one Parquet file of `directory`."""
    frame(spark, schema, rows).coalesce(1).write.mode("overwrite").parquet(str(directory))
