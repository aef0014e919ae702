"""Send checks and pings to producer groups over HTTP, signed, and read their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

import msgspec
from msgspec import Meta, Struct

from app.egress.http_client import EgressClient
from app.egress.reply import REPLY_LIMIT_BYTES, Reply
from app.egress.urls import without_query
from app.field_rules import REASON_MAX, json_of
from app.observability.trace_context import trace_headers
from app.policy.check_schedule import Answered, CheckResult, Unanswered
from app.secrets.signatures import Secret, headers
from app.verdicts import Verdict

# An answer to a check of many transactions may have so many bytes more for each of them, enough for its longest reason.
MORE_FOR_EACH_BYTES = 4 * 1024
NOT_AMONG = "the answer has no verdict for this transaction"
_VERDICTS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK, "unknown": None}
_encode = msgspec.json.Encoder().encode
# `identity`: answers must not be compressed, because they are not decompressed.
_PLAIN = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}


# Unknown fields of answers are ignored: a producer's framework may add some, and the verdict is what counts.
class CheckAnswer(Struct):
    """The body of a check URL's answer with status 200."""

    verdict: Literal["commit", "rollback", "unknown"]
    reason: Annotated[str, Meta(max_length=REASON_MAX)] | None = None

    def __post_init__(self) -> None:
        if self.reason is not None and "\x00" in self.reason:
            raise ValueError("`reason` holds NUL")


class ManyAnswers(Struct):
    """The body of the answer to a check of many transactions. Each answer is read by itself."""

    answers: list[msgspec.Raw]


class OneAnswer(CheckAnswer, kw_only=True):
    """The answer to one of many."""

    transaction_id: UUID


_decode = msgspec.json.Decoder(CheckAnswer).decode
_decode_many = msgspec.json.Decoder(ManyAnswers).decode
_decode_one = msgspec.json.Decoder(OneAnswer).decode


@dataclass(frozen=True, slots=True)
class UrlResult:
    """The result of one call of a URL; `error` None: it answered."""

    url: str
    at: datetime
    error: str | None
    status: int | None = None
    duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class CheckReply:
    """The result of a check, and of each URL that was tried; `result` is from the last of them.

    `answers`: of a check of many transactions that was answered, the results by id; the others have `result`.
    """

    result: CheckResult
    tried: tuple[UrlResult, ...]
    response: str | None
    answers: Mapping[UUID, CheckResult] | None = None


def body_fields(body: bytes, content_type: str) -> dict[str, Any]:
    """Return `body` for JSON, verbatim, or `body_base64` for anything else, as `/half` takes them."""
    json = json_of(body, content_type)
    return {"body_base64": body} if json is None else {"body": json}


async def ask(
    client: EgressClient,
    urls: Sequence[str],
    secrets: Sequence[Secret],
    webhook_id: str,
    body: bytes,
    *,
    timeout_s: float,
    now: datetime,
    trace: str | None = None,
    many: int = 0,
) -> CheckReply:
    """Send a check to the URLs in turn until one answers, each within `timeout_s`. All get the same signature.

    `many`: the check is of so many transactions, which one URL answers together; 0: it is of one by itself.
    """
    limit = REPLY_LIMIT_BYTES + many * MORE_FOR_EACH_BYTES
    signed = {**_PLAIN, **trace_headers(trace), **headers(secrets, webhook_id, body, now)}
    tried: list[UrlResult] = []
    failures: list[Unanswered] = []
    response: str | None = None
    for url in urls:
        reply = await client.call(url, body, signed, timeout_s=timeout_s, reply_limit=limit)
        answers = read_answers(reply) if many else None
        result = Unanswered(NOT_AMONG) if answers is not None else read_answer(reply, now, limit, many=bool(many))
        if answers is not None:
            tried.append(UrlResult(url, now, None, reply.status, reply.duration_ms))
            return CheckReply(result, tuple(tried), reply.text or None, answers)
        error = result.error if isinstance(result, Unanswered) else None
        tried.append(UrlResult(url, now, error, reply.status, reply.duration_ms))
        response = reply.text or None
        if isinstance(result, Answered):
            return CheckReply(result, tuple(tried), response)
        failures.append(result)
    return CheckReply(_together(urls, failures), tuple(tried), response)


async def ping(
    client: EgressClient, group: str, url: str, secrets: Sequence[Secret], *, timeout_s: float, now: datetime
) -> UrlResult:
    """Ping one URL, signed. Any 2xx answer counts as success."""
    body = _encode({"type": "halfnote.ping", "producer_group": group, "at": now})
    signed = {**_PLAIN, **headers(secrets, f"ping_{uuid4()}", body, now)}
    reply = await client.call(url, body, signed, timeout_s=timeout_s)
    error = reply.error
    if error is None and not 200 <= (reply.status or 0) < 300:
        error = f"answered {reply.status}; a ping wants 2xx"
    return UrlResult(url, now, error, reply.status, reply.duration_ms)


def read_answers(reply: Reply) -> dict[UUID, CheckResult] | None:
    """Read the answer to a check of many transactions, by id; None if it is no such answer.

    An answer that cannot be read, and a transaction with two different ones, has no result.
    """
    if reply.status != 200 or reply.truncated:
        return None
    try:
        listed = _decode_many(reply.body).answers
    except (msgspec.DecodeError, ValueError):
        return None
    found: dict[UUID, CheckResult] = {}
    for raw in listed:
        try:
            one = _decode_one(raw)
        except (msgspec.DecodeError, ValueError):
            continue
        result = Answered(_VERDICTS[one.verdict], one.reason)
        if found.setdefault(one.transaction_id, result) != result:
            found[one.transaction_id] = Unanswered("the answer has two verdicts for this transaction")
    return found


def read_answer(reply: Reply, now: datetime, limit: int = REPLY_LIMIT_BYTES, *, many: bool = False) -> CheckResult:
    """Read a check's answer: 200 with a verdict, 202 or 204 for `unknown`; anything else counts as unanswered.

    `limit`: the most bytes of an answer. `many`: the check is of many transactions, and `read_answers` found no answers
    to it.
    """
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
        return Unanswered(f"answered 200, but with more than {limit // 1024} KiB")
    if many:
        return Unanswered("answered 200, but not {answers: [{transaction_id, verdict, reason?}]}")
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
