"""What a client may send by its stream of settings: so many bytes a message, and so many messages a minute."""

from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused
from app.rocketmq.request_limits import RequestLimits

_MINUTE_S = 60.0


class SettingsStream:
    """The messages of one stream. Those of a minute may all come at once (a token bucket)."""

    def __init__(self, limits: RequestLimits) -> None:
        self._bytes, self._per_minute = limits.settings_bytes, limits.settings_per_minute
        self._left, self._last = float(self._per_minute), float("-inf")

    def take(self, content: bytes, at: float) -> None:
        """Note a message at the time `at`, in seconds. Raises CallRefused if it is too large or one too many."""
        if len(content) > self._bytes:
            raise CallRefused(
                Code.BAD_REQUEST,
                f"The settings have {len(content):,} bytes; {self._bytes:,} are the most (--max-settings-bytes). Name "
                "fewer topics, or use several clients.",
            )
        most = float(self._per_minute)
        self._left = min(most, self._left + (at - self._last) * most / _MINUTE_S)
        self._last = at
        if self._left < 1:
            raise CallRefused(
                Code.TOO_MANY_REQUESTS,
                f"This stream sent more than {self._per_minute:,} messages in a minute (--max-settings-per-minute). "
                "Send settings only when they change.",
            )
        self._left -= 1
