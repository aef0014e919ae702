"""The roles that may call each route: one table for the fast path and for FastAPI's routes.

A route that is not in the table is refused. The routes themselves check the scope of a producer's or subscriber's key.
"""

from collections.abc import Iterable, Iterator
from re import Pattern

from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute, compile_path

from app.permissions import Role

_P, _S, _O, _A, _M = Role.PRODUCER, Role.SUBSCRIBER, Role.OPERATOR, Role.ADMIN, Role.METRICS

Roles = frozenset[Role]

# Open to every caller: probes, and pages that are the same in every installation.
OPEN: Roles = frozenset(Role)
PEOPLE: Roles = frozenset({_O, _A})
ADMINS: Roles = frozenset({_A})
PRODUCERS: Roles = frozenset({_P, _A})
SUBSCRIBERS: Roles = frozenset({_S, _A})
OWN_GROUPS: Roles = PEOPLE | {_P}
OWN_SUBSCRIPTIONS: Roles = PEOPLE | {_S}
BOTH: Roles = PEOPLE | {_P, _S}
SCRAPERS: Roles = PEOPLE | {_M}
NO_ROLE: Roles = frozenset()

RULES: dict[tuple[str, str], Roles] = {
    ("POST", "/half"): PRODUCERS,
    ("POST", "/end"): PRODUCERS,
    ("POST", "/messages"): PRODUCERS,
    ("POST", "/halves"): PRODUCERS,
    ("POST", "/ends"): PRODUCERS,
    ("GET", "/messages/{message_id}"): BOTH,
    ("GET", "/transactions"): OWN_GROUPS,
    ("GET", "/transactions/{transaction_id:uuid}"): OWN_GROUPS,
    ("GET", "/transactions/{transaction_id:uuid}/attempts"): OWN_GROUPS,
    ("GET", "/transactions/{transaction_id:uuid}/delivery"): OWN_GROUPS,
    ("POST", "/transactions/{transaction_id:uuid}/check"): PEOPLE,
    ("POST", "/transactions/{transaction_id:uuid}/verdict"): PEOPLE,
    ("POST", "/transactions/{transaction_id:uuid}/reissue"): PEOPLE,
    ("POST", "/transactions/{transaction_id:uuid}/replay"): PEOPLE,
    ("POST", "/transactions/check"): PEOPLE,
    ("POST", "/transactions/verdict"): PEOPLE,
    ("GET", "/topics"): BOTH,
    ("PUT", "/topics/{name}"): ADMINS,
    ("DELETE", "/topics/{name}"): ADMINS,
    ("GET", "/workers"): PEOPLE,
    ("GET", "/stats"): PEOPLE,
    ("GET", "/stats/series"): PEOPLE,
    ("GET", "/events"): PEOPLE,
    ("GET", "/search"): PEOPLE,
    ("GET", "/accept"): PEOPLE,
    ("PUT", "/accept"): PEOPLE,
    ("GET", "/producer-groups"): OWN_GROUPS,
    ("GET", "/producer-groups/{name}"): OWN_GROUPS,
    ("PUT", "/producer-groups/{name}"): ADMINS,
    ("PATCH", "/producer-groups/{name}"): ADMINS,
    ("DELETE", "/producer-groups/{name}"): ADMINS,
    ("POST", "/producer-groups/{name}/test"): PEOPLE,
    ("POST", "/producer-groups/{name}/rotate-secret"): ADMINS,
    ("POST", "/producer-groups/{name}/checks/claim"): PRODUCERS,
    ("POST", "/producer-groups/{name}/checks/answers"): PRODUCERS,
    ("GET", "/subscriptions"): OWN_SUBSCRIPTIONS,
    ("GET", "/subscriptions/{name}"): OWN_SUBSCRIPTIONS,
    ("PUT", "/subscriptions/{name}"): SUBSCRIBERS,
    ("PATCH", "/subscriptions/{name}"): SUBSCRIBERS,
    ("DELETE", "/subscriptions/{name}"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/test"): OWN_SUBSCRIPTIONS,
    ("POST", "/subscriptions/{name}/pause"): OWN_SUBSCRIPTIONS,
    ("POST", "/subscriptions/{name}/resume"): OWN_SUBSCRIPTIONS,
    ("POST", "/subscriptions/{name}/rotate-secret"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/claim"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/ack"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/nack"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/extend"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/reject"): SUBSCRIBERS,
    ("POST", "/subscriptions/{name}/replay"): OWN_SUBSCRIPTIONS,
    ("GET", "/subscriptions/{name}/replays"): OWN_SUBSCRIPTIONS,
    ("GET", "/subscriptions/{name}/replays/{replay_id}"): OWN_SUBSCRIPTIONS,
    ("DELETE", "/subscriptions/{name}/replays/{replay_id}"): OWN_SUBSCRIPTIONS,
    ("GET", "/dead-letters"): OWN_SUBSCRIPTIONS,
    ("GET", "/dead-letters/groups"): OWN_SUBSCRIPTIONS,
    ("GET", "/dead-letters/{subscription}/{message_id}"): OWN_SUBSCRIPTIONS,
    ("POST", "/dead-letters/redeliver"): PEOPLE,
    ("DELETE", "/dead-letters"): PEOPLE,
    ("GET", "/reconciliation"): PEOPLE,
    ("GET", "/reconciliation/certificates"): PEOPLE,
    ("GET", "/reconciliation/{day}"): PEOPLE,
    ("GET", "/reconciliation/{day}/certificate"): PEOPLE,
    ("GET", "/findings"): PEOPLE,
    ("GET", "/findings/{finding_id}"): PEOPLE,
    ("GET", "/findings/kinds/{kind}"): OPEN,
    ("POST", "/api-keys"): ADMINS,
    ("GET", "/api-keys"): ADMINS,
    ("GET", "/api-keys/{key_id}"): ADMINS,
    ("PUT", "/api-keys/{key_id}"): ADMINS,
    ("POST", "/api-keys/{key_id}/rotate"): ADMINS,
    ("DELETE", "/api-keys/{key_id}"): ADMINS,
    ("GET", "/audit"): ADMINS,
    ("GET", "/audit/chain"): ADMINS,
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
