"""The service comes first: where a program of Spark shares its machine, it takes what the service leaves."""

import os
import sys

NICE = "HALFNOTE_SPARK_NICE"
DEFAULT = 10


def stand_behind() -> None:
    """Give this program, and the Java that it starts, the niceness HALFNOTE_SPARK_NICE: 10 unless told, 0 for none.

    One that is nicer already stays so. The reads themselves are done by Postgres, no faster than they are taken.
    Raises SystemExit (2, wrong usage) for what is no number from 0 to 19.
    """
    told = os.environ.get(NICE, str(DEFAULT))
    if not told.isdecimal() or not 0 <= int(told) <= 19:
        print(f"{NICE} is a number from 0 to 19, not {told!r}.", file=sys.stderr)
        raise SystemExit(2)
    if os.name == "posix":
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(mine, int(told)))
