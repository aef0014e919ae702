"""Runs the plans of few rows as they are planned: without compilation and adaptive execution."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

# Compilation and adaptive execution of plans take a hundred times longer than to run them over a few rows in one
# partition.
AS_THEY_ARE = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
}


@contextmanager
def as_they_are(spark: SparkSession, *, if_: bool) -> Iterator[None]:
    """Run the plans of the block without adaptive execution, unless `if_` is false."""
    before = {name: str(spark.conf.get(name)) for name in AS_THEY_ARE} if if_ else {}
    for name in before:
        spark.conf.set(name, AS_THEY_ARE[name])
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
