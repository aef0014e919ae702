"""The advisory locks of a database, by name. Each number is taken for one purpose alone.

The numbers stay as they are: replicas of two versions share a database during an upgrade. The proof imports nothing of
the service, so it has constants of its own for the last two; a test holds them equal.
"""

from enum import IntEnum, unique


@unique
class AdvisoryLock(IntEnum):
    """The key of each advisory lock, as `pg_advisory_lock` takes it."""

    # Taken last in each database transaction that publishes, and held until its commit is visible: then offsets become
    # visible in order.
    OFFSET = 7001
    # Replicas that start together migrate one after another.
    MIGRATION = 7002
    # Replicas that make or end the same day take turns.
    DAYS = 7003
    # One session at a time does upkeep.
    UPKEEP = 7004
    # Replicas claim checks one after another.
    CHECK_CLAIMS = 7005
    # One replica at a time sweeps.
    SWEEP = 7006
    # Requests that start a subscription or a replay share it, from before they look where the log begins until their
    # commit. Upkeep takes it alone to close a day.
    NEW_READERS = 7007
    # One worker at a time asks for the round of a producer group. With a second number, the hash of the group's name.
    ROUNDS = 7008
    # One run of the proof at a time writes.
    PROOF = 7010
    # One run of `archive`, `restore` or `redact` at a time.
    ARCHIVE = 7011
