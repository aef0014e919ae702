"""Builds the one ASGI app, `app.main:app`, that uvicorn, TestClient and ASGITransport use."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.routing import APIRoute

from app.config import Settings
from app.door import AsgiApp
from app.front import Front, install_error_handlers
from app.hot import Hot
from app.openapi import install_document
from app.routers import (
    accept,
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
from app.start import running
from app.telemetry import set_up_logs


@asynccontextmanager
async def _lifespan(api: FastAPI) -> AsyncIterator[None]:
    set_up_logs()
    # Settings are read when the service starts, not when the module is imported.
    async with running(Settings()) as runtime:
        api.state.runtime = runtime
        try:
            yield
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
    install_error_handlers(api)
    install_document(api)
    return Hot(Front(api, api.state), api.state), api


app, api = create_app()
