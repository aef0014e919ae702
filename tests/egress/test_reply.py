"""What is read of an answer."""

from datetime import UTC, datetime

import pytest

from app.egress.reply import RETRY_AFTER_MAX_S, Reply

NOW = datetime(2026, 11, 27, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0),
        ("9" * 400, RETRY_AFTER_MAX_S),
        ("Fri, 27 Nov 2026 08:01:30 GMT", 90.0),
        ("Fri, 27 Nov 2026 07:00:00 GMT", 0.0),
        ("soon", None),
        ("", None),
        # Dates that Python cannot represent.
        ("Mon, 01 Jan 99999999999 00:00:00 GMT", None),
        ("Mon, 01 Jan 2027 00:00:00 +99999999999999999999", None),
    ],
)
def test_retry_after(value: str, expected: float | None) -> None:
    reply = Reply(503, {"retry-after": value}, b"", False, None, 0)
    assert reply.retry_after_s(NOW) == expected
