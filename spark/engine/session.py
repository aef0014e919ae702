"""The Spark session, the same for every engine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from py4j.java_gateway import java_import
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession, is_remote

from spark.engine import connect
from spark.engine.jdbc_driver import COORDINATE, LISTS, OPTION, NoJarError, configured_settings, jar_settings
from spark.engine.kept_steps import keep_in_files
from spark.engine.signals import PATIENCE_S, apart

# Set by spark-submit, whose JVM starts before this program.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
# The longest directory, in bytes, that leaves room for a socket's name of 42 (unix(7) has 108 for the whole).
_MOST_SOCKET_DIR = 64

# Of every JVM. The classes are Spark's own: checking each before its use takes a tenth of the processor time of a run
# over a whole day, and a fifth of that of a run over few rows.
_ALWAYS = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:-UsePerfData -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
# The faster compiler alone, for code that runs once. It would have 48 MB for its code, and stop when they are full. The
# space of classes begins at the size that a run needs.
_FIRST_COMPILER = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:MetaspaceSize=256m"
# A run ends within a minute and does not need short pauses. Compilation of short-lived code took half of it, so the
# highest tier starts later and compiles only long-running code.
JAVA_OPTIONS = (
    f"{_ALWAYS} -XX:+UseParallelGC -XX:Tier4InvocationThreshold=150000 -XX:Tier4MinInvocationThreshold=30000 "
    "-XX:Tier4CompileThreshold=300000 -XX:Tier4BackEdgeThreshold=2000000"
)
# A run that reads Postgres searches the rows in Python. Java plans more than it computes then, while the readers need
# the cores: with the first compiler alone it takes a fifth less processor time. A run over a million suspects takes as
# long as with both.
JAVA_OPTIONS_PLANNING = f"{_ALWAYS} {_FIRST_COMPILER} -XX:+UseParallelGC"
# Most code of a run over few rows runs once: starting Spark and planning. The heap begins at the size that it needs.
JAVA_OPTIONS_SMALL = f"{_ALWAYS} {_FIRST_COMPILER} -XX:+UseSerialGC -Xms768m -Xmn384m"
# PySpark uses these classes at almost every call, by their short names. Java searches all jars for the name in each of
# ten packages, unless it knows the package.
_OFTEN_USED = ("org.apache.spark.api.python.PythonUtils", "org.apache.spark.sql.api.python.PythonSQLUtils")
DEFAULTS = {
    # Times are UTC in every time zone of the machine.
    "spark.sql.session.timeZone": "UTC",
    # An overflow or a cast that fails is an error, never a null that looks like "nothing found".
    "spark.sql.ansi.enabled": "true",
    # Adaptive execution sizes the joins while they run; small days must not pay for 200 tasks.
    "spark.sql.shuffle.partitions": "16",
    "spark.sql.adaptive.enabled": "true",
    # Ids and verdicts are ASCII. The tables of ICU, which `lower` uses otherwise, take seconds to build.
    "spark.sql.icu.caseMappings.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    # By default, Spark passes rows to Python through a TCP port that accepts one caller. If another program connects to
    # this port at that moment, the run fails. A socket file, in java.io.tmpdir, prevents this.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.authenticate.socketTimeout": "2m",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    # By default, PySpark and Spark store with each expression the line of Python that made it, for the texts of errors.
    # That is eight calls of Java for each, and a large part of the CPU time of a small run.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    # The program reports failures with Java's cause; Java's log repeats them in a hundred lines.
    "spark.log.level": "FATAL",
}


def session(master: str | None = None, *, jdbc: bool = True, **conf: str) -> SparkSession:
    """Start or return the session. `master`: by default spark-submit's, else all cores of this machine.

    `jdbc`: whether a program on this machine alone reads with JDBC; otherwise it does not wait for Maven.

    `conf` overrides the settings of spark-submit and HALFNOTE_SPARK_CONF, which override the defaults here. An existing
    session keeps its settings, except those in `conf`. Raises NoJarError, and RunFailedError if a Connect server does
    not answer.
    """
    if server := connect.server(master):
        return connect.session(server, DEFAULTS | configured_settings(fetch=False) | conf)
    given = _submitted()
    jar = _jar(given) if _SUBMITTED in os.environ else configured(master, jdbc=jdbc)
    chosen = {name: value for name, value in (DEFAULTS | jar).items() if name not in given} | conf
    if master is not None or "spark.master" not in given | chosen:
        chosen["spark.master"] = master or "local[*]"
    if SparkContext._active_spark_context is not None:
        chosen = conf
    builder = SparkSession.builder.appName("halfnote")
    for name, value in chosen.items():
        builder = builder.config(name, value)
    with _java_ended_with_us():
        made = builder.getOrCreate()
    for name in _OFTEN_USED:
        java_import(made._jvm, name)
    if _SUBMITTED in os.environ and jar:
        _load(made, jar["spark.jars"])
    return made


@contextmanager
def running(
    place: Path, master: str | None = None, *, jdbc: bool = True, java: str = JAVA_OPTIONS
) -> Iterator[SparkSession]:
    """Yield a session whose files are all below `place`, and stop it at the end. An existing session is yielded
    unchanged and stays open. `jdbc`: as in `session`; `java`: the driver's options. Raises NoJarError.
    """
    before = SparkSession.getActiveSession()
    if before is not None:
        yield before
        return
    temporary = place / "java"
    temporary.mkdir()
    here = {
        "spark.local.dir": str(place / "local"),
        "spark.driver.extraJavaOptions": f"{java} -Djava.io.tmpdir={temporary}",
        "spark.python.unix.domain.socket.enabled": str(len(os.fsencode(temporary)) <= _MOST_SOCKET_DIR).lower(),
    }
    with _java_ended_with_us():
        made = session(master, jdbc=jdbc, **here)
        if not is_local(made):
            keep_in_files(made, str(place / "steps"))
        try:
            yield made
        finally:
            apart(made.stop)


def is_local(spark: SparkSession) -> bool:
    """Return whether Spark runs in this machine's JVM alone, so that this process and Spark have the same files."""
    return not is_remote() and _master(spark).startswith("local")


