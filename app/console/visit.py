"""One request to the console, and the answers that pages build: HTML, CSV, a redirect."""

import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.admission.route_roles import RULES
from app.console.csv_files import csv_text
from app.console.rendering import render
from app.console.sessions import Session, cookie_of
from app.errors import Invalid
from app.permissions import Caller
from app.runtime.state import Runtime
from app.schemas.validation import Model, checked

if TYPE_CHECKING:  # it imports Authlib, an optional dependency
    from app.console.openid.issuer import Issuer

# Parameters that are the console's own, beside those of the API.
OWN = frozenset({"format", "internal", "done", "done_code"})
# The rows of a list on a page, and those that a CSV file reads at once.
ROWS, CSV_ROWS = 50, 1000
# The most rows of a CSV file, and the most reads for it: a read may find fewer rows than it was asked for.
CSV_MOST, CSV_READS = 10_000, 50

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    # With `no-referrer` browsers send forms with `Origin: null`.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(slots=True)
class Visit:
    """A request to the console. `form` holds the fields of a POST."""

    request: Request
    runtime: Runtime
    caller: Caller
    session: Session
    is_new: bool
    # None: no one signs in by OpenID Connect.
    issuer: "Issuer | None" = None
    form: dict[str, str] = field(default_factory=dict)
    # The id of the state of the service that was known before anything was read for the page; empty: none was.
    seen: str = field(init=False)

    def __post_init__(self) -> None:
        """Note the state."""
        self.seen = self.runtime.state_feed.id

    @property
    def is_secure(self) -> bool:
        """Whether the browser speaks TLS, to this process or to a proxy before it."""
        forwarded = self.request.headers.get("x-forwarded-proto", "")
        return self.request.url.scheme == "https" or forwarded == "https"

    @property
    def path(self) -> dict[str, Any]:
        """The parameters in the path."""
        return self.request.path_params

    @property
    def asked(self) -> dict[str, str]:
        """The query without empty fields."""
        return {name: value for name, value in self.request.query_params.items() if value}

    def filter_of(self, names: Sequence[str]) -> dict[str, str]:
        """Return the query of an act by a filter. Raises Invalid for a parameter that is none of these names, or empty.

        To ignore it would act on more than was asked for.
        """
        for name, value in self.request.query_params.items():
            if not value:
                raise Invalid(f"`{name}` is empty. Give it a value, or leave it out.", field=name)
            if name not in names:
                raise Invalid(f"`{name}` is no filter of this act. Its filters: {', '.join(names)}.", field=name)
        return self.asked

    @property
    def wants_csv(self) -> bool:
        """Whether the list is asked for as CSV."""
        return self.asked.get("format") == "csv"

    def query(self, model: type[Model], **fixed: Any) -> Model:
        """Return the query as the API's model of it. Raises Invalid."""
        asked = {name: value for name, value in self.asked.items() if name not in OWN}
        return checked(model, {**asked, **fixed})

    def list_query(self, model: type[Model], **fixed: Any) -> Model:
        """Return the query of a list, with as many rows as a page has, or a read for a CSV file. Raises Invalid."""
        return self.query(model, limit=CSV_ROWS if self.wants_csv else ROWS, **fixed)

    def may(self, method: str, route: str) -> bool:
        """Return whether the caller's role may call a route of the API."""
        caller = self.caller
        return (caller.role is None and caller.known) or caller.role in RULES[method, route]

    def here(self, **changes: str | None) -> str:
        """Return this page's URL with other query parameters (None: without it)."""
        asked = {**self.asked, "done": None, "done_code": None, **changes}
        wanted = {name: value for name, value in asked.items() if value is not None}
        return quote(self.request.scope["path"]) + (f"?{urlencode(wanted)}" if wanted else "")

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        """Return a page."""
        response = HTMLResponse(render(template, visit=self, **values), status, headers=HEADERS)
        self._keep(response)
        return response

    async def csv_of_list(
        self,
        name: str,
        columns: Sequence[str],
        query: Model,
        read: Callable[[Model], Awaitable[Any]],
        *,
        keep: Callable[[Any], bool] = lambda _: True,
        **other: Any,
    ) -> Response:
        """Return a list from this page on as a CSV file; beyond CSV_MOST rows its last line says where it goes on.

        `read` returns a page for a query; `keep`: whether the file has a row; `other`: as in `csv_of`.
        """
        rows: list[Any] = []
        cursor = None
        for _ in range(CSV_READS):
            limit = min(CSV_ROWS, CSV_MOST - len(rows))
            found = await read(query.model_copy(update={"limit": limit, "count": False}))
            rows += filter(keep, found.items)
            cursor = found.next_cursor
            if cursor is None or len(rows) >= CSV_MOST:
                break
            query = query.model_copy(update={"cursor": cursor})
        lacks = None if cursor is None else f"The list goes on at {self.here(cursor=str(cursor))}"
        return self.csv_of(name, columns, rows, lacks=lacks, **other)

    def csv_of(
        self, name: str, columns: Sequence[str], rows: Iterable[object], *, lacks: str | None = None, **other: Any
    ) -> Response:
        """Return these fields of rows as a CSV file. `other`: for a column, the function of a row that its cell is.

        `lacks`: as in `csv`.
        """
        cells = ([other[one](row) if one in other else getattr(row, one) for one in columns] for row in rows)
        return self.csv(name, columns, cells, lacks=lacks)

    def csv(
        self, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]], *, lacks: str | None = None
    ) -> Response:
        """Return a list as a CSV file. `lacks`: what the file does not have, for its last line; None: nothing."""
        text = csv_text(header, rows, lacks)
        file = f"halfnote-{name}{'' if lacks is None else '-incomplete'}.csv"
        headers = {**HEADERS, "content-disposition": f'attachment; filename="{file}"'}
        return Response(text, media_type="text/csv; charset=utf-8", headers=headers)

    def redirect(self, to: str, *, done: str | None = None) -> Response:
        """Return a redirect to a page of the console, which shows what was done."""
        if done:
            to += f"{'&' if '?' in to else '?'}{urlencode({'done': done, 'done_code': self._code_of(done)})}"
        response = RedirectResponse(to, 303, headers=HEADERS)
        self._keep(response)
        return response

    @property
    def done(self) -> str | None:
        """What was done, if a redirect of this session says so: a link of another person could say anything."""
        text = self.asked.get("done")
        if text is None or not hmac.compare_digest(
            self.asked.get("done_code", "").encode(), self._code_of(text).encode()
        ):
            return None
        return text

    def _code_of(self, text: str) -> str:
        return hmac.new(self.session.token.encode(), text.encode(), "sha256").hexdigest()[:32]

    def _keep(self, response: Response) -> None:
        if self.is_new:
            response.headers.append("set-cookie", cookie_of(self.runtime, self.session, is_secure=self.is_secure))
