"""The installations that one run proves: each has a name and a database of its own."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

# A URL may contain `=`, so a name is recognized by what follows it. `file:` and a path name a file with a URL.
NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})=(?P<value>(?:postgres(?:ql)?(?:\+asyncpg)?:|file:).+)")


# What --out has beside the directories of the installations.
TAKEN = {"report.html", "set-aside"}


class NamesError(ValueError):
    """The names of installations are wrong; the text says which and how to name them."""


@dataclass(frozen=True, slots=True)
class Installation:
    """An installation. `name`: empty for the only one, unless it was given. `read_url`: its standby, if any."""

    name: str
    database_url: str
    read_url: str | None = None
    base_url: str | None = None

    @property
    def source(self) -> str:
        """The URL to read from."""
        return self.read_url or self.database_url


def installations(
    database_urls: Sequence[str], read_urls: Sequence[str] = (), base_urls: Sequence[tuple[str, str]] = ()
) -> list[Installation]:
    """Return the installations of `URL` or `NAME=URL`; without a name, the database's own is the name.

    `base_urls`: by name; the name is empty if there is one installation. Raises NamesError.
    """
    only = len(database_urls) == 1
    databases = [_named(text, only) for text in database_urls]
    if taken := next((name for name, _ in databases if name in TAKEN), None):
        raise NamesError(f"{taken} is a name of --out itself: name that database otherwise, --database-url NAME=URL")
    wrong = sorted(name for name, count in Counter(name for name, _ in databases).items() if count > 1)
    if wrong:
        raise NamesError(f"two databases have the name {wrong[0]}: name them, --database-url NAME=URL")
    read = _by_name("--read-url", [_named(text, only) for text in read_urls], databases)
    base = _by_name("--base-url", base_urls, databases)
    return [Installation(name, url, read.get(name), base.get(name)) for name, url in databases]


def named(text: str) -> tuple[str | None, str]:
    """Return the name and the URL of `NAME=URL`, or None and `text`."""
    match = NAMED.fullmatch(text)
    return (match["name"], match["value"]) if match else (None, text)


def is_several(database_urls: Sequence[str]) -> bool:
    """Return whether these are URLs for `--database-url` of this program only: several, or one with a name."""
    return len(database_urls) > 1 or any(named(text)[0] is not None for text in database_urls)


def _named(text: str, only: bool) -> tuple[str, str]:
    name, url = named(text)
    if name is not None or only:
        return name or "", url
    made = _of_database(url)
    if not made:
        raise NamesError("a database among several needs a name: --database-url NAME=URL")
    return made, url


def _of_database(url: str) -> str:
    try:
        name = unquote(urlsplit(url).path).lstrip("/")
    except ValueError:
        return ""
    # A name is also a directory of --out.
    return name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) and not url.startswith("file:") else ""


def _by_name(option: str, given: Sequence[tuple[str, str]], databases: Sequence[tuple[str, Any]]) -> dict[str, str]:
    names = {name for name, _ in databases}
    if len(names) == 1 and len(given) == 1 and not given[0][0]:
        return dict.fromkeys(names, given[0][1])
    counts = Counter(name for name, _ in given)
    for name, count in counts.items():
        if name not in names or count > 1:
            raise NamesError(f"{option} needs one NAME=URL for each of {', '.join(sorted(names)) or 'the databases'}")
    return dict(given)
