"""The result of an HTTP call, and the limits of an answer."""

from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime

from msgspec import Struct

# The most bytes of an answer's body that are kept. A longer body is cut and its connection closed.
REPLY_LIMIT_BYTES = 16 * 1024
# The longest `Retry-After` that is believed: three days.
RETRY_AFTER_MAX_S = 259_200.0


class Reply(Struct, frozen=True):
    """The result of a call: `status` and `body` (cut at a limit, then `truncated`), or `error` without an answer.

    `headers` have names in lower case. `unreachable`: no connection was made, so nothing was sent.
    """

    status: int | None
    headers: Mapping[str, str]
    body: bytes
    truncated: bool
    error: str | None
    duration_ms: int
    timed_out: bool = False
    unreachable: bool = False

    @property
    def text(self) -> str:
        """The body as text for people, at most 1,000 characters, without NUL."""
        return self.body[:4000].decode("utf-8", "replace").replace("\x00", "\ufffd")[:1000]

    def retry_after_s(self, now: datetime) -> float | None:
        """Return `Retry-After` (RFC 9110) in seconds from now, at most RETRY_AFTER_MAX_S, or None."""
        value = self.headers.get("retry-after", "").strip()
        if value.isascii() and value.isdigit():
            return min(float(value), RETRY_AFTER_MAX_S)
        try:
            return min(max(0.0, (parsedate_to_datetime(value) - now).total_seconds()), RETRY_AFTER_MAX_S)
        except (ValueError, TypeError, OverflowError):
            return None
