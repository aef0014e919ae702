"""Run Spark programs as child processes: check their requirements first, and pass signals on."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from app.cli.errors import WRONG_USAGE, Refusal
from app.lifecycle.signals import hangup_as_sigterm

NEEDED = ("pyspark", "psycopg", "pyarrow", "jinja2", "matplotlib")
OLDEST_JAVA = 17
GET_JAVA = (
    "Spark needs Java 17: on Debian and Ubuntu `apt install openjdk-17-jre-headless`, on macOS "
    "`brew install openjdk@17`, elsewhere from https://adoptium.net. Put it on the PATH, or name it by JAVA_HOME."
)
PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def refuse_without_spark() -> None:
    """Raise Refusal if PySpark or a package that it needs is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise Refusal(
            f"The nightly proof needs {', '.join(missing)}. Install it where this command runs: "
            "pip install 'halfnote-server[spark]'",
            code=WRONG_USAGE,
        )


def runs_elsewhere(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a Spark Connect server, whose address begins with `sc:`, runs the program's Java."""
    return bool(environment.get("SPARK_REMOTE")) or any(one.rpartition("=")[2].startswith("sc:") for one in arguments)


def refuse_without_java() -> None:
    """Raise Refusal unless there is a Java that Spark runs on."""
    home = os.environ.get("JAVA_HOME")
    # The same search as in Spark's own scripts.
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        raise Refusal(f"There is no `java` on the PATH. {GET_JAVA}", code=WRONG_USAGE)
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True).stderr  # noqa: S603 - as Spark does
    except OSError as error:
        raise Refusal(f"{java} cannot be run: {error.strerror}. {GET_JAVA}", code=WRONG_USAGE) from None
    # Versions up to 8 begin with `1.`.
    version = re.search(r'version "(?:1\.)?(\d+)', said)
    if version is None or int(version[1]) < OLDEST_JAVA:
        found = f"is Java {version[1]}" if version else "does not print its version"
        raise Refusal(f"{java} {found}. {GET_JAVA}", code=WRONG_USAGE)


def follow(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program to its end and pass signals on to it; return its exit status as a shell does (128 + signal).

    A closed terminal ends it by SIGTERM. Its child processes end with it: a program that ends while its Java starts
    would leave Java waiting forever.
    """
    early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        with hangup_as_sigterm():
            # In its own process group: otherwise a terminal's Ctrl-C reaches it twice.
            child = subprocess.Popen(command, env=environment, process_group=0 if os.name == "posix" else None)  # noqa: S603
            for number in early:
                child.send_signal(number)
            ended = child.wait()
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return ended if ended >= 0 else 128 - ended
