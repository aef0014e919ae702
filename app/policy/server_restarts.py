"""PURE: decide how long the embedded Postgres rests after a restart before it is restarted again."""

# The wait from the end of a restart; it doubles.
FIRST_WAIT_S = 1.5
# A server that cannot start, as on a full disk, starts no sooner for being tried often.
LONGEST_WAIT_S = 30.0
# A server that starts and dies again, as one that the system kills for its memory, serves until then.
LONGEST_WAIT_OF_STARTED_S = 6.0


def wait_s(before_s: float, *, started: bool) -> float:
    """Return the wait in seconds after a restart, from the wait before it; 0: the server had worked for long.

    `started`: whether the restart succeeded.
    """
    return min(LONGEST_WAIT_OF_STARTED_S if started else LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * before_s))
