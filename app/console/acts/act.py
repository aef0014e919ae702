"""What an act is, and the two pages that each has: the preview with the form, and the POST that acts."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from app.console.page import Page
from app.console.visit import Visit
from app.errors import Problem
from app.schemas.fields import ActNote, Reason, Strict
from app.schemas.validation import checked

# The field of a form that comes back confirmed.
CONFIRMED = "confirmed"
# Of an offset, the longest number in a form.
_DIGITS_MAX = 19
_UNCONFIRMED = "Nothing is done yet. This is what the act does:"


class _WithReason(Strict):
    reason: Reason


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of an act's form, beside the reason."""

    name: str
    label: str
    kind: str = "text"
    value: str = ""
    hint: str = ""
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Preview:
    """What an act is about to touch. `facts`: names and values; `items`: the ids concerned, with their links."""

    target: str
    back: str
    facts: list[tuple[str, Any]]
    effect: str
    command: str
    items: list[tuple[str, str]] = field(default_factory=list)
    more: str = ""
    fields: tuple[FormField, ...] = ()
    is_possible: bool = True


@dataclass(frozen=True, slots=True)
class Done:
    """What an act did, and the page that shows it. `secret`: shown once. `results`: rows that have no other place."""

    said: str
    back: str
    secret: str | None = None
    results: list[tuple[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Confirm:
    """What an act would change, found by a dry run of what the form says. The form comes again, to be confirmed."""

    facts: list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class ConsoleAct:
    """A person's act. `path` ends with its name; `needs` is the API's route whose function `run` calls."""

    path: str
    label: str
    needs: tuple[str, str]
    preview: Callable[[Visit], Awaitable[Preview]]
    run: Callable[[Visit, str], Awaitable[Done | Confirm]]
    tone: str = "plain"

    def pages(self) -> list[Page]:
        """Return the page with the form, and the one that takes it."""
        return [Page("GET", self.path, self.show, self.needs), Page("POST", self.path, self.take, self.needs)]

    async def show(self, visit: Visit) -> Response:
        """Show what the act touches, and its form."""
        return visit.page("act.html", act=self, preview=await self.preview(visit), problem=None, reason="")

    async def take(self, visit: Visit) -> Response:
        """Run the act, then lead back. A refusal shows the form again."""
        reason = visit.form.get("reason", "").strip()
        try:
            done = await self.run(visit, checked(_WithReason, {"reason": reason}).reason)
        except Problem as problem:
            preview = await self.preview(visit)
            return visit.page("act.html", problem.status, act=self, preview=preview, problem=problem, reason=reason)
        if isinstance(done, Confirm):
            preview = await self.preview(visit)
            given = {name: value for name, value in visit.form.items() if name not in ("csrf", "reason")}
            hidden = tuple(FormField(name, "", "hidden", value) for name, value in {**given, CONFIRMED: "yes"}.items())
            preview = replace(preview, effect=_UNCONFIRMED, facts=preview.facts + done.facts, fields=hidden)
            return visit.page("act.html", act=self, preview=preview, problem=None, reason=reason)
        if done.secret is None and not done.results:
            return visit.redirect(done.back, done=done.said)
        return visit.page("done.html", act=self, done=done)


def number_or_text(text: str) -> int | str:
    """Return a number that the API reads, or the text, which the API then refuses.

    Python does not read a number of thousands of digits.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else text


def note_of(reason: str) -> ActNote:
    """Return the reason in the form of the API."""
    return ActNote(reason=reason)
