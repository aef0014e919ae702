"""What an endpoint returns that needs nothing but the commit of a lane: the request, and how its outcome is answered.

The HTTP protocol then needs no task: it queues the request, and answers from the callback of the lane's future.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeAlias

from msgspec import Struct

from app.coordinator.group_commit import GroupCommitLane, Outcome, R

# A status and a JSON body.
JsonAnswer: TypeAlias = tuple[int, bytes]


class LaneCall(Struct, Generic[R, Outcome], gc=False):
    """A request that is ready for its lane.

    `answer(outcome)` returns the answer, or a coroutine if the answer takes more than the outcome.
    """

    lane: GroupCommitLane[R, Outcome]
    request: R
    answer: Callable[[Outcome], "JsonAnswer | Coroutine[Any, Any, JsonAnswer]"]


# What an endpoint returns. It returns a coroutine if the request must await something before the lane.
Begun: TypeAlias = LaneCall[Any, Any] | Coroutine[Any, Any, JsonAnswer]


async def completed(begun: Begun) -> JsonAnswer:
    """Return the answer to a request that has begun. Raises Problem."""
    if not isinstance(begun, LaneCall):
        return await begun
    answer = begun.answer(await begun.lane.commit(begun.request))
    return answer if isinstance(answer, tuple) else await answer
