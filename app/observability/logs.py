"""Logs by structlog: key=value lines on a terminal, JSON elsewhere."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import asyncpg
import structlog

from app.observability.trace_context import current, log_fields

# One list, whose content is replaced: a logger that was used before the logs are set up again keeps the list.
_processors: list[structlog.typing.Processor] = []


def set_up_logs(*, terminal: bool | None = None) -> None:
    """Send every log line, ours and the libraries', through structlog: key=value on a terminal, JSON otherwise."""
    on_terminal = sys.stderr.isatty() if terminal is None else terminal
    shared: list[structlog.typing.Processor] = [
        without_rows,
        structlog.contextvars.merge_contextvars,
        with_trace,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    tail: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=on_terminal, exception_formatter=structlog.dev.plain_traceback)]
        if on_terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    _processors[:] = [*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter]
    structlog.configure(
        processors=_processors,
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail]
    )
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(formatter)
    logging.basicConfig(handlers=[out], level=logging.INFO, force=True)
    for own in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(own).handlers.clear()
        # Access lines are discarded. Without a handler uvicorn does not format them either.
        logging.getLogger(own).propagate = own != "uvicorn.access"
    for chatty in ("alembic", "httpx", "aiohttp"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # These clients log every failed attempt. The delivery's own log line has its outcome.
    for client in ("aiokafka", "aio_pika", "aiormq", "nats"):
        logging.getLogger(client).setLevel(logging.CRITICAL)


def with_trace(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the current trace and span to a line that names none."""
    for name, value in log_fields(current.get()).items():
        fields.setdefault(name, value)
    return fields


def without_rows(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Remove the refused row from Postgres errors, because it may hold a message's body.

    The detail follows the error's own text, so everything after it is cut.
    """
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = value.partition("\nDETAIL:")[0]
    _forget_rows(_exception_of(fields.get("exc_info")))
    return fields


def _exception_of(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return exc_info[1]  # type: ignore[no-any-return]
    return sys.exc_info()[1] if exc_info else None


def _forget_rows(error: BaseException | None) -> None:
    """Remove the detail from an exception and its causes before a traceback prints them."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        if isinstance(error, asyncpg.PostgresError):
            error.detail = None
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
        waiting += [error.__cause__, error.__context__]
