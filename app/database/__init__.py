"""Connections to Postgres, SQLSTATE to problem, LISTEN and NOTIFY."""
