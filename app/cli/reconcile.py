"""`halfnote reconcile`: run the nightly proof in a Spark process of its own."""

import asyncio
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from textwrap import fill
from typing import NoReturn

import typer

from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.leaving import leaving
from app.cli.serve import settings_with
from app.cli.spark_program import follow, refuse_without_java, refuse_without_spark, runs_elsewhere
from app.config import Settings

# The program parses all options itself, --help included.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
HELP = {"-h", "--help"}
DATABASE_URL = "--database-url"
PYTHON = (sys.executable, "-P", "-m")
# A run over Parquet needs no database.
FROM_PARQUET = "--from-parquet"
# The shortest abbreviation of each that argparse accepts.
LEAST = {DATABASE_URL: "--dat", FROM_PARQUET: "--f"}
# Only the proof takes several databases; the program has the same name for them.
DATABASE_URLS = "HALFNOTE_DATABASE_URLS"
NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*=(postgres|file:)")


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("reconcile", context_settings=PASSED_ON)(reconcile)


def reconcile(context: typer.Context) -> None:
    """Prove that halves, verdicts, outbox and deliveries agree, or report findings. Needs PySpark and Java 17.

    Exit codes: 0 proved, 1 the run failed, 2 wrong usage, 3 findings. `halfnote reconcile --help` lists the options.
    """
    run("reconcile", context.args, several=True)


def run(program: str, arguments: Sequence[str], *, several: bool = False) -> None:
    """Run a Spark program over the service's database and exit with its status. Raises Refusal.

    `several`: the program takes several databases, and refuses by itself those that it cannot use.
    """
    if any(argument in HELP for argument in arguments):
        describe(program, arguments)
    refuse_without_spark()
    if not runs_elsewhere(arguments, os.environ):
        refuse_without_java()
    command = [*PYTHON, f"spark.jobs.{program}"]
    if any(_names(argument, FROM_PARQUET) for argument in arguments):
        raise SystemExit(follow([*command, *arguments], os.environ))
    urls, rest = _without_urls(arguments)
    if several and (len(urls) > 1 or any(map(NAMED.match, urls)) or (not urls and os.environ.get(DATABASE_URLS))):
        environment = {**os.environ, **({DATABASE_URLS: "\n".join(urls)} if urls else {})}
        raise SystemExit(follow([*command, *rest], environment))
    if urls:
        os.environ.pop("HALFNOTE_DATABASE_URL_FILE", None)
        os.environ.pop(DATABASE_URLS, None)
    settings = settings_with(database_url=urls[-1] if urls else None)
    with leaving(), database_of(settings) as url:
        # In the environment: every user of the machine can read a program's arguments.
        ended = follow([*command, *rest], {**os.environ, "HALFNOTE_DATABASE_URL": url})
    raise SystemExit(ended)


def describe(program: str, arguments: Sequence[str]) -> NoReturn:
    """Print the program's options, which needs no PySpark, and what must be installed before the program can run."""
    status = follow([*PYTHON, "spark.options", program, *arguments], os.environ)
    try:
        refuse_without_spark()
    except Refusal as refusal:
        print(f"\n{fill(str(refusal), 80, break_on_hyphens=False)}", file=sys.stderr)
    raise SystemExit(status)


def _names(argument: str, option: str) -> bool:
    """Return whether an argument is the option, or an abbreviation that argparse accepts."""
    name = argument.partition("=")[0]
    return name.startswith(LEAST[option]) and option.startswith(name)


def _without_urls(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the databases' URLs that options give, and the other arguments. Raises Refusal."""
    urls: list[str] = []
    rest: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument == "--":
            return urls, [*rest, argument, *left]
        if not _names(argument, DATABASE_URL):
            rest.append(argument)
            continue
        _, given, url = argument.partition("=")
        if not given and not left:
            raise Refusal(f"{DATABASE_URL} needs a value.", code=WRONG_USAGE)
        urls.append(url if given else left.pop(0))
    return urls, rest


@contextmanager
def database_of(settings: Settings) -> Iterator[str]:
    """Yield the URL of the database, at this version's schema; start the embedded one unless a service runs it.

    Raises Refusal.
    """
    # Imported here: these modules take long to import, and other commands do not need them.
    from app.cli.refusals import refusals
    from app.database.connection import refuse_unusable
    from app.embedded_postgres.attach import borrowed
    from app.lifecycle.database import refuse_behind
    from app.observability.logs import set_up_logs

    async def refuse(url: str) -> None:
        await refuse_unusable(url)
        await refuse_behind(url)

    set_up_logs()
    with ExitStack() as stack:
        with refusals():
            url = settings.database_url or stack.enter_context(borrowed(settings.data_dir))
            asyncio.run(refuse(url))
        yield url
