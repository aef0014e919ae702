"""Puts requests that wait at the same time into one, and takes its answer apart, without input or output.

`POST /half` becomes a part of `POST /halves`, `/end` of `/ends`, and plain messages of a list in `/messages`. Each
outcome in the answer is what a request of its own would get, so an exchange does not see the difference.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from halfnote.exchange import NoAnswer, Request, Response

# Transactions of one request, as the service takes them.
TRANSACTIONS_MOST = 500
# Bytes of the bodies of one request.
BYTES_MOST = 256 * 1024
# A request of more bytes is sent by itself, at once: few of these fit into one, so the others would wait for places.
BYTES_SHARED = 16 * 1024
# So many requests of one kind are under way at once; what comes meanwhile waits for the next one.
UNDER_WAY_MOST = 2
# A request that is under way for longer than this no longer keeps others waiting: it may have no answer until its time
# limit, while others would have one, for example from another replica.
SLOW_S = 0.25
# The service refused a request as a whole, as one without these routes does: requests stay single for so long.
SINGLE_FOR_S = 60.0

# The list that takes requests of each path, and its field.
_LISTS = {"/half": ("/halves", "halves"), "/end": ("/ends", "ends"), "/messages": ("/messages", "transactions")}
# These refuse each transaction of a request alike.
_FOR_ALL = (401, 403, 408, 425, 429)


class Single:
    """Whether requests must be sent one by one, because the service refused a list of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._until = clock, 0.0

    def takes(self, request: Request) -> bool:
        """Return whether a request may become part of another one. One to `/messages` may be a list already."""
        return (
            request.path in _LISTS
            and request.method == "POST"
            and len(request.content) <= BYTES_SHARED
            and self._clock() >= self._until
            and not (request.path == "/messages" and request.content.startswith(b'{"transactions"'))
        )

    def refused(self) -> None:
        """Note that the service refused a list as a whole."""
        self._until = self._clock() + SINGLE_FOR_S


def fitting(sizes: Sequence[int]) -> int:
    """Return how many of the waiting requests of these sizes, in bytes, go into one."""
    total = 0
    for count, size in enumerate(sizes[:TRANSACTIONS_MOST]):
        total += size
        if total > BYTES_MOST and count:
            return count
    return min(len(sizes), TRANSACTIONS_MOST)


def combined(requests: Sequence[Request]) -> Request:
    """Return one request for several of the same path; a single one stays as it is."""
    if len(requests) == 1:
        return requests[0]
    path, field = _LISTS[requests[0].path]
    content = b'{"%b":[%b]' % (field.encode(), b",".join(request.content for request in requests))
    traces = [request.headers.get("traceparent") for request in requests]
    if any(trace is not None for trace in traces):
        content += b',"traceparents":%b' % json.dumps(traces).encode()
    return Request("POST", path, content + b"}", max(request.timeout_s for request in requests))


def too_late(request: Request, *, sent: bool) -> NoAnswer:
    """Return what a caller gets whose time is over, while the request that its own is a part of may have more."""
    return NoAnswer(f"no answer within {request.timeout_s:g} s", sent)


def parted(came: Response | NoAnswer, count: int) -> "list[Response | NoAnswer] | None":
    """Return what each of `count` requests gets; None if the list was refused, so that each must be sent by itself."""
    if count == 1 or isinstance(came, NoAnswer):
        return [came] * count
    if came.status == 200:
        outcomes = _outcomes(came.content)
        if outcomes is None or len(outcomes) != count:
            return [NoAnswer(f"answered without {count} outcomes", sent=True)] * count
        return [Response(one["status"], _headers(one), b"", one) for one in outcomes]
    if 400 <= came.status < 500 and came.status not in _FOR_ALL:
        return None
    return [came] * count


def _outcomes(content: bytes) -> list[dict[str, Any]] | None:
    try:
        outcomes = json.loads(content)["outcomes"]
        return outcomes if all(isinstance(one["status"], int) for one in outcomes) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _headers(outcome: dict[str, Any]) -> dict[str, str]:
    after_s = outcome.get("retry_after_s")
    return {} if after_s is None else {"retry-after": str(after_s)}
