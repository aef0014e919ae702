"""From what a database call raises to the problem that HTTP answers, by its SQLSTATE."""

from uuid import UUID

import asyncpg
import structlog
from sqlalchemy.exc import DBAPIError

from app.database.connection import NoConnection, PoolBusy
from app.database.standby_wait import WaitCanceled
from app.errors import (
    DatabaseReadOnly,
    DatabaseUnavailable,
    InternalError,
    Invalid,
    OutcomeUnknown,
    Problem,
    StorageFull,
)

log = structlog.get_logger(__name__)

# Errors of one row (data exception, constraint violation): the batch is split to find it. Any other fails the batch.
ROW_ERRORS = ("22", "23")
READ_ONLY = ("25006", "57P03")
STORAGE_FULL = ("53100",)
# check_violation; without a constraint's name it means that no partition takes the row.
NO_PARTITION = "23514"
# The backend went away (shutdown, crash, protocol, a time limit of the session): what it was doing may have been
# committed.
GONE = ("08", "57P01", "57P02", "57P05", "25P03", "25P04")
# Syntax, names and rights: a defect of a statement, or a database that is not as migrations left it.
OUR_MISTAKES = "42"
RETRY_AFTER_S = 1
WAIT_CANCELED = "The wait for the database's standby was canceled, so a failover could lose this. Repeat the request."
# How asyncpg speaks of a connection that broke; the last one when it was broken before the statement went out.
BROKEN = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)


class Unconfirmed(Exception):
    """The flush was sent and no commit was confirmed."""


def problem_of(error: Exception, transaction_id: UUID | None = None) -> Problem:
    """Turn what a database call raised into the problem that HTTP answers; unknown errors become `internal`."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Unconfirmed):
        return OutcomeUnknown(
            "The database did not confirm the commit. Repeat the request with this transaction_id.",
            retry_after_s=RETRY_AFTER_S,
            **({"transaction_id": str(transaction_id)} if transaction_id else {}),
        )
    if isinstance(error, PoolBusy):
        return DatabaseUnavailable(
            "All database connections of this process are in use; repeat later.", retry_after_s=RETRY_AFTER_S
        )
    if isinstance(error, NoConnection):
        return _problem_of_opening(error, error.__cause__)
    if isinstance(error, DBAPIError) and error.orig is not None:
        # SQLAlchemy wraps what fails while it opens a connection.
        return _problem_of_opening(error.orig, error.orig.__cause__)
    if isinstance(error, WaitCanceled):
        return DatabaseUnavailable(WAIT_CANCELED, retry_after_s=RETRY_AFTER_S)
    state = _state_of(error)
    if state in READ_ONLY:
        return DatabaseReadOnly("The database takes no writes just now; repeat later.", retry_after_s=RETRY_AFTER_S)
    if state in STORAGE_FULL:
        return StorageFull("The database's disk is full; make room and repeat.", retry_after_s=10 * RETRY_AFTER_S)
    if state == NO_PARTITION and not getattr(error, "constraint_name", None):
        return DatabaseUnavailable("The id's day has no partition yet; GET /readyz says why.", retry_after_s=10)
    if state[:2] in ROW_ERRORS:
        return Invalid(f"The database cannot store this request: {error}")
    if state.startswith(OUR_MISTAKES):
        log.error("defect", sqlstate=state, exc_info=error)
    if isinstance(error, (asyncpg.PostgresError, *BROKEN)):
        if transaction_id is None:
            # A lane logs the failure of its batch itself.
            log.warning("statement_failed", sqlstate=state, error=str(error) or type(error).__name__)
        return DatabaseUnavailable(
            "The database did not take the statement; repeat later.", retry_after_s=RETRY_AFTER_S
        )
    log.error("defect", exc_info=error)
    return InternalError("Halfnote made a mistake; its log has the trace.")


def _problem_of_opening(error: BaseException, cause: BaseException | None) -> Problem:
    """Turn what was raised while a connection was opened into a problem. No statement of the request was sent."""
    if isinstance(cause, Exception):
        if _state_of(cause) in (*READ_ONLY, *STORAGE_FULL) or not isinstance(cause, (asyncpg.PostgresError, *BROKEN)):
            return problem_of(cause)
        error = cause
    log.warning("not_connected", sqlstate=_state_of(error), error=str(error) or type(error).__name__)
    return DatabaseUnavailable(
        "The database could not be connected in time; repeat later.", retry_after_s=RETRY_AFTER_S
    )


def _state_of(error: BaseException) -> str:
    return getattr(error, "sqlstate", None) or ""
