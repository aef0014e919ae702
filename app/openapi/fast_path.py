"""The fast path's part of the OpenAPI document, generated from the structs that validate its requests."""

from typing import Any

import msgspec

from app.config import Settings
from app.coordinator.wire import (
    HEADER_NAME,
    MEDIA_TYPE,
    TRANSACTIONS_MAX,
    EndAnswer,
    EndRequest,
    EndsRequest,
    HalfAnswer,
    HalfRequest,
    HalvesRequest,
    PlainAnswer,
    PlainRequest,
    PlainsRequest,
    UnknownAnswer,
)
from app.errors import (
    ContentDiffers,
    DayGone,
    Draining,
    GroupUnregistered,
    IdTimeSkew,
    Invalid,
    OutcomeUnknown,
    Overloaded,
    Problem,
    TopicReserved,
    TopicUndeclared,
    TransactionUnknown,
    VerdictConflict,
    WrongGroup,
)
from app.field_rules import JSON_BODY_TYPE, NAME_PATTERN
from app.openapi.problems import add_problems
from app.schemas.transactions import ID

MANY = (
    f"Up to {TRANSACTIONS_MAX} transactions in one request. Each takes the same steps as a request of its own: the "
    "outcomes say which were refused. A repeat is safe."
)
REF = "#/components/schemas/{name}"
BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

NEW_HALF: tuple[type[Problem], ...] = (
    ContentDiffers,
    Invalid,
    IdTimeSkew,
    GroupUnregistered,
    TopicReserved,
    TopicUndeclared,
    Draining,
    Overloaded,
    OutcomeUnknown,
)

_ORDER = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030, "total": "99.50"}}
_AT = "2026-11-21T08:00:00.125000Z"
_SENT = [{"message_id": f"{ID}-0", "topic": "order", "offset": 1030}]


def hot_schemas(settings: Settings) -> dict[str, Any]:
    """Return the schemas of the fast path's structs, with the rules that types alone cannot express."""
    _, schemas = msgspec.json.schema_components(
        [
            *(HalfRequest, HalfAnswer, EndRequest, EndAnswer, UnknownAnswer, PlainRequest, PlainAnswer),
            *(HalvesRequest, EndsRequest, PlainsRequest),
        ],
        ref_template=REF,
    )
    schemas |= {
        "HalvesAnswer": _outcomes("HalvesAnswer", [201, 200], "HalfAnswer"),
        "EndsAnswer": _outcomes("EndsAnswer", [200, 202], "EndAnswer", "UnknownAnswer"),
        "PlainsAnswer": _outcomes("PlainsAnswer", [201, 200], "PlainAnswer"),
    }
    for field in schemas["CheckPolicy"]["properties"].values():
        for variant in field.get("anyOf", ()):
            if variant.pop("multipleOf", None):
                variant["type"] = "integer"
    message = schemas["Message"]
    fields = message["properties"]
    fields["topic"]["not"] = {"pattern": r"^halfnote\."}
    fields["headers"]["anyOf"][0] |= {
        "propertyNames": {"pattern": f"^{HEADER_NAME}$"},
        "additionalProperties": {"type": "string", "pattern": NAME_PATTERN},
    }
    fields["deliver_after_s"]["anyOf"][0]["maximum"] = settings.delay_limit_s
    plain_text = {"type": "string", "contentEncoding": "base64", "pattern": BASE64}
    json_message = _variant(message, "body", JSON_BODY_TYPE, body_base64={"type": "null"})
    bytes_message = _variant(message, "body_base64", MEDIA_TYPE, body_base64=fields["body_base64"] | plain_text)
    for absent in ("anyOf", "default"):
        del bytes_message["properties"]["body_base64"][absent]
    del bytes_message["properties"]["body"]
    schemas["JsonMessage"] = json_message | {"title": "JsonMessage", "description": "A message whose body is JSON."}
    schemas["BytesMessage"] = bytes_message | {"title": "BytesMessage", "description": "A message of any other kind."}
    schemas["Message"] = {
        "title": "Message",
        "description": message["description"],
        "oneOf": [{"$ref": REF.format(name=name)} for name in ("JsonMessage", "BytesMessage")],
    }
    return schemas


def _outcomes(title: str, statuses: list[int], *answers: str) -> dict[str, Any]:
    """Return the schema of the answer to many transactions."""
    done = {
        "description": "the answer that a request of its own would get, and its `status`",
        "properties": {"status": {"type": "integer", "enum": statuses}},
        "required": ["status"],
        "allOf": [{"anyOf": [{"$ref": REF.format(name=name)} for name in answers]}],
    }
    refused = {
        "description": "the problem document that a request of its own would get, with its `Retry-After` as a field",
        "properties": {"retry_after_s": {"type": "integer"}},
        "allOf": [{"$ref": REF.format(name="ProblemDocument")}],
    }
    return {
        "title": title,
        "description": "One outcome for each transaction, in the order of the request.",
        "type": "object",
        "properties": {"outcomes": {"type": "array", "items": {"anyOf": [done, refused]}}},
        "required": ["outcomes"],
    }


