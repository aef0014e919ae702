"""Watches an SQLAlchemy session, so that a transaction's end is the outcome of its database transaction.

The session's own events show it: the outermost database transaction counts once its commit has returned. Savepoints
within the block do not count; one around it that is rolled back takes the block's messages along. A session that joined
a transaction of its connection which is still open does not count either.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.exc import MissingGreenlet, SQLAlchemyError
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.util import await_only

from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.block import DatabaseState, OpenTransaction
from halfnote.databases.base import STANDS
from halfnote.databases.sqlalchemy import is_of, run_on
from halfnote.errors import NotEntered

_KEY = "halfnote_bindings"
log = logging.getLogger("halfnote")


class SessionBinding:
    """Watches a session: the database transaction that is open now, else the first one that is committed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state: DatabaseState = "open" if session.in_transaction() else "none"
        self._tried = self._committed = self._hides_rollbacks = False
        self._notify: Callable[[DatabaseState], Any] | None = None
        self._barrier: Barrier | AsyncBarrier | None = None
        self._transaction: OpenTransaction | None = None
        self._entered = False
        # The savepoints that the block is in, the innermost first; the one that was rolled back in the block with its
        # work; and whether that one is over, so that the block may do its work again.
        self._savepoints = _savepoints(session)
        self._undone: SessionTransaction | None = None
        self._may_redo = False
        _bindings(session).append(self)

    @property
    def state(self) -> DatabaseState:
        """The state of the database transaction; `committed` is final."""
        if self._state == "open" and self._undone is not None and not self._may_redo:
            return "undone"
        return self._state

    @property
    def hides_rollbacks(self) -> bool:
        """Whether one of its databases may roll back by itself and continue."""
        return self._hides_rollbacks

    def enter_with(self, barrier: Barrier | AsyncBarrier, transaction: OpenTransaction) -> None:
        """Enter a barrier in the database transaction that is open now, or else in each that begins until a commit.

        Raises BarrierRefused, also later, from the statement that begins a database transaction.
        """
        self._barrier, self._transaction = barrier, transaction
        for connection in _connections(self._session.get_transaction()):
            if self._savepoints:
                # A session sends a savepoint to the database only when it is used, and the row must be in it.
                self._session.connection(bind_arguments={"bind": connection})
            self.on_connection(connection)

    def on_begin_of(self, begun: SessionTransaction, connection: Connection) -> None:
        """Enter the barrier where a database transaction or a savepoint begins, but not outside the block's savepoint.

        That one begins after those around it.
        """
        if not self._savepoints or begun is self._savepoints[0] or (begun.nested and begun not in self._savepoints):
            self.on_connection(connection)

    def on_connection(self, connection: Connection) -> None:
        """Enter the barrier, if the connection is of its database and the row is not written yet."""
        barrier, transaction = self._barrier, self._transaction
        if (
            barrier is None
            or transaction is None
            or self._state == "committed"
            # Closed: what was rolled back since is not entered again.
            or (self._entered and self._notify is not None)
            or not is_of(barrier.database, connection)
        ):
            return
        if self._entered and run_on(connection, barrier.standing(transaction.transaction_id)):
            return
        run_on(connection, barrier.entering(transaction, barrier.settle))
        self._entered, self._undone = True, None

    def drop(self) -> None:
        """Write into the open database transaction that the block drops its messages, if it does.

        So a check knows, too, if this process ends before its end is posted.
        """
        barrier, transaction = self._barrier, self._transaction
        if barrier is None or transaction is None or transaction.rolled_back is None or self.state != "open":
            return
        root = self._session.get_transaction()
        for entry in set(() if root is None else root._connections.values()):
            # After a failed flush it is not active: the database has rolled back, and the row is gone.
            if entry[1].is_active and is_of(barrier.database, entry[0]):
                run_on(entry[0], barrier.dropping(transaction.transaction_id))

    def drop_at_exit(self) -> None:
        """Call `drop` when the block closes within a database transaction of the caller; its failure is logged."""
        try:
            self.drop()
        except SQLAlchemyError as error:
            # As after a failure that the code hid: then nothing is committed.
            log.warning("the barrier could not note that messages are dropped: %s", error)

    def require_entered(self, connections: set[Connection]) -> None:
        """Raise NotEntered before a commit that does not reach the barrier's database."""
        barrier, transaction = self._barrier, self._transaction
        if barrier is None or transaction is None or self._state == "committed" or not connections:
            return
        if not any(is_of(barrier.database, connection) for connection in connections):
            raise NotEntered(transaction.transaction_id)

    def when_over(self, notify: Callable[[DatabaseState], Any]) -> None:
        """Call `notify` once, at the end of the open database transaction. The task that it returns is awaited."""
        self._notify = notify

    def release(self) -> None:
        """Stop watching, unless the call that `when_over` registered is still due."""
        if self._notify is None and self in _bindings(self._session):
            _bindings(self._session).remove(self)

    def on_begin(self) -> None:
        """Record the start of a database transaction; one after a rollback is a new try: the outcome is open again."""
        if self._state != "committed":
            self._state, self._committed, self._savepoints, self._undone = "open", False, [], None

    def on_try(self, *, hides_rollbacks: bool) -> None:
        """Record the start of the commit: if it fails from now on, it may still have succeeded."""
        self._tried, self._hides_rollbacks = True, hides_rollbacks

    def on_commit(self) -> None:
        """Record that the commit has returned."""
        self._committed = True

    def on_rollback(self) -> "asyncio.Task[Any] | None":
        """Record that a savepoint was rolled back: the block's work is gone if the block was in it.

        Returns the task that posts the end, if there is one.
        """
        gone = [number for number, savepoint in enumerate(self._savepoints) if not savepoint.is_active]
        if self._state != "open" or not gone:
            return None
        if self._notify is not None:
            return self._over("undone")
        self._undone, self._may_redo = self._savepoints[gone[-1]], False
        del self._savepoints[: gone[-1] + 1]
        return None

    def on_end_of(self, savepoint: SessionTransaction) -> None:
        """Record the end of a savepoint. If it was not rolled back, its work belongs to the one around it."""
        if savepoint is self._undone:
            self._may_redo = True
        elif savepoint in self._savepoints:
            self._savepoints.remove(savepoint)

    def on_end(self) -> "asyncio.Task[Any] | None":
        """Record the end of the database transaction; return the task that posts the end, if there is one."""
        if self._state != "open":
            return None
        if self._committed:
            # After a savepoint that was rolled back in the block, the barrier knows whether the work was done again.
            return self._over("committed" if self._undone is None else "doubtful")
        return self._over("doubtful" if self._tried else "rolled_back")

    def _over(self, state: DatabaseState) -> "asyncio.Task[Any] | None":
        self._state = state
        notify, self._notify = self._notify, None
        if notify is None:
            return None
        self.release()
        task: asyncio.Task[Any] | None = notify(state)
        return task


