"""The roles that may call each route: one table for the fast path and for FastAPI's routes.

A route that is not in the table is refused. The routes themselves check the scope of a producer's or subscriber's key.
"""

from collections.abc import Iterable, Iterator
from re import Pattern

from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute, compile_path

from app.permissions import Role

_P, _S, _O, _A, _M, _V = Role.PRODUCER, Role.SUBSCRIBER, Role.OPERATOR, Role.ADMIN, Role.METRICS, Role.VIEWER

Roles = frozenset[Role]

# Open to every caller: probes, and pages that are the same in every installation.
OPEN: Roles = frozenset(Role)
PEOPLE: Roles = frozenset({_O, _A})
ADMINS: Roles = frozenset({_A})
# A viewer reads what people read, and changes nothing.
READERS: Roles = PEOPLE | {_V}
AUDITORS: Roles = ADMINS | {_V}
PRODUCERS: Roles = frozenset({_P, _A})
PEOPLE_AND_PRODUCERS: Roles = PEOPLE | {_P}
SUBSCRIBERS: Roles = frozenset({_S, _A})
OWN_SUBSCRIPTIONS: Roles = PEOPLE | {_S}
READERS_AND_PRODUCERS: Roles = READERS | {_P}
READERS_AND_SUBSCRIBERS: Roles = READERS | {_S}
READERS_AND_BOTH: Roles = READERS | {_P, _S}
SCRAPERS: Roles = READERS | {_M}
NO_ROLE: Roles = frozenset()

