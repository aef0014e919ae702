"""RocketMQ itself and Halfnote with its gateway, side by side, with the same topics and groups."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.gateway import GatewayProcess
from tests.support.processes import Service
from tests.support.rocketmq_servers import RocketMq, rocketmq_of

# RocketMQ's limit of a body.
BODY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Pair:
    """Both, running. `rocketmq` has a proxy for gRPC; `gateway` is Halfnote's, for both protocols."""

    rocketmq: RocketMq
    gateway: GatewayProcess
    admin: httpx.AsyncClient

    async def add(self, topic: str, producers: str, **groups: dict[str, Any]) -> None:
        """Make a topic with a producer group and consumer groups. Groups: their retries, and whether they are ordered.

        Checks and retries come after a second or soon after it.
        """
        await self.rocketmq.add_topic(topic)
        shape = {"checks": "claim", "immunity_s": 3, "interval_s": 2}
        await self._put(f"/producer-groups/{producers}", shape)
        for name, group in groups.items():
            await self.rocketmq.add_group(name, **group)
            ordered = {"ordered": "key"} if group.get("ordered") else {}
            retry = {"retry": [1] * group["retries"]} if "retries" in group else {}
            pulled = {"topics": [topic], "destination": {"type": "pull"}, **retry, **ordered}
            await self._put(f"/subscriptions/{name}@{topic}", pulled)

    async def dead_letters(self, group: str, topic: str) -> int:
        """Return how many dead letters a group has in Halfnote."""
        answer = await self.admin.get("/dead-letters", params={"subscription": f"{group}@{topic}"})
        return len(answer.json()["items"])

    async def _put(self, path: str, shape: dict[str, Any]) -> None:
        answer = await self.admin.put(path, json=shape)
        assert answer.is_success, answer.text


@asynccontextmanager
async def pair_of(place: Path, dsn: str, topic_type: str) -> AsyncIterator[Pair]:
    """Run both, with their files in the directory `place`; skips without its jars. `topic_type`: of RocketMQ topics."""
    async with AsyncExitStack() as stack:
        (place / "rocketmq").mkdir()
        rocketmq = await stack.enter_async_context(rocketmq_of(place / "rocketmq", topic_type))
        limit = str(BODY_BYTES * 3 // 2)
        service = Service(place / "data", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_BODY_LIMIT_BYTES=limit)
        stack.callback(service.stop)
        await service.start()
        gateway = GatewayProcess(place, service.url, "--remoting-port", "0", "--max-body-bytes", str(BODY_BYTES))
        stack.callback(gateway.stop)
        await gateway.start()
        admin = await stack.enter_async_context(httpx.AsyncClient(base_url=service.url, timeout=60))
        yield Pair(rocketmq, gateway, admin)
