"""An exchange with the service as a generator: it yields a request and receives its outcome.

This module has no input or output. A driver (`async_driver`, `sync_driver`) sends the requests and waits. So both
producers share every decision, and tests need neither sockets nor time.
"""

import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias, TypeVar

from halfnote.errors import Problem, Refused, Unconfirmed
from halfnote.json_text import parsed

T = TypeVar("T")

# The first pause after a failure; each next one is twice as long, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# How long connects may be refused before a request fails, unlike a timeout: nothing can have been stored.
REFUSED_WITHIN_S = 1.0
SHORTEST_TIMEOUT_S = 0.05
# The application seeds the module's own generator, or checks its state; and the producers of many processes that were
# seeded alike, or forked, would retry at the same moment.
_random = random.SystemRandom()
# What drivers log of transactions whose ends are not posted, or of halves that are not withdrawn.
_LEFT = "%d transactions are left to check-back, so Halfnote asks about them: "
LEFT_AT_CLOSE = _LEFT + "the producer was closed before their ends were posted"
LEFT_AS_CLOSED = _LEFT + "the producer is closed, and posts no end in the background"
LEFT_TOO_MANY = _LEFT + "too many ends wait"


@dataclass(frozen=True)
class Request:
    """A request to send. Its outcome is a Response or NoAnswer."""

    method: str
    path: str
    content: bytes
    timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wait:
    """A pause. Its outcome is None."""

    seconds: float


@dataclass(frozen=True)
class Call:
    """A call of the user's function, plain or async. Its outcome is Returned or Raised.

    `waits`: it may wait for a lock of local work, as a barrier does. A plain function of this kind never runs on an
    event loop, where that work may have to run to its end.
    """

    function: Callable[[], Any]
    waits: bool = False


@dataclass(frozen=True)
class Later:
    """Another exchange to run in the background. Its outcome is True, or False if too many are running.

    It is False after a close, too. `transactions`: how many the exchange is about. The driver logs that they are left
    to check-back, unless the exchange that yields this goes on without it (`has_fallback`).
    """

    exchange: "Exchange[Any]"
    transactions: int = 1
    has_fallback: bool = False


@dataclass(frozen=True)
class Response:
    """An answer; header names are in lower case. `part`: the JSON object, if it was a part of another answer."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    part: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class NoAnswer:
    """No answer came. `sent`: the request may have arrived. `refused`: there was no connection, without a timeout."""

    error: str
    sent: bool
    refused: bool = False


@dataclass(frozen=True)
class Returned:
    """The return value of a function."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The exception of a function."""

    error: Exception


class Dropped(BaseException):
    """Thrown into an exchange whose caller was canceled, which then yields only what runs later.

    `is_over`: the exchange has handed over what is left to do, or left it to check-back.
    """

    is_over = False


