"""When a request is repeated and how its answer is read; the test sets the time."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest
from halfnote.errors import Refused, Unconfirmed
from halfnote.exchange import Answer, NoAnswer, Request, Response, Wait, asked, retry_after_s

REQUEST = Request("POST", "/half", b"{}", timeout_s=5.0)


def response(status: int, content: Any = None, **headers: str) -> Response:
    raw = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
    return Response(status, {name.replace("_", "-"): value for name, value in headers.items()}, raw)


def refusal(status: int, kind: str, **extra: Any) -> Response:
    return response(status, {"type": f"/problems/{kind}", "title": kind, "detail": "no", **extra})


def play(
    answers: Sequence[Response | NoAnswer],
    *,
    within_s: float = 15.0,
    attempts: int | None = None,
    took_s: float = 0.0,
    refused_within_s: float | None = None,
) -> tuple[Answer | Exception, list[float], list[float]]:
    """Play an exchange; return its result, its pauses, and the timeout of each attempt."""
    now, pauses, timeouts = [100.0], [], []
    exchange = asked(
        "it",
        REQUEST,
        within_s=within_s,
        clock=lambda: now[0],
        attempts=attempts,
        refused_within_s=refused_within_s,
    )
    left = list(answers)
    effect: Any = next(exchange)
    try:
        while True:
            if isinstance(effect, Wait):
                pauses.append(effect.seconds)
                now[0] += effect.seconds
                effect = exchange.send(None)
            else:
                timeouts.append(effect.timeout_s)
                now[0] += took_s
                effect = exchange.send(left.pop(0) if len(left) > 1 else left[0])
    except StopIteration as stop:
        return stop.value, pauses, timeouts
    except (Refused, Unconfirmed) as error:
        return error, pauses, timeouts


def test_an_answer_is_an_answer() -> None:
    assert play([response(201, {"a": 1})]) == (Answer(201, {"a": 1}), [], [5.0])


@pytest.mark.parametrize(
    "failure",
    [
        NoAnswer("reset", sent=True),
        response(500, b"boom"),
        refusal(503, "overloaded"),
        refusal(503, "outcome-unknown"),
        response(502, b"<html>bad gateway"),
        response(429),
        response(408),
        response(200, b"<html>welcome"),
        response(200, [1]),
        response(200, b"\xff"),
    ],
)
def test_what_may_pass_is_repeated(failure: Response | NoAnswer) -> None:
    answer, pauses, _ = play([failure, failure, response(200, {"a": 1})])
    assert (answer.status, answer.content) == (200, {"a": 1})
    assert 0.05 <= pauses[0] <= 0.1
    assert 0.1 <= pauses[1] <= 0.2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 415, 421, 422, 301])
def test_what_is_final_is_not_repeated(status: int) -> None:
    answer, pauses, _ = play([refusal(status, "some-kind")])
    assert isinstance(answer, Refused)
    assert answer.problem.status == status
    assert pauses == []


def test_something_else_at_the_url_is_named_as_such() -> None:
    answer, _, _ = play([response(404, b"<html>no such page")])
    assert isinstance(answer, Refused)
    assert "another program than Halfnote answered: <html>no such page" in str(answer)


def test_retry_after_is_kept_to() -> None:
    _, pauses, _ = play([response(503, retry_after="3"), response(429, retry_after="2"), response(200)])
    assert pauses == [3.0, 2.0]


@pytest.mark.parametrize("over", ["0", "Sat, 21 Nov 2020 08:00:00 GMT"])
def test_a_retry_after_that_is_over_leaves_the_usual_pauses(over: str) -> None:
    """A service that is overloaded must not get requests without a pause."""
    _, pauses, _ = play([response(503, retry_after=over), response(503, retry_after=over), response(200)])
    assert len(pauses) == 2
    assert 0.05 <= pauses[0] <= 0.1 <= pauses[1] <= 0.2


def test_a_date_will_do_and_nonsense_is_left_out() -> None:
    at = datetime.now(timezone.utc) + timedelta(seconds=90)
    assert 80 < (retry_after_s(response(503, retry_after=format_datetime(at))) or 0) <= 90
    for unreadable in ("soon", "Mon, 01 Jan 99999999999 00:00:00 GMT"):
        assert retry_after_s(response(503, retry_after=unreadable)) is None
    assert retry_after_s(response(503)) is None
    assert retry_after_s(response(500, retry_after="3")) is None


def test_it_does_not_wait_for_what_comes_too_late() -> None:
    answer, pauses, _ = play([refusal(503, "overloaded"), response(503, retry_after="60")])
    assert isinstance(answer, Unconfirmed)
    assert len(pauses) == 1


def test_it_ends_at_its_deadline_and_the_last_attempt_has_the_time_that_is_left() -> None:
    answer, pauses, timeouts = play([NoAnswer("silent", sent=True)], within_s=12.0, took_s=5.0)
    assert isinstance(answer, Unconfirmed)
    assert "silent" in str(answer)
    assert timeouts[:2] == [5.0, 5.0]
    assert timeouts[2] < 2.0
    assert len(pauses) == 2


def test_a_single_attempt() -> None:
    answer, pauses, _ = play([NoAnswer("silent", sent=True)], attempts=1)
    assert isinstance(answer, Unconfirmed)
    assert pauses == []


@pytest.mark.parametrize(
    ("answers", "perhaps"),
    [
        ([NoAnswer("refused", sent=False)], False),
        ([refusal(503, "overloaded")], False),
        ([refusal(503, "draining"), NoAnswer("refused", sent=False)], False),
        ([NoAnswer("reset", sent=True), NoAnswer("refused", sent=False)], True),
        ([refusal(503, "outcome-unknown")], True),
        ([response(500, b"boom")], True),
        ([response(504, b"")], True),
    ],
)
def test_it_tells_whether_it_may_have_been_stored(answers: list[Response | NoAnswer], perhaps: bool) -> None:
    answer, _, _ = play(answers, attempts=len(answers))
    assert isinstance(answer, Unconfirmed)
    assert answer.perhaps_done is perhaps


@pytest.mark.parametrize(("skew_s", "word"), [(600.2, "600 s ahead of"), (-600.2, "600 s behind")])
def test_a_clock_that_is_off_is_named_with_by_how_much(skew_s: float, word: str) -> None:
    times = {"coordinator_time": "2026-11-21T08:00:00+00:00", "id_time": "2026-11-21T08:10:00+00:00"}
    answer, _, _ = play([refusal(422, "id-time-skew", skew_s=skew_s, **times)])
    assert f"this machine's clock (2026-11-21T08:10:00+00:00) is {word} the coordinator's" in str(answer)


REFUSED = NoAnswer("connection refused", sent=False, refused=True)


def test_connects_that_are_refused_fail_soon() -> None:
    """Nothing can have been stored, so a caller does not wait as long as for a lost answer."""
    error, pauses, _ = play([REFUSED], refused_within_s=1.0)
    assert isinstance(error, Unconfirmed)
    assert not error.perhaps_done
    assert 0 < sum(pauses) < 1.0


@pytest.mark.parametrize("first", [NoAnswer("reset", sent=True), NoAnswer("no answer", sent=False), response(502)])
def test_another_failure_has_the_whole_time(first: Response | NoAnswer) -> None:
    """It may have been stored, or the service is there."""
    _, pauses, _ = play([first, REFUSED], refused_within_s=1.0)
    assert 5.0 < sum(pauses) < 15.0


def test_background_requests_have_the_whole_time() -> None:
    _, pauses, _ = play([REFUSED])
    assert 5.0 < sum(pauses) < 15.0
