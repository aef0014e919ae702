"""Where the database is: a URL, or a file that contains one and is read at each connect (`file:/path`)."""

import re
from pathlib import Path
from urllib.parse import urlsplit

FILE = "file:"
# The last one is SQLAlchemy's form of the same URL.
SCHEMES = ("postgresql", "postgres", "postgresql+asyncpg")
SETTING = "HALFNOTE_DATABASE_URL_FILE"
FORM = "postgresql://user:password@host:5432/halfnote (percent-encode special characters of the password)"
# One host or several, each with a port or without.
_HOST = r"(?:\[[^\]]*\]|[^:,\[\]]*)(?::[0-9]*)?"
_are_hosts = re.compile(rf"{_HOST}(?:,{_HOST})*").fullmatch


class BadUrlFile(ConnectionError):
    """The file has no URL now; the next connect reads it again. The text does not repeat the content."""


def url_of(address: str) -> str:
    """Return the URL of an address. Raises BadUrlFile."""
    if not address.startswith(FILE):
        return address
    path = Path(address.removeprefix(FILE))
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadUrlFile(f"{SETTING}: {path} cannot be read: {reason}") from None
    url = checked_url(text)
    if url is None or len(text.splitlines()) != 1:
        raise BadUrlFile(f"{SETTING}: {path} must contain one line, {FORM}")
    return url


def checked_url(text: str) -> str | None:
    """Return a URL with the scheme `postgresql`, or None if it is not one.

    A password with a character that ends the host's part leaves a rest of it where the port is, which the drivers'
    errors would quote.
    """
    scheme, separator, rest = text.partition("://")
    try:
        hosts = urlsplit(f"postgresql://{rest}").netloc.rpartition("@")[2]
    except ValueError:
        return None
    return f"postgresql://{rest}" if separator and scheme in SCHEMES and _are_hosts(hosts) else None
