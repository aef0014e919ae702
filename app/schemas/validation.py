"""Read values as a model of the API, with the API's problem for the first one that is invalid."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from app.errors import Invalid

Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Return the values as a model of the API. Raises Invalid with the first field at fault."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise Invalid(f"`{name}`: {first['msg'].removeprefix('Value error, ')}.", field=name) from None
