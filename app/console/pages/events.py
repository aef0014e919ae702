"""The event stream of the console: that of `GET /events`, for a session. It ends with the session."""

from starlette.responses import Response

from app.console.page import Page
from app.console.sessions import LASTS_S as SESSION_LASTS_S
from app.console.sessions import caller_of
from app.console.visit import HEADERS, Visit
from app.routers.events import LASTS_S, still_may, stream_of


async def follow(visit: Visit) -> Response:
    """Send the state of the service as server-sent events."""
    runtime, caller, session = visit.runtime, visit.caller, visit.session
    left_s = session.began_at + SESSION_LASTS_S - runtime.clock.time()
    # A browser sends the header only when it connects again by itself.
    seen = visit.request.headers.get("last-event-id") or visit.asked.get("after")
    response = stream_of(
        visit.request,
        runtime,
        caller,
        seen,
        0 if visit.request.method == "HEAD" else min(LASTS_S, left_s),
        # The cookie is opened again, because the key that sealed it may have been removed.
        lambda: still_may(caller, runtime.authenticator.off, lambda: caller_of(runtime, visit.request.scope)),
    )
    response.headers.update(HEADERS)
    return response


PAGES = [Page("GET", "/console/events", follow, ("GET", "/events"))]
