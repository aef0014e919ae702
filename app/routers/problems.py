"""`GET /problems/{slug}`: the page of a problem's `type`: what it means and what to do."""

import inspect

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from app.errors import NotFound, all_problems
from app.routers.dependencies import problems

router = APIRouter(tags=["meta"])


@router.get(
    "/problems/{slug}",
    response_class=PlainTextResponse,
    summary="What a problem type means",
    responses=problems(NotFound),
)
async def get_problem(slug: str) -> str:
    """Return a problem type's status, title, meaning and remedy as text."""
    for problem in all_problems():
        if problem.slug == slug:
            return f"{problem.status} {problem.title}\n\n{inspect.getdoc(problem)}\n"
    raise NotFound(f"There is no problem type `{slug}`. docs/errors.md lists all.")
