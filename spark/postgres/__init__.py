"""Connections to Postgres, the exported snapshot, COPY."""
