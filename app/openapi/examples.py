"""Builds an example for every body in the OpenAPI document from the examples of its fields.

FastAPI leaves nulls out of its document, and so out of examples. A required field that is null must not be missing.
"""

from collections.abc import Mapping
from typing import Any

from app.schemas.transactions import AT, ID

JSON = "application/json"
NULL = {"type": "null"}
# Defaults for a field that has only a type.
BY_FORMAT = {"uuid": ID, "date-time": AT, "date": AT[:10]}
BY_TYPE: dict[str, Any] = {"boolean": False, "integer": 1, "number": 1.0, "object": {}, "null": None}


def add_examples(document: dict[str, Any]) -> None:
    """Give each JSON body an example that fits its schema. Raises KeyError for a schema without a possible example."""
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        if "examples" in schema:
            schema["examples"] = [_with_nulls(example, schema, schemas) for example in schema["examples"]]
    for methods in document["paths"].values():
        for operation in methods.values():
            bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
            for content in (body["content"][JSON] for body in bodies if JSON in body.get("content", {})):
                _complete(content, schemas)


def _complete(content: dict[str, Any], schemas: Mapping[str, Any]) -> None:
    schema = content["schema"]
    for named in content.get("examples", {}).values():
        named["value"] = _with_nulls(named["value"], schema, schemas)
    if "example" in content:
        content["example"] = _with_nulls(content["example"], schema, schemas)
    elif "examples" not in content:
        content["example"] = example_of(schema, schemas)


def example_of(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """Return an example of a schema: its own, or one built from its parts.

    An optional field without an example is left out. Raises KeyError for required text without an example.
    """
    schema = _resolved(schema, schemas)
    if "examples" in schema:
        return schema["examples"][0]
    for known in ("example", "const", "default"):
        if known in schema:
            return schema[known]
    if "enum" in schema:
        return schema["enum"][0]
    variants = schema.get("anyOf") or schema.get("oneOf")
    if variants:
        return None if NULL in variants else example_of(variants[0], schemas)
    if "properties" in schema:
        return {
            name: example_of(field, schemas)
            for name, field in schema["properties"].items()
            if name in schema.get("required", ()) or not {"example", "examples"}.isdisjoint(_resolved(field, schemas))
        }
    if schema.get("type") == "array":
        return [example_of(schema["items"], schemas)]
    return BY_FORMAT[schema["format"]] if "format" in schema else BY_TYPE[schema["type"]]


def _with_nulls(example: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """Return an example with null for each required field that is missing."""
    schema = _resolved(schema, schemas)
    if isinstance(example, list) and "items" in schema:
        return [_with_nulls(one, schema["items"], schemas) for one in example]
    if not isinstance(example, dict) or "properties" not in schema:
        return example
    fields = schema["properties"]
    lacking = {name: None for name in schema.get("required", ()) if name not in example}
    return lacking | {
        name: _with_nulls(value, fields[name], schemas) if name in fields else value for name, value in example.items()
    }


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema
