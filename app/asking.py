"""What Halfnote asks a producer group over HTTP: checks and pings, signed, and how an answer is read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct

from app.callback_urls import without_query
from app.callbacks import CallbackClient, Reply
from app.policy import Answered, Brought, Unanswered
from app.schemas import REASON_MAX
from app.signing import Secret, headers
from app.trace_context import trace_headers
from app.verdicts import Verdict

_VERDICTS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK, "unknown": None}
_JSON_BODY = re.compile(r"application/(?:[a-z0-9.+-]+\+)?json\b", re.I).match
_encode = msgspec.json.Encoder().encode
# `identity`: an answer is read as it comes, never unpacked.
_PLAIN = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}


class CheckAnswer(Struct, forbid_unknown_fields=True):
    """What a check URL answers with 200."""

    verdict: Literal["commit", "rollback", "unknown"]
    reason: Annotated[str, Meta(max_length=REASON_MAX)] | None = None

    def __post_init__(self) -> None:
        if self.reason is not None and "\x00" in self.reason:
            raise ValueError("`reason` holds NUL")


_decode = msgspec.json.Decoder(CheckAnswer).decode


@dataclass(frozen=True, slots=True)
class UrlResult:
    """How a URL did just now; `error` None: it answered."""

    url: str
    at: datetime
    error: str | None
    status: int | None = None
    duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """What asking came to, and how each URL that was tried did; the last one is where `brought` is from."""

    brought: Brought
    tried: tuple[UrlResult, ...]
    response: str | None


def check_body(fields: dict[str, Any], messages: Sequence[dict[str, Any]]) -> bytes:
    """Return the JSON of a check: `type`, then the fields of the transaction, then its messages."""
    return _encode({"type": "halfnote.check", **fields, "messages": messages})


def body_fields(body: bytes, content_type: str) -> dict[str, Any]:
    """Return `body` for JSON, verbatim, or `body_base64` for anything else, as `/half` takes them."""
    if _JSON_BODY(content_type):
        try:
            msgspec.json.decode(body)
        except msgspec.DecodeError:
            pass  # JSON by name alone (it came as base64): shown as the bytes it is
        else:
            return {"body": msgspec.Raw(body)}
    return {"body_base64": body}


async def ask(
    client: CallbackClient,
    urls: Sequence[str],
    secrets: Sequence[Secret],
    webhook_id: str,
    body: bytes,
    *,
    timeout_s: float,
    now: datetime,
    trace: str | None = None,
) -> Asked:
    """Ask the URLs in turn until one answers; each has `timeout_s`. Signed once: the same over failover."""
    signed = {**_PLAIN, **trace_headers(trace), **headers(secrets, webhook_id, body, now)}
    tried: list[UrlResult] = []
    failures: list[Unanswered] = []
    response: str | None = None
    for url in urls:
        reply = await client.call(url, body, signed, timeout_s=timeout_s)
        brought = read_answer(reply, now)
        error = brought.error if isinstance(brought, Unanswered) else None
        tried.append(UrlResult(url, now, error, reply.status, reply.duration_ms))
        response = reply.text or None
        if isinstance(brought, Answered):
            return Asked(brought, tuple(tried), response)
        failures.append(brought)
    return Asked(_together(urls, failures), tuple(tried), response)


async def ping(
    client: CallbackClient, group: str, url: str, secrets: Sequence[Secret], *, timeout_s: float, now: datetime
) -> UrlResult:
    """Ping one URL, signed; any 2xx answer says that it is alive."""
    body = _encode({"type": "halfnote.ping", "producer_group": group, "at": now})
    signed = {**_PLAIN, **headers(secrets, f"ping_{uuid4()}", body, now)}
    reply = await client.call(url, body, signed, timeout_s=timeout_s)
    error = reply.error
    if error is None and not 200 <= (reply.status or 0) < 300:
        error = f"answered {reply.status}; a ping wants 2xx"
    return UrlResult(url, now, error, reply.status, reply.duration_ms)


def read_answer(reply: Reply, now: datetime) -> Brought:
    """Read a check's answer: 200 with a verdict, 202 or 204 for `unknown`; anything else is no answer."""
    if reply.status is None:
        return Unanswered(reply.error or "no answer", congested=reply.timed_out)
    if reply.status in (202, 204):
        return Answered(None)
    if reply.status in (429, 503):
        return Unanswered(f"answered {reply.status}", congested=True, hold_s=reply.retry_after_s(now))
    if 300 <= reply.status < 400:
        return Unanswered(f"answered {reply.status}; redirects are not followed")
    if reply.status != 200:
        return Unanswered(f"answered {reply.status}; a check wants 200, 202 or 204")
    if reply.truncated:
        return Unanswered("answered 200, but with more than 16 KiB")
    try:
        answer = _decode(reply.body)
    except (msgspec.DecodeError, ValueError) as error:
        return Unanswered(f"answered 200, but not {{verdict, reason?}}: {error}"[:500])
    return Answered(_VERDICTS[answer.verdict], answer.reason)


def _together(urls: Sequence[str], failures: Sequence[Unanswered]) -> Unanswered:
    if len(failures) == 1:
        return failures[0]
    error = "; ".join(f"{without_query(url)}: {failure.error}" for url, failure in zip(urls, failures, strict=True))
    holds = [failure.hold_s for failure in failures if failure.hold_s is not None]
    return Unanswered(
        (error or "there is no URL to ask")[:2000],
        congested=any(failure.congested for failure in failures),
        hold_s=max(holds, default=None),
    )
