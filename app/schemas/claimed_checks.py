"""Requests and answers of the routes by which producers claim and answer the checks of their group."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.field_rules import REASON_MAX
from app.schemas.fields import Id, Strict, Whole

# Checks of one claim, answers of one request.
CLAIM_MAX = 100
ANSWERS_MAX = 500
# The longest time to answer claimed checks, and the longest time that a claim waits.
INVISIBLE_MAX_S = 3600
WAIT_MAX_S = 30

HANDLE_PATTERN = r"^[0-9]{1,10}-[0-9]{1,18}$"
CHECK_EXAMPLE: dict[str, Any] = {
    "type": "halfnote.check",
    "transaction_id": "019a9f1c-1030-7b1e-8f00-1030a1030a10",
    "producer_group": "shop",
    "check": 1,
    "max_checks": 15,
    "born_at": "2026-11-21T08:00:00Z",
    "context": {"order": 1030},
    "messages": [
        {
            "message_id": "019a9f1c-1030-7b1e-8f00-1030a1030a10-0",
            "topic": "order",
            "key": "order-1030",
            "tag": None,
            "headers": {},
        }
    ],
    "handle": "1-1",
}


class ClaimRequest(Strict):
    """How many checks a producer takes, for how long, and how long it waits for the first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"max": 32, "invisible_s": 30, "wait_s": 20}]})

    max: Whole = Field(32, ge=1, le=CLAIM_MAX, description="the most checks that the answer has")
    invisible_s: Whole = Field(
        30, ge=1, le=INVISIBLE_MAX_S, description="time to answer: until then no other claim and no call gets the check"
    )
    wait_s: Whole = Field(
        0, ge=0, le=WAIT_MAX_S, description="how long to wait if no check is due; the answer comes with the first"
    )
    started: bool = Field(
        False,
        strict=True,
        description="true for the first claim of a producer that starts: checks that were not answered are due at once",
    )


class ClaimedMessage(BaseModel):
    """A message of a transaction, as a check tells it. `body` or `body_base64` only with `include_body`."""

    model_config = ConfigDict(extra="allow")

    message_id: str
    topic: str
    key: str | None
    tag: str | None
    headers: dict[str, str]


class ClaimedCheck(BaseModel):
    """A check that is out to this claim, with the fields of a check that Halfnote sends."""

    model_config = ConfigDict(json_schema_extra={"examples": [CHECK_EXAMPLE]})

    type: Literal["halfnote.check"]
    transaction_id: UUID
    producer_group: str
    check: int = Field(description="the number of this check")
    max_checks: int = Field(description="answered checks until `on_exhausted`")
    born_at: datetime
    context: Any = Field(description="the half's `context`; null if it had none")
    messages: list[ClaimedMessage]
    handle: str = Field(description="names this claim of the check in its answer")
    traceparent: str = Field("", description="the half's trace context, if it had one")


class Claimed(BaseModel):
    """The checks that are out to this claim until `answer_by`; none if none was due in time."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"answer_by": "2026-11-21T08:00:36Z", "checks": [CHECK_EXAMPLE]}]}
    )

    answer_by: datetime
    checks: list[ClaimedCheck]


def _storable(value: str) -> str:
    if "\x00" in value:
        raise ValueError("NUL cannot be stored")
    return value


class CheckVerdict(Strict):
    """The answer to one check."""

    transaction_id: Id
    verdict: Literal["commit", "rollback", "unknown"]
    handle: str | None = Field(
        None,
        pattern=HANDLE_PATTERN,
        description="of the claim that is answered. Without it, the answer is to whatever check is out. An `unknown` "
        "whose claim is over is refused; a verdict is final and always taken",
    )
    reason: Annotated[str, AfterValidator(_storable)] | None = Field(
        None,
        max_length=REASON_MAX,
        description="why, for people who read it later",
        json_schema_extra={"pattern": r"^[^\u0000]*$"},
    )


class AnswersRequest(BaseModel):
    """Answers to checks. Each is taken or refused on its own."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"answers": [{"transaction_id": CHECK_EXAMPLE["transaction_id"], "handle": "1-1", "verdict": "commit"}]}
            ]
        },
    )

    answers: list[Any] = Field(
        min_length=1,
        max_length=ANSWERS_MAX,
        json_schema_extra={"items": CheckVerdict.model_json_schema()},
    )


class AnswerOutcomes(BaseModel):
    """An outcome for each answer, in the order of the request: what `/end` answers, or a problem, and its `status`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "outcomes": [
                        {
                            "status": 200,
                            "transaction_id": CHECK_EXAMPLE["transaction_id"],
                            "verdict": "commit",
                            "source": "check",
                            "decided_at": "2026-11-21T08:00:07Z",
                            "replayed": False,
                            "messages": [
                                {"message_id": f"{CHECK_EXAMPLE['transaction_id']}-0", "topic": "order", "offset": 1030}
                            ],
                        }
                    ]
                }
            ]
        }
    )

    outcomes: list[dict[str, Any]]
