"""Build the ASGI app `app.main:app` that uvicorn, TestClient and ASGITransport use."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from app.admission.route_roles import RouteRules, routes_of
from app.config import Settings
from app.console.asgi import Console
from app.lifecycle.startup import running
from app.observability.logs import set_up_logs
from app.openapi.document import install_document
from app.routers import (
    accept,
    api_docs,
    api_keys,
    audit,
    certificates,
    claimed_checks,
    claims,
    dead_letters,
    delivery_reasons,
    events,
    health,
    messages,
    operator_verdicts,
    problems,
    producer_groups,
    proof_report,
    recent_deliveries,
    reconciliation,
    reissues,
    replays,
    search,
    stats,
    subscription_actions,
    subscriptions,
    topics,
    transaction_deliveries,
    transaction_replays,
    transactions,
    workers,
)
from app.routers.batches import post_ends, post_halves
from app.routers.end import post_end
from app.routers.half import post_half
from app.routers.known_query import require_known_query
from app.routers.messages import post_messages
from app.server.connection_limits import HttpLimits, most_connections
from app.server.fast_path import FastPath
from app.server.middleware import DirectAnswer, ProblemMiddleware, install_error_handlers
from app.server.request_pipeline import Begin

# The paths that skip the framework (app/server/fast_path.py).
ENDPOINTS: dict[str, Begin] = {
    "/half": post_half,
    "/end": post_end,
    "/messages": post_messages,
    "/halves": post_halves,
    "/ends": post_ends,
}

# Routes of FastAPI that answer most requests without it (app/server/middleware.py).
DIRECT: dict[str, DirectAnswer] = {
    "/subscriptions/{name}/claim": claims.claim_directly,
    "/subscriptions/{name}/ack": claims.acknowledge_directly,
}


@asynccontextmanager
async def _lifespan(api: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
    set_up_logs()
    # The service reads settings at its start, not at import.
    settings = Settings()
    limits = HttpLimits(
        settings.request_timeout_s,
        most_connections(settings.connections_max),
        settings.body_limit_bytes,
        settings.head_limit_bytes,
        settings.refusal_read_s,
    )
    async with running(settings) as runtime:
        api.state.runtime = runtime
        try:
            # The web server's protocol (app/server/http_protocol.py) gets the settings only in this way.
            yield {"http_limits": limits, "server_certificate": runtime.certificate}
        finally:
            api.state.runtime = None


def _operation_id(route: APIRoute) -> str:
    return route.name


def create_app() -> tuple[ASGIApp, FastAPI]:
    """Return the whole ASGI app, and the FastAPI app inside it."""
    api = FastAPI(
        title="Halfnote",
        version=version("halfnote-server"),
        lifespan=_lifespan,
        # app/routers/api_docs.py serves this page from files of the package.
        docs_url=None,
        redoc_url=None,
        # A redirect of `PUT /subscriptions/` would hide that the name is missing.
        redirect_slashes=False,
        dependencies=[Depends(require_known_query)],
        generate_unique_id_function=_operation_id,
    )
    api.include_router(transactions.router)
    api.include_router(transaction_deliveries.router)
    api.include_router(delivery_reasons.router)
    api.include_router(operator_verdicts.router)
    api.include_router(reissues.router)
    api.include_router(transaction_replays.router)
    api.include_router(messages.router)
    api.include_router(topics.router)
    api.include_router(accept.router)
    api.include_router(workers.router)
    api.include_router(stats.router)
    api.include_router(events.router)
    api.include_router(search.router)
    api.include_router(health.router)
    api.include_router(problems.router)
    api.include_router(producer_groups.router)
    api.include_router(claimed_checks.router)
    api.include_router(subscriptions.router)
    api.include_router(subscription_actions.router)
    api.include_router(recent_deliveries.router)
    api.include_router(claims.router)
    api.include_router(replays.router)
    api.include_router(dead_letters.router)
    # Before the route of a day, which has the same form.
    api.include_router(certificates.router)
    api.include_router(proof_report.router)
    api.include_router(reconciliation.router)
    api.include_router(api_keys.router)
    api.include_router(audit.router)
    api.include_router(api_docs.router)
    install_error_handlers(api)
    install_document(api)
    framework = ProblemMiddleware(api, api.state, RouteRules(routes_of(api.router.routes)), DIRECT)
    return FastPath(Console(framework, api.state), api.state, ENDPOINTS), api


app, api = create_app()
