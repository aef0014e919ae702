"""Convert httpx's answers and failures for both drivers."""

import asyncio
from urllib.parse import urlsplit

import httpx

from halfnote.exchange import NoAnswer, Response

AGENT = "halfnote-python"
# Close idle connections before the server does (often after 5 s), perhaps while a request is being sent.
LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=4.0)
# No request was sent, because there was no connection.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.ProxyError)
_NOT_SENT_BY_AIOHTTP = ("ClientConnectorError", "ConnectionTimeoutError", "InvalidURL")
SHORT_OF_ANSWER = "no answer within {:g} s ({})"
# The part of a request's time in which it must be connected. A limit for the whole that comes first would hide that
# nothing was sent.
CONNECTED_WITHIN = 0.9
# There was no connection, and no time limit was reached: refused, unreachable, an unknown name.
_REFUSED_BY_AIOHTTP = "ClientConnectorError"
# The exceptions of httpx and its transports when no answer comes.
FAILURES = (httpx.HTTPError, httpx.StreamError, OSError, asyncio.TimeoutError)


def base_of(url: str) -> str:
    """Return Halfnote's URL without a slash at its end. Raises TypeError or ValueError."""
    if not isinstance(url, str):
        raise TypeError(f"the URL of Halfnote must be text, not {type(url).__name__}")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # Without a password that it may contain.
        shown = repr(url) if "@" not in url else "the given one"
        raise ValueError(f"the URL of Halfnote must begin with http:// or https:// and name a host; {shown} does not")
    return url.rstrip("/")


def headers_of(api_key: str | None) -> dict[str, str]:
    """Return the headers of every request."""
    headers = {"content-type": "application/json", "accept": "application/json", "user-agent": AGENT}
    return headers if api_key is None else {**headers, "authorization": f"Bearer {api_key}"}


def answered(answer: httpx.Response) -> Response:
    """Return a fully read answer."""
    return Response(answer.status_code, answer.headers, answer.content)


def unanswered(error: Exception, timeout_s: float) -> NoAnswer:
    """Return the reason that no answer came."""
    text = str(error) or type(error).__name__
    sent = not isinstance(error, _NOT_SENT)
    refused = isinstance(error, httpx.ConnectError)
    cause = error.__cause__
    if type(cause).__module__.startswith("aiohttp."):
        # The transport of httpx-aiohttp reports every lost connection as a ConnectTimeout.
        names = {base.__name__ for base in type(cause).__mro__}
        sent, refused = names.isdisjoint(_NOT_SENT_BY_AIOHTTP), _REFUSED_BY_AIOHTTP in names
        text = str(cause) or type(cause).__name__
    elif isinstance(error, (httpx.TimeoutException, asyncio.TimeoutError)):
        text = SHORT_OF_ANSWER.format(timeout_s, type(error).__name__)
    return NoAnswer(text, sent, refused)
