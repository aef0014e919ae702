"""How a message's body stands in an answer: as the producer's own bytes."""

import base64
from typing import Any

import msgspec
from fastapi.responses import Response
from pydantic import BaseModel

from app.decoding import check_json
from app.errors import MalformedJson
from app.schemas import is_json_type


def with_body(shown: BaseModel, body: bytes, content_type: str) -> Response:
    """Return the answer with the body spliced in as it is: through Python's values numbers would change."""
    fields: dict[str, Any] = shown.model_dump(mode="json", exclude_unset=True)
    if is_json_type(content_type) and _is_json(body):
        fields["body"] = msgspec.Raw(body)
    else:
        fields["body_base64"] = base64.b64encode(body).decode()
    return Response(msgspec.json.encode(fields), media_type="application/json")


def _is_json(body: bytes) -> bool:
    # A producer may send bytes under a JSON content type by `body_base64`.
    try:
        check_json(body)
    except MalformedJson:
        return False
    return True
