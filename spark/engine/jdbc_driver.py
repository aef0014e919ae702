"""Find Postgres's JDBC driver, and read the Spark settings of the operator."""

import os
from collections.abc import Mapping
from pathlib import Path

from spark.errors import RunFailedError

VERSION = "42.7.7"
COORDINATE = f"org.postgresql:postgresql:{VERSION}"
OPTION = "HALFNOTE_JDBC_JAR"
SETTINGS = "HALFNOTE_SPARK_CONF"
# Settings that bring jars, as names separated by commas.
LISTS = ("spark.jars", "spark.jars.packages")


class NoJarError(RunFailedError):
    """The named jar does not exist, or a setting cannot be read; the text says what to do."""


def kept_jar() -> Path:
    """Return the path of the default jar; the file may be missing."""
    return Path.home() / ".cache" / "halfnote" / "spark-jars" / f"postgresql-{VERSION}.jar"


def jar_settings(environment: Mapping[str, str] = os.environ, *, fetch: bool = True) -> dict[str, str]:
    """Return the Spark settings for the driver: the named jar, else the jar in the cache, else the one from Maven.

    Without `fetch` there are none for the one from Maven.

    Raises NoJarError if HALFNOTE_JDBC_JAR names a file that does not exist.
    """
    named = environment.get(OPTION)
    if named:
        if not Path(named).is_file():
            raise NoJarError(f"{OPTION} names {named}, which is not a file. Put {COORDINATE} there, or unset it.")
        return {"spark.jars": str(Path(named).resolve())}
    if kept_jar().is_file():
        return {"spark.jars": str(kept_jar())}
    return {"spark.jars.packages": COORDINATE} if fetch else {}


def configured_settings(environment: Mapping[str, str] = os.environ, *, fetch: bool = True) -> dict[str, str]:
    """Return the settings of HALFNOTE_SPARK_CONF, one `name=value` per line, with the driver among its jars.

    Without `fetch` the driver is left out if it would come from Maven.

    Raises NoJarError if a line has another form.
    """
    settings: dict[str, str] = {}
    for line in filter(None, map(str.strip, environment.get(SETTINGS, "").splitlines())):
        name, is_there, value = (part.strip() for part in line.partition("="))
        if not name.startswith("spark.") or not is_there:
            raise NoJarError(f"{SETTINGS} has the line {line!r}. Each line must be spark.…=value.")
        settings[name] = value
    driver = jar_settings(environment, fetch=fetch)
    return settings | {name: ",".join(filter(None, (jar, settings.get(name)))) for name, jar in driver.items()}