Effect: TypeAlias = Request | Wait | Call | Later
Exchange: TypeAlias = Generator[Effect, Any, T]
# Returns the JSON object of an answer's body. Raises ValueError or RecursionError.
Reader: TypeAlias = Callable[[bytes], Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """A success: its status and its JSON object.

    `after_doubt`: an earlier attempt may have been stored as well. `sent_at`: when the answered attempt was sent.
    """

    status: int
    content: Mapping[str, Any]
    after_doubt: bool = False
    sent_at: float = field(default=0.0, compare=False)


class Temporary(Unconfirmed):
    """The outcome of one transaction of a request that may have another one later."""


Outcome: TypeAlias = Answer | Refused | Unconfirmed


def asked(
    what: str,
    request: Request,
    *,
    within_s: float,
    clock: Callable[[], float] = time.monotonic,
    attempts: int | None = None,
    refused_within_s: float | None = None,
    after_s: float | None = None,
    read: Reader | None = None,
) -> Exchange[Answer]:
    """Send a request until it is answered for good, for at most `within_s` seconds or `attempts` times.

    If each attempt was refused a connection, so that nothing can have been stored, for at most `refused_within_s`.
    Only for requests that may be repeated. Each attempt has the time limit `request.timeout_s`. `Retry-After` of a 429
    or 503 is obeyed, unless the usual pause is longer; if it exceeds the remaining time, the exchange fails at once.
    `after_s`: the request repeats one that has failed, whose answer asked for such a pause (0: for none). `read`
    returns the JSON object of a success, if it is not to be parsed as usual. Raises Refused or Unconfirmed.
    """
    began = clock()
    until, refused_until = began + within_s, began + (within_s if refused_within_s is None else refused_within_s)
    perhaps_done, only_refused, tried = False, True, 0
    pause_s = FIRST_PAUSE_S
    if after_s is not None:
        first_s = max(after_s, _jittered(pause_s))
        if first_s >= within_s:
            raise Unconfirmed(what, f"a pause of {first_s:g} s was asked for", perhaps_done=True, after_s=after_s)
        yield Wait(first_s)
        pause_s *= 2
    while True:
        sent_at = clock()
        left_s = max(until - sent_at, SHORTEST_TIMEOUT_S)
        timeout_s = min(request.timeout_s, left_s)
        came = yield Request(request.method, request.path, request.content, timeout_s, request.headers)
        tried += 1
        if isinstance(came, NoAnswer):
            error, perhaps_done, asked_s = came.error, perhaps_done or came.sent, None
            only_refused = only_refused and came.refused
        else:
            only_refused = False
            found = _read(came, read)
            if isinstance(found, Answer):
                return replace(found, after_doubt=perhaps_done, sent_at=sent_at)
            if isinstance(found, Problem):
                raise Refused(what, found, perhaps_done=perhaps_done)
            error, asked_s = found, retry_after_s(came)
            perhaps_done = perhaps_done or not _surely_not_done(came)
        wait_s = max(asked_s or 0.0, _jittered(pause_s))
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        if tried == attempts or clock() + wait_s >= (min(until, refused_until) if only_refused else until):
            raise Unconfirmed(what, error, perhaps_done=perhaps_done, after_s=asked_s or 0.0)
        yield Wait(wait_s)


def asked_each(
    what: str,
    request_of: Callable[[Sequence[int]], Request],
    count: int,
    *,
    within_s: float,
    clock: Callable[[], float] = time.monotonic,
    attempts: int | None = None,
    refused_within_s: float | None = None,
    after_s: float | None = None,
) -> Exchange[list[Outcome]]:
    """Send a request of `count` transactions until each is answered for good; return the outcome of each.

    `request_of` returns the request of the transactions of these numbers: only what is not answered for good is sent
    again. Time limits, attempts and `after_s` are those of `asked`.
    """
    until, tried, pause_s = clock() + within_s, 0, FIRST_PAUSE_S
    found: dict[int, Outcome] = {}
    waiting, doubtful = list(range(count)), set[int]()
    while True:
        try:
            answer = yield from asked(
                what,
                request_of(waiting),
                within_s=max(until - clock(), SHORTEST_TIMEOUT_S),
                clock=clock,
                attempts=attempts,
                refused_within_s=None if tried else refused_within_s,
                after_s=None if tried else after_s,
            )
            outcomes = _outcomes(what, answer, len(waiting))
        except (Refused, Unconfirmed) as fault:
            fault.perhaps_done = fault.perhaps_done or bool(doubtful)
            found.update(dict.fromkeys(waiting, fault))
            break
        tried += 1
        found.update(zip(waiting, outcomes, strict=True))
        later = [(n, one) for n, one in zip(waiting, outcomes, strict=True) if isinstance(one, Temporary)]
        if answer.after_doubt:
            doubtful.update(waiting)
        doubtful |= {n for n, one in later if one.perhaps_done}
        for n, one in zip(waiting, outcomes, strict=True):
            if n in doubtful and not isinstance(one, Answer):
                one.perhaps_done = True
        waiting = [n for n, _ in later]
        wait_s = max([_jittered(pause_s), *(one.after_s for _, one in later)])
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        if not later or tried == attempts or clock() + wait_s >= until:
            break
        yield Wait(wait_s)
    return [found[n] for n in range(count)]


def pauses(within_s: float, clock: Callable[[], float]) -> Iterator[float]:
    """Yield the pauses between attempts, until `within_s` seconds after the first attempt has ended."""
    until, pause_s = clock() + within_s, FIRST_PAUSE_S
    while clock() + (wait_s := _jittered(pause_s)) < until:
        yield wait_s
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def carried_on(make: Callable[[], Exchange[T]]) -> Exchange[T]:
    """Run what follows local work; if its caller is canceled, begin it once more in the background."""
    try:
        return (yield from make())
    except Dropped as dropped:
        if not dropped.is_over:
            dropped.is_over = True
            yield Later(make())
        raise


def _jittered(pause_s: float) -> float:
    """Return a part of a pause, so that many callers do not retry at the same moment."""
    return pause_s * _random.uniform(0.5, 1)


def _outcomes(what: str, answer: Answer, count: int) -> "list[Outcome]":
    outcomes = answer.content.get("outcomes")
    if not isinstance(outcomes, list) or len(outcomes) != count:
        raise Unconfirmed(what, f"answered without {count} outcomes", perhaps_done=True)
    return [_outcome(what, one, answer.sent_at) for one in outcomes]


def _outcome(what: str, content: Mapping[str, Any], sent_at: float) -> Outcome:
    status = content["status"]
    if status < 300:
        return Answer(status, content, sent_at=sent_at)
    problem = _problem_of(status, content)
    if not _temporary(status):
        return Refused(what, problem)
    perhaps_done = not _surely_nothing(status, problem.type)
    return Temporary(
        what, f"answered {problem}", perhaps_done=perhaps_done, after_s=content.get("retry_after_s") or 0.0
    )


def _read(response: Response, read: Reader | None = None) -> Answer | Problem | str:
    """Return an answer, a final refusal, or the reason for another attempt."""
    is_success = 200 <= response.status < 300
    content = _object(response, read if is_success else None)
    if is_success:
        return (
            f"answered {response.status} without a JSON object" if content is None else Answer(response.status, content)
        )
    if 300 <= response.status < 400:
        return Problem(response.status, "redirect", "redirects are not followed: name the final URL")
    problem = _problem(response, content)
    return f"answered {problem}" if _temporary(response.status) else problem


def _temporary(status: int) -> bool:
    return status in (408, 425, 429) or status >= 500


def _problem(response: Response, content: Mapping[str, Any] | None) -> Problem:
    if content is None or not isinstance(content.get("type"), str):
        text = response.content[:200].decode("utf-8", "replace").strip() or "no text"
        return Problem(response.status, "not-halfnote", f"another program than Halfnote answered: {text}")
    return _problem_of(response.status, content)


def _problem_of(status: int, content: Mapping[str, Any]) -> Problem:
    extra = {name: value for name, value in content.items() if name not in ("type", "title", "status", "detail")}
    kind = str(content.get("type")).rpartition("/")[2]
    return Problem(status, kind, str(content.get("detail") or content.get("title") or kind), extra)


def _object(response: Response, read: Reader | None = None) -> Mapping[str, Any] | None:
    if response.part is not None:
        return response.part
    try:
        found = (read or parsed)(response.content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _surely_not_done(response: Response) -> bool:
    """Return whether a failure's type means that nothing was stored (docs/errors.md)."""
    content = _object(response) or {}
    return _surely_nothing(response.status, str(content.get("type")).rpartition("/")[2])


def _surely_nothing(status: int, kind: str) -> bool:
    return status == 429 or kind in (
        "overloaded",
        "draining",
        "not-ready",
        "database-read-only",
        "storage-full",
    )


def retry_after_s(response: Response) -> float | None:
    """Return `Retry-After` of a 429 or 503 in seconds from now (RFC 9110: seconds or a date), or None."""
    if response.status not in (429, 503):
        return None
    value = response.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None
