"""The bytes of a webhook's requests, compared with an encoding that takes no care of its cost."""

import base64
import hmac
import re
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.delivery import Delivered, Delivery, Failed
from app.destinations.cloudevents import event
from app.destinations.webhook import Webhook, batch_id
from app.egress.http_client import EgressClient
from app.secrets.signatures import Secret
from tests.support.check_responder import RawServer, plain
from tests.support.webhooks import COMMITTED, SECRET, message

NOW = COMMITTED + timedelta(hours=1)
PRIVATE = "whsk_" + base64.b64encode(bytes(range(32))).decode()
SECRETS = (
    Secret(SECRET),
    Secret("whsec_" + base64.b64encode(b"k" * 64).decode()),
    Secret("whsec_" + base64.b64encode(b"l" * 100).decode()),
    Secret(PRIVATE),
    Secret("whsec_" + "A" * 32, NOW + timedelta(seconds=1)),
    Secret("whsec_" + "B" * 32, NOW),
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Headers = dict[str, str]


def escaped(value: str) -> str:
    """Percent-encode one character after the other (CloudEvents HTTP binding 1.0.2 §3.1.3.2)."""
    return "".join(c if "!" <= c <= "~" and c not in '"%' else quote(c, safe="") for c in value)


def described(one: Delivery, *, binary: bool) -> Headers:
    """Return the headers that describe a message."""
    headers: Headers = {}
    if binary:
        headers["ce-specversion"] = "1.0"
        headers["ce-id"] = one.message_id
        headers["ce-source"] = escaped("/producer-groups/" + quote(one.producer_group, safe=""))
        headers["ce-type"] = escaped(one.topic)
        headers["ce-time"] = one.committed_at.isoformat().replace("+00:00", "Z")
        if one.key is not None:
            headers["ce-subject"] = escaped(one.key)
    headers["content-type"] = one.content_type if binary else "application/cloudevents+json"
    headers["halfnote-transaction"] = str(one.transaction_id)
    headers["halfnote-offset"] = str(one.offset)
    headers["halfnote-attempt"] = str(one.attempt)
    headers["halfnote-subscription"] = escaped(one.subscription)
    if one.tag is not None:
        headers["halfnote-tag"] = escaped(one.tag)
    if one.replay is not None:
        headers["halfnote-replay"] = escaped(one.replay)
    for name, value in one.headers.items():
        headers[f"halfnote-h-{name}"] = escaped(value)
    if one.trace is not None:
        headers["traceparent"], _, state = one.trace.partition(" ")
        if state:
            headers["tracestate"] = state
    return headers


def signature(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.partition("_")[2])
    if secret.startswith("whsec_"):
        return "v1," + base64.b64encode(hmac.new(key, signed, "sha256").digest()).decode()
    return "v1a," + base64.b64encode(Ed25519PrivateKey.from_private_bytes(key[:32]).sign(signed)).decode()


def request_of(url: str, headers: Headers, webhook_id: str, body: bytes, secrets: Sequence[Secret]) -> bytes | None:
    """Return the request's bytes; None if a header would break its line."""
    headers = dict(headers)
    timestamp = int(NOW.timestamp())
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    valid = [known.secret for known in secrets if known.expires_at is None or known.expires_at > NOW]
    headers["webhook-id"] = webhook_id
    headers["webhook-timestamp"] = str(timestamp)
    headers["webhook-signature"] = " ".join(signature(secret, signed) for secret in valid)
    for name, value in (("user-agent", "halfnote"), ("accept-encoding", "identity")):
        headers.setdefault(name, value)
    if re.search(r"[\r\n\0]", "".join([*headers.keys(), *headers.values()])):
        return None
    headers["content-length"] = str(len(body))
    lines = ["POST /hook HTTP/1.1", f"host: {urlsplit(url).netloc}", *(f"{n}: {v}" for n, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def expected(url: str, always: Headers, mode: str, sent: Sequence[Delivery], secrets: Sequence[Secret]) -> bytes | None:
    """Return the bytes of one request with these messages; None if it is refused."""
    always = {name.lower(): value for name, value in always.items()}
    first = sent[0]
    if mode == "batch" or len(sent) > 1:
        about = {"content-type": "application/cloudevents-batch+json"}
        about["halfnote-subscription"] = escaped(first.subscription)
        if first.replay is not None:
            about["halfnote-replay"] = escaped(first.replay)
        body = b"[" + b",".join(map(event, sent)) + b"]"
        return request_of(url, always | about, batch_id(sent), body, secrets)
    binary = mode in ("binary", "auto")
    body = first.body if binary else event(first)
    return request_of(url, always | described(first, binary=binary), first.message_id, body, secrets)


texts = st.text(max_size=20) | st.text("az09-._~!\"%' é\r\n\0", max_size=8)
lines = st.text(' !~abcXYZ019;=/+"%é\r\n\0', max_size=12)
names = st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True) | st.sampled_from(["id", "a\nb", "a\rb", "é"])
ours = st.dictionaries(
    st.sampled_from(["Authorization", "X-a", "User-Agent", "accept-encoding", "Traceparent", "tracestate", "cookie"]),
    st.text(' !~abcXYZ019"%\r\n\0', max_size=12),
    max_size=4,
)
messages = st.builds(
    message,
    st.integers(1, 10**6),
    subscription=texts,
    producer_group=texts,
    topic=texts,
    key=st.none() | texts,
    tag=st.none() | texts,
    headers=st.dictionaries(names, texts, max_size=3),
    content_type=st.sampled_from(["application/json", "text/plain"]) | lines,
    body=st.binary(max_size=80) | st.just(b'{"a":1}'),
    committed_at=st.integers(0, 10**15).map(lambda us: COMMITTED + timedelta(microseconds=us)),
    replay=st.none() | texts,
    trace=st.sampled_from([None, TRACE, f"{TRACE} a=1,b=2"]),
)
secrets_ = st.lists(st.sampled_from(SECRETS), min_size=1, max_size=3, unique=True)
modes = st.sampled_from(["binary", "structured", "batch", "auto"])
PLAIN: dict[str, Any] = {"tag": "new", "headers": {"Trace": "50% off"}, "trace": TRACE, "replay": "7"}


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with RawServer(plain(204)) as started:
        yield started


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ours, modes, st.lists(messages, min_size=1, max_size=3), secrets_, st.booleans())
@example({}, "binary", [message(1, **PLAIN), message(2, **PLAIN)], SECRETS, True)
@example({"traceparent": "x", "X-a": "y"}, "binary", [message(1, **PLAIN), message(2)], SECRETS[:1], False)
@example({"X-a": "b\r\nc: d"}, "structured", [message(1)], SECRETS[:1], False)
@example({}, "binary", [message(1, content_type="text/plain\r\na: b"), message(2)], SECRETS[:1], False)
@example({}, "binary", [message(1, topic="a\r\nb: c", key="\r\n\0"), message(2)], SECRETS[2:], False)
async def test_the_bytes_are_those_of_a_plain_encoding(
    http_client: EgressClient,
    server: RawServer,
    own: Headers,
    mode: Any,
    deliveries: list[Delivery],
    secrets: Sequence[Secret],
    has_consent: bool,
) -> None:
    origin = "eventhub.example" if has_consent else None
    always = {**own, **({"webhook-request-origin": origin} if origin else {})}
    calls = [deliveries] if mode in ("batch", "auto") else [[one] for one in deliveries]
    webhook = Webhook(http_client, server.url, own, secrets, 30.0, mode, 3, origin)
    for sent in calls:
        [outcome, *_] = await webhook.deliver(sent, NOW)
        whole = expected(server.url, always, mode, sent, secrets)
        if whole is None and len(sent) > 1:
            # Parts of a failed batch are sent again, and a part may be without the fault.
            server.requests.clear()
        elif whole is None:
            assert isinstance(outcome, Failed)
            assert outcome.error == "ValueError: a header holds a line break or NUL"
            assert not server.requests
        else:
            assert isinstance(outcome, Delivered), outcome
            request = server.requests.pop()
            assert request.head + request.body == whole
            assert not server.requests