RULES: dict[tuple[str, str], Roles] = {
    ("POST", "/half"): PRODUCERS,
    ("POST", "/end"): PRODUCERS,
    ("POST", "/messages"): PRODUCERS,
    ("POST", "/halves"): PRODUCERS,
    ("POST", "/ends"): PRODUCERS,
    ("GET", "/messages/{message_id}"): READERS_AND_BOTH,
    ("GET", "/transactions"): READERS_AND_PRODUCERS,
    ("GET", "/transactions/{transaction_id:uuid}"): READERS_AND_PRODUCERS,
    ("GET", "/transactions/{transaction_id:uuid}/attempts"): READERS_AND_PRODUCERS,
    ("GET", "/transactions/{transaction_id:uuid}/deliveries"): READERS_AND_PRODUCERS,
    ("GET", "/transactions/{transaction_id:uuid}/delivery"): READERS_AND_PRODUCERS,
    ("POST", "/transactions/{transaction_id:uuid}/check"): PEOPLE_AND_PRODUCERS,
    ("POST", "/transactions/{transaction_id:uuid}/verdict"): PEOPLE,
    ("POST", "/transactions/{transaction_id:uuid}/reissue"): PEOPLE,
    ("POST", "/transactions/{transaction_id:uuid}/replay"): PEOPLE,
    ("POST", "/transactions/check"): PEOPLE,
    ("POST", "/transactions/verdict"): PEOPLE,
    ("POST", "/transactions/reissue"): PEOPLE,
    ("GET", "/topics"): READERS_AND_BOTH,
    ("PUT", "/topics/{name}"): ADMINS,
    ("DELETE", "/topics/{name}"): ADMINS,
    ("GET", "/workers"): READERS,
    ("GET", "/stats"): READERS,
    ("GET", "/stats/series"): READERS,
    ("GET", "/events"): READERS,
    ("GET", "/search"): READERS,
    ("GET", "/accept"): READERS,
    ("PUT", "/accept"): PEOPLE,
    ("GET", "/producer-groups"): READERS_AND_PRODUCERS,
    ("GET", "/producer-groups/{name}"): READERS_AND_PRODUCERS,
    ("PUT", "/producer-groups/{name}"): PRODUCERS,
    ("PATCH", "/producer-groups/{name}"): ADMINS,
    ("DELETE", "/producer-groups/{name}"): ADMINS,
    ("POST", "/producer-groups/{name}/test"): PEOPLE,
    ("POST", "/producer-groups/{name}/rotate-secret"): ADMINS,
    ("POST", "/producer-groups/{name}/checks/claim"): PRODUCERS,
    ("POST", "/producer-groups/{name}/checks/answers"): PRODUCERS,
    ("GET", "/subscriptions"): READERS_AND_SUBSCRIBERS,
    ("GET", "/subscriptions/{name}"): READERS_AND_SUBSCRIBERS,
    ("PUT", "/subscriptions/{name}"): SUBSCRIBERS,
    ("PATCH", "/subscriptions/{name}"): SUBSCRIBERS,
    ("DELETE", "/subscriptions/{name}"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/test"): OWN_SUBSCRIPTIONS,
    ("POST", "/subscriptions/{name}/pause"): OWN_SUBSCRIPTIONS,
    ("POST", "/subscriptions/{name}/resume"): OWN_SUBSCRIPTIONS,
    ("POST", "/subscriptions/{name}/reset-breaker"): OWN_SUBSCRIPTIONS,
    ("GET", "/subscriptions/{name}/recent"): READERS_AND_SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/rotate-secret"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/claim"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/ack"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/nack"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/extend"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/reject"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/replay"): OWN_SUBSCRIPTIONS,
    ("GET", "/subscriptions/{name}/replays"): READERS_AND_SUBSCRIBERS,
    ("GET", "/subscriptions/{name}/replays/{replay_id}"): READERS_AND_SUBSCRIBERS,
    ("DELETE", "/subscriptions/{name}/replays/{replay_id}"): OWN_SUBSCRIPTIONS,
    ("GET", "/dead-letters"): READERS_AND_SUBSCRIBERS,
    ("GET", "/dead-letters/groups"): READERS_AND_SUBSCRIBERS,
    ("GET", "/dead-letters/{subscription}/{message_id}"): READERS_AND_SUBSCRIBERS,
    ("POST", "/dead-letters/redeliver"): PEOPLE,
    ("DELETE", "/dead-letters"): PEOPLE,
    ("GET", "/reconciliation"): READERS,
    ("GET", "/reconciliation/certificates"): READERS,
    ("GET", "/reconciliation/report"): READERS,
    ("GET", "/reconciliation/{day}"): READERS,
    ("GET", "/reconciliation/{day}/certificate"): READERS,
    ("GET", "/findings"): READERS,
    ("GET", "/findings/{finding_id}"): READERS,
    ("GET", "/findings/kinds/{kind}"): OPEN,
    ("POST", "/api-keys"): ADMINS,
    ("GET", "/api-keys"): AUDITORS,
    ("GET", "/api-keys/{key_id}"): AUDITORS,
    ("PUT", "/api-keys/{key_id}"): ADMINS,
    ("POST", "/api-keys/{key_id}/rotate"): ADMINS,
    ("DELETE", "/api-keys/{key_id}"): ADMINS,
    ("GET", "/audit"): AUDITORS,
    ("GET", "/audit/chain"): AUDITORS,
    ("GET", "/metrics"): SCRAPERS,
    ("GET", "/livez"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/version"): OPEN,
    ("GET", "/problems/{slug}"): OPEN,
    ("GET", "/openapi.json"): OPEN,
    ("GET", "/docs"): OPEN,
}


def routes_of(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Yield method and path template of every route of a FastAPI app, in the order in which it tries them.

    Raises TypeError for a kind of route that has neither, because no rule could refuse it.
    """
    for route in iter_route_contexts(list(routes)):
        if not isinstance(route.path, str) or not route.methods:
            raise TypeError(f"{route} has no path and methods, so no rule could be given to it.")
        for method in sorted(route.methods):
            yield method, route.path


class RouteRules:
    """Finds the rule of a request before its body is read."""

    def __init__(self, routes: Iterable[tuple[str, str]]) -> None:
        # Grouped by the first path segment, so that few patterns are tried.
        self._by_segment: dict[str, list[tuple[str, Pattern[str], Roles]]] = {}
        for method, template in routes:
            # A HEAD request has the rule of GET.
            roles = RULES.get(("GET" if method == "HEAD" else method, template), NO_ROLE)
            known = self._by_segment.setdefault(_segment(template), [])
            known.append((method, compile_path(template)[0], roles))

    def of(self, method: str, path: str) -> Roles | None:
        """Return the roles that may make this request; None if no route matches."""
        for known, pattern, roles in self._by_segment.get(_segment(path), ()):
            if known == method and pattern.match(path):
                return roles
        return None


def _segment(path: str) -> str:
    return path.split("/", 2)[1] if path.startswith("/") else ""
