"""Requests and answers of the API key routes."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, WithJsonSchema, model_validator

from app.field_rules import NAME_MAX, RATE_LEAST_PER_S, has_control_character
from app.permissions import KEY_CHARACTERS, PREFIX, Role, is_key
from app.schemas.fields import Name, PutChanges, Strict, Time, Whole
from app.schemas.subscription_put import TopicPattern
from app.schemas.totals import TOTAL, TotalShown

SCOPE_MAX = 100
OVERLAP_S = 86_400
OVERLAP_MAX_S = 30 * 86_400
# The scopes that each role requires and allows.
SCOPES: dict[Role, tuple[str, ...]] = {
    Role.PRODUCER: ("producer_groups", "topics"),
    Role.SUBSCRIBER: ("subscriptions", "topics"),
}
# The roles whose keys have the permission `bodies`. The others need bodies for their work, or can make other keys.
BODIES_OF = (Role.OPERATOR, Role.VIEWER)
ALL_SCOPES = ("producer_groups", "topics", "subscriptions")


def _check_pattern(value: str) -> str:
    if not 1 <= len(value) <= NAME_MAX or has_control_character(value) or "*" in value[:-1]:
        raise ValueError("a name, or the beginning of one with a single `*` at its end, of 1 to 255 characters")
    return value


_PATTERN = r"^([^\u0000-\u001f\u007f*]+\*?|\*)$"
NamePattern = Annotated[
    str,
    AfterValidator(_check_pattern),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": NAME_MAX, "pattern": _PATTERN}),
]
Names = Annotated[list[NamePattern], Field(max_length=SCOPE_MAX)]
Topics = Annotated[list[TopicPattern], Field(max_length=SCOPE_MAX)]

KEY_EXAMPLE: dict[str, Any] = {
    "key_id": 1030,
    "name": "shop",
    "prefix": "hn_4fTq9Z",
    "role": "producer",
    "producer_groups": ["shop"],
    "topics": ["order", "order.*"],
    "subscriptions": [],
    "rate_per_s": None,
    "bodies": None,
    "created_at": "2026-11-21T08:00:00Z",
    "created_by": "dana",
    "rotated_from": None,
    "expires_at": None,
    "revoked_at": None,
    "last_used_at": "2026-11-21T08:30:00Z",
}
_EXAMPLES: list[Any] = [
    {"name": "shop", "role": "producer", "producer_groups": ["shop"], "topics": ["order", "order.*"]},
    {"name": "mailer", "role": "subscriber", "subscriptions": ["mailer"], "topics": ["order"]},
    {"name": "dana", "role": "operator"},
    {"name": "support", "role": "viewer", "bodies": True},
]


def _variant(role: Role) -> dict[str, Any]:
    wanted = SCOPES.get(role, ())
    properties: dict[str, Any] = {"role": {"const": role.value}}
    if role not in BODIES_OF:
        properties["bodies"] = {"const": None}
    properties |= {name: {"minItems": 1} if name in wanted else {"maxItems": 0} for name in ALL_SCOPES}
    return {"properties": properties, "required": ["role", *wanted]}


class ApiKeyNew(Strict):
    """A new key. A producer's key has groups and topics, a subscriber's key has subscriptions and topics."""

    model_config = ConfigDict(
        json_schema_extra={"examples": _EXAMPLES, "anyOf": [_variant(role) for role in Role]},
    )

    name: Name = Field(description="the owner of the key; several keys may have one name", examples=["shop"])
    role: Role = Field(examples=["producer"])
    producer_groups: Names = Field([], description="a producer's groups: names, or prefixes with a `*`")
    topics: Topics = Field(
        [],
        description="the topics that a producer publishes to, or a subscriber reads: names, or prefixes with a `*`. "
        "Reserved topics (`halfnote.…`) only if a name or prefix begins with `halfnote.`",
    )
    subscriptions: Names = Field([], description="a subscriber's subscriptions: names, or prefixes with a `*`")
    rate_per_s: float | None = Field(
        None, ge=RATE_LEAST_PER_S, le=1_000_000, strict=True, description="instead of HALFNOTE_KEY_RATE_PER_S"
    )
    bodies: bool | None = Field(
        None,
        strict=True,
        description="of a viewer or an operator: whether answers have the bodies of messages and the contexts of "
        "halves; null: of an operator they have, of a viewer not",
    )
    expires_at: Time | None = Field(None, description="when it expires; null: valid until revoked")

    @model_validator(mode="after")
    def _scopes_fit_the_role(self) -> "ApiKeyNew":
        wanted = SCOPES.get(self.role, ())
        for name in ALL_SCOPES:
            if name in wanted and not getattr(self, name):
                raise ValueError(f"`{name}` is needed by a {self.role}'s key; `*` stands for all")
            if name not in wanted and getattr(self, name):
                raise ValueError(f"`{name}` means nothing to the role {self.role}")
        if self.bodies is not None and self.role not in BODIES_OF:
            raise ValueError(f"`bodies` means nothing to the role {self.role}")
        return self


def _check_key(value: SecretStr) -> SecretStr:
    if not is_key(value.get_secret_value()):
        raise ValueError(f"must be `hn_` and {KEY_CHARACTERS} to 128 random letters or digits")
    return value


ChosenKey = Annotated[
    SecretStr,
    AfterValidator(_check_key),
    WithJsonSchema(
        {"type": "string", "writeOnly": True, "pattern": f"^{PREFIX}[0-9A-Za-z]{{{KEY_CHARACTERS},128}}$"},
    ),
]


class ApiKeyPost(ApiKeyNew):
    """A new key in a POST."""

    key: ChosenKey | None = Field(
        None,
        description="the key itself, as `hn_$(openssl rand -hex 32)` makes it, for what takes keys from a store of "
        "secrets. If not given, Halfnote makes it",
    )


class RotateRequest(Strict):
    """Options of a key rotation."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"overlap_s": 3600}]})

    overlap_s: Whole = Field(OVERLAP_S, ge=0, le=OVERLAP_MAX_S, description="how long the former key stays valid")


class ApiKeyShown(BaseModel):
    """A key without its secret part."""

    model_config = ConfigDict(json_schema_extra={"examples": [KEY_EXAMPLE]})

    key_id: int
    name: str
    prefix: str = Field(description="the first characters, to distinguish keys")
    role: Role
    producer_groups: list[str]
    topics: list[str]
    subscriptions: list[str]
    rate_per_s: float | None
    bodies: bool | None = Field(description="whether answers have bodies; null: as the role has")
    created_at: datetime
    created_by: str | None
    rotated_from: int | None = Field(description="the key that this key replaced")
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(description="to the minute")


class ApiKeyChanged(PutChanges, ApiKeyShown):
    """The answer of a PUT: the key, and what changed."""

    model_config = ConfigDict(json_schema_extra={"examples": [{**KEY_EXAMPLE, "changed": ["topics"], "reset": []}]})


class ApiKeyMade(ApiKeyShown):
    """A new key with its secret."""

    model_config = ConfigDict(json_schema_extra={"examples": [{**KEY_EXAMPLE, "key": "hn_" + "4" * 43}]})

    key: str | None = Field(
        description="shown only in this answer; null if the request gave it. Halfnote stores only its SHA-256"
    )


class ApiKeyPage(BaseModel):
    """A page of keys."""

    items: list[ApiKeyShown]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")
    total: TotalShown | None = Field(None, description=TOTAL)
