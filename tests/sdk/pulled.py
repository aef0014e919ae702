"""Answers of a coordinator to a consumer that claims from the subscription `worker`."""

from collections.abc import Callable
from typing import Any

import httpx

from tests.sdk.coordinators import Scripted, answer

URL = "http://localhost"
ACTS = ("claim", "ack", "nack", "extend", "reject")
CLAIM, ACK, NACK, EXTEND, REJECT = (f"/subscriptions/worker/{act}" for act in ACTS)


def claimed(*numbers: int, key: str | None = None) -> httpx.Response:
    """Return the answer to a claim: messages with these numbers as bodies and offsets, all of one key."""
    messages: list[dict[str, Any]] = [
        {
            "handle": f"h{number}",
            "message_id": f"019a9f1c-1030-7b1e-8f00-1030a1030a10-{number}",
            "offset": number,
            "producer_group": "shop",
            "topic": "order",
            "key": key,
            "tag": None,
            "headers": {},
            "content_type": "application/json",
            "committed_at": "2026-11-21T08:00:00Z",
            "attempt": 1,
            "replay": None,
            "body": number,
        }
        for number in numbers
    ]
    return answer(200, {"messages": messages, "held_until": "2026-11-21T08:01:00Z", "more": False})


def outcomes(request: httpx.Request) -> httpx.Response:
    """Answer that all messages of a request are settled, or held for longer."""
    handles = httpx.Response(200, content=request.content).json()["handles"]
    return answer(200, {"outcomes": [{"status": 200} for _ in handles]})


def scripted(*claims: httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]) -> Scripted:
    """Return a coordinator that answers claims so, one after the other, and settles everything."""
    return Scripted(
        {
            CLAIM: list(claims),
            **{path: [outcomes] for path in (ACK, NACK, EXTEND, REJECT)},
        }
    )
