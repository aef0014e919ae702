"""The consent handshake of CloudEvents' HTTP webhooks, on real sockets."""

import asyncio

import pytest
from pydantic import ValidationError

from app.config import Settings
from app.destinations.webhook_consent import Consent, consent
from app.egress.http_client import EgressClient
from tests.support.check_responder import RawServer, Responder, Silent, plain


@pytest.mark.parametrize(
    ("allowed", "rate", "granted"),
    [
        ("halfnote.example", "120", 120),
        ("Halfnote.Example", "*", None),
        ("*", "1", 1),
        ("*", None, None),
    ],
)
async def test_a_receiver_consents_with_any_status(
    http_client: EgressClient, allowed: str, rate: str | None, granted: int | None
) -> None:
    permission = {"WebHook_Allowed_Origin": allowed} | ({"WebHook_Allowed_Rate": rate} if rate else {})
    for status in (200, 204, 405):
        async with RawServer(plain(status, **permission)) as server:
            assert await consent(http_client, server.url, "halfnote.example", 600, 5) == Consent(granted)
        [request] = server.requests
        assert (request.method, request.body) == ("OPTIONS", b"")
        assert request.headers["webhook-request-origin"] == "halfnote.example"
        assert request.headers["webhook-request-rate"] == "600"


async def test_no_rate_is_requested_if_there_is_none(http_client: EgressClient) -> None:
    async with RawServer(plain(200, WebHook_Allowed_Origin="*")) as server:
        await consent(http_client, server.url, "halfnote", None, 5)
    assert "webhook-request-rate" not in server.requests[0].headers


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "without WebHook-Allowed-Origin"),
        ({"Allow": "OPTIONS, POST"}, "without WebHook-Allowed-Origin"),
        ({"WebHook_Allowed_Origin": "other.example"}, "`other.example`, not of `halfnote`"),
        ({"WebHook_Allowed_Origin": "*", "WebHook_Allowed_Rate": "0"}, "WebHook-Allowed-Rate of `0`"),
        ({"WebHook_Allowed_Origin": "*", "WebHook_Allowed_Rate": "fast"}, "WebHook-Allowed-Rate of `fast`"),
    ],
)
async def test_anything_else_is_no_consent(http_client: EgressClient, headers: dict[str, str], reason: str) -> None:
    async with RawServer(plain(200, **headers)) as server:
        refusal = await consent(http_client, server.url, "halfnote", None, 5)
    assert isinstance(refusal, str)
    assert reason in refusal


async def test_a_receiver_that_does_not_answer_has_not_consented(http_client: EgressClient) -> None:
    async with Responder() as hook:
        # This receiver serves only POST and answers 405, as the specification requires of it.
        assert "answered 405" in str(await consent(http_client, hook.url, "halfnote", None, 5))
        closed = hook.url
    assert "did not answer to OPTIONS" in str(await consent(http_client, closed, "halfnote", None, 5))
    async with Silent() as silent, asyncio.timeout(20):
        assert "no whole answer" in str(await consent(http_client, silent.url, "halfnote", None, 0.3))


async def test_a_redirect_is_not_followed_for_consent(http_client: EgressClient) -> None:
    async with (
        RawServer(plain(200, WebHook_Allowed_Origin="*")) as elsewhere,
        RawServer(plain(307, Location=elsewhere.url)) as server,
    ):
        assert isinstance(await consent(http_client, server.url, "halfnote", None, 5), str)
        assert elsewhere.requests == []


def test_the_origin_is_like_a_dns_name() -> None:
    assert Settings(_env_file=None).origin == "halfnote"  # type: ignore[call-arg]
    assert Settings(_env_file=None, origin="relay-1.shop.example").origin == "relay-1.shop.example"  # type: ignore[call-arg]
    for invalid in ("", "a b", "https://shop", "ä", "-", "a\r\nb", "x" * 254):
        with pytest.raises(ValidationError):
            Settings(_env_file=None, origin=invalid)  # type: ignore[call-arg]
