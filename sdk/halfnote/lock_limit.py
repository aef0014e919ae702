"""Limits how long the statements of a script wait for another database transaction, in each dialect."""

from typing import TypeVar

from halfnote.databases.base import Dialect, Script, Statement

T = TypeVar("T")


def limited(dialect: Dialect, wait_s: float, script: Script[T]) -> Script[T]:
    """Run a script whose statements wait that long for a lock, then set what held before.

    The error of a wait that took longer is one of `waits_for_another`. SQLite waits as long as its connection says.
    """
    yield from _wait_less(dialect, wait_s)
    try:
        result = yield from script
    except Exception:
        # PostgreSQL's setting ends with the database transaction, which takes no other statement any more.
        if dialect == "mysql":
            yield from _wait_as_before(dialect)
        raise
    yield from _wait_as_before(dialect)
    return result


def longest_wait_s(dialect: Dialect, wait_s: float) -> float:
    """Return how long a statement waits for a lock with the limit `wait_s`: MySQL counts whole seconds."""
    return max(1, round(wait_s)) if dialect == "mysql" else wait_s


def _wait_less(dialect: Dialect, wait_s: float) -> Script[None]:
    if dialect == "postgresql":
        # 0 would be no limit.
        limit = f"{max(1, int(wait_s * 1000))}ms"
        yield Statement(
            "select set_config('halfnote.lock_timeout', current_setting('lock_timeout'), true), "
            f"set_config('lock_timeout', '{limit}', true)"
        )
    elif dialect == "mysql":
        yield Statement("set @halfnote_wait_s = @@innodb_lock_wait_timeout")
        yield Statement(f"set innodb_lock_wait_timeout = {longest_wait_s(dialect, wait_s)}")


def _wait_as_before(dialect: Dialect) -> Script[None]:
    if dialect == "postgresql":
        yield Statement("select set_config('lock_timeout', current_setting('halfnote.lock_timeout'), true)")
    elif dialect == "mysql":
        yield Statement("set innodb_lock_wait_timeout = @halfnote_wait_s")