def _await(tasks: "Sequence[asyncio.Task[Any] | None]") -> None:
    """Wait for tasks within an `AsyncSession`. Without one, their loop runs them by itself."""
    begun = [task for task in tasks if task is not None]
    if not begun:
        return
    # Not the tasks themselves: they go on if the session's code is canceled.
    waiting = asyncio.wait(begun)
    try:
        await_only(waiting)
    except MissingGreenlet:
        waiting.close()


def _bindings(session: Session) -> list[SessionBinding]:
    """Return the watchers of a session; its events have one listener for all of them."""
    found: list[SessionBinding] | None = session.info.get(_KEY)
    if found is None:
        found = session.info[_KEY] = []
        event.listen(session, "after_transaction_create", _on_create)
        event.listen(session, "after_begin", _on_begin)
        event.listen(session, "before_commit", _on_before_commit)
        event.listen(session, "after_commit", _on_after_commit)
        event.listen(session, "after_rollback", _on_rollback)
        event.listen(session, "after_transaction_end", _on_end)
    return found


def _on_create(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        for binding in list(_bindings(session)):
            binding.on_begin()


def _on_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    for binding in list(_bindings(session)):
        binding.on_begin_of(transaction, connection)


def _on_before_commit(session: Session) -> None:
    bindings = list(_bindings(session))
    if not bindings or session.in_nested_transaction():
        return
    # The flush of the commit comes after this event, and may begin the database transaction.
    session.flush()
    connections = _connections(session.get_transaction())
    for connection in connections:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(STANDS)
    hides_rollbacks = any(connection.dialect.name in ("mysql", "mariadb") for connection in connections)
    for binding in bindings:
        binding.require_entered(connections)
        binding.drop()
        binding.on_try(hides_rollbacks=hides_rollbacks)


def _on_after_commit(session: Session) -> None:
    if not session.in_nested_transaction() and not _joined(session.get_transaction()):
        for binding in list(_bindings(session)):
            binding.on_commit()


def _on_rollback(session: Session) -> None:
    _await([binding.on_rollback() for binding in list(_bindings(session))])


def _on_end(session: Session, transaction: SessionTransaction) -> None:
    tasks: list[asyncio.Task[Any] | None] = []
    for binding in list(_bindings(session)):
        if transaction.nested:
            binding.on_end_of(transaction)
        elif transaction.parent is None and not _joined(transaction):
            tasks.append(binding.on_end())
    _await(tasks)


def _joined(transaction: SessionTransaction | None) -> bool:
    """Return whether the session is part of a transaction of a connection that is still open."""
    return any(connection.in_transaction() for connection in _connections(transaction))


def _savepoints(session: Session) -> list[SessionTransaction]:
    """Return the savepoints that are open in a session."""
    found, one = list[SessionTransaction](), session.get_nested_transaction()
    while one is not None:
        if one.nested:
            found.append(one)
        one = one.parent
    return found


def _connections(transaction: SessionTransaction | None) -> set[Connection]:
    """Return the connections of a session's database transaction: several, if mappers have their own engines."""
    return set() if transaction is None else {entry[0] for entry in transaction._connections.values()}
