"""Sign in by OpenID Connect: lead to the issuer, and take its answer."""

from starlette.responses import Response

from app.console.asked_page import NEXT, asked_page
from app.console.openid import people
from app.console.openid.people import Person
from app.console.openid.sign_in import BEGIN, CALLBACK, SignIn, begin, cookie_of, sign_in_of
from app.console.page import Page
from app.console.sessions import begin as begin_session
from app.console.visit import HEADERS, Visit
from app.errors import NotFound, Problem, SignInRefused


async def lead(visit: Visit) -> Response:
    """Lead the browser to the issuer."""
    if visit.issuer is None:
        raise NotFound("No issuer of OpenID Connect is set (HALFNOTE_OIDC_ISSUER).")
    sign_in = begin(visit.runtime, asked_page(visit.asked.get(NEXT)))
    try:
        url = await visit.issuer.begin(sign_in)
    except Problem as problem:
        return _refused(visit, problem)
    headers = {**HEADERS, "location": url, "set-cookie": cookie_of(visit.runtime, sign_in)}
    return Response(status_code=303, headers=headers)


async def take(visit: Visit) -> Response:
    """Take the issuer's answer, and begin a session if the person has a role."""
    try:
        sign_in = _sign_in(visit)
        assert visit.issuer is not None  # it began the sign-in
        person = await visit.issuer.finish(sign_in, visit.request.query_params)
        response = _entered(visit, person, sign_in.page)
    except Problem as problem:
        response = _refused(visit, problem)
    response.headers.append("set-cookie", cookie_of(visit.runtime, None))
    return response


def _sign_in(visit: Visit) -> SignIn:
    if visit.issuer is None:
        raise NotFound("No issuer of OpenID Connect is set (HALFNOTE_OIDC_ISSUER).")
    sign_in = sign_in_of(visit.runtime, visit.request.scope)
    if sign_in is None:
        raise SignInRefused("This sign-in is over, or began in another browser. Begin again.")
    return sign_in


def _entered(visit: Visit, person: Person, page: str) -> Response:
    if people.caller_of(visit.runtime.settings, person) is None:
        claim = visit.runtime.settings.oidc_role_claim
        raise SignInRefused(
            f"{person.name} has no role here. HALFNOTE_OIDC_ROLES gives roles by the claim `{claim}`, and none of "
            f"this account's values is in it. Ask an admin of this service, or of the issuer."
        )
    visit.session, visit.is_new = begin_session(visit.runtime, person=person), True
    # A redirect would still count as coming from the issuer's site, and the browser would not send the new cookie.
    return visit.page("signed_in.html", person=person, page=page)


def _refused(visit: Visit, problem: Problem) -> Response:
    # The browser keeps the session that it has: it did not send it, because the request came from another site.
    visit.is_new = False
    return visit.page("sign_in_refused.html", problem.status, problem=problem)


PAGES = [Page("GET", BEGIN, lead, None), Page("GET", CALLBACK, take, None)]