def engine_of(spark: SparkSession, master: str | None) -> str:
    """Return where Spark runs: its master, or the address of the Connect server. `master`: as in `session`."""
    server = connect.server(master) if is_remote() else None
    return _master(spark) if server is None else connect.public(server)


def cores(spark: SparkSession) -> int:
    """Return how many threads of this process may work at once: as many as Spark's on this machine."""
    # Only a classic session has a SparkContext. Java knows the limits of a container.
    return spark.sparkContext.defaultParallelism if is_local(spark) else os.cpu_count() or 1


def _master(spark: SparkSession) -> str:
    return str(spark.conf.get("spark.master"))


@contextmanager
def _java_ended_with_us() -> Iterator[None]:
    """If a signal ends the program within the block, end the JVM that was started in it, even while the JVM starts.

    Otherwise the JVM ends later and leaves files in the directory of the run. A JVM that is still starting would never
    end: PySpark has removed the directory in which it writes its port, and it fails without ending.
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
    """Return spark-submit's settings; none if Python started first."""
    if _SUBMITTED not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def configured(master: str | None, *, jdbc: bool) -> dict[str, str]:
    """Return the operator's settings with the driver, unless it would have to be fetched and is not needed."""
    settings = configured_settings(fetch=False)
    local = (master or settings.get("spark.master", "local")).startswith("local")
    return configured_settings(fetch=jdbc or not local)


def _jar(given: dict[str, str]) -> dict[str, str]:
    """Return the setting of the driver's jar, if spark-submit did not get one.

    A command with jars must also name the driver, because its JVM already runs and fetches no jars from Maven.
    """
    if given.keys() & LISTS:
        return {}
    settings = jar_settings()
    if "spark.jars" not in settings:
        raise NoJarError(f"spark-submit needs Postgres's driver: add --packages {COORDINATE}, or set {OPTION}.")
    return settings


def _load(made: SparkSession, jar: str) -> None:
    """Add a jar to the driver's class path: once the JVM runs, spark.jars only reaches executors."""
    jvm: Any = made._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    loader.addURL(jvm.java.io.File(jar).toURI().toURL())
