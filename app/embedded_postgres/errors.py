"""Errors at the start of the embedded Postgres."""


class EmbeddedPostgresError(Exception):
    """The embedded Postgres cannot start; the text says why and what to do."""


class InUseError(EmbeddedPostgresError):
    """Another process owns the cluster."""
