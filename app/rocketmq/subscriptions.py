"""The subscription of each consumer group and topic: found, or declared with the rights of the client's own key."""

import json
import time
from collections.abc import Mapping
from typing import Any

import structlog

from app.rocketmq.credentials import ApiKeys
from app.rocketmq.filters import Filters
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.paths import path_of
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused

log = structlog.get_logger(__name__)

# How long a subscription is taken to exist after it was seen.
SEEN_S = 30.0

Shape = Mapping[str, Any]


class Subscriptions:
    """Subscriptions that were seen lately, by name and key."""

    def __init__(self, api: HalfnoteApi) -> None:
        self._api = api
        self._seen: dict[tuple[str, ApiKeys], tuple[float, Shape]] = {}

    async def of(self, name: str, topic: str, keys: ApiKeys, filters: Filters, start: str = "latest") -> Shape:
        """Return the subscription; declare it, with these filters, if there is none. Raises CallRefused.

        A new one begins with the messages that come from now on, as a new consumer group does in RocketMQ, unless
        `start` is `earliest`.
        """
        return self.seen(name, keys) or await self._read(name, topic, keys, filters, start)

    def seen(self, name: str, keys: ApiKeys) -> Shape | None:
        """Return the subscription as it was within the last SEEN_S; None: it was not seen."""
        at, shape = self._seen.get((name, keys), (0.0, None))
        return shape if time.monotonic() - at < SEEN_S else None

    async def filter_by(self, name: str, topic: str, keys: ApiKeys, filters: Filters, start: str = "latest") -> None:
        """Give the subscription these filters, as the last consumer that says how to filter decides in RocketMQ.

        One that does not exist is declared. Raises CallRefused.
        """
        # A consumer may have said something else by another gateway since the subscription was seen here.
        shape = await self._read(name, topic, keys, filters, start)
        if _compared(shape["filters"]) == _compared(filters):
            return
        content = {"filters": _patch(shape["filters"], filters)}
        changed = json.loads(await self._api.call("PATCH", path_of("subscriptions", name), keys.subscriber, content))
        log.info("rocketmq_filters_changed", subscription=name, filters=filters, former=shape["filters"])
        self._keep(name, keys, changed)

    async def order_by_key(self, name: str, topic: str, keys: ApiKeys, filters: Filters, start: str = "latest") -> None:
        """Let the messages of a key come in their order, as an orderly consumer asks. Raises CallRefused."""
        shape = await self._read(name, topic, keys, filters, start)
        if shape["ordered"] == "key":
            return
        content = {"ordered": "key"}
        changed = json.loads(await self._api.call("PATCH", path_of("subscriptions", name), keys.subscriber, content))
        log.info("rocketmq_subscription_ordered", subscription=name)
        self._keep(name, keys, changed)

    def forget(self, name: str, keys: ApiKeys) -> None:
        """Look again at the next call: the subscription was deleted or changed."""
        self._seen.pop((name, keys), None)

    async def _read(self, name: str, topic: str, keys: ApiKeys, filters: Filters, start: str) -> Shape:
        shape = await self._found(name, keys) or await self._declared(name, topic, keys, filters, start)
        if shape is None:
            # It was made meanwhile, by a person or another gateway. What they said of it stays.
            shape = await self._found(name, keys)
        if shape is None:
            raise CallRefused(
                Code.PROXY_TIMEOUT,
                f"The subscription `{name}` was made and deleted meanwhile. Try again.",
                for_now=True,
            )
        if shape["destination"]["type"] != "pull":
            raise CallRefused(
                Code.CONSUMER_GROUP_NOT_FOUND,
                f"The subscription `{name}` delivers to its destination ({shape['destination']['type']}), so no "
                "consumer can claim from it. Delete it, or name the consumer group differently.",
            )
        self._keep(name, keys, shape)
        return shape

    def _keep(self, name: str, keys: ApiKeys, shape: Shape) -> None:
        now = time.monotonic()
        self._seen = {one: seen for one, seen in self._seen.items() if now - seen[0] < SEEN_S}
        self._seen[name, keys] = (now, shape)

    async def _found(self, name: str, keys: ApiKeys) -> Shape | None:
        try:
            answer = await self._api.call("GET", path_of("subscriptions", name), keys.subscriber)
        except CallRefused as refused:
            if refused.slug == "subscription-unknown":
                return None
            raise
        found: Shape = json.loads(answer)
        return found

    async def _declared(self, name: str, topic: str, keys: ApiKeys, filters: Filters, start: str) -> Shape | None:
        """Make the subscription and return it; None: there is one by now."""
        content: dict[str, Any] = {"topics": [topic], "destination": {"type": "pull"}, "start": start}
        if filters is not None:
            content["filters"] = filters
        try:
            answer = await self._api.call(
                "PUT", path_of("subscriptions", name), keys.subscriber, content, only_new=True
            )
        except CallRefused as refused:
            if refused.slug == "subscription-exists":
                return None
            raise
        log.info("rocketmq_subscription_declared", subscription=name, topic=topic, filters=filters)
        declared: Shape = json.loads(answer)
        return declared


def _compared(filters: Filters) -> Any:
    """Filters in the form in which equal ones are equal."""
    given = {name: value for name, value in (filters or {}).items() if value}
    return {name: sorted(value) if isinstance(value, list) else value for name, value in given.items()}


def _patch(former: Filters, wanted: Filters) -> Filters:
    """Return the JSON Merge Patch from one to the other: a name that it leaves out would stay."""
    if wanted is None:
        return None
    headers = wanted.get("headers")
    if headers is not None:
        headers = {**dict.fromkeys((former or {}).get("headers") or (), None), **headers}
    return {"tags": wanted.get("tags"), "headers": headers}
