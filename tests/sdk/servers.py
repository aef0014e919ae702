"""Web frameworks on real sockets, as their users run them in development: uvicorn, Werkzeug and Django's own server."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

import django
import uvicorn
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.urls import URLPattern
from werkzeug.serving import make_server


@asynccontextmanager
async def asgi_server(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI app with uvicorn in this loop; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=0))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
        if serving.done():
            serving.result()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


@contextmanager
def wsgi_server(app: Callable[..., Any]) -> Iterator[str]:
    """Serve a WSGI app with Werkzeug on a thread; yield its URL."""
    with running(make_server("127.0.0.1", 0, app, threaded=True)) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def django_server(urls: Sequence[URLPattern]) -> Iterator[str]:
    """Serve Django's URLs with Django's own server on a thread; yield its URL."""
    configure()
    settings.ROOT_URLCONF = tuple(urls)

    class Quiet(WSGIRequestHandler):  # type: ignore[misc]
        """Django's, without a line for each request."""

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadedWSGIServer(("127.0.0.1", 0), Quiet)
    server.daemon_threads = True
    server.set_app(WSGIHandler())
    with running(server) as port:
        yield f"http://127.0.0.1:{port}"


def configure() -> None:
    """Set Django up, once in a process; tests add the databases that they use."""
    if not settings.configured:
        settings.configure(
            ALLOWED_HOSTS=["127.0.0.1", "testserver"],
            MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"],
            SECRET_KEY="only for tests",
            DATABASES={},
            LOGGING_CONFIG=None,
        )
        django.setup()


@contextmanager
def running(server: Any) -> Iterator[int]:
    """Run a socketserver on a thread; yield its port."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def threaded(server: AbstractContextManager[str]) -> Any:
    """Return a server on a thread as an asynchronous context."""

    class Entered:
        async def __aenter__(self) -> str:
            return server.__enter__()

        async def __aexit__(self, *failure: Any) -> None:
            await asyncio.to_thread(server.__exit__, *failure)

    return Entered()
