"""Reading from a standby: whether its settings let a long read be, and how a read that was cancelled looks."""

from dataclasses import dataclass

# A read of a big day takes less than this.
LONG_READ_S = 300


@dataclass(frozen=True, slots=True)
class StandbySettings:
    """`max_standby_streaming_delay_s`: how long replay waits for a reader; -1: for ever."""

    hot_standby_feedback: bool
    max_standby_streaming_delay_s: float


def standby_warning(settings: StandbySettings) -> str | None:
    """Return what to say of a standby that may cancel the reads of a run, None if it lets them be."""
    delay = settings.max_standby_streaming_delay_s
    if settings.hot_standby_feedback or delay < 0 or delay >= LONG_READ_S:
        return None
    return (
        f"The standby lets readers hold up its replay for {delay:g} s only, so a vacuum on the primary may cancel this "
        "run's reads; it begins again with a new snapshot then. Set hot_standby_feedback = on there, or "
        f"max_standby_streaming_delay to {LONG_READ_S} s or more."
    )


def cancelled_by_replay(said: str) -> bool:
    """Tell from an error's text whether the standby cancelled a read, or the session that held the snapshot."""
    return any(
        sign in said
        for sign in (
            "conflict with recovery",
            "could not import the requested snapshot",
            # The session that exported it is gone.
            "invalid snapshot identifier",
        )
    ) or ("snapshot" in said and "does not exist" in said)
