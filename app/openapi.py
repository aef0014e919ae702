"""The OpenAPI document: FastAPI's routes, the hot paths, and what is true of every path."""

from typing import Any

from fastapi import FastAPI

from app.config import Settings
from app.errors import (
    BadRequest,
    BodyTooLarge,
    DatabaseReadOnly,
    DatabaseUnavailable,
    Forbidden,
    ForeignOrigin,
    HostNotAllowed,
    Invalid,
    MalformedJson,
    NotReady,
    NotThisMachine,
    Overloaded,
    Problem,
    StorageFull,
    TooManyRequests,
    Unauthenticated,
    WrongContentType,
)
from app.example_document import add_examples
from app.hot_document import hot_operations, hot_schemas
from app.problem_document import ProblemDocument, add_problems
from app.rules import OPEN, RULES, Roles

ABOUT = """
A producer that must change its own database and tell the world posts a *half message* (`POST /half`), runs its local
database transaction, and posts the *end* (`POST /end`). If the end never comes, Halfnote asks the producer's check URL.

Requests and answers are JSON. Unknown fields are refused; of a key that occurs twice, the last one counts. Times are
RFC 3339 in UTC, durations are seconds (`_s`). Errors are RFC 9457 problem details; `type` leads to its explanation.

Where `HALFNOTE_AUTH=keys` is set, every call but those of probes needs an API key: `Authorization: Bearer hn_…`. A key
has a role, and `x-roles` names those that may make a call.
"""

TAGS = [
    {"name": "producing", "description": "The three calls of a producer"},
    {"name": "transactions", "description": "Where they stand, and what a person does about them"},
    {"name": "messages", "description": "One message and where it went"},
    {"name": "producer groups", "description": "Whom to ask, and when"},
    {"name": "subscriptions", "description": "Where committed messages go"},
    {"name": "dead letters", "description": "What was given up, to be redelivered or dropped by a person"},
    {"name": "keys and audit", "description": "Who may do what, and what people did"},
    {
        "name": "nightly proof",
        "description": "What was told and what was got, reconciled day by day: where they differ",
    },
]

# Refused before a route is looked at, or by the database behind any of them.
EVERY: tuple[type[Problem], ...] = (BadRequest, NotThisMachine, HostNotAllowed, DatabaseUnavailable, NotReady)
KEYED: tuple[type[Problem], ...] = (Unauthenticated, Forbidden, TooManyRequests, Overloaded)
WRITING: tuple[type[Problem], ...] = (
    MalformedJson,
    ForeignOrigin,
    BodyTooLarge,
    WrongContentType,
    DatabaseReadOnly,
    StorageFull,
)


def install_document(api: FastAPI) -> None:
    """Make `api.openapi()` return the whole document, with the limits of the service that is running."""
    plain = api.openapi

    def whole() -> dict[str, Any]:
        if api.openapi_schema is None:
            runtime = getattr(api.state, "runtime", None)
            api.openapi_schema = complete(plain(), Settings() if runtime is None else runtime.settings)
        return api.openapi_schema

    api.openapi = whole  # type: ignore[method-assign]


def complete(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Add the hot paths and what is true of every path to FastAPI's document."""
    document["info"]["description"] = ABOUT.strip()
    document["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    document["servers"] = [{"url": "/", "description": "this service"}]
    document["tags"] = TAGS
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(hot_schemas(settings))
    schemas["ProblemDocument"] = ProblemDocument.model_json_schema()
    for path, operation in hot_operations().items():
        document["paths"].setdefault(path, {})["post"] = operation
    document["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "an API key, `hn_…`"}
    }
    ruled = {(method.lower(), _documented(path)): roles for (method, path), roles in RULES.items()}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            roles = ruled.get((method, path), frozenset())
            _refusals(method, operation, roles)
            if settings.auth == "keys":
                operation["security"] = [] if roles is OPEN else [{"key": []}]
    add_examples(document)
    return document


def _documented(path: str) -> str:
    """Return a route's path as the document writes it, without convertors."""
    return path.replace(":uuid}", "}")


def _refusals(method: str, operation: dict[str, Any], roles: Roles) -> None:
    responses = operation["responses"]
    if "application/json" in responses.get("422", {}).get("content", {}):
        # FastAPI's own shape, which the error handler replaces.
        del responses["422"]
        add_problems(responses, Invalid)
    add_problems(responses, *EVERY, *(WRITING if method != "get" else ()))
    if roles is not OPEN:
        add_problems(responses, *KEYED)
        operation["x-roles"] = sorted(roles)
    operation["responses"] = dict(sorted(responses.items()))
