"""Reading from a standby: whether its settings allow a long read, and how to recognize a cancelled read."""

from dataclasses import dataclass

# The read of a large day takes less time than this.
LONG_READ_S = 300


@dataclass(frozen=True, slots=True)
class StandbySettings:
    """A standby's settings; `max_standby_streaming_delay_s`: how long replay waits for a reader; -1: no limit."""

    hot_standby_feedback: bool
    max_standby_streaming_delay_s: float


def standby_warning(settings: StandbySettings) -> str | None:
    """Return a warning about a standby that may cancel a run's reads, None if it does not."""
    delay = settings.max_standby_streaming_delay_s
    if settings.hot_standby_feedback or delay < 0 or delay >= LONG_READ_S:
        return None
    return (
        f"The standby's replay waits for readers for only {delay:g} s, so a vacuum on the primary may cancel this "
        "run's reads. Then the run begins again with a new snapshot. Set hot_standby_feedback = on there, or "
        f"max_standby_streaming_delay to {LONG_READ_S} s or more."
    )


# The server ends a session that is idle in its transaction. If the client is sending then, the last message is lost.
LOST_SESSION = ("server closed the connection unexpectedly", "Connection reset", "I/O error occurred while sending")


def cancelled_by_replay(said: str, *, standby: bool) -> bool:
    """Return whether, by an error's text, the standby cancelled a read, or the session that held the snapshot.

    `standby`: whether the server is a standby. There a lost session counts as cancelled: if the server itself is gone,
    the next snapshot fails.
    """
    signs = (
        "conflict with recovery",
        "could not import the requested snapshot",
        # The session that exported the snapshot has ended.
        "invalid snapshot identifier",
        *(LOST_SESSION if standby else ()),
    )
    return any(sign in said for sign in signs) or ("snapshot" in said and "does not exist" in said)
