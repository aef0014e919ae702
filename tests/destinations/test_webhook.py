"""Webhooks on real sockets, read by the published `standardwebhooks` and `cloudevents` packages."""

import base64
import json
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

import pytest
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from standardwebhooks import Webhook as Verifier

from app.delivery import Delivered, Failed, Gone, Outcome, Refused
from app.egress.http_client import EgressClient
from app.field_rules import header_fault
from app.secrets.signatures import OVERLAP, Secret, new_secret, public_key, rotated
from tests.secrets.test_signatures import verify_asymmetric
from tests.support.check_responder import Call, Responder
from tests.support.webhooks import COMMITTED, SECRET, message, now, webhook

BODY = b'{ "z":1.0,  "a":[ ],\n "caf\xc3\xa9": 1e400 }'
FULL: dict[str, Any] = {
    "producer_group": "my shop",
    "topic": "order.é",
    "key": 'café "1" %',
    "tag": "new one",
    "headers": {"Trace": "50% off", "x_Y.z": "ü"},
    "body": BODY,
}


def parse_verified(call: Call) -> BaseCloudEvent:
    """Verify a request's signature and read it as a CloudEvent, as a receiver does."""
    Verifier(SECRET).verify(call.body, call.headers, json_parse=False)
    return from_http_event(HTTPMessage(call.headers, call.body))


async def outcome_at(http_client: EgressClient, status: int, content: Any = None, **headers: str) -> Outcome:
    """Deliver one message to a receiver with this answer; `_` in header names stands for `-`."""
    async with Responder(
        status=status, content=content, **{n.replace("_", "-"): v for n, v in headers.items()}
    ) as hook:
        [outcome] = await webhook(http_client, hook.url).deliver([message()], now())
        assert len(hook.calls) == 1
    return outcome


async def test_a_binary_event_is_the_body_and_headers(http_client: EgressClient) -> None:
    async with Responder(status=204) as hook:
        sent = message(7, **FULL)
        [outcome] = await webhook(http_client, hook.url, {"Authorization": "Bearer x"}).deliver([sent], now())
    assert isinstance(outcome, Delivered)
    assert outcome.status == 204
    [call] = hook.calls
    assert call.body == BODY
    event = parse_verified(call)
    assert (event.get_id(), event.get_type(), event.get_subject()) == (sent.message_id, sent.topic, sent.key)
    assert event.get_source() == "/producer-groups/my%20shop"
    assert event.get_time() == COMMITTED + timedelta(seconds=7)
    assert event.get_datacontenttype() == "application/json"
    halfnote = {name: unquote(value) for name, value in call.headers.items() if name.startswith("halfnote-")}
    assert halfnote == {
        "halfnote-transaction": str(sent.transaction_id),
        "halfnote-offset": "7",
        "halfnote-attempt": "1",
        "halfnote-subscription": "mailer",
        "halfnote-tag": "new one",
        "halfnote-h-trace": "50% off",
        "halfnote-h-x_y.z": "ü",
    }
    assert call.headers["authorization"] == "Bearer x"
    assert call.headers["accept-encoding"] == "identity"
    assert call.headers["webhook-id"] == sent.message_id
    assert "webhook-request-origin" not in call.headers


async def test_a_structured_event_holds_everything_and_the_body_verbatim(http_client: EgressClient) -> None:
    async with Responder() as hook:
        sent = message(7, replay="12", attempt=3, **FULL)
        [outcome] = await webhook(http_client, hook.url, mode="structured").deliver([sent], now())
    assert isinstance(outcome, Delivered)
    [call] = hook.calls
    assert call.headers["content-type"] == "application/cloudevents+json"
    assert not any(name.startswith("ce-") for name in call.headers)
    assert (call.headers["halfnote-replay"], call.headers["webhook-id"]) == ("12", sent.message_id)
    assert b'"data":' + BODY in call.body
    event = parse_verified(call)
    attributes = event.get_attributes()
    assert json.loads(attributes.pop("halfnoteheaders")) == FULL["headers"]
    assert attributes == {
        "specversion": "1.0",
        "id": sent.message_id,
        "source": "/producer-groups/my%20shop",
        "type": sent.topic,
        "subject": sent.key,
        "time": COMMITTED + timedelta(seconds=7),
        "datacontenttype": "application/json",
        "halfnotetransaction": str(sent.transaction_id),
        "halfnoteoffset": "7",
        "halfnoteattempt": "3",
        "halfnotesubscription": "mailer",
        "halfnotetag": "new one",
        "halfnotereplay": "12",
    }
    assert event.get_data() == json.loads(BODY)


