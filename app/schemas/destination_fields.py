"""Types of a destination's fields: headers, secrets, and names with placeholders."""

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, WithJsonSchema

from app.field_rules import NAME_PATTERN, has_control_character, header_fault
from app.secrets.signatures import secret_fault

HEADERS_MAX = 32
HEADER_NAME_MAX = 128
HEADER_VALUE_MAX = 4096
CREDENTIAL_MAX = 4096

_HEADER_NAME = "[A-Za-z][A-Za-z0-9-]*"
_HEADER_VALUE = "([!-~]([ -~]*[!-~])?)?"
_GROUP4 = "[A-Za-z0-9+/]{4}"
# 24 to 64 bytes that both sides know; or an ed25519 private key: its seed of 32 bytes, or that and the public key.
SHARED_SECRET = rf"^whsec_({_GROUP4}){{8,20}}({_GROUP4}|[A-Za-z0-9+/]{{3}}=|({_GROUP4})?[A-Za-z0-9+/]{{2}}==)?$"
PRIVATE_KEY = rf"^whsk_(({_GROUP4}){{10}}[A-Za-z0-9+/]{{3}}=|({_GROUP4}){{21}}[A-Za-z0-9+/]{{2}}==)$"

_PLACEHOLDER = r"\{(topic|key|tag|group)\}"
_WORD = "[A-Za-z0-9_-]"
_SUBJECT_TOKEN = rf"([!-)+-\-/-=?-z|~]|{_PLACEHOLDER})+"


def _check_headers(value: dict[str, str]) -> dict[str, str]:
    for name, content in value.items():
        if len(name) > HEADER_NAME_MAX or not re.fullmatch(_HEADER_NAME, name):
            raise ValueError(f"a name is a letter, then letters, digits and `-`, {HEADER_NAME_MAX} in all")
        if len(content) > HEADER_VALUE_MAX:
            raise ValueError(f"`{name}` is longer than {HEADER_VALUE_MAX} characters")
        fault = header_fault(name, content)
        if fault:
            raise ValueError(f"`{name}` {fault}")
    if len({name.lower() for name in value}) < len(value):
        raise ValueError("two names differ only by case")
    return value


def _check_secret(value: SecretStr) -> SecretStr:
    fault = secret_fault(value.get_secret_value(), ("v1", "v1a"))
    if fault:
        raise ValueError(fault)
    return value


def _check_credential(value: SecretStr) -> SecretStr:
    if not 0 < len(value) <= CREDENTIAL_MAX or has_control_character(value.get_secret_value()):
        raise ValueError(f"1 to {CREDENTIAL_MAX} characters, none of them a control character")
    return value


def _filled(pattern: str, longest: int, form: str) -> Callable[[str], str]:
    whole = re.compile(pattern).fullmatch

    def check(value: str) -> str:
        if len(value) > longest or not whole(value):
            raise ValueError(
                f"1 to {longest} characters, {form}; of braces only {{topic}}, {{key}}, {{tag}}, {{group}}"
            )
        return value

    return check


def _text(pattern: str, longest: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "minLength": 1, "maxLength": longest, "pattern": f"^{pattern}$"})


OwnHeaders = Annotated[
    dict[str, str],
    AfterValidator(_check_headers),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": HEADERS_MAX,
            "propertyNames": {"pattern": f"^{_HEADER_NAME}$", "maxLength": HEADER_NAME_MAX},
            "additionalProperties": {"type": "string", "maxLength": HEADER_VALUE_MAX, "pattern": f"^{_HEADER_VALUE}$"},
        }
    ),
    Field(max_length=HEADERS_MAX),
]
SigningSecret = Annotated[
    SecretStr,
    AfterValidator(_check_secret),
    WithJsonSchema(
        {"type": "string", "writeOnly": True, "anyOf": [{"pattern": SHARED_SECRET}, {"pattern": PRIVATE_KEY}]}
    ),
]
Credential = Annotated[
    SecretStr,
    AfterValidator(_check_credential),
    WithJsonSchema(
        {
            "type": "string",
            "writeOnly": True,
            "minLength": 1,
            "maxLength": CREDENTIAL_MAX,
            "pattern": NAME_PATTERN,
        }
    ),
]

# What is AMQP's is a short string of at most 255 bytes; what the placeholders make too long is refused when it is sent.
_ROUTING_KEY = rf"([^{{}}\u0000-\u001f\u007f]|{_PLACEHOLDER})+"
_SUBJECT = rf"{_SUBJECT_TOKEN}(\.{_SUBJECT_TOKEN})*"
# Not of dots alone: `.` and `..` are no names.
_KAFKA_TOPIC = rf"\.*({_WORD}|{_PLACEHOLDER})({_WORD}|\.|{_PLACEHOLDER})*"
RoutingKey = Annotated[
    str,
    AfterValidator(_filled(_ROUTING_KEY, 255, "none of them a control character")),
    _text(_ROUTING_KEY, 255),
]
Subject = Annotated[
    str,
    AfterValidator(_filled(_SUBJECT, 255, "printable ASCII without spaces and wildcards, with `.` between tokens")),
    _text(_SUBJECT, 255),
]
KafkaTopic = Annotated[
    str,
    AfterValidator(_filled(_KAFKA_TOPIC, 249, "letters, digits, `.`, `_` and `-`")),
    _text(_KAFKA_TOPIC, 249),
]
