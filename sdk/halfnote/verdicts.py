"""The outcome of a local database transaction, as its producer reports it."""

from enum import Enum


class Verdict(str, Enum):
    """A verdict. `UNKNOWN` decides nothing: Halfnote sends another check later."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


COMMIT, ROLLBACK, UNKNOWN = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN
