"""Dependencies that the FastAPI routes share: the runtime, the caller, and the documented problems of a route."""

from typing import Annotated, Any

from fastapi import Depends, Request

from app.errors import Problem
from app.openapi.problems import add_problems
from app.permissions import Caller
from app.runtime.state import Runtime


# `async`, although they await nothing: FastAPI runs plain functions in threads, which takes longer than most requests.
async def get_runtime(request: Request) -> Runtime:
    """Return the process's runtime."""
    runtime: Runtime = request.app.state.runtime
    return runtime


RuntimeDep = Annotated[Runtime, Depends(get_runtime)]


async def get_caller(request: Request) -> Caller:
    """Return the authenticated caller of the request."""
    caller: Caller = request.scope["caller"]
    return caller


CallerDep = Annotated[Caller, Depends(get_caller)]


def problems(*kinds: type[Problem]) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that may raise these problems.

    The problems that every route may raise are added when the document is built.
    """
    documented: dict[str, Any] = {}
    add_problems(documented, *kinds)
    return {int(status): response for status, response in documented.items()}
