"""Calls of Halfnote's HTTP API, each with the key of the RocketMQ client for which it is made."""

import json
import ssl
import time
from typing import Any

import httpx

from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused, refusal_of

CONNECT_S = 3.0
# How long an answer may take, beside the time that a claim waits.
ANSWER_S = 10.0


class HalfnoteApi:
    """Halfnote at one URL. Raises CallRefused for a problem, and if there is no answer."""

    def __init__(
        self,
        url: str,
        verify: ssl.SSLContext | bool,
        metrics: GatewayMetrics,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self._metrics = url, metrics
        # A waiting claim holds its connection, so their number is not limited here. No proxy from the environment: the
        # service is in this network.
        self._http = httpx.AsyncClient(
            base_url=url,
            verify=verify,
            trust_env=False,
            transport=transport,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def post(self, path: str, key: str | None, content: dict[str, Any], *, wait_s: float = 0) -> bytes:
        """Return the answer's body. `wait_s`: how long the request waits for something to claim."""
        return await self.call("POST", path, key, content, wait_s=wait_s)

    async def call(
        self, method: str, path: str, key: str | None, content: dict[str, Any] | None = None, *, wait_s: float = 0
    ) -> bytes:
        """Return the answer's body."""
        begun = time.monotonic()
        try:
            answer = await self._http.request(
                method,
                path,
                content=None if content is None else json.dumps(content).encode(),
                headers={
                    **({} if content is None else {"content-type": "application/json"}),
                    **({"authorization": f"Bearer {key}"} if key else {}),
                },
                timeout=httpx.Timeout(ANSWER_S + wait_s, connect=CONNECT_S),
            )
        except httpx.HTTPError as error:
            self._metrics.api("none", None)
            raise CallRefused(
                Code.PROXY_TIMEOUT,
                f"Halfnote does not answer at {self.url}: {error or type(error).__name__}.",
                for_now=True,
            ) from None
        self._metrics.api(str(answer.status_code), None if wait_s else time.monotonic() - begun)
        if not answer.is_success:
            raise refusal_of(answer.status_code, _problem(answer))
        return answer.content


def _problem(answer: httpx.Response) -> dict[str, Any]:
    try:
        read = answer.json()
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
