"""The six kinds of destinations, in PUT requests and in answers. Secrets are accepted and never shown.

A rule over several fields is written twice, side by side: as a schema for the document, and as a check.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, SecretStr, ValidationInfo, WithJsonSchema, field_validator, model_validator

from app.schemas.addresses import AmqpUrl, HostPort, NatsUrl, RedisUrl
from app.schemas.destination_fields import (
    PRIVATE_KEY,
    SHARED_SECRET,
    Credential,
    KafkaTopic,
    OwnHeaders,
    RoutingKey,
    SigningSecret,
    Subject,
)
from app.schemas.fields import Name, Strict, Whole
from app.schemas.producer_groups import CheckUrlText
from app.secrets.signatures import kind_of

WEBHOOK: dict[str, Any] = {"type": "webhook", "url": "http://127.0.0.1:9001/orders"}
WEBHOOK_EXAMPLE: dict[str, Any] = {**WEBHOOK, "headers": {"authorization": "Bearer receiver-token"}}
WEBHOOK_SHOWN_EXAMPLE: dict[str, Any] = {**WEBHOOK, "header_names": ["authorization"]}
RABBITMQ_EXAMPLE: dict[str, Any] = {
    "type": "rabbitmq",
    "url": "amqp://127.0.0.1:5672/shop",
    "exchange": "orders",
    "routing_key": "{topic}.{tag}",
    "username": "halfnote",
}
NATS_EXAMPLE: dict[str, Any] = {"type": "nats", "url": "nats://127.0.0.1:4222", "subject": "shop.{topic}"}
KAFKA_EXAMPLE: dict[str, Any] = {"type": "kafka", "bootstrap": ["127.0.0.1:9092"], "topic": "shop-{topic}"}
REDIS_EXAMPLE: dict[str, Any] = {
    "type": "redis",
    "url": "redis://127.0.0.1:6379/0",
    "stream": "shop:{topic}",
    "maxlen": 1_000_000,
}
PUT_EXAMPLES: list[dict[str, Any]] = [
    WEBHOOK_EXAMPLE,
    {**RABBITMQ_EXAMPLE, "password": "a-password"},
    NATS_EXAMPLE,
    KAFKA_EXAMPLE,
    REDIS_EXAMPLE,
]
PULL_EXAMPLE: dict[str, Any] = {"type": "pull"}

_STREAM_MAX = 1_000_000_000_000
# Beside `| None` pydantic writes a limit into the document by a name that means nothing there.
StreamLength = Annotated[
    Whole,
    Field(ge=1, le=_STREAM_MAX),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _STREAM_MAX}),
]
_NULL = {"type": "null"}
_KEPT = "not shown; kept by a PUT that leaves it out, as long as type, address and `username` stay"
_TEMPLATE = "; {topic}, {key}, {tag} and {group} stand for the message's"


def _when(given: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"properties": given, "required": required}


def _with_user(value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
    if value is not None and info.data.get("username") is None:
        raise ValueError("needs a `username`")
    return value


class WebhookShape(Strict):
    """A webhook: each message is a signed POST of its body, or of several messages with `mode: batch` or `auto`."""

    type: Literal["webhook"]
    url: CheckUrlText
    mode: Literal["binary", "structured", "batch", "auto"] = Field(
        "binary",
        description="of CloudEvents 1.0: binary, the body verbatim and the rest in headers; structured, one JSON "
        "document; batch, a JSON array of up to `batch_max`; auto, binary for a message that waits alone, else batch, "
        "for a receiver that takes both",
    )
    batch_max: Whole = Field(
        100, ge=1, le=1000, description="messages in a request at most, with `mode: batch` or `auto`"
    )
    signing: Literal["v1", "v1a"] = Field(
        "v1", description="Standard Webhooks: v1, HMAC by a shared secret; v1a, ed25519, verified by the `public_key`"
    )
    consent: bool = Field(
        False,
        strict=True,
        description="ask the receiver first (CloudEvents webhook handshake, `OPTIONS`), each time that the URL is new; "
        "the rate that it grants bounds `rate_per_s`",
    )


class WebhookPut(WebhookShape):
    """A webhook in a PUT."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [WEBHOOK_EXAMPLE],
            "anyOf": [
                _when({"signing": {"const": "v1"}, "secret": {"anyOf": [{"pattern": SHARED_SECRET}, _NULL]}}, []),
                _when(
                    {"signing": {"const": "v1a"}, "secret": {"anyOf": [{"pattern": PRIVATE_KEY}, _NULL]}}, ["signing"]
                ),
            ],
        }
    )

    headers: OwnHeaders | None = Field(
        None,
        description="sent with each delivery; not those of HTTP itself, nor `webhook-`, `ce-` and `halfnote-`. Values "
        "are not shown; kept by a PUT that leaves them out, as long as scheme, host and port of `url` stay",
    )
    secret: SigningSecret | None = Field(
        None,
        description="signs deliveries: `whsec_…` with v1, `whsk_…` with v1a; if not given, made for a new subscription "
        "and kept by a later PUT",
    )

    @field_validator("secret")
    @classmethod
    def _signs(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and kind_of(value.get_secret_value()) != info.data.get("signing"):
            raise ValueError("must begin with `whsec_` for signing v1, with `whsk_` for v1a")
        return value


class WebhookShown(WebhookShape):
    """A webhook in an answer."""

    model_config = ConfigDict(json_schema_extra={"examples": [WEBHOOK_SHOWN_EXAMPLE]})

    header_names: list[str] = Field(default_factory=list, description="of its own headers; their values are secret")
    public_key: str | None = Field(None, description="`whpk_…`, by which a receiver verifies v1a; null with v1")
    granted_rate_per_s: float | None = Field(
        None, description="what the receiver granted; null: no bound, or not asked"
    )


class RabbitShape(Strict):
    """RabbitMQ: persistent, mandatory messages, delivered when the broker confirmed them."""

    model_config = ConfigDict(json_schema_extra={"examples": [RABBITMQ_EXAMPLE]})

    type: Literal["rabbitmq"]
    url: AmqpUrl = Field(description="a vhost other than `/` is the path, percent-encoded")
    exchange: str = Field(
        "", max_length=127, pattern=r"^[ -~]*$", description="it must exist; empty: the default one, to queues by name"
    )
    routing_key: RoutingKey | None = Field(None, description="not given: the topic" + _TEMPLATE)
    username: Name | None = None


class RabbitPut(RabbitShape):
    """RabbitMQ in a PUT."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{**RABBITMQ_EXAMPLE, "password": "a-password"}],
            "anyOf": [_when({"username": {"type": "string"}}, ["username"]), _when({"password": _NULL}, [])],
        }
    )

    password: Credential | None = Field(None, description=_KEPT)

    _needs_user = field_validator("password")(_with_user)


class NatsShape(Strict):
    """NATS JetStream: a message counts as delivered when a stream that has its subject acknowledged it."""

    model_config = ConfigDict(json_schema_extra={"examples": [NATS_EXAMPLE]})

    type: Literal["nats"]
    url: NatsUrl = Field(description="tls:// insists on TLS")
    subject: Subject | None = Field(None, description="a stream must have it; not given: the topic" + _TEMPLATE)
    username: Name | None = None


class NatsPut(NatsShape):
    """NATS JetStream in a PUT."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [NATS_EXAMPLE],
            "anyOf": [
                _when({"username": {"type": "string"}, "token": _NULL}, ["username"]),
                _when({"username": _NULL, "password": _NULL}, []),
            ],
        }
    )

    password: Credential | None = Field(None, description=_KEPT)
    token: Credential | None = Field(None, description="instead of `username` and `password`; not shown; kept as they")

    _needs_user = field_validator("password")(_with_user)

    @field_validator("token")
    @classmethod
    def _alone(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and info.data.get("username") is not None:
            raise ValueError("is used instead of `username` and `password`; send one of the two")
        return value


class KafkaShape(Strict):
    """Kafka: an idempotent producer with acks=all; the message's key chooses the partition."""

    model_config = ConfigDict(json_schema_extra={"examples": [KAFKA_EXAMPLE]})

    type: Literal["kafka"]
    bootstrap: list[HostPort] = Field(min_length=1, max_length=16, description="brokers to begin with")
    topic: KafkaTopic | None = Field(None, description="not given: the message's" + _TEMPLATE)
    tls: bool = Field(False, strict=True)
    sasl: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(None, description="with `username`")
    username: Name | None = None


class KafkaPut(KafkaShape):
    """Kafka in a PUT."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [KAFKA_EXAMPLE],
            "anyOf": [
                _when({"sasl": {"type": "string"}, "username": {"type": "string"}}, ["sasl", "username"]),
                _when({"sasl": _NULL, "username": _NULL, "password": _NULL}, []),
            ],
        }
    )

    password: Credential | None = Field(None, description=_KEPT)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sasl is None and (self.username is not None or self.password is not None):
            raise ValueError("`username` and `password` need a `sasl` mechanism")
        if self.sasl is not None and self.username is None:
            raise ValueError("`sasl` needs a `username`")
        return self


class RedisShape(Strict):
    """Redis Streams: one entry a message."""

    model_config = ConfigDict(json_schema_extra={"examples": [REDIS_EXAMPLE]})

    type: Literal["redis"]
    url: RedisUrl = Field(description="the path is the database's number")
    stream: RoutingKey | None = Field(None, description="its key; not given: the topic" + _TEMPLATE)
    maxlen: StreamLength | None = Field(None, description="trim the stream to about this many entries; omitted: never")
    username: Name | None = None


class RedisPut(RedisShape):
    """Redis Streams in a PUT."""

    password: Credential | None = Field(None, description=_KEPT)


class PullShape(Strict):
    """No destination: consumers claim the messages, by `POST /subscriptions/{name}/claim`."""

    model_config = ConfigDict(json_schema_extra={"examples": [PULL_EXAMPLE]})

    type: Literal["pull"]


DestinationPut = Annotated[
    WebhookPut | RabbitPut | NatsPut | KafkaPut | RedisPut | PullShape, Field(discriminator="type")
]
DestinationShown = Annotated[
    WebhookShown | RabbitShape | NatsShape | KafkaShape | RedisShape | PullShape, Field(discriminator="type")
]
