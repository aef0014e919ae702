"""Many transactions in one request: each takes the same steps as a request of its own, and all share the lane.

The answer is 200 with `outcomes`, one for each, in the order of the request: the answer or the problem document that a
request of its own would get, and its `status`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import msgspec

from app.coordinator.decoding import decode
from app.coordinator.lane_call import Begun, JsonAnswer, LaneCall
from app.coordinator.wire import (
    TRANSACTIONS_MAX,
    EndRequest,
    EndsRequest,
    HalfRequest,
    HalvesRequest,
    TraceParents,
)
from app.database.errors import problem_of
from app.errors import Invalid, Problem
from app.observability.metric_groups import HttpMetrics
from app.observability.trace_context import context_of
from app.permissions import Caller
from app.routers.end import end_begun
from app.routers.half import half_begun
from app.runtime.state import Runtime

T = TypeVar("T")
P = ParamSpec("P")

# Of one request, so many transactions at once may use connections of the pool.
AT_ONCE = 4

_Queued: TypeAlias = tuple[Callable[[Any], Any], "asyncio.Future[Any]"]
# A transaction of the request after its eager steps: in its lane, in a task, or refused.
Item: TypeAlias = "_Queued | asyncio.Task[JsonAnswer] | Exception"


class ManyRoute(Generic[T]):
    """How one route takes many transactions.

    `route` is its path. `field` is the field of `many` that is a list of `one`. `begin` takes a decoded transaction.
    """

    def __init__(
        self,
        route: str,
        field: str,
        many: type[msgspec.Struct],
        one: type[T],
        begin: Callable[[Runtime, Caller, T, str | None], Begun],
    ) -> None:
        self._route, self._field, self._begin = route, field, begin
        self._many: msgspec.json.Decoder[Any] = msgspec.json.Decoder(many)
        self._one: msgspec.json.Decoder[T] = msgspec.json.Decoder(one)
        listed = msgspec.defstruct(
            "Listed",
            [(field, list[msgspec.Raw]), ("traceparents", TraceParents, msgspec.UNSET)],
            forbid_unknown_fields=True,
        )
        self._raw: msgspec.json.Decoder[Any] = msgspec.json.Decoder(listed)

    def begun(self, runtime: Runtime, caller: Caller, body: bytes, trace: str | None) -> Begun:
        """Return the coroutine that answers. Raises Problem if the body is no list of 1 to TRANSACTIONS_MAX."""
        requests, given = self._requests(body)
        runtime.load_limits.take_more(caller, len(requests) - 1)
        return self._answer(runtime, caller, requests, _traces(given, len(requests), trace))

    def _requests(self, body: bytes) -> tuple[list[T | Problem], TraceParents]:
        try:
            many = decode(self._many, body)
            found: list[T | Problem] = getattr(many, self._field)
        except Invalid:
            # A transaction that does not fit must not refuse the others.
            many = decode(self._raw, body)
            found = [self._decoded(raw) for raw in getattr(many, self._field)]
            if not 1 <= len(found) <= TRANSACTIONS_MAX:
                raise Invalid(
                    f"A request has 1 to {TRANSACTIONS_MAX} transactions, not {len(found)}.", field=self._field
                ) from None
        return found, many.traceparents

    def _decoded(self, raw: msgspec.Raw) -> T | Problem:
        try:
            return decode(self._one, bytes(raw))
        except Problem as problem:
            return problem

    async def _answer(
        self, runtime: Runtime, caller: Caller, requests: Sequence[T | Problem], traces: Sequence[str | None]
    ) -> JsonAnswer:
        limit = asyncio.Semaphore(AT_ONCE)
        # All are queued before the first await, so that they share a flush.
        items: list[Item] = [
            request if isinstance(request, Problem) else begun_item(limit, self._begin, runtime, caller, request, trace)
            for request, trace in zip(requests, traces, strict=True)
        ]
        return 200, b'{"outcomes":[%b]}' % b",".join(await outcomes_of(items, runtime.metrics.http, self._route))


def _traces(given: TraceParents, count: int, of_request: str | None) -> Sequence[str | None]:
    """Return the trace context of each transaction. Raises Invalid for a list of another length."""
    if given is msgspec.UNSET:
        return [of_request] * count
    if len(given) != count:
        raise Invalid(
            f"`traceparents` has one entry for each of the {count} transactions, or null, not {len(given)}.",
            field="traceparents",
        )
    return [of_request if parent is None else context_of(parent) for parent in given]


def begun_item(limit: asyncio.Semaphore, begin: Callable[P, Begun], *args: P.args, **kwargs: P.kwargs) -> Item:
    """Take the eager steps of one transaction of a request; the rest waits for its turn in `limit`."""
    try:
        begun = begin(*args, **kwargs)
        if isinstance(begun, LaneCall):
            return begun.answer, begun.lane.enqueue(begun.request)
    except Exception as error:
        return error
    return asyncio.create_task(_limited(begun, limit))


async def outcomes_of(items: Sequence[Item], metrics: HttpMetrics, route: str) -> list[bytes]:
    """Return the outcome of each transaction of a request, as JSON, and count the statuses for the route."""
    try:
        # A coroutine for each transaction would take as long as its answer, and one flush has most of them.
        outcomes = [found if isinstance(found := _outcome(item), tuple) else await found for item in items]
    finally:
        for item in items:
            if isinstance(item, asyncio.Task):
                item.cancel()
    metrics.observe_outcomes(route, [status for status, _ in outcomes])
    return [outcome for _, outcome in outcomes]


async def _limited(begun: Coroutine[Any, Any, JsonAnswer], limit: asyncio.Semaphore) -> JsonAnswer:
    async with limit:
        return await begun


def _outcome(item: Item) -> JsonAnswer | Coroutine[Any, Any, JsonAnswer]:
    """Return the outcome of one transaction; a coroutine if its flush has not ended, or the answer takes more."""
    if isinstance(item, Exception):
        return _refusal(item)
    if isinstance(item, asyncio.Task) or not item[1].done():
        return _awaited(item)
    answer, future = item
    try:
        found = answer(future.result())
    except Exception as error:
        return _refusal(error)
    return _answered(*found) if isinstance(found, tuple) else _awaited(found)


async def _awaited(item: "_Queued | Awaitable[JsonAnswer]") -> JsonAnswer:
    try:
        if isinstance(item, tuple):
            answer, future = item
            found = answer(await future)
            status, body = found if isinstance(found, tuple) else await found
        else:
            status, body = await item
    except Exception as error:
        return _refusal(error)
    return _answered(status, body)


def _answered(status: int, body: bytes) -> JsonAnswer:
    return status, b'{"status":%d,%b' % (status, body[1:])


def _refusal(error: Exception) -> JsonAnswer:
    problem = problem_of(error)
    if problem.retry_after_s is None:
        return problem.status, problem.body()
    return problem.status, b'{"retry_after_s":%d,%b' % (problem.retry_after_s, problem.body()[1:])


_HALVES = ManyRoute("/halves", "halves", HalvesRequest, HalfRequest, half_begun)
_ENDS = ManyRoute("/ends", "ends", EndsRequest, EndRequest, end_begun)


def post_halves(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> Begun:
    """Store many halves: 200 with an outcome of each. Raises Problem for the body as a whole."""
    return _HALVES.begun(runtime, caller, body, trace)


def post_ends(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> Begun:
    """Record many verdicts: 200 with an outcome of each. Raises Problem for the body as a whole."""
    return _ENDS.begun(runtime, caller, body, trace)
