"""Refuse query parameters that a request does not have: a misspelt `dry_run` must not run for real."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel

from app.errors import Invalid

# A request that only reads may have more, such as what a proxy adds against caches.
READS = ("GET", "HEAD")


async def require_known_query(request: Request) -> None:
    """Raise Invalid for a query parameter that is given twice, or that the route of a writing request does not have."""
    route = request.scope.get("route")
    if not request.scope["query_string"] or not isinstance(route, APIRoute):
        return
    known = _parameters(route.dependant)
    given = request.query_params.multi_items()
    for name in dict(given):
        if name not in known:
            if request.method not in READS:
                has = f"it has {', '.join(sorted(known))}" if known else "it has none"
                raise Invalid(f"`{name}`: this request has no such query parameter; {has}.", field=name)
        elif not known[name] and sum(one == name for one, _ in given) > 1:
            raise Invalid(f"`{name}`: give this query parameter once.", field=name)


def _parameters(dependant: Dependant) -> dict[str, bool]:
    """Return the query parameters of a route by name, and whether each may be repeated."""
    found: dict[str, bool] = {}
    for inner in dependant.dependencies:
        found |= _parameters(inner)
    for parameter in dependant.query_params:
        annotation = parameter.field_info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            for name, field in annotation.model_fields.items():
                found[field.alias or name] = _is_list(field.annotation)
        else:
            found[parameter.alias] = _is_list(annotation)
    return found


def _is_list(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is_list(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return any(_is_list(one) for one in get_args(annotation))
    return annotation in (list, set, tuple) or origin in (list, set, tuple)
