"""What became of a local database transaction, as a producer says it."""

from enum import Enum


class Verdict(str, Enum):
    """`UNKNOWN` decides nothing: Halfnote asks (again) later."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


COMMIT, ROLLBACK, UNKNOWN = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN
