"""Turn the errors of an unusable database, key or certificate into one sentence that says what to do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from sqlalchemy.exc import DBAPIError

from app.cli.errors import Refusal
from app.config import BadAdminKeyFile
from app.database.connection import UnusableDatabase
from app.database.url_file import SETTING
from app.embedded_postgres import EmbeddedPostgresError
from app.runtime.server_certificate import BadCertificate

CHECK_URL = "Check HALFNOTE_DATABASE_URL."
LOST = "The connection was lost. Run the command again when the server answers."
LOCKED = "Another session holds a lock. End that session or wait for its end, then run the command again."
# By SQLSTATE, or by its class, the first two characters.
ADVICE = {
    "08": LOST,
    "25006": "The server takes no writes. Name the primary in HALFNOTE_DATABASE_URL.",
    "28": "Check the user and the password in HALFNOTE_DATABASE_URL.",
    "3D000": "Create the database, or name another one in HALFNOTE_DATABASE_URL.",
    "40P01": LOCKED,
    "42501": "The login lacks a right. docs/operations/roles.md says what each login needs.",
    "53100": "The disk of the database server is full. Make room there, then run the command again.",
    "53300": "The server has no connection left. End others or raise its max_connections, then run the command again.",
    "55P03": LOCKED,
    "57014": "A time limit of the login, the database or the server ended a statement. Raise its statement_timeout.",
    "57P": LOST,
}


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the errors of an unusable database, key or certificate into a Refusal."""
    try:
        yield
    except (UnusableDatabase, EmbeddedPostgresError, BadAdminKeyFile, BadCertificate) as error:
        raise Refusal(str(error)) from None
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, DBAPIError) as error:
        raise Refusal(_sentences(error)) from None


def _sentences(error: BaseException) -> str:
    """Say what a database's error is, and what to do about it."""
    while isinstance(error, DBAPIError) and error.orig is not None:
        # SQLAlchemy has two errors of its own around the driver's.
        error = error.orig.__cause__ or error.orig
    # Further lines have details, which may quote a row.
    said = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    return f"The database cannot be used: {said}. {_advice(error)}"


def _advice(error: BaseException) -> str:
    if isinstance(error, asyncpg.InterfaceError) and not isinstance(error, ValueError):
        # A wrong URL is a ValueError as well.
        return LOST
    state: str = getattr(error, "sqlstate", None) or ""
    advice = next((ADVICE[part] for part in (state, state[:3], state[:2]) if part in ADVICE), CHECK_URL)
    # Only one of the two settings has a value.
    return advice.replace("HALFNOTE_DATABASE_URL", SETTING) if os.environ.get(SETTING) else advice
