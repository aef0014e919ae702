"""The lines of `halfnote transactions show`."""

from app.cli.transaction_view import entry_text, message_rows


def test_postponements_are_one_line_with_their_number() -> None:
    entry = {
        "at": "2026-11-21T08:00:00Z",
        "what": "attempt",
        "subscription": "mailer",
        "attempt": 1,
        "outcome": "postponed",
        "status": 503,
        "duration_ms": 4,
        "times": 274,
        "last_at": "2026-11-21T08:10:00Z",
    }
    expected = "to mailer, attempt 1, postponed, status 503, 4 ms, 274 times until 2026-11-21 08:10:00 UTC"
    assert entry_text(entry) == expected


def test_a_message_without_a_delivery_says_why() -> None:
    message = {"topic": "order", "tag": None, "key": "order-1030", "deliveries": []}
    assert message_rows(0, {**message, "offset": None})[0][-1] == ""
    assert message_rows(0, {**message, "offset": 7})[0][-1] == "no subscription takes it"
    delayed = {**message, "offset": 7, "due_at": "2026-11-21T08:10:00Z"}
    assert message_rows(0, delayed)[0][-1] == "due 2026-11-21 08:10:00"
