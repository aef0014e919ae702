"""Builds the OpenAPI document: FastAPI's routes, the fast path, and the responses of every path."""

from typing import Any

from fastapi import FastAPI

from app.admission.route_roles import OPEN, RULES, Roles
from app.config import Settings
from app.errors import (
    BadRequest,
    BodyTooLarge,
    ContentEncoded,
    DatabaseReadOnly,
    DatabaseUnavailable,
    Forbidden,
    ForeignOrigin,
    HeadTooLarge,
    HostNotAllowed,
    InternalError,
    Invalid,
    MalformedJson,
    MethodNotAllowed,
    NotReady,
    NotThisMachine,
    Overloaded,
    Problem,
    RequestTimeout,
    StorageFull,
    TooManyRequests,
    Unauthenticated,
    WrongContentType,
)
from app.openapi.examples import add_examples
from app.openapi.fast_path import hot_operations, hot_schemas
from app.openapi.problems import ProblemDocument, add_problems

ABOUT = """
A producer that must change its own database and notify other services posts a *half message* (`POST /half`), runs its
local database transaction, and posts the *end* (`POST /end`). If the end never comes, Halfnote asks the producer's
check URL.

Requests and answers are JSON. Unknown fields are refused; of a key that occurs twice, the last one counts. Times are
RFC 3339 in UTC, durations are seconds (`_s`). Errors are RFC 9457 problem details; `type` leads to its explanation.

With `HALFNOTE_AUTH=keys` every call except probes needs an API key: `Authorization: Bearer hn_…`. A key has a role, and
`x-roles` names the roles that may make a call.
"""

TAGS = [
    {"name": "producing", "description": "The three calls of a producer"},
    {"name": "transactions", "description": "States of transactions, and actions of a person on them"},
    {"name": "messages", "description": "Messages and their deliveries"},
    {"name": "producer groups", "description": "Check URLs and check policy"},
    {"name": "subscriptions", "description": "Where committed messages go"},
    {"name": "dead letters", "description": "Messages that used up their tries, for a person to redeliver or drop"},
    {"name": "keys and audit", "description": "API keys, and the changes that people made"},
    {
        "name": "nightly proof",
        "description": "The nightly proof that halves, Ops, outbox and deliveries agree, day by day",
    },
]

# Problems from before routing, from the database behind any route, and from a defect in any route.
EVERY: tuple[type[Problem], ...] = (
    BadRequest,
    NotThisMachine,
    MethodNotAllowed,
    RequestTimeout,
    HostNotAllowed,
    HeadTooLarge,
    InternalError,
    DatabaseUnavailable,
    NotReady,
)
KEYED: tuple[type[Problem], ...] = (Unauthenticated, Forbidden, TooManyRequests, Overloaded)
WRITING: tuple[type[Problem], ...] = (
    MalformedJson,
    ForeignOrigin,
    BodyTooLarge,
    ContentEncoded,
    WrongContentType,
    DatabaseReadOnly,
    StorageFull,
)


def install_document(api: FastAPI) -> None:
    """Make `api.openapi()` return the whole document, with the limits of the running service."""
    plain = api.openapi

    def whole() -> dict[str, Any]:
        if api.openapi_schema is None:
            runtime = getattr(api.state, "runtime", None)
            api.openapi_schema = complete(plain(), Settings() if runtime is None else runtime.settings)
        return api.openapi_schema

    api.openapi = whole  # type: ignore[method-assign]


def complete(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Add the fast path and the common responses to FastAPI's document."""
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
    """Return a route's path in the form of the document, without convertors."""
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
