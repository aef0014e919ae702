"""What goes wrong while starting the embedded Postgres."""


class EmbeddedPostgresError(Exception):
    """The embedded Postgres cannot start; the text is one or two sentences that end in what to do about it."""


class InUseError(EmbeddedPostgresError):
    """Another process owns the cluster."""