def _variant(message: dict[str, Any], body: str, content_type: str, **fields: Any) -> dict[str, Any]:
    known = message["properties"]
    text, null = known["content_type"]["anyOf"]
    described = known["content_type"] | {"anyOf": [text | {"pattern": f"^{content_type}$"}, null]}
    properties = {**known, "content_type": described, **fields}
    return {**message, "properties": properties, "required": ["topic", body]}


def hot_operations() -> dict[str, dict[str, Any]]:
    """Return the operations of the fast path."""
    half = {"producer_group": "shop", "messages": [_ORDER], "context": {"order": 1030}}
    half_answer = {
        "transaction_id": ID,
        "born_at": _AT,
        "first_check_at": "2026-11-21T08:00:06.125000Z",
        "replayed": False,
        "messages": [{"message_id": f"{ID}-0", "topic": "order"}],
    }
    plain = {"producer_group": "shop", "messages": [_ORDER]}
    plain_answer = {"transaction_id": ID, "committed_at": _AT, "replayed": False, "messages": _SENT}
    end = {"transaction_id": ID, "producer_group": "shop", "verdict": "commit"}
    end_answer = {
        "transaction_id": ID,
        "verdict": "commit",
        "source": "producer",
        "decided_at": _AT,
        "replayed": False,
        "messages": _SENT,
    }

    def outcomes(status: int, done: dict[str, Any]) -> dict[str, Any]:
        refused = GroupUnregistered("Producer group `shop` is not registered.", field="producer_group")
        return {"outcomes": [{"status": status, **done}, msgspec.json.decode(refused.body())]}

    heard = {"transaction_id": ID, "verdict": "unknown", "state": "in_doubt"}
    return {
        "/half": _operation(
            "post_half",
            "Store a half message",
            "Acknowledged after its database commit. They are invisible until the transaction commits. A repeat "
            "with the same `transaction_id` is safe.",
            ("HalfRequest", half),
            {
                201: ("HalfAnswer", "Stored", half_answer),
                200: (
                    "HalfAnswer",
                    "Stored before, with the same content. With a recorded `verdict`: do no local work",
                    half_answer | {"replayed": True, "verdict": "rollback"},
                ),
            },
            NEW_HALF,
        ),
        "/end": _operation(
            "post_end",
            "Commit or roll back",
            "The first verdict is final. A repeat is safe.",
            ("EndRequest", end),
            {
                200: ("EndAnswer", "The verdict is on disk; `replayed` is true if it was recorded before", end_answer),
                202: ("UnknownAnswer", "`unknown` changes nothing", heard),
            },
            (TransactionUnknown, WrongGroup, VerdictConflict, DayGone, Invalid, Overloaded, OutcomeUnknown),
        ),
        "/messages": _operation(
            "post_messages",
            "Send messages that have nothing to coordinate",
            "Half and commit in one call: all messages or none.",
            ("PlainRequest", plain),
            {
                201: ("PlainAnswer", "Stored and committed", plain_answer),
                200: ("PlainAnswer", "Committed before, with the same content", plain_answer | {"replayed": True}),
            },
            NEW_HALF,
            many=("PlainsRequest", "PlainsAnswer", {"transactions": [plain]}, outcomes(201, plain_answer)),
        ),
        "/halves": _operation(
            "post_halves",
            "Store many half messages",
            MANY,
            ("HalvesRequest", {"halves": [half]}),
            {200: ("HalvesAnswer", "Each is stored or refused", outcomes(201, half_answer))},
            (Invalid, Overloaded),
        ),
        "/ends": _operation(
            "post_ends",
            "Commit or roll back many transactions",
            MANY,
            ("EndsRequest", {"ends": [end]}),
            {200: ("EndsAnswer", "Each is recorded or refused", outcomes(200, end_answer))},
            (Invalid, Overloaded),
        ),
    }


def _operation(
    name: str,
    summary: str,
    description: str,
    request: tuple[str, dict[str, Any]],
    answers: dict[int, tuple[str, str, dict[str, Any]]],
    refused: tuple[type[Problem], ...],
    many: tuple[str, str, dict[str, Any], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(status): {"description": text, "content": _json(schema, example)}
        for status, (schema, text, example) in answers.items()
    }
    content = _json(*request)
    if many is not None:
        of_many, answer_of_many, example_of_many, answered = many
        content = _either(content, of_many, example_of_many)
        responses["200"]["content"] = _either(responses["200"]["content"], answer_of_many, answered)
    add_problems(responses, *refused)
    return {
        "tags": ["producing"],
        "summary": summary,
        "description": description,
        "operationId": name,
        "requestBody": {"required": True, "content": content},
        "responses": responses,
    }


def _either(content: dict[str, Any], schema: str, example: dict[str, Any]) -> dict[str, Any]:
    """Return a content that may also have the schema of many transactions."""
    one = content["application/json"]
    schemas = {"oneOf": [one["schema"], {"$ref": REF.format(name=schema)}]}
    examples = {"one": {"value": one["example"]}, "many": {"value": example}}
    return {"application/json": {"schema": schemas, "examples": examples}}


def _json(schema: str, example: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(name=schema)}, "example": example}}
