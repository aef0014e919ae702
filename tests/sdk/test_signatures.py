"""Signatures: those of the service are valid; altered, old and foreign ones are not."""

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from halfnote import SignatureError, Verifier
from halfnote.signatures import sign
from standardwebhooks import Webhook

from app.secrets.signatures import Secret, headers, new_secret, public_key

BODY = b'{"type": "halfnote.check"}'
SECRET, OTHER = new_secret(), new_secret()
AT = datetime(2026, 11, 21, 8, tzinfo=UTC)
NOW = AT.timestamp()


def signed(*secrets: str, body: bytes = BODY) -> dict[str, str]:
    """Return the headers as the service makes them."""
    return headers([Secret(secret) for secret in secrets], "chk_1", body, AT)


def verifier(secrets: Any = SECRET, now: float = NOW) -> Verifier:
    return Verifier(secrets, clock=lambda: now)


def test_what_the_service_signs_is_believed() -> None:
    assert verifier().verify(signed(SECRET), BODY) == "chk_1"


def test_a_private_key_is_known_by_its_public_half() -> None:
    private = new_secret("v1a")
    assert verifier(public_key(private)).verify(signed(private), BODY) == "chk_1"
    with pytest.raises(SignatureError):
        verifier(public_key(private)).verify(signed(private), BODY + b" ")
    with pytest.raises(SignatureError):
        verifier(public_key(private)).verify({**signed(private), "webhook-signature": "v1a,!"}, BODY)


@pytest.mark.parametrize(("known", "used"), [([SECRET, OTHER], [SECRET]), ([OTHER, SECRET], [SECRET])])
def test_secrets_overlap_on_either_side(known: list[str], used: list[str]) -> None:
    assert verifier(known).verify(signed(*used), BODY)
    assert verifier(used[0]).verify(signed(*known), BODY)


def test_secrets_may_change_while_it_runs() -> None:
    secrets = [OTHER]
    one = verifier(lambda: secrets)
    with pytest.raises(SignatureError):
        one.verify(signed(SECRET), BODY)
    secrets.append(SECRET)
    assert one.verify(signed(SECRET), BODY)


@pytest.mark.parametrize(
    "altered",
    [
        lambda sent: {**sent, "webhook-id": "chk_2"},
        lambda sent: {**sent, "webhook-timestamp": str(int(NOW) + 1)},
        lambda sent: {**sent, "webhook-signature": "v1,AAAA"},
        lambda sent: {**sent, "webhook-signature": "v2," + sent["webhook-signature"][3:]},
        lambda sent: {**sent, "webhook-signature": "é"},
    ],
)
def test_what_was_altered_is_not(altered: Callable[[dict[str, str]], dict[str, str]]) -> None:
    with pytest.raises(SignatureError, match="no signature fits"):
        verifier().verify(altered(signed(SECRET)), BODY)


def test_nor_another_body_or_secret() -> None:
    with pytest.raises(SignatureError, match="no signature fits"):
        verifier().verify(signed(SECRET), BODY + b" ")
    with pytest.raises(SignatureError, match="no signature fits"):
        verifier().verify(signed(OTHER), BODY)


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
@pytest.mark.parametrize("value", [None, ""])
def test_what_is_not_signed_at_all_is_told_so(name: str, value: str | None) -> None:
    sent = {known: text for known, text in signed(SECRET).items() if known != name}
    with pytest.raises(SignatureError, match="it was not signed"):
        verifier().verify(sent if value is None else {**sent, name: value}, BODY)


@pytest.mark.parametrize("timestamp", ["-1", "1e9", "²", "now", "1" * 400])
def test_a_time_that_is_none(timestamp: str) -> None:
    with pytest.raises(SignatureError):
        verifier().verify({**signed(SECRET), "webhook-timestamp": timestamp}, BODY)


@pytest.mark.parametrize(
    ("off_s", "expected"),
    [
        (600, "which is 600 s behind this machine's (2026-11-21T08:10:00Z)"),
        (-600, "which is 600 s ahead of this machine's (2026-11-21T07:50:00Z)"),
    ],
)
def test_ten_minutes_of_skew_are_named(off_s: int, expected: str) -> None:
    with pytest.raises(SignatureError) as refused:
        verifier(now=NOW + off_s).verify(signed(SECRET), BODY)
    assert "signed at 2026-11-21T08:00:00Z by the coordinator's clock" in str(refused.value)
    assert expected in str(refused.value)
    assert ("sent again" in str(refused.value)) == (off_s > 0)


def test_four_minutes_are_allowed() -> None:
    assert verifier(now=NOW + 240).verify(signed(SECRET), BODY)
    assert verifier(now=NOW - 240).verify(signed(SECRET), BODY)


def test_a_wrong_signature_gets_no_answer_about_clocks() -> None:
    with pytest.raises(SignatureError, match="no signature fits"):
        verifier(now=NOW + 6000).verify(signed(OTHER), BODY)


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_!!!",
        "whsec_" + base64.b64encode(b"short").decode(),
        "whsec_" + base64.b64encode(b"short" * 13).decode(),
        "plain",
    ],
)
def test_a_secret_that_is_none_is_refused_at_once_and_not_shown(secret: str) -> None:
    with pytest.raises(ValueError, match="base64 of 24 to 64 bytes") as refused:
        Verifier(secret)
    assert "c2hv" not in str(refused.value)


def test_none_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="a secret to verify with is missing"):
        Verifier([])


def test_what_is_signed_here_is_believed_by_the_published_package() -> None:
    Webhook(SECRET).verify(BODY, sign(SECRET, "msg_1", BODY))
