"""Where Postgres's JDBC driver comes from."""

import os
from collections.abc import Mapping
from pathlib import Path

VERSION = "42.7.7"
COORDINATE = f"org.postgresql:postgresql:{VERSION}"
OPTION = "HALFNOTE_JDBC_JAR"


class NoJarError(Exception):
    """The jar that was named is not there; the text says what to do."""


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
