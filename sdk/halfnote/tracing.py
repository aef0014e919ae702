"""The W3C trace context of messages, so that a consumer's spans join the producer's trace."""

import sys
from contextvars import ContextVar

# Set it if there is no OpenTelemetry, for example from the header of an incoming request.
traceparent: ContextVar[str | None] = ContextVar("halfnote_traceparent", default=None)


def current_traceparent() -> str | None:
    """Return the value set in `traceparent`, else the current OpenTelemetry span if there is one, else None."""
    given = traceparent.get()
    if given is not None or "opentelemetry" not in sys.modules:
        return given
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
