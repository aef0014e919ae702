"""What both drivers make of httpx's answers and failures."""

import asyncio

import httpx

from halfnote.exchange import NoAnswer, Response

AGENT = "halfnote-python"
# Idle connections are closed before servers do it (after 5 s, many of them), perhaps just as a request goes out.
LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=4.0)
# Nothing was sent: not even a connection came about.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.ProxyError)
_NOT_SENT_BY_AIOHTTP = ("ClientConnectorError", "ConnectionTimeoutError", "InvalidURL")
SHORT_OF_ANSWER = "no answer within {:g} s ({})"
# What httpx and its transports raise where no answer comes.
FAILURES = (httpx.HTTPError, httpx.StreamError, OSError, asyncio.TimeoutError)


def headers_of(api_key: str | None) -> dict[str, str]:
    """Return the headers of every request."""
    headers = {"content-type": "application/json", "accept": "application/json", "user-agent": AGENT}
    return headers if api_key is None else {**headers, "authorization": f"Bearer {api_key}"}


def answered(answer: httpx.Response) -> Response:
    """Return an answer that was read whole."""
    return Response(answer.status_code, answer.headers, answer.content)


def unanswered(error: Exception, timeout_s: float) -> NoAnswer:
    """Return why none came."""
    text = str(error) or type(error).__name__
    sent = not isinstance(error, _NOT_SENT)
    cause = error.__cause__
    if type(cause).__module__.startswith("aiohttp."):
        # Its transport for httpx calls every lost connection a ConnectTimeout.
        sent = not any(base.__name__ in _NOT_SENT_BY_AIOHTTP for base in type(cause).__mro__)
        text = str(cause) or type(cause).__name__
    elif isinstance(error, httpx.TimeoutException):
        text = SHORT_OF_ANSWER.format(timeout_s, type(error).__name__)
    return NoAnswer(text, sent)
