"""A deadlock of MariaDB whose error the code hides."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from tests.sdk.sites import execute_on_cursor


def deadlocked(
    execute: Callable[[str], Any], connect: Callable[[], Any], other: Any, error: tuple[type[Exception], str]
) -> None:
    """Have a database transaction end in a deadlock with that of `other`, and say nothing of its error.

    `execute` runs a statement in it. `connect` makes one more connection.
    """
    # The server takes the one that has written less for its victim.
    execute_on_cursor(other, "update orders set number = number + 10 where number > 1")
    execute("select number from orders where number = 1 for update")
    waiting = threading.Thread(target=execute_on_cursor, args=(other, "update orders set number = 11 where number = 1"))
    waiting.start()
    with closing(connect()) as looker, closing(looker.cursor()) as cursor:
        while True:
            cursor.execute("select count(*) from information_schema.innodb_lock_waits")
            if cursor.fetchone()[0]:
                break
            looker.rollback()
            # InnoDB refreshes its list of locks only for readers that have not read it for a tenth of a second.
            time.sleep(0.2)
    with pytest.raises(error[0], match=error[1]):
        execute("select number from orders where number > 11 for update")
    waiting.join()
    other.rollback()
