"""Sends the asynchronous producer's requests with aiohttp (`halfnote[fast]`): less CPU time than with httpx."""

import asyncio
from collections.abc import Mapping
from functools import lru_cache

import aiohttp
from yarl import URL

from halfnote.exchange import NoAnswer, Request, Response
from halfnote.http import CONNECTED_WITHIN, LIMITS, SHORT_OF_ANSWER
from halfnote.tls import trusted

_FAILURES = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
# No request was sent, because there was no connection.
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)


class AiohttpWire:
    """The connections of one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        connector = aiohttp.TCPConnector(
            limit=LIMITS.max_connections or 0,
            keepalive_timeout=LIMITS.keepalive_expiry,
            ssl=trusted(url),
        )
        jar = aiohttp.DummyCookieJar()
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=jar, headers=headers)
        self._url = url
        # Cache the URLs of all transactions, because parsing one takes longer than sending the request.
        self._urls = {path: URL(url + path) for path in ("/half", "/end", "/messages")}

    async def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request, and read its answer."""
        try:
            async with self._session.request(
                request.method,
                self._urls.get(request.path) or URL(self._url + request.path, encoded=True),
                data=request.content or None,
                headers=request.headers or None,
                timeout=_timeouts(request.timeout_s),
                allow_redirects=False,
            ) as answer:
                return Response(answer.status, answer.headers, await answer.read())
        except _FAILURES as error:
            sent = not isinstance(error, _NOT_SENT)
            if isinstance(error, asyncio.TimeoutError):
                return NoAnswer(SHORT_OF_ANSWER.format(request.timeout_s, type(error).__name__), sent)
            refused = isinstance(error, aiohttp.ClientConnectorError)
            return NoAnswer(str(error) or type(error).__name__, sent, refused)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()


@lru_cache(maxsize=16)
def _timeouts(seconds: float) -> aiohttp.ClientTimeout:
    connect_s = seconds * CONNECTED_WITHIN
    return aiohttp.ClientTimeout(total=seconds, connect=connect_s, sock_connect=connect_s)