@pytest.mark.parametrize(
    ("content_type", "body", "is_data"),
    [
        ("application/json", b"null", True),
        ("application/vnd.shop+JSON; charset=utf-8", b' "x" ', True),
        ("text/json", b"[1]", True),
        ("text/plain", b"[1]", False),
        ("application/octet-stream", bytes(range(256)), False),
        ("application/json", b"{broken", False),
        ("application/json", b"", False),
        ("application/json", b'"\xff"', False),
        ("application/json", '{"a":1}'.encode("utf-16"), False),
        ("application/json", b"[" * 100_000 + b"]" * 100_000, False),
        ("application/jsonp", b"1", False),
    ],
)
async def test_a_body_that_is_no_json_is_sent_as_base64(
    http_client: EgressClient, content_type: str, body: bytes, is_data: bool
) -> None:
    async with Responder() as hook:
        await webhook(http_client, hook.url, mode="structured").deliver(
            [message(content_type=content_type, body=body)], now()
        )
    [call] = hook.calls
    found = json.loads(call.body)
    if is_data:
        assert found["data"] == json.loads(body)
    else:
        assert base64.b64decode(found["data_base64"], validate=True) == body
    assert found["datacontenttype"] == content_type
    event = parse_verified(call)
    assert event.get_data() == (json.loads(body) if is_data else body)


async def test_attempts_have_the_same_id_and_their_own_timestamps(http_client: EgressClient) -> None:
    async with Responder(status=500) as hook:
        destination = webhook(http_client, hook.url)
        at = now()
        await destination.deliver([message()], at - timedelta(seconds=60))
        await destination.deliver([message(attempt=2)], at)
    first, second = hook.calls
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert int(second.headers["webhook-timestamp"]) - int(first.headers["webhook-timestamp"]) == 60
    for call in hook.calls:
        Verifier(SECRET).verify(call.body, call.headers)


async def test_both_secrets_sign_during_the_overlap_also_if_their_kinds_differ(http_client: EgressClient) -> None:
    new = new_secret("v1a")
    public = public_key(new)
    assert public is not None
    async with Responder() as hook:
        during = webhook(http_client, hook.url, secrets=rotated([Secret(SECRET)], new, now()), mode="structured")
        await during.deliver([message()], now())
        await during.deliver([message()], now() + OVERLAP)
    first, second = hook.calls
    Verifier(SECRET).verify(first.body, first.headers)
    for call in (first, second):
        verify_asymmetric(public, call.body, call.headers)
    assert second.headers["webhook-signature"].startswith("v1a,")
    assert " " not in second.headers["webhook-signature"]


async def test_only_2xx_is_success(http_client: EgressClient) -> None:
    for status in (200, 201, 202, 204, 299):
        assert isinstance(await outcome_at(http_client, status), Delivered)
    for status in (301, 302, 304, 307, 308, 400, 404, 413, 429, 500, 503, 504):
        outcome = await outcome_at(http_client, status)
        assert isinstance(outcome, Failed)
        assert (outcome.status, outcome.unreachable, outcome.retry_after_s) == (status, False, None)
        assert str(status) in outcome.error


async def test_an_answer_is_recorded_as_readable_text(http_client: EgressClient) -> None:
    outcome = await outcome_at(http_client, 500, "no\x00pe" * 1000)
    assert isinstance(outcome, Failed)
    assert outcome.response is not None
    assert (len(outcome.response), outcome.response[:4]) == (1000, '"no\\')
    assert isinstance(await outcome_at(http_client, 500), Failed)


