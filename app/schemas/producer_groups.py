"""Requests and answers of the producer-group routes."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, WithJsonSchema

from app.schemas.addresses import HOST, PORT
from app.schemas.fields import WHOLE, PutChanges, Strict
from app.schemas.totals import TOTAL, TotalShown
from app.secrets.signatures import secret_fault
from app.verdicts import CheckOutcome

URLS_MAX = 16
_URL = rf"https?://{HOST}({PORT})?([/?][!-\"$-~]*)?"
_url = re.compile(_URL).fullmatch
_GROUP4 = "[A-Za-z0-9+/]{4}"
_SECRET = rf"whsec_({_GROUP4}){{8,20}}({_GROUP4}|[A-Za-z0-9+/]{{3}}=|({_GROUP4})?[A-Za-z0-9+/]{{2}}==)?"


def _check_url(value: str) -> str:
    if not _url(value):
        raise ValueError("must be an http:// or https:// URL in ASCII, without user, password or fragment")
    return value


def _check_secret(value: SecretStr) -> SecretStr:
    fault = secret_fault(value.get_secret_value())
    if fault:
        raise ValueError(fault)
    return value


CheckUrlText = Annotated[
    str,
    AfterValidator(_check_url),
    WithJsonSchema({"type": "string", "format": "uri", "maxLength": 2048, "pattern": f"^{_URL}$"}),
]
SecretText = Annotated[
    SecretStr,
    AfterValidator(_check_secret),
    WithJsonSchema({"type": "string", "pattern": f"^{_SECRET}$"}),
]

SHAPE_EXAMPLE: dict[str, Any] = {
    "check_urls": ["http://127.0.0.1:9000/halfnote/check"],
    "immunity_s": 6,
    "interval_s": 30,
    "max_checks": 15,
    "check_timeout_s": 5,
    "unanswered_park_s": 259_200,
    "on_exhausted": "rollback",
    "check_max_in_flight": 32,
    "ping_interval_s": 60,
    "checks": "call",
    "batch_checks": False,
}
EXAMPLE: dict[str, Any] = {
    "name": "shop",
    **SHAPE_EXAMPLE,
    "claimed_at": None,
    "held_until": None,
    "created_at": "2026-11-21T08:00:00Z",
    "updated_at": "2026-11-21T08:00:00Z",
    "urls": [
        {
            "url": "http://127.0.0.1:9000/halfnote/check",
            "last_ok": "2026-11-21T08:01:00Z",
            "last_error": None,
            "last_error_at": None,
        }
    ],
}
CHANGES_EXAMPLE: dict[str, Any] = {"changed": ["interval_s"], "reset": ["interval_s"]}


# The limits of a group's numbers, for PUT and PATCH. They come first, as in fields.Position.
DayS: TypeAlias = Annotated[int, Field(ge=1, le=86_400), WHOLE]
PingS: TypeAlias = Annotated[int, Field(ge=5, le=86_400), WHOLE]
ParkS: TypeAlias = Annotated[int, Field(ge=60, le=2_592_000), WHOLE]
AnswerS: TypeAlias = Annotated[int, Field(ge=1, le=60), WHOLE]
Checks: TypeAlias = Annotated[int, Field(ge=1, le=1000), WHOLE]
AtOnce: TypeAlias = Annotated[int, Field(ge=1, le=1000), WHOLE]


class GroupPut(Strict):
    """A producer group in a PUT. Durations are seconds. A missing field gets its default."""

    model_config = ConfigDict(json_schema_extra={"examples": [SHAPE_EXAMPLE]})

    check_urls: Annotated[
        list[CheckUrlText],
        Field(
            default_factory=list,
            max_length=URLS_MAX,
            description="used in rotation; the next URL at once if one does not answer. Empty only with "
            "`checks: claim`",
            json_schema_extra={"uniqueItems": True},
        ),
    ]
    checks: Literal["call", "claim"] = Field(
        "call",
        description="`call`: Halfnote calls the check URLs. `claim`: producers may also claim the checks "
        "(`POST /producer-groups/{name}/checks/claim`), and no URL is needed",
    )
    batch_checks: bool = Field(
        False,
        strict=True,
        description="true: one call asks about up to 100 transactions, and its answer has a verdict for each. A call "
        "has at most as many as `check_max_in_flight` and HALFNOTE_CHECK_CONCURRENCY allow",
    )
    immunity_s: DayS = Field(6, description="check immunity: time before the first check of a new half")
    interval_s: DayS = Field(30, description="time between checks")
    max_checks: Checks = Field(15, description="answered checks until `on_exhausted`")
    check_timeout_s: AnswerS = Field(5, description="time for a whole answer, for each URL")
    unanswered_park_s: ParkS = Field(
        259_200, description="time without an answered check after which a transaction is parked"
    )
    on_exhausted: Literal["rollback", "park"] = Field(
        "rollback", description="the result of `max_checks` answers of unknown"
    )
    check_max_in_flight: AtOnce = Field(32, description="checks in flight at once, over all replicas")
    ping_interval_s: PingS = Field(60, description="how often each URL is pinged")
    secret: SecretText | None = Field(None, description="signs checks and pings; created for a new group if not given")


class GroupPatch(Strict):
    """A change of some fields of a group. Null gives a field its default. The limits are those of PUT."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"interval_s": 60}]})

    check_urls: Annotated[
        list[CheckUrlText],
        Field(default_factory=list, max_length=URLS_MAX, json_schema_extra={"uniqueItems": True}),
    ]
    checks: Literal["call", "claim"] | None = None
    batch_checks: Annotated[bool, Field(strict=True)] | None = None
    immunity_s: DayS | None = None
    interval_s: DayS | None = None
    max_checks: Checks | None = None
    check_timeout_s: AnswerS | None = None
    unanswered_park_s: ParkS | None = None
    on_exhausted: Literal["rollback", "park"] | None = None
    check_max_in_flight: AtOnce | None = None
    ping_interval_s: PingS | None = None
    secret: SecretText | None = Field(None, description="a new secret; for 24 hours the former signs as well")


