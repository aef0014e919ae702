"""Access keys and their signatures, and the file that has them."""

import hmac
from pathlib import Path

import pytest

from app.rocketmq.credentials import ApiKeys, Credentials, CredentialsFault, read_credentials
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused

PRODUCER, SUBSCRIBER = "hn_" + "p" * 43, "hn_" + "s" * 43
FILE = f"""
credentials:
  - access_key: shop
    secret_key: shop-secret
    producer_key: {PRODUCER}
    subscriber_key: {SUBSCRIBER}
  - access_key: points
    secret_key: points-secret
    api_key: {SUBSCRIBER}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "credentials.yaml"
    written.write_text(FILE)
    return written


def signed(access_key: str, secret: str, date: str = "20261125T120000Z", *, scope: str = "") -> dict[str, str]:
    signature = hmac.new(secret.encode(), date.encode(), "sha1").hexdigest().upper()
    said = f"MQv2-HMAC-SHA1 Credential={access_key}{scope}, SignedHeaders=x-mq-date-time, Signature={signature}"
    return {"x-mq-date-time": date, "authorization": said}


def test_a_signature_leads_to_the_api_keys(file: Path) -> None:
    credentials = Credentials(read_credentials(file), ApiKeys("own", "own"))
    assert credentials.keys_of(signed("shop", "shop-secret")) == ApiKeys(PRODUCER, SUBSCRIBER)
    assert credentials.keys_of(signed("points", "points-secret", scope="/eu/Rocketmq")) == ApiKeys(
        SUBSCRIBER, SUBSCRIBER
    )


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer hn_x"},
        signed("shop", "another-secret"),
        signed("unknown", "shop-secret"),
        {**signed("shop", "shop-secret"), "x-mq-date-time": "20261125T120001Z"},
        {**signed("shop", "shop-secret"), "authorization": "MQv2-HMAC-SHA1 Credential=shop"},
        {"authorization": signed("shop", "shop-secret")["authorization"]},
    ],
)
def test_everything_else_is_unauthorized(file: Path, metadata: dict[str, str]) -> None:
    credentials = Credentials(read_credentials(file), ApiKeys("own", "own"))
    with pytest.raises(CallRefused) as refused:
        credentials.keys_of(metadata)
    assert refused.value.code == Code.UNAUTHORIZED


@pytest.mark.parametrize("text", ["a", ",", " ", "/"])
def test_the_time_to_refuse_a_long_header_grows_no_faster_than_its_length(file: Path, text: str) -> None:
    credentials = Credentials(read_credentials(file), ApiKeys("own", "own"))
    # Steps that grow with the square of the length would not end within the time of a test.
    with pytest.raises(CallRefused):
        credentials.keys_of({"authorization": "MQv2-HMAC-SHA1 Credential=a" + text * 2_000_000})


def test_without_a_file_every_client_has_the_gateways_key() -> None:
    assert Credentials(None, ApiKeys("own", "own")).keys_of({}) == ApiKeys("own", "own")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no list"),
        ("credentials: []", "no list"),
        ("credentials: [1]", "other fields"),
        ("credentials: [{access_key: a, secret_key: longenough, key: x}]", "other fields"),
        ("credentials: [{access_key: a, secret_key: longenough}]", "no `api_key`"),
        ("credentials: [{access_key: 'a b', secret_key: longenough, api_key: KEY}]", "access_key"),
        ("credentials: [{access_key: a, secret_key: short, api_key: KEY}]", "less than 8"),
        ("credentials: [{access_key: a, secret_key: 12345678, api_key: KEY}]", "not a text"),
        ("credentials: [{access_key: a, secret_key: longenough, api_key: hn_short}]", "no API key"),
        (
            "credentials: [{access_key: a, secret_key: longenough, api_key: KEY}, "
            "{access_key: a, secret_key: longenough, api_key: KEY}]",
            "earlier entry",
        ),
        ("credentials: [{secret_key: longenough", "no YAML, line 1"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_never_what_is_in_it(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "credentials.yaml"
    file.write_text(text.replace("KEY", PRODUCER))
    with pytest.raises(CredentialsFault, match=fault) as raised:
        read_credentials(file)
    assert "longenough" not in str(raised.value)
    with pytest.raises(CredentialsFault):
        read_credentials(tmp_path / "missing.yaml")
