"""Whether a synchronous standby has what is acknowledged: reads that wait for it, and waits that were canceled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg

# The class of the warning with which Postgres reports success although a wait for a standby was canceled.
WARNING = "01000"

# The row of another database transaction is visible although no standby has it, if its wait was canceled or the server
# restarted. A database transaction that only reads does not wait either. This part of its statement writes a message of
# no table, so that the commit waits for all before it; without a synchronous standby it writes nothing. The statement
# must join `confirmed`: what nothing reads is not executed.
CONFIRMED = """confirmed as materialized (
  select case when current_setting('synchronous_standby_names') <> ''
    then pg_logical_emit_message(true, 'halfnote', '') end
)"""


class WaitCanceled(asyncpg.PostgresError):
    """The database transaction is committed here, but its wait for a synchronous standby was canceled."""

    def __init__(self, warning: str) -> None:
        super().__init__(warning)
        self.sqlstate = WARNING  # type: ignore[misc]


# Makes the commit of a database transaction that writes nothing wait for all before it, as CONFIRMED does.
CONFIRM = """
select pg_logical_emit_message(true, 'halfnote', '') where current_setting('synchronous_standby_names') <> ''
"""


def canceled_wait(message: asyncpg.PostgresLogMessage) -> str | None:
    """Return the text of a warning that the wait of a commit for a synchronous standby was canceled, else None."""
    if getattr(message, "severity_en", None) != "WARNING" or getattr(message, "sqlstate", "") != WARNING:
        return None
    return str(getattr(message, "message", "warning"))


@contextmanager
def noted_waits(connection: "asyncpg.Connection[Any]") -> Iterator[list[str]]:
    """Collect the warnings that a wait for a synchronous standby was canceled."""
    found: list[str] = []

    def note(_: object, message: asyncpg.PostgresLogMessage) -> None:
        text = canceled_wait(message)
        if text is not None:
            found.append(text)

    connection.add_log_listener(note)
    try:
        yield found
    finally:
        connection.remove_log_listener(note)


@contextmanager
def uncanceled_waits(connection: "asyncpg.Connection[Any]") -> Iterator[None]:
    """Raise WaitCanceled at the end of a block in which a commit's wait for a synchronous standby was canceled."""
    with noted_waits(connection) as canceled:
        yield
    if canceled:
        raise WaitCanceled(canceled[0])
