"""Problems in the OpenAPI document: one response per status, with each problem type and an example."""

import inspect
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from app.errors import TYPE_PREFIX, Problem

MEDIA_TYPE = "application/problem+json"


class ProblemDocument(BaseModel):
    """RFC 9457 problem details. Some types have further fields (docs/errors.md)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="the problem's type, a path that explains it", examples=["/problems/invalid"])
    title: str
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="what is wrong with this request, and what to do")
    field: str | None = Field(None, description="the field at fault, as `messages[0].topic`")


def add_problems(responses: dict[str, Any], *kinds: type[Problem]) -> None:
    """Add problem types to an operation's `responses`."""
    for kind in kinds:
        known = responses.setdefault(str(kind.status), {"description": ""})
        schema = {"$ref": "#/components/schemas/ProblemDocument"}
        shown = known.setdefault("content", {}).setdefault(MEDIA_TYPE, {"schema": schema, "examples": {}})
        if kind.slug not in shown["examples"]:
            shown["examples"][kind.slug] = _example(kind)
            known["description"] = "; ".join(filter(None, [known["description"], f"`{kind.slug}`"]))
        if kind.status in (429, 503):
            known["headers"] = {
                "Retry-After": {"description": "seconds, where it is known", "schema": {"type": "integer"}}
            }
        if kind.status == 405:
            known["headers"] = {"Allow": {"description": "the methods of the path", "schema": {"type": "string"}}}


def _example(kind: type[Problem]) -> dict[str, Any]:
    meaning = (inspect.getdoc(kind) or kind.title).partition("\n\n")[0].replace("\n", " ")
    return {
        "summary": kind.title,
        "value": {"type": TYPE_PREFIX + kind.slug, "title": kind.title, "status": kind.status, "detail": meaning},
    }
