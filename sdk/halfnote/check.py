"""The check-back endpoint: Halfnote asks it for the outcome of a transaction."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from halfnote.barrier_mark import unmarked
from halfnote.exchange import Call, Raised
from halfnote.hosting import Answering, AsgiApp, Reply, django_view, is_async, wsgi_app
from halfnote.json_text import parsed
from halfnote.listener import CheckedMessage, CheckedTransaction, CheckListener
from halfnote.signatures import TOLERANCE_S, Secrets, SignatureError, Verifier
from halfnote.times import instant
from halfnote.verdicts import Verdict

log = logging.getLogger("halfnote")

# Less than a producer group's `check_timeout_s`, so that the answer to many checks still comes.
MANY_WITHIN_S = 3.0
# How long a barrier waits for the open database transaction of one of many: the others must be answered too.
EACH_WITHIN_S = 0.5


class CheckEndpoint:
    """Answers checks and pings of one producer group, by a listener or a barrier.

    `secrets`: the group's, both while one is being replaced; they may be a function that returns them. A check of
    another group is refused: its transactions are in another database.
    """

    def __init__(
        self,
        listener: CheckListener,
        *,
        group: str,
        secrets: Secrets,
        tolerance_s: float = TOLERANCE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not callable(getattr(listener, "check_local", None)):
            raise TypeError(f"a barrier or a listener with `check_local` is expected, not {type(listener).__name__}")
        self._listener, self._group, self._clock = listener, group, clock
        self._verifier = Verifier(secrets, tolerance_s=tolerance_s, clock=clock)

    def asgi(self) -> Any:
        """Return an ASGI app: `app.add_route("/halfnote/check", endpoint.asgi())` in Starlette and FastAPI."""
        return AsgiApp(self)

    def wsgi(
        self, app: Callable[..., Iterable[bytes]] | None = None, path: str = "/halfnote/check"
    ) -> Callable[..., Any]:
        """Return a WSGI app that answers at `path` and leaves the rest to `app`.

        In Flask: `app.wsgi_app = endpoint.wsgi(app.wsgi_app)`. Raises TypeError if the listener is asynchronous.
        """
        return wsgi_app(self, app, path)

    def django(self) -> Callable[..., Any]:
        """Return a Django view: `path("halfnote/check", endpoint.django())`."""
        return django_view(self)

    @property
    def calls_async(self) -> bool:
        """Whether the listener must be awaited."""
        return is_async(self._listener.check_local)

    def answering(self, headers: Mapping[str, str], body: bytes) -> Answering:
        """Answer a POST: 401 if its signature is invalid, 204 to a ping, the listener's verdict to a check."""
        try:
            self._verifier.verify(headers, body)
        except SignatureError as error:
            log.warning("a check was refused: %s", error)
            return _refusal(401, str(error))
        try:
            asked = parsed(body)
            if asked["type"] == "halfnote.ping":
                return Reply(204)
            if asked["type"] == "halfnote.checks":
                many = [checked(one, self._clock()) for one in asked["checks"]]
                return (yield from self._answering_many(many, asked["producer_group"]))
            transaction = checked(asked, self._clock())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("a signed request was not understood: %s: %s", type(error).__name__, error)
            return _refusal(400, "this is neither halfnote.check nor halfnote.ping")
        if transaction.group != self._group:
            return self._foreign(transaction.group)
        came = yield Call(lambda: self._listener.check_local(transaction))
        if isinstance(came, Raised):
            log.error("check of transaction %s failed", transaction.transaction_id, exc_info=came.error)
            return _refusal(500, "the check failed; see the log of this service")
        return _verdict(transaction, came.value)

    def _answering_many(self, transactions: Sequence[CheckedTransaction], group: str) -> Answering:
        """Answer a check of many transactions; those without an answer in time are left out, and asked again."""
        if group != self._group:
            return self._foreign(group)
        answers: list[dict[str, str]] = []
        began = time.monotonic()
        for each in transactions:
            left_s = MANY_WITHIN_S - (time.monotonic() - began)
            if left_s < 0:
                log.warning(
                    "%d of %d checks took too long to answer", len(transactions) - len(answers), len(transactions)
                )
                break
            transaction = replace(each, within_s=min(EACH_WITHIN_S, left_s))
            came = yield Call(partial(self._listener.check_local, transaction))
            if isinstance(came, Raised):
                log.error("check of transaction %s failed", transaction.transaction_id, exc_info=came.error)
            elif _verdict(transaction, came.value).status == 200:
                answers.append({"transaction_id": str(transaction.transaction_id), "verdict": came.value.value})
        return Reply(200, json.dumps({"answers": answers}).encode())

    def _foreign(self, group: str) -> Reply:
        log.error("a check of group %s arrived at the endpoint of group %s", group, self._group)
        return _refusal(403, f"this endpoint answers for the producer group {self._group}")


def checked(asked: Mapping[str, Any], now: float) -> CheckedTransaction:
    """Return the transaction that a check's JSON asks about; `now`: seconds since 1970. Raises ValueError etc."""
    if asked["type"] != "halfnote.check":
        raise ValueError(f"type {asked['type']!r}")
    born_at = instant(asked["born_at"])
    barrier, context = unmarked(asked.get("context"))
    return CheckedTransaction(
        transaction_id=UUID(asked["transaction_id"]),
        group=asked["producer_group"],
        check=int(asked["check"]),
        max_checks=int(asked["max_checks"]),
        born_at=born_at,
        age_s=max(0.0, now - born_at.timestamp()),
        context=context,
        messages=[_message(message) for message in asked["messages"]],
        barrier=barrier,
    )


def _message(message: Mapping[str, Any]) -> CheckedMessage:
    return CheckedMessage(
        message["message_id"],
        message["topic"],
        message.get("key"),
        message.get("tag"),
        message.get("headers") or {},
        message.get("body"),
    )


def _verdict(transaction: CheckedTransaction, verdict: Any) -> Reply:
    if not isinstance(verdict, Verdict):
        log.error(
            "check_local returned %r for transaction %s; it must return COMMIT, ROLLBACK or UNKNOWN",
            verdict,
            transaction.transaction_id,
        )
        return _refusal(500, "the listener returned no verdict; see the log of this service")
    log.info("check %d of transaction %s: %s", transaction.check, transaction.transaction_id, verdict.value)
    return Reply(200, json.dumps({"verdict": verdict.value}).encode())


def _refusal(status: int, detail: str) -> Reply:
    return Reply(status, json.dumps({"status": status, "detail": detail}).encode())