class UrlState(BaseModel):
    """The last results of one check URL, from checks and pings."""

    url: str
    last_ok: datetime | None = Field(description="the time of its last answer")
    last_error: str | None = Field(description="the error of its last failure")
    last_error_at: datetime | None


class GroupAnswer(BaseModel):
    """A producer group, without its secret."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    name: str
    check_urls: list[str]
    immunity_s: int
    interval_s: int
    max_checks: int
    check_timeout_s: int
    unanswered_park_s: int
    on_exhausted: Literal["rollback", "park"]
    check_max_in_flight: int
    ping_interval_s: int
    checks: Literal["call", "claim"]
    batch_checks: bool
    claimed_at: datetime | None = Field(description="when a producer last claimed checks, within 10 s; null: never")
    held_until: datetime | None = Field(
        description="until then no check is sent, because an answer had `Retry-After`; a PUT or PATCH of the "
        "group, also one that changes nothing, ends it. null: the group is asked"
    )
    created_at: datetime
    updated_at: datetime
    urls: list[UrlState] = Field(description="one for each of `check_urls`")


class GroupChanged(PutChanges, GroupAnswer):
    """The answer of a PUT: the group, and what changed."""

    model_config = ConfigDict(json_schema_extra={"examples": [{**EXAMPLE, **CHANGES_EXAMPLE}]})


class GroupCreated(GroupChanged):
    """A new producer group, with its secret unless the request gave one."""

    secret: str | None = Field(description="shown only in this answer; null if the request gave it, or in a dry run")


class GroupStandingShown(BaseModel):
    """The undecided transactions of a group."""

    in_doubt: int
    parked: int
    exact: bool = Field(description="false: there are at least so many; 1,000 transactions are looked at")


class CheckAnswersShown(BaseModel):
    """What checks of the group's undecided transactions answered."""

    outcome: CheckOutcome
    checks: int = Field(description="checks with this outcome; of 200 transactions, the last 50 checks of each")
    last_at: datetime


class GroupShown(GroupAnswer):
    """A producer group and its state."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    **EXAMPLE,
                    "standing": {"in_doubt": 2, "parked": 0, "exact": True},
                    "answers": [{"outcome": "unknown", "checks": 3, "last_at": "2026-11-21T08:01:00Z"}],
                }
            ]
        }
    )

    standing: GroupStandingShown
    answers: list[CheckAnswersShown] = Field(description="by outcome, the most frequent first")


class GroupListed(GroupAnswer):
    """A producer group in a list."""

    standing: GroupStandingShown | None = Field(None, description="null unless it was asked for")


class GroupList(BaseModel):
    """A page of producer groups."""

    items: list[GroupListed]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")
    total: TotalShown | None = Field(None, description=TOTAL)


class PingResult(BaseModel):
    """The result of a ping of one URL."""

    url: str
    ok: bool = Field(description="answered with 2xx in time")
    status: int | None
    duration_ms: int
    error: str | None


class PingAnswer(BaseModel):
    """The result of a ping of each URL."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "results": [
                        {
                            "url": "http://127.0.0.1:9000/halfnote/check",
                            "ok": True,
                            "status": 204,
                            "duration_ms": 3,
                            "error": None,
                        }
                    ]
                }
            ]
        }
    )

    results: list[PingResult]


class NewSecret(BaseModel):
    """A new secret."""

    secret: str = Field(description="shown this once", examples=["whsec_" + "M" * 43 + "="])
    former_signs_until: datetime | None = Field(description="until then the former secret signs as well")
    earlier_signs_until: datetime | None = Field(
        description="not null: the former secret was less than 24 hours old, and until then one that is older signs as "
        "well. Another person may have given the former secret to receivers: they need the new one too"
    )
