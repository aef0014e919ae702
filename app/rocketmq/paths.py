"""Paths of Halfnote's HTTP API."""

from urllib.parse import quote


def path_of(*parts: str) -> str:
    """Return a path of these parts, each one segment."""
    return "".join(f"/{quote(part, safe='@')}" for part in parts)
