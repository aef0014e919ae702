"""The options of archive, restore and redact, with the service's environment variables as defaults."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import TypeVar

from spark.errors import RunFailedError

T = TypeVar("T")

DATABASE_URL = "HALFNOTE_DATABASE_URL"
ARCHIVE = "HALFNOTE_ARCHIVE"
BODIES = "HALFNOTE_ARCHIVE_BODIES"
KEEP_S = "HALFNOTE_ARCHIVE_KEEP_S"
# The service's setting has the same limits: a test compares them.
LEAST_KEEP_S, MOST_KEEP_S = 86_400, 36_500 * 86_400
YES = {"true", "1", "yes", "on", "t", "y"}
NO = {"false", "0", "no", "off", "f", "n"}


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all three have."""
    made = argparse.ArgumentParser(prog=program, description=description)
    made.add_argument("--database-url", metavar="URL", help=f"the primary; default: {DATABASE_URL}")
    made.add_argument("--master", help="where Spark runs; default: spark-submit's, else local[*]")
    return made


def parsed(
    made: argparse.ArgumentParser, argv: Sequence[str] | None, environment: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """Return the options, with the environment's values as defaults; ends the program on wrong usage.

    Adds `url`, the database's.
    """
    given = made.parse_args(argv)
    given.url = given.database_url or given_address(environment) or ""
    if not given.url:
        made.error(f"the database is missing: give --database-url, or set {DATABASE_URL}")
    return given


def given_address(environment: Mapping[str, str]) -> str | None:
    """Return where the environment says that the database is: a URL, or `file:` and the path of a file with one."""
    file = environment.get(f"{DATABASE_URL}_FILE")
    return environment.get(DATABASE_URL) or (f"file:{os.path.abspath(file)}" if file else None)


def from_environment(name: str, of: Callable[[str], T], environment: Mapping[str, str] = os.environ) -> T | None:
    """Return a variable's value, None if it is not set or empty. Raises RunFailedError if it cannot be read."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    try:
        return of(text)
    except ValueError:
        raise RunFailedError(f"{name} has the invalid value {text!r}.") from None


def yes_or_no(text: str) -> bool:
    """Parse a boolean as the service's variables do. Raises ValueError."""
    if text.lower() not in YES | NO:
        raise ValueError(text)
    return text.lower() in YES


def keep_s(text: str) -> int:
    """Parse how long something is kept, as the service's setting: a day to 100 years. Raises ValueError."""
    seconds = int(text)
    if not LEAST_KEEP_S <= seconds <= MOST_KEEP_S:
        raise ValueError(text)
    return seconds


def given_keep_s(text: str) -> int:
    """Parse the same of a command line. Raises argparse.ArgumentTypeError."""
    try:
        return keep_s(text)
    except ValueError:
        said = f"{text!r} is not a number of seconds, {LEAST_KEEP_S} to {MOST_KEEP_S}"
        raise argparse.ArgumentTypeError(said) from None


def day(text: str) -> date:
    """Return the day of YYYY-MM-DD. Raises argparse.ArgumentTypeError."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a day like 2026-11-21") from None
