"""Inbound HTTP below the routes: the uvicorn protocol, connection limits, middleware, the fast path."""
