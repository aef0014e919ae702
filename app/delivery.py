"""A delivery of one message to one subscription, and its possible outcomes. Values only.

They are structs, because one of each is made for each message, and a frozen dataclass costs several times as much.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

from msgspec import Struct
from msgspec.structs import force_setattr


class Delivery(Struct, frozen=True):
    """A committed message on its way to one subscription. `attempt` counts from 1; `body` is the producer's bytes.

    `replay` is the id of the replay that sends it again, None for live delivery. `trace` is a context of
    app.observability.trace_context. `placeholders` replace the message's own values in the names of a broker, such as a
    queue's.
    """

    subscription: str
    message_id: str
    transaction_id: UUID
    offset: int
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    content_type: str
    body: bytes
    committed_at: datetime
    attempt: int
    replay: str | None = None
    trace: str | None = None
    placeholders: Mapping[str, str] | None = None


class Delivered(Struct, frozen=True):
    """The destination has the message."""

    status: int | None
    duration_ms: int


class Failed(Struct, frozen=True):
    """The destination did not confirm the message. A later try may succeed.

    `retry_after_s`: the destination asked for a pause. `unreachable`: no connection was made, so the message is not the
    cause.
    """

    error: str
    status: int | None
    response: str | None
    retry_after_s: float | None
    duration_ms: int
    unreachable: bool = False

    def __post_init__(self) -> None:
        _make_storable(self, "error", "response")


class Refused(Struct, frozen=True):
    """The destination refuses this message for good. `reason`: the reason it gave.

    `asked`: False if Halfnote knew this without sending the message, so it says nothing about whether the destination
    answers.
    """

    reason: str
    error: str
    status: int | None
    response: str | None
    duration_ms: int
    asked: bool = True

    def __post_init__(self) -> None:
        _make_storable(self, "reason", "error", "response")


class Gone(Struct, frozen=True):
    """The destination refuses all further messages."""

    error: str
    status: int | None
    response: str | None
    duration_ms: int

    def __post_init__(self) -> None:
        _make_storable(self, "error", "response")


Outcome: TypeAlias = Delivered | Failed | Refused | Gone


def storable(text: str) -> str:
    """Return a text of others as Postgres and any JSON reader take it: without NUL and surrogates that stand alone."""
    return text.replace("\x00", "\ufffd").encode(errors="replace").decode()


def _make_storable(outcome: Struct, *fields: str) -> None:
    """Replace what Postgres does not store in texts of a destination.

    One such text would fail the statement that records the outcomes of all subscriptions of a worker.
    """
    for field in fields:
        text = getattr(outcome, field)
        if text is not None:
            force_setattr(outcome, field, storable(text))
