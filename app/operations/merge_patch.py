"""JSON Merge Patch (RFC 7396): a request names the fields that change, and null gives a field its default."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def merged(target: Any, patch: Any) -> Any:
    """Return a JSON value with a patch applied."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def patched(model: type[Model], stored: Mapping[str, Any], patch: Mapping[str, Any]) -> Model:
    """Return a resource in the form of its PUT with a patch applied. Raises RequestValidationError."""
    whole = merged(stored, patch)
    try:
        return model.model_validate_json(msgspec.json.encode(whole))
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_context=False)]
        raise RequestValidationError(found, body=whole) from None
