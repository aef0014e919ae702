"""What a page of the console is: a method, a path, the function that answers, and the API's route that it needs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.responses import Response

from app.console.visit import Visit

Answer = Callable[[Visit], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Page:
    """A page. `needs`: the roles of this route of the API may open it; None: everyone, also without a session."""

    method: str
    path: str
    answer: Answer
    needs: tuple[str, str] | None
