"""Where the tests' database is, in the words that JDBC wants."""

from urllib.parse import unquote, urlsplit


def jdbc_options(dsn: str) -> dict[str, str]:
    """Return the options of Spark's reader for a database's url."""
    parts = urlsplit(dsn)
    return {
        "url": f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}?stringtype=unspecified",
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "driver": "org.postgresql.Driver",
    }
