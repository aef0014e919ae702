"""Logs, metrics, spans, and W3C trace context."""
