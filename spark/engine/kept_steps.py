"""Computes a step of a run and returns its rows without its plan."""

import secrets

from pyspark.sql import DataFrame, SparkSession

# The session's setting for the directory of `keep_in_files`.
DIRECTORY = "spark.halfnote.steps"


def keep_in_files(spark: SparkSession, directory: str) -> None:
    """Keep the steps of this session in files below `directory`, which every executor reaches.

    By default their rows are in the memory and on the disks of the executors: faster, and lost with an executor. Where
    Spark runs on one machine, its executor is lost only with the run.
    """
    spark.conf.set(DIRECTORY, directory)


def kept(frame: DataFrame) -> DataFrame:
    """Compute a frame and return its rows. They stay until the run ends, or, without files, as long as the frame."""
    directory = frame.sparkSession.conf.get(DIRECTORY, "")
    if not directory:
        return frame.localCheckpoint(eager=True)
    place = f"{directory}/{secrets.token_hex(8)}"
    frame.write.parquet(place)
    return frame.sparkSession.read.schema(frame.schema).parquet(place)
