"""Lowers the priority of Spark's programs, so that a service on the same machine comes first."""

import os
import sys

NICE = "HALFNOTE_SPARK_NICE"
DEFAULT = 10


def stand_behind() -> None:
    """Give this program, and the Java that it starts, the niceness HALFNOTE_SPARK_NICE: 10 by default, 0 for none.

    A higher niceness stays. The reads run in Postgres, but no faster than this program receives the rows. Raises
    SystemExit (2, wrong usage) unless the value is a number from 0 to 19.
    """
    value = os.environ.get(NICE, str(DEFAULT))
    if not value.isdecimal() or not 0 <= int(value) <= 19:
        print(f"{NICE} must be a number from 0 to 19, not {value!r}.", file=sys.stderr)
        raise SystemExit(2)
    if os.name == "posix":
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(mine, int(value)))
