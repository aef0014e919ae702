"""Refusals of the coordinator in memory, as problem documents (RFC 9457)."""

from typing import Any

import httpx


class Refusal(Exception):
    """A request that is refused."""

    def __init__(self, status: int, kind: str, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail, self.extra = status, kind, detail, extra

    def response(self) -> httpx.Response:
        """Return it as an answer."""
        content = {"type": f"/problems/{self.kind}", "title": self.kind, "status": self.status, "detail": self.detail}
        return httpx.Response(
            self.status, json={**content, **self.extra}, headers={"content-type": "application/problem+json"}
        )


def invalid(field: str, expected: str) -> Refusal:
    """Return the refusal of a field."""
    return Refusal(422, "invalid", f"`{field}`: {expected}.", field=field)
