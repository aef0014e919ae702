"""The W3C trace context that goes along with messages, so that a consumer's spans join the producer's trace."""

import sys
from contextvars import ContextVar

# Set it where there is no OpenTelemetry, for instance from an incoming request's header.
traceparent: ContextVar[str | None] = ContextVar("halfnote_traceparent", default=None)


def current_traceparent() -> str | None:
    """Return what `traceparent` was set to, else the current OpenTelemetry span, if that is in use, else None."""
    given = traceparent.get()
    if given is not None or "opentelemetry" not in sys.modules:
        return given
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
