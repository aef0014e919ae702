"""Where the database is: a URL, or a file that contains one and is read at each connect (`file:/path`)."""

from pathlib import Path

FILE = "file:"
# The last one is SQLAlchemy's form of the same URL.
SCHEMES = ("postgresql", "postgres", "postgresql+asyncpg")
SETTING = "HALFNOTE_DATABASE_URL_FILE"


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
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in SCHEMES or len(text.splitlines()) != 1:
        raise BadUrlFile(f"{SETTING}: {path} must contain one line, postgresql://user:password@host:5432/halfnote")
    return f"postgresql://{rest}"
