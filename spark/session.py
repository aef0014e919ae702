"""The Spark session, the same for every engine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from spark.interrupts import PATIENCE_S, apart
from spark.jar import COORDINATE, LISTS, OPTION, NoJarError, jar_settings, told_settings

# Set by spark-submit, whose JVM is there before this program.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
# The longest directory, in bytes, that leaves room for a socket's name of 42 (unix(7) has 108 for the whole).
_MOST_SOCKET_DIR = 64

# A run is over in a minute, and has no use for pauses that are short. Half of it was compilers at work on what ran for
# a second: the highest tier begins later, which leaves it what is worth it.
JAVA_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UseParallelGC -XX:Tier4InvocationThreshold=150000 "
    "-XX:Tier4MinInvocationThreshold=30000 -XX:Tier4CompileThreshold=300000 -XX:Tier4BackEdgeThreshold=2000000"
)
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
    # Spark hands rows to Python at a port that takes one caller: any other program that tries this port just then (its
    # own server had it before, say) makes the run fail. A socket file has no strangers; java.io.tmpdir has it.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.authenticate.socketTimeout": "2m",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    # What fails is said by the program, with the cause that Java gives; its log says the same on a hundred lines.
    "spark.log.level": "FATAL",
}


def session(master: str | None = None, **conf: str) -> SparkSession:
    """Start or return the session. `master`: by default spark-submit's, else all cores of this machine.

    `conf` comes before what spark-submit or HALFNOTE_SPARK_CONF was told, that before the defaults here. Raises
    NoJarError.
    """
    given = _submitted()
    jar = _jar(given) if _SUBMITTED in os.environ else told_settings()
    chosen = {name: value for name, value in (DEFAULTS | jar).items() if name not in given} | conf
    if master is not None or "spark.master" not in given | chosen:
        chosen["spark.master"] = master or "local[*]"
    builder = SparkSession.builder.appName("halfnote")
    for name, value in chosen.items():
        builder = builder.config(name, value)
    with _java_ended_with_us():
        made = builder.getOrCreate()
    if _SUBMITTED in os.environ and jar:
        _load(made, jar["spark.jars"])
    return made


@contextmanager
def running(place: Path, master: str | None = None) -> Iterator[SparkSession]:
    """Lend a session whose files are all below `place`, and stop it at the end; one that was there before is lent as it
    is, and goes on. Raises NoJarError.
    """
    before = SparkSession.getActiveSession()
    if before is not None:
        yield before
        return
    java = place / "java"
    java.mkdir()
    here = {
        "spark.local.dir": str(place / "local"),
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} -Djava.io.tmpdir={java}",
        "spark.python.unix.domain.socket.enabled": str(len(os.fsencode(java)) <= _MOST_SOCKET_DIR).lower(),
    }
    with _java_ended_with_us():
        made = session(master, **here)
        try:
            yield made
        finally:
            apart(made.stop)


@contextmanager
def _java_ended_with_us() -> Iterator[None]:
    """If somebody ends the program within the block, end the JVM that was started in it, be it still starting.

    By itself it ends later, and leaves files where the run's were. One that is still starting stays for ever: PySpark
    has removed the directory where it would leave its port, and it fails without ending.
    """
    before = set(psutil.Process().children())
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        started = [child for child in psutil.Process().children() if child not in before]
        with suppress(psutil.NoSuchProcess):
            started += [one for child in started for one in child.children(recursive=True)]
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(started, PATIENCE_S)
        raise


def _submitted() -> dict[str, str]:
    """What spark-submit was told; nothing if Python started first."""
    if _SUBMITTED not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _jar(given: dict[str, str]) -> dict[str, str]:
    """What spark-submit was not told: whoever names jars to it names the driver among them; and its JVM, which runs
    already, fetches none from Maven."""
    if given.keys() & LISTS:
        return {}
    settings = jar_settings()
    if "spark.jars" not in settings:
        raise NoJarError(f"spark-submit needs Postgres's driver: add --packages {COORDINATE}, or set {OPTION}.")
    return settings


def _load(made: SparkSession, jar: str) -> None:
    """Bring a jar to where the driver looks for classes: once the JVM runs, spark.jars brings it to executors only."""
    jvm: Any = made._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    loader.addURL(jvm.java.io.File(jar).toURI().toURL())
