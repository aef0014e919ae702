"""`halfnote reconcile`: the nightly proof, as cron calls it. Spark runs it in a process of its own."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

import typer

from app.cli.refusal import Refusal
from app.cli.serve import WRONG_USAGE, settings_with
from app.cli.spark_program import follow, refuse_without_java, refuse_without_spark
from app.config import Settings

# All options are the program's own, --help among them.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
HELP = {"-h", "--help"}
DATABASE_URL = "--database-url"
# Over Parquet no database is asked.
FROM_PARQUET = "--from-parquet"
# As much of each as argparse needs to know it from the others.
LEAST = {DATABASE_URL: "--dat", FROM_PARQUET: "--f"}


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("reconcile", context_settings=PASSED_ON)(reconcile)


def reconcile(context: typer.Context) -> None:
    """Prove that halves, verdicts, outbox and deliveries agree, or say where they don't; needs PySpark and Java 17.

    Ends with 0: proved; 3: findings; 1: the run failed; 2: wrong usage. `halfnote reconcile --help` has the options.
    """
    run("spark.jobs.reconcile", context.args)


def run(module: str, arguments: Sequence[str]) -> None:
    """Run a program of the proof over the service's database and end with its exit status. Raises Refusal."""
    refuse_without_spark()
    refuse_without_java()
    program = [sys.executable, "-P", "-m", module]
    if any(argument in HELP or _names(argument, FROM_PARQUET) for argument in arguments):
        raise SystemExit(follow([*program, *arguments], os.environ))
    url, rest = _without_url(arguments)
    settings = settings_with(database_url=url)
    with _leaving(), database_of(settings) as url:
        # By the environment: everyone can read a program's arguments.
        ended = follow([*program, *rest], {**os.environ, "HALFNOTE_DATABASE_URL": url})
    raise SystemExit(ended)


def _names(argument: str, option: str) -> bool:
    """Tell whether an argument is an option, or as much of its name as argparse takes for it."""
    name = argument.partition("=")[0]
    return name.startswith(LEAST[option]) and option.startswith(name)


def _without_url(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the database's URL, if it was given as an option, and the other arguments. Raises Refusal."""
    for index, argument in enumerate(arguments):
        if _names(argument, DATABASE_URL):
            _, given, url = argument.partition("=")
            after = index + 1 if given else index + 2
            if after > len(arguments):
                raise Refusal(f"{DATABASE_URL} needs a value.", code=WRONG_USAGE)
            return url if given else arguments[index + 1], [*arguments[:index], *arguments[after:]]
    return None, list(arguments)


@contextmanager
def database_of(settings: Settings) -> Iterator[str]:
    """Yield where the database is, at this version's schema; the embedded one is started if no service runs it.

    Raises Refusal.
    """
    # Only here: what they need takes long to import, and other commands don't need it.
    from app.cli.service import refusals
    from app.database import refuse_unusable
    from app.embedded.running import borrowed
    from app.start import refuse_behind
    from app.telemetry import set_up_logs

    async def refuse(url: str) -> None:
        await refuse_unusable(url)
        await refuse_behind(url)

    set_up_logs()
    with ExitStack() as stack:
        with refusals():
            url = settings.database_url or stack.enter_context(borrowed(settings.data_dir))
            asyncio.run(refuse(url))
        yield url


@contextmanager
def _leaving() -> Iterator[None]:
    """End on SIGTERM and Ctrl-C in order: what is on the way out stops a server that was started here."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