async def test_a_redirect_is_not_followed(http_client: EgressClient) -> None:
    async with Responder() as elsewhere:
        outcome = await outcome_at(http_client, 307, location=elsewhere.url)
        assert elsewhere.calls == []
    assert isinstance(outcome, Failed)
    assert outcome.error == "redirected (307); name the final URL in the subscription"


async def test_410_ends_the_subscription(http_client: EgressClient) -> None:
    outcome = await outcome_at(http_client, 410, "moved")
    assert isinstance(outcome, Gone)
    assert (outcome.status, outcome.error, outcome.response) == (410, "answered 410", '"moved"')


@pytest.mark.parametrize("status", [400, 410, 422, 500, 503])
async def test_abort_message_refuses_with_its_reason(http_client: EgressClient, status: int) -> None:
    outcome = await outcome_at(
        http_client, status, webhook_delivery="Abort-Message", halfnote_reason="x" * 600, retry_after="9"
    )
    assert isinstance(outcome, Refused)
    assert (outcome.reason, outcome.status) == ("x" * 500, status)
    plain = await outcome_at(http_client, status, webhook_delivery="abort-message")
    assert isinstance(plain, Refused)
    assert plain.reason == "abort-message"


async def test_abort_message_on_a_success_is_a_success(http_client: EgressClient) -> None:
    assert isinstance(await outcome_at(http_client, 200, webhook_delivery="abort-message"), Delivered)


async def test_retry_after_in_seconds_or_as_a_date(http_client: EgressClient) -> None:
    date = (now() + timedelta(seconds=90)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    for status, value, expected in (
        (429, "120", 120.0),
        (503, "0", 0.0),
        (503, "0000000000007", 7.0),
        (503, "9" * 5000, 259_200.0),
        (503, "Fri, 31 Dec 9999 23:59:59 GMT", 259_200.0),
        (503, date, 90.0),
        (503, "Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        (429, "soon", None),
        (429, "-5", None),
        (500, "120", None),
    ):
        outcome = await outcome_at(http_client, status, retry_after=value)
        assert isinstance(outcome, Failed)
        assert outcome.retry_after_s == (None if expected is None else pytest.approx(expected, abs=3)), value


async def test_a_receiver_that_consented_gets_the_origin(http_client: EgressClient) -> None:
    async with Responder() as hook:
        await webhook(http_client, hook.url, origin="halfnote.example").deliver([message()], now())
    assert hook.calls[0].headers["webhook-request-origin"] == "halfnote.example"


async def test_configured_headers_are_sent_once_in_any_case(http_client: EgressClient) -> None:
    async with Responder() as hook:
        await webhook(http_client, hook.url, {"User-Agent": "shop", "X-Token": "t"}).deliver([message()], now())
    assert (hook.calls[0].headers["user-agent"], hook.calls[0].headers["x-token"]) == ("shop", "t")


async def test_the_address_shows_no_token(http_client: EgressClient) -> None:
    assert webhook(http_client, "https://shop.example/hook?token=x").address == "https://shop.example/hook"


def test_headers_that_halfnote_sets_cannot_be_configured() -> None:
    for name in (
        *("Host", "Content-Length", "content-type", "Content-Encoding", "Transfer-Encoding", "Connection", "Upgrade"),
        *("Accept-Encoding", "Webhook-Signature", "WebHook-Request-Origin", "CE-id", "Halfnote-Offset", "Proxy-Foo"),
        *("Expect", "TE", "Trailer", "", "a b", "a:b", "ä"),
    ):
        assert header_fault(name, "x") is not None, name
    for value in ("a\r\nb", "ä", " x", "x ", "\x00"):
        assert header_fault("x-token", value) is not None, value
    assert header_fault("Authorization", "Bearer a b") is None
    assert header_fault("x-empty", "") is None
