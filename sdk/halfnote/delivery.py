"""The endpoint to which Halfnote delivers messages."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from halfnote.errors import StillRunning
from halfnote.exchange import Call, Raised
from halfnote.hosting import Answering, AsgiApp, Reply, django_view, is_async, wsgi_app
from halfnote.inbox import AsyncInbox, Inbox, Reject
from halfnote.message import NotAMessage, from_http, ids_of, is_signed_as
from halfnote.signatures import TOLERANCE_S, Secrets, SignatureError, Verifier

log = logging.getLogger("halfnote")

# How many characters of a reason the service keeps.
REASON_MAX = 500
# When a message that is still worked on comes again. It uses up no try.
RETRY_AFTER_S = 5


class DeliveryEndpoint:
    """Receives a subscription's deliveries: verifies, reads, and runs the handler; with an inbox, once per message.

    `handler(message, connection)` with an inbox, else `handler(message)`; an async function is awaited. Answers: 200,
    the handler has run, now or before; 500, the handler raised, and Halfnote tries again; 503, another run of the
    message goes on, and it comes again after 5 s, which uses up no try; 422, the handler raised Reject, and the message
    becomes a dead letter at once. A test delivery is answered 200 without the handler.
    """

    def __init__(
        self,
        handler: Callable[..., Any],
        *,
        secrets: Secrets,
        inbox: Inbox | AsyncInbox | None = None,
        tolerance_s: float = TOLERANCE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if inbox is not None and is_async(handler) != isinstance(inbox, AsyncInbox):
            raise TypeError("an AsyncInbox awaits its handler, an Inbox does not: make both async functions or neither")
        self._take = handler if inbox is None else partial(_receive, inbox, handler)
        self._calls_async = is_async(handler)
        self._verifier = Verifier(secrets, tolerance_s=tolerance_s, clock=clock)

    def asgi(self) -> Any:
        """Return an ASGI app: `app.add_route("/deliveries", endpoint.asgi())` in Starlette and FastAPI."""
        return AsgiApp(self)

    def wsgi(self, app: Callable[..., Iterable[bytes]] | None = None, path: str = "/deliveries") -> Callable[..., Any]:
        """Return a WSGI app that answers at `path` and leaves the rest to `app`. Raises TypeError if it must await."""
        return wsgi_app(self, app, path)

    def django(self) -> Callable[..., Any]:
        """Return a Django view: `path("deliveries", endpoint.django())`."""
        return django_view(self)

    @property
    def calls_async(self) -> bool:
        """Whether the handler must be awaited."""
        return self._calls_async

    def answering(self, headers: Mapping[str, str], body: bytes) -> Answering:
        """Answer a delivery. A batch is handled message by message; its answer is the worst one."""
        try:
            signed_id = self._verifier.verify(headers, body)
            messages = from_http(headers, body)
            if not is_signed_as(signed_id, headers, messages):
                # The inbox knows a message by its id.
                raise SignatureError("the message is another one than webhook-id, which is signed: altered request")
        except SignatureError as error:
            log.warning("a delivery was refused: %s", error)
            return _refusal(401, str(error))
        except NotAMessage as error:
            log.error("a signed delivery was not understood: %s", error)
            return _refusal(400, str(error))
        rejected: Reject | None = None
        failed, running = [], []
        for message in messages:
            if message.is_test:
                log.info("test delivery %s of subscription %s", message.message_id, message.subscription)
                continue
            came = yield Call(partial(self._take, message))
            if not isinstance(came, Raised):
                continue
            if isinstance(came.error, Reject):
                log.error("message %s was rejected: %s", message.message_id, came.error.reason)
                rejected = came.error
            elif isinstance(came.error, StillRunning):
                log.warning("%s", came.error)
                running.append(message)
            else:
                log.error("message %s failed", message.message_id, exc_info=came.error)
                failed.append(message)
        if failed:
            return _refusal(500, f"the handler failed: {ids_of(failed)}; see the log of this service")
        if running:
            return _refusal(503, f"still worked on: {ids_of(running)}", {"retry-after": str(RETRY_AFTER_S)})
        if rejected is not None:
            return _rejection(rejected.reason)
        return Reply(200)


def _receive(inbox: Inbox | AsyncInbox, handler: Callable[..., Any], message: Any) -> Any:
    return inbox.receive(message, handler)


def _rejection(reason: str) -> Reply:
    # A header holds printable ASCII in one line.
    printable = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}~"
    # A surrogate has no form in UTF-8, and the answer must be made all the same.
    text = quote(" ".join(reason.split()), safe=printable, errors="replace")[:REASON_MAX]
    headers = {"webhook-delivery": "abort-message", "halfnote-reason": text}
    return Reply(422, json.dumps({"status": 422, "detail": reason}).encode(), headers)


def _refusal(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, json.dumps({"status": status, "detail": detail}).encode(), headers or {})
