"""The answer of `GET /stats`."""

from datetime import date, datetime
from uuid import UUID

from pydantic import Field

from app.schemas.transactions import AT, ID, Shown

EXACT = "false: more than 1,000, counted up to 100,000 without a look at each"


class UndecidedShown(Shown):
    """Transactions of one state."""

    count: int = Field(examples=[3])
    exact: bool = Field(description=EXACT, examples=[True])
    oldest: UUID | None = Field(
        description="the oldest; null: there is none, or the 1,001 rows with the lowest ids all have a verdict already",
        examples=[ID],
    )
    oldest_born_at: datetime | None = Field(
        description="when the oldest was born, or, if `oldest` is null, a time before that, also if none is left; "
        "null: there is none",
        examples=[AT],
    )


class DeadLettersShown(Shown):
    """Dead letters of all subscriptions."""

    count: int = Field(examples=[0])
    exact: bool = Field(description=EXACT, examples=[True])
    oldest_at: datetime | None = Field(description="when the oldest died; null: there is none", examples=[None])


class OpenBreakerShown(Shown):
    """The open circuit breaker of an active subscription."""

    subscription: str = Field(examples=["mailer"])
    opened_at: datetime = Field(examples=[AT])
    because: str | None = Field(examples=["503 from https://mailer.example/in"])


class OpenBreakersShown(Shown):
    """Open circuit breakers."""

    count: int = Field(examples=[1])
    first: list[OpenBreakerShown] = Field(description="those that opened first, at most 20")


class SubscriptionCounts(Shown):
    """Subscriptions by state."""

    active: int = Field(examples=[12])
    paused: int = Field(examples=[1])
    disabled: int = Field(examples=[0])


class OldestLagShown(Shown):
    """The lag of the active subscription whose oldest waiting message is the oldest."""

    subscription: str = Field(examples=["mailer"])
    messages: int = Field(description="messages that wait, of the next 10,000 log entries", examples=[42])
    exact: bool = Field(description="false: there may be more", examples=[True])
    seconds: float = Field(description="age of the oldest message that waits (s)", examples=[3.5])


class DoneShown(Shown):
    """How often something was done, and the rate."""

    count: int = Field(examples=[900])
    per_s: float = Field(description="over `covered_s`", examples=[1.0])


class WindowShown(Shown):
    """What was done in a time until now, in whole minutes."""

    window_s: int = Field(description="900 or 86400", examples=[900])
    covered_s: float = Field(
        description="the part of the time that has figures: shorter in a new installation (s)", examples=[888.2]
    )
    halves: DoneShown = Field(description="halves stored, plain messages included")
    commits: DoneShown = Field(description="verdicts `commit` recorded")
    rollbacks: DoneShown = Field(description="verdicts `rollback` recorded")
    deliveries: DoneShown = Field(description="attempts that delivered, replays included")
    failed_attempts: DoneShown = Field(description="attempts that did not deliver")
    checks: DoneShown = Field(description="checks sent to producers")


class HeldDayShown(Shown):
    """A day that is kept past its retention."""

    day: date = Field(examples=["2026-11-21"])
    causes: list[str] = Field(examples=[["in_doubt", "undelivered:mailer"]])


class DiskShown(Shown):
    """The database's size."""

    database_bytes: int = Field(examples=[1_200_000_000])
    free_bytes: int | None = Field(
        description="by how much it may still grow; null where the process cannot know", examples=[None]
    )


class WorkerCounts(Shown):
    """Worker processes and the shards of active subscriptions that none of them holds."""

    present: int = Field(examples=[2])
    unheld_shards: int = Field(description="counted up to 1,000", examples=[0])


class LastProofShown(Shown):
    """The last run of the nightly proof."""

    run_id: int = Field(examples=[30])
    state: str = Field(description="`proved`, `findings` or `failed`", examples=["proved"])
    ended_at: datetime = Field(examples=[AT])
    open_findings: int = Field(description="findings of all days that are open", examples=[0])
    proved_at: datetime | None = Field(description="when a run last found nothing", examples=[AT])


class Stats(Shown):
    """The state of the service, in one answer."""

    at: datetime = Field(description="when it was measured", examples=[AT])
    in_doubt: UndecidedShown
    parked: UndecidedShown
    dead_letters: DeadLettersShown
    breakers: OpenBreakersShown
    subscriptions: SubscriptionCounts
    lag: OldestLagShown | None = Field(description="null: no message waits for an active subscription")
    activity: list[WindowShown] = Field(description="of the last 15 minutes and of the last 24 hours")
    held_days: list[HeldDayShown] = Field(description="oldest first")
    disk: DiskShown
    workers: WorkerCounts
    proof: LastProofShown | None = Field(description="null: no run has ended")
