"""Answers of the routes of the nightly proof. An absent optional field is left out; null is a value."""

from datetime import date, datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import Field

from app.schemas.totals import TOTAL, TotalShown
from app.schemas.transactions import AT, ID, Shown

RunState = Literal["proved", "findings", "failed"]
DAY = "2026-11-20"
COUNTS = {"half": 10_300, "op": 10_300, "outbox": 10_240, "receipt": 20_480}


class RunShown(Shown):
    """One run of the proof."""

    run_id: int = Field(examples=[30])
    state: RunState = Field(
        description="`proved`: no finding; `findings`: at least one; `failed`: the run did not finish",
        examples=["findings"],
    )
    engine: str = Field(description="the Spark master it ran on", examples=["local[2]"])
    source: str = Field(description="the source: primary, standby or archive", examples=["primary"])
    seen_at: datetime | None = Field(
        None, description="the time of its snapshot; rows visible then were reconciled", examples=[AT]
    )
    started_at: datetime = Field(examples=[AT])
    ended_at: datetime = Field(examples=[AT])
    days: list[date] = Field(description="the days that the run read", examples=[[DAY]])
    open: int = Field(description="findings of these days that were open at the end of the run", examples=[3])
    new: int = Field(description="of those, how many are new or were found again after they were resolved")
    resolved: int = Field(description="findings of these days that this run did not find again")
    seconds: dict[str, float] = Field(description="how long each stage took", examples=[{"read": 8.5, "join": 12.1}])
    error: str | None = Field(None, description="why it failed")


class DayShown(Shown):
    """A day with the result of the last run that read it."""

    day: date = Field(examples=[DAY])
    state: Literal["provisional", "final"] = Field(
        description="`provisional`: it is read again when it has changed; `final`: all is decided and settled",
        examples=["final"],
    )
    run_id: int = Field(description="the last run that read it", examples=[30])
    reconciled_at: datetime = Field(examples=[AT])
    counts: dict[str, int] = Field(description="its rows, by table", examples=[COUNTS])
    found: dict[str, int] = Field(
        description="findings by kind, also those past what is stored of a kind; kinds without any may be left out",
        examples=[{"parked": 2, "unrouted": 1}],
    )
    score: dict[str, float | None] = Field(
        description="`complete`, `agreed`, `timely` and `orderly`, each from 0 to 100; 100: no finding of that part; "
        "null: the day has no rows; empty: the day was read before there were scores",
        examples=[{"complete": 99.98, "agreed": 100.0, "timely": 99.99, "orderly": 100.0}],
    )


class ReconciledDayShown(DayShown):
    """A day with the figures of the report's plots, and the runs that read it."""

    figures: dict[str, Any] = Field(
        description="outcomes by hour, times to the verdict, checks, and for each subscription latency and attempts"
    )
    runs: list[RunShown] = Field(description="the runs that read the day, newest first, up to 50")


class RunPage(Shown):
    """A page of runs, newest first."""

    items: list[RunShown]
    next_cursor: int | None = Field(description="send it as `runs_before` for the next page; null: this was the last")


class DayPage(Shown):
    """A page of days, newest first."""

    items: list[DayShown]
    next_cursor: date | None = Field(description="send it as `days_before` for the next page; null: this was the last")


class ReconciliationShown(Shown):
    """The state of the nightly proof."""

    verdict: RunState | None = Field(
        description="the result of the last run; null: there was none", examples=["proved"]
    )
    run: RunShown | None = Field(description="the last run")
    proved_at: datetime | None = Field(
        description="the end of the last run without a finding; null: there was none", examples=[AT]
    )
    open: dict[str, int] = Field(
        description="open findings of all days by kind; kinds without any are left out", examples=[{"parked": 2}]
    )
    provisional: int = Field(description="stored days that may still change", examples=[4])
    final: int = Field(description="stored days in which everything is decided and settled", examples=[38])
    runs: RunPage
    days: DayPage


class FindingShown(Shown):
    """A finding: one per day, kind and subject."""

    finding_id: int = Field(examples=[1030])
    day: date = Field(examples=[DAY])
    kind: str = Field(description="the rule that found it", examples=["parked"])
    state: Literal["open", "resolved"]
    subject: str = Field(
        description="the subject: the id of a transaction, message or delivery, an offset, a topic, a group",
        examples=[ID],
    )
    transaction_id: UUID | None = Field(None, examples=[ID])
    message_id: str | None = Field(None, examples=[f"{ID}-0"])
    subscription: str | None = Field(None, examples=["mailer"])
    producer_group: str | None = Field(None, examples=["shop"])
    detail: dict[str, Any] = Field(description="the details, by kind", examples=[{"reason": "15 checks"}])
    first_run: int = Field(description="the run that found it first", examples=[29])
    first_seen_at: datetime = Field(examples=[AT])
    last_run: int = Field(description="the last run that found it", examples=[30])
    last_seen_at: datetime = Field(examples=[AT])
    resolved_run: int | None = Field(None, description="the run that did not find it again, if its day was not removed")
    resolved_at: datetime | None = None
    docs: str = Field(description="where this kind is explained", examples=["/findings/kinds/parked"])
    transaction: str | None = Field(
        None, description="where its transaction is shown", examples=[f"/transactions/{ID}"]
    )


class FindingPage(Shown):
    """A page of findings: by day, newest first, then by kind and subject, backwards."""

    items: list[FindingShown]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")
    total: TotalShown | None = Field(None, description=TOTAL)
