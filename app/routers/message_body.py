"""Puts a message's body into an answer, byte for byte."""

import base64
from typing import Any

import msgspec
from fastapi.responses import Response
from pydantic import BaseModel

from app.field_rules import json_of
from app.permissions import Caller


def with_body(shown: BaseModel, caller: Caller, body: bytes, content_type: str) -> Response:
    """Return the answer with the body's own bytes, if the caller may read bodies.

    Decoding and encoding the body would change its numbers.
    """
    fields: dict[str, Any] = shown.model_dump(mode="json", exclude_unset=True)
    json = json_of(body, content_type) if caller.reads_bodies else None
    if not caller.reads_bodies:
        fields["body_hidden"] = True
    elif json is None:
        fields["body_base64"] = base64.b64encode(body).decode()
    else:
        fields["body"] = json
    return Response(msgspec.json.encode(fields), media_type="application/json")
