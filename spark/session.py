"""The Spark session, the same for every engine."""

import os

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from spark.jar import jar_settings

# Set by spark-submit, whose JVM is there before this program.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"

DEFAULTS = {
    # Times are UTC whatever the machine's zone.
    "spark.sql.session.timeZone": "UTC",
    # An overflow or a cast that fails is an error, never a null that looks like "nothing found".
    "spark.sql.ansi.enabled": "true",
    # Joins of a day are cut to size while they run; small days must not pay for 200 tasks.
    "spark.sql.shuffle.partitions": "16",
    "spark.sql.adaptive.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
}


def session(master: str | None = None, **conf: str) -> SparkSession:
    """Start or return the session. `master`: by default spark-submit's, else all cores of this machine.

    `conf` comes before what spark-submit was told, that before the defaults here. Raises NoJarError.
    """
    given = _submitted()
    chosen = {name: value for name, value in (DEFAULTS | _jar(given)).items() if name not in given} | conf
    if master is not None or "spark.master" not in given:
        chosen["spark.master"] = master or "local[*]"
    builder = SparkSession.builder.appName("halfnote")
    for name, value in chosen.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _submitted() -> dict[str, str]:
    """What spark-submit was told; nothing if Python started first."""
    if _SUBMITTED not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _jar(given: dict[str, str]) -> dict[str, str]:
    """Whoever names jars names the driver among them."""
    return {} if {"spark.jars", "spark.jars.packages"} & given.keys() else jar_settings()
