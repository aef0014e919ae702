"""Builds the one ASGI app, `app.main:app`, that uvicorn, TestClient and ASGITransport use."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from app.config import Settings
from app.door import AsgiApp
from app.front import Front, install_error_handlers
from app.hot import Hot
from app.openapi import install_document
from app.patience import HttpLimits, most_connections
from app.routers import (
    accept,
    api_keys,
    audit,
    dead_letters,
    health,
    messages,
    problems,
    producer_groups,
    reconciliation,
    reissues,
    replays,
    subscription_acts,
    subscriptions,
    topics,
    transactions,
    verdicts,
)
from app.rules import RouteRules, routes_of
from app.start import running
from app.telemetry import set_up_logs


@asynccontextmanager
async def _lifespan(api: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
    set_up_logs()
    # Settings are read when the service starts, not when the module is imported.
    settings = Settings()
    limits = HttpLimits(
        settings.request_timeout_s, most_connections(settings.connections_max), settings.body_limit_bytes
    )
    async with running(settings) as runtime:
        api.state.runtime = runtime
        try:
            # For the web server's protocol (app/corked.py), which has no other way to the settings.
            yield {"http_limits": limits}
        finally:
            api.state.runtime = None


def _operation_id(route: APIRoute) -> str:
    return route.name


def create_app() -> tuple[AsgiApp, FastAPI]:
    """Return the whole ASGI app, and the FastAPI app inside it."""
    api = FastAPI(
        title="Halfnote",
        version=version("halfnote-server"),
        lifespan=_lifespan,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    api.include_router(transactions.router)
    api.include_router(verdicts.router)
    api.include_router(reissues.router)
    api.include_router(messages.router)
    api.include_router(topics.router)
    api.include_router(accept.router)
    api.include_router(health.router)
    api.include_router(problems.router)
    api.include_router(producer_groups.router)
    api.include_router(subscriptions.router)
    api.include_router(subscription_acts.router)
    api.include_router(replays.router)
    api.include_router(dead_letters.router)
    api.include_router(reconciliation.router)
    api.include_router(api_keys.router)
    api.include_router(audit.router)
    install_error_handlers(api)
    install_document(api)
    front = Front(api, api.state, RouteRules(routes_of(api.router.routes)))
    return Hot(front, api.state), api


app, api = create_app()
