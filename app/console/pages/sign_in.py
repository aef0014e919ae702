"""Sign in with an API key, once for 12 hours, and sign out."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.responses import Response

from app.admission.route_roles import READERS
from app.config import Settings
from app.console.asked_page import NEXT, SIGN_IN, SIGN_OUT, UNDONE, asked_page, sign_in_of
from app.console.openid.sign_in import BEGIN
from app.console.page import Page
from app.console.sessions import begin, ended_cookie
from app.console.visit import HEADERS, Visit
from app.errors import Forbidden, Problem, Unauthenticated
from app.permissions import Caller


@dataclass(frozen=True, slots=True)
class IssuerButton:
    """The button that leads to the issuer of OpenID Connect."""

    label: str
    begin: str


async def show(visit: Visit) -> Response:
    """Show the form, or lead home where no key is needed."""
    page = asked_page(visit.asked.get(NEXT))
    if visit.caller.known:
        return visit.redirect(page)
    issuer, undone = _button(visit.runtime.settings, page), UNDONE in visit.asked
    return visit.page("sign_in.html", problem=None, undone=undone, issuer=issuer, page=page)


async def take(visit: Visit) -> Response:
    """Take a key and begin a session with a new token; lead to the page that was asked for."""
    page = asked_page(visit.form.get(NEXT))
    try:
        holder = _holder(visit)
    except Problem as problem:
        issuer = _button(visit.runtime.settings, page)
        return visit.page("sign_in.html", problem.status, problem=problem, undone=False, issuer=issuer, page=page)
    visit.session, visit.is_new = begin(visit.runtime, holder.digest), True
    return visit.redirect(page)


async def sign_out(visit: Visit) -> Response:
    """End the session in this browser."""
    headers = {**HEADERS, "location": SIGN_IN, "set-cookie": ended_cookie(visit.runtime, is_secure=visit.is_secure)}
    return Response(status_code=303, headers=headers)


def _button(settings: Settings, page: str) -> IssuerButton | None:
    if settings.oidc_issuer is None:
        return None
    label = settings.oidc_label or urlsplit(settings.oidc_issuer).netloc
    # By the address to which the issuer sends people back: a cookie of another address would not come back.
    return IssuerButton(label, sign_in_of(page, f"{settings.public_url}{BEGIN}"))


def _holder(visit: Visit) -> Caller:
    authenticator = visit.runtime.authenticator
    if authenticator.off:
        return visit.caller
    key = visit.form.get("key", "").strip()
    if not key.isascii():
        raise Unauthenticated("This key is not known.")
    holder = authenticator.caller(f"Bearer {key}".encode())
    if holder.role not in READERS:
        raise Forbidden(
            f"This key is for the role {holder.role}. The console is for people: operators, admins and viewers."
        )
    return holder


PAGES = [
    Page("GET", SIGN_IN, show, None),
    Page("POST", SIGN_IN, take, None),
    Page("POST", SIGN_OUT, sign_out, None),
]
