"""Where Postgres's JDBC driver comes from, and what else Spark is told by whoever runs it."""

import os
from collections.abc import Mapping
from pathlib import Path

from spark.errors import RunFailedError

VERSION = "42.7.7"
COORDINATE = f"org.postgresql:postgresql:{VERSION}"
OPTION = "HALFNOTE_JDBC_JAR"
SETTINGS = "HALFNOTE_SPARK_CONF"
# What brings jars, names separated by commas.
LISTS = ("spark.jars", "spark.jars.packages")


class NoJarError(RunFailedError):
    """The jar that was named is not there, or a setting cannot be read; the text says what to do."""


def kept_jar() -> Path:
    """Return where a jar is looked for when none is named; it need not be there."""
    return Path.home() / ".cache" / "halfnote" / "spark-jars" / f"postgresql-{VERSION}.jar"


def jar_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the Spark settings that bring the driver: the jar that is named, else the one in the cache, else Maven's.

    Raises NoJarError if HALFNOTE_JDBC_JAR names a file that is not there.
    """
    named = environment.get(OPTION)
    if named:
        if not Path(named).is_file():
            raise NoJarError(f"{OPTION} names {named}, which is no file. Put {COORDINATE} there, or unset it.")
        return {"spark.jars": str(Path(named).resolve())}
    if kept_jar().is_file():
        return {"spark.jars": str(kept_jar())}
    return {"spark.jars.packages": COORDINATE}


def told_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what HALFNOTE_SPARK_CONF says, one `name=value` a line, with the driver among its jars.

    Raises NoJarError if a line is no such thing.
    """
    told: dict[str, str] = {}
    for line in filter(None, map(str.strip, environment.get(SETTINGS, "").splitlines())):
        name, is_there, value = (part.strip() for part in line.partition("="))
        if not name.startswith("spark.") or not is_there:
            raise NoJarError(f"{SETTINGS} has the line {line!r}. Each has to be spark.…=value.")
        told[name] = value
    driver = jar_settings(environment)
    return told | {name: ",".join(filter(None, (jar, told.get(name)))) for name, jar in driver.items()}
