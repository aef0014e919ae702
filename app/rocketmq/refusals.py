"""Why a call of a RocketMQ client is refused: a code of the protocol and a text. Halfnote's problems as such."""

import json
from collections.abc import Mapping
from typing import Any

from app.rocketmq.protocol.definition_pb2 import Code, Status


class CallRefused(Exception):
    """A call is refused. `code` is the protocol's; `slug` and `field` are of Halfnote's problem, if there was one.

    `for_now`: the same call may succeed later, because Halfnote is away or overloaded.
    """

    def __init__(self, code: Code, text: str, *, slug: str = "", field: str = "", for_now: bool = False) -> None:
        super().__init__(text)
        self.code, self.text, self.slug, self.field, self.for_now = code, text, slug, field, for_now

    @property
    def status(self) -> Status:
        """The refusal as clients read it."""
        return Status(code=self.code, message=self.text)


OK_STATUS = Status(code=Code.OK, message="OK")

# Halfnote's problems, by the last part of their type.
_BY_SLUG: dict[str, Code] = {
    "topic-reserved": Code.ILLEGAL_TOPIC,
    "topic-undeclared": Code.TOPIC_NOT_FOUND,
    "group-unregistered": Code.TOPIC_NOT_FOUND,
    "transaction-unknown": Code.INVALID_TRANSACTION_ID,
    "wrong-group": Code.INVALID_TRANSACTION_ID,
    "verdict-conflict": Code.INVALID_TRANSACTION_ID,
    "day-gone": Code.INVALID_TRANSACTION_ID,
    "subscription-unknown": Code.CONSUMER_GROUP_NOT_FOUND,
    "not-pulled": Code.CONSUMER_GROUP_NOT_FOUND,
    "not-held": Code.INVALID_RECEIPT_HANDLE,
    "handle-invalid": Code.INVALID_RECEIPT_HANDLE,
    "overloaded": Code.TOO_MANY_REQUESTS,
}
_BY_STATUS: dict[int, Code] = {
    401: Code.UNAUTHORIZED,
    403: Code.FORBIDDEN,
    413: Code.MESSAGE_BODY_TOO_LARGE,
    422: Code.BAD_REQUEST,
    429: Code.TOO_MANY_REQUESTS,
    # What RocketMQ's proxy answers if its broker does not: clients try again, or elsewhere.
    502: Code.PROXY_TIMEOUT,
    503: Code.PROXY_TIMEOUT,
    504: Code.PROXY_TIMEOUT,
}
_BY_FIELD: dict[str, Code] = {
    "topic": Code.ILLEGAL_TOPIC,
    "key": Code.ILLEGAL_MESSAGE_KEY,
    "tag": Code.ILLEGAL_MESSAGE_TAG,
    "headers": Code.MESSAGE_PROPERTIES_TOO_LARGE,
    "deliver_after_s": Code.ILLEGAL_DELIVERY_TIME,
    "invisible_s": Code.ILLEGAL_INVISIBLE_TIME,
}


def refusal_of(status: int, problem: Mapping[str, Any]) -> CallRefused:
    """Return Halfnote's problem as a refusal. The text is the problem's own, which says what to do."""
    slug = str(problem.get("type", "")).rpartition("/")[2]
    field = str(problem.get("field") or "")
    code = _BY_SLUG.get(slug)
    if code is None and status == 422:
        code = _BY_FIELD.get(field.rpartition(".")[2])
    if code is None:
        code = _BY_STATUS.get(status, Code.INTERNAL_SERVER_ERROR)
    title = str(problem.get("title") or f"Halfnote answered {status}")
    detail = problem.get("detail")
    text = f"{title}: {detail}" if detail else title
    return CallRefused(code, text, slug=slug, field=field, for_now=status == 429 or status >= 500)


def outcomes_of(answer: bytes) -> list[CallRefused | None]:
    """Return what was refused of each handle in the answer to a settlement; None: it was done."""
    outcomes = json.loads(answer)["outcomes"]
    return [None if one["status"] == 200 else refusal_of(one["status"], one) for one in outcomes]
