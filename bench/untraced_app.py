"""`bench.untraced_app:app` is the service as bench.untraced leaves it."""

from bench.untraced import installed

installed()

from app.main import app  # noqa: E402 -- only now

__all__ = ["app"]
