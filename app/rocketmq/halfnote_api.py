"""Calls of Halfnote's HTTP API, each with the key of the RocketMQ client for which it is made."""

import json
import ssl
import time
from typing import Any

import httpx
import structlog

from app.rocketmq.buffers import BufferedBytes, Buffers
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused, refusal_of

log = structlog.get_logger(__name__)

CONNECT_S = 3.0
# How long an answer may take, beside the time that a claim waits.
ANSWER_S = 10.0
# What an answer of unknown length counts: the most bodies of a claim, in base64, with their fields.
UNKNOWN_BYTES = 12 * 1024 * 1024


class HalfnoteApi:
    """Halfnote at one URL. Raises CallRefused for a problem, and if there is no answer.

    `shown_url`: the URL without the credentials that it may have, for the log.
    """

    def __init__(
        self,
        url: str,
        verify: ssl.SSLContext | bool,
        metrics: GatewayMetrics,
        buffers: Buffers,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.buffers, self._metrics = buffers, metrics
        self.shown_url = str(httpx.URL(url).copy_with(userinfo=b""))
        self._is_away = False
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

    async def post(self, path: str, key: str | None, content: dict[str, Any]) -> bytes:
        """Return the answer's body."""
        return await self.call("POST", path, key, content)

    async def claim(
        self,
        path: str,
        key: str | None,
        content: dict[str, Any],
        *,
        wait_s: float,
        buffered: BufferedBytes | None = None,
    ) -> bytes:
        """Claim, and wait up to `wait_s` for something to claim; return the answer's body.

        It is read when there is room for it among what the gateway holds, or after ROOM_WITHIN_S: what is claimed is
        held by Halfnote from its answer on. It is a part of `buffered`.
        """
        return await self.call("POST", path, key, content, wait_s=wait_s, buffered=buffered)

    async def call(
        self,
        method: str,
        path: str,
        key: str | None,
        content: dict[str, Any] | None = None,
        *,
        wait_s: float = 0,
        buffered: BufferedBytes | None = None,
        only_new: bool = False,
    ) -> bytes:
        """Return the answer's body. `only_new`: create, and change nothing that exists (`If-None-Match: *`)."""
        begun = time.monotonic()
        request = self._http.build_request(
            method,
            path,
            content=None if content is None else json.dumps(content).encode(),
            headers={
                # The length of an answer is then that of what is held.
                "accept-encoding": "identity",
                **({} if content is None else {"content-type": "application/json"}),
                **({"authorization": f"Bearer {key}"} if key else {}),
                **({"if-none-match": "*"} if only_new else {}),
            },
            timeout=httpx.Timeout(ANSWER_S + wait_s, connect=CONNECT_S),
        )
        try:
            answer = await self._http.send(request, stream=buffered is not None)
            if buffered is not None:
                await _read(answer, buffered)
        except httpx.HTTPError as error:
            self._metrics.api("none", None)
            # An exception is true also without a text, as that of a timeout.
            why = str(error) or type(error).__name__
            self._note_away(why)
            # Clients learn nothing of where Halfnote is.
            raise CallRefused(Code.PROXY_TIMEOUT, f"Halfnote does not answer: {why}.", for_now=True) from None
        self._is_away = False
        self._metrics.api(str(answer.status_code), None if wait_s else time.monotonic() - begun)
        if not answer.is_success:
            raise refusal_of(answer.status_code, _problem(answer))
        return answer.content

    def _note_away(self, why: str) -> None:
        """Log the first request without an answer. All of them are in the metrics."""
        if not self._is_away:
            log.warning("rocketmq_halfnote_away", url=self.shown_url, error=why)
        self._is_away = True


async def _read(answer: httpx.Response, buffered: BufferedBytes) -> None:
    try:
        if answer.is_success:
            length = answer.headers.get("content-length", "")
            await buffered.answer(int(length) if length.isdecimal() else UNKNOWN_BYTES)
        await answer.aread()
    finally:
        await answer.aclose()


def _problem(answer: httpx.Response) -> dict[str, Any]:
    try:
        read = answer.json()
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
