"""A session of Spark Connect: Spark runs behind a server, and this process needs no Java."""

import os
from collections.abc import Mapping

from pyspark.errors import PySparkException, PySparkImportError
from pyspark.sql import SparkSession

from spark.errors import RunFailedError

REMOTE = "SPARK_REMOTE"
SCHEME = "sc://"
INSTALL = "pip install 'halfnote-server[spark-connect]'"


def server(master: str | None) -> str | None:
    """Return the address of the Connect server, `sc://host:port`, that `--master` or SPARK_REMOTE names; else None.

    Raises RunFailedError if they contradict each other.
    """
    remote = os.environ.get(REMOTE) or None
    if remote is not None and (master not in (None, remote) or not remote.startswith(SCHEME)):
        raise RunFailedError(
            f"{REMOTE} is {public(remote)}. It must be the address of a Connect server, such as sc://host:15002, and "
            "excludes another --master: unset it, or leave --master out."
        )
    chosen = remote or master or ""
    return chosen if chosen.startswith(SCHEME) else None


def session(server: str, settings: Mapping[str, str]) -> SparkSession:
    """Return the session of a server, which is started if there is none, with those `settings` that a session has.

    The server's operator chooses memory, jars and the like when the server starts. Raises RunFailedError.
    """
    try:
        made = SparkSession.builder.remote(server).getOrCreate()
        for name, value in settings.items():
            if name.startswith("spark.sql.") and made.conf.isModifiable(name):
                made.conf.set(name, value)
    except PySparkImportError as error:
        raise RunFailedError(f"Spark Connect needs more packages: {INSTALL}. {error}") from error
    except PySparkException as error:
        raise RunFailedError(f"The Spark Connect server {public(server)} does not answer: {error}") from error
    return made


def public(server: str) -> str:
    """Return an address without its parameters, which may have a token."""
    return server.partition("/;")[0].rstrip("/")
