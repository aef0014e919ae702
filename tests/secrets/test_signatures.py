"""Signatures, verified by the published package and by the primitives; rotation, and which secrets are valid."""

import base64
import json
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from app.secrets.signatures import (
    OVERLAP,
    Kind,
    Secret,
    Signer,
    dump,
    headers,
    kind_of,
    load,
    new_secret,
    public_key,
    rotated,
    secret_fault,
    signs,
)

BODY = b'{"order": 1030}'
# RFC 8032 §7.1, TEST 1.
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


def whsk(key: bytes) -> str:
    return "whsk_" + base64.b64encode(key).decode()


def verify_asymmetric(public: str, body: bytes, sent: dict[str, str]) -> None:
    """Verify as the specification requires of a receiver: one `v1a` signature must match. Raises InvalidSignature.

    The published package for Python supports only `v1`.
    """
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public.removeprefix("whpk_"), validate=True))
    signed = f"{sent['webhook-id']}.{sent['webhook-timestamp']}.".encode() + body
    for signature in sent["webhook-signature"].split(" "):
        version, _, encoded = signature.partition(",")
        if version == "v1a":
            try:
                return key.verify(base64.b64decode(encoded, validate=True), signed)
            except InvalidSignature:
                continue
    raise InvalidSignature


def test_a_symmetric_signature_is_the_published_example() -> None:
    at = datetime.fromtimestamp(1614265330, UTC)
    secrets = [Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")]
    assert headers(secrets, "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', at) == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_the_published_package_verifies_new_secrets() -> None:
    secret = new_secret()
    sent = headers([Secret(secret)], "a-0", BODY, datetime.now(UTC))
    assert Webhook(secret).verify(BODY, sent) == json.loads(BODY)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(BODY + b" ", sent)


@pytest.mark.parametrize("secret", [whsk(SEED), whsk(SEED + PUBLIC)])
def test_a_private_key_of_either_form_signs_for_its_public_key(secret: str) -> None:
    assert public_key(secret) == "whpk_" + base64.b64encode(PUBLIC).decode()
    sent = headers([Secret(secret)], "a-0", BODY, datetime.now(UTC))
    verify_asymmetric("whpk_" + base64.b64encode(PUBLIC).decode(), BODY, sent)
    for body, changed in (
        (BODY + b" ", sent),
        (BODY, {**sent, "webhook-id": "a-1"}),
        (BODY, {**sent, "webhook-timestamp": "1"}),
    ):
        with pytest.raises(InvalidSignature):
            verify_asymmetric("whpk_" + base64.b64encode(PUBLIC).decode(), body, changed)


def test_new_private_keys_differ_and_are_complete() -> None:
    one, other = new_secret("v1a"), new_secret("v1a")
    assert one != other
    assert (kind_of(one), secret_fault(one, ("v1a",))) == ("v1a", None)
    assert len(base64.b64decode(one.removeprefix("whsk_"))) == 64
    public = public_key(one)
    assert public is not None
    verify_asymmetric(public, BODY, headers([Secret(one)], "a-0", BODY, datetime.now(UTC)))
    assert public_key(new_secret()) is None


def test_during_a_rotation_both_secrets_sign_also_if_their_kinds_differ() -> None:
    now = datetime.now(UTC)
    old, new = new_secret(), new_secret("v1a")
    public = public_key(new)
    assert public is not None
    signer = Signer(rotated([Secret(old)], new, now))
    within = signer.headers("a-0", BODY, now + OVERLAP - timedelta(seconds=1))
    assert [one.partition(",")[0] for one in within["webhook-signature"].split(" ")] == ["v1a", "v1"]
    verify_asymmetric(public, BODY, within)
    Webhook(old).verify(BODY, signer.headers("a-0", BODY, now))
    after = signer.headers("a-0", BODY, now + OVERLAP)
    assert len(after["webhook-signature"].split(" ")) == 1
    verify_asymmetric(public, BODY, after)


def test_a_second_rotation_does_not_prolong_the_first_secret() -> None:
    now = datetime.now(UTC)
    once = rotated([Secret("whsec_" + "A" * 32)], "whsec_" + "B" * 32, now)
    twice = rotated(once, "whsec_" + "C" * 32, now + timedelta(hours=1))
    assert [known.expires_at for known in twice] == [None, now + timedelta(hours=25), now + OVERLAP]
    assert load(dump(twice)) == twice
    assert [known.secret[6] for known in rotated(twice, "whsec_" + "A" * 32, now + OVERLAP)] == ["A", "C", "B"]


def test_a_former_secret_signs_until_its_overlap_ends() -> None:
    now = datetime.now(UTC)
    former, current, other = ("whsec_" + letter * 32 for letter in "ABC")
    stored = rotated([Secret(former)], current, now)
    within, after = now + OVERLAP - timedelta(seconds=1), now + OVERLAP
    assert [signs(stored, one, within) for one in (former, current, other)] == [True, True, False]
    assert [signs(stored, one, after) for one in (former, current, other)] == [False, True, False]
    assert not signs([], current, now)


@pytest.mark.parametrize(
    ("secret", "kinds", "valid"),
    [
        ("whsec_" + "A" * 32, ("v1",), True),
        ("whsec_" + base64.b64encode(bytes(64)).decode(), ("v1", "v1a"), True),
        (whsk(SEED), ("v1", "v1a"), True),
        (whsk(SEED + PUBLIC), ("v1a",), True),
        ("whsec_" + "A" * 28, ("v1",), False),
        ("whsec_" + base64.b64encode(bytes(65)).decode(), ("v1",), False),
        ("whsec_" + "A" * 31 + "!", ("v1",), False),
        ("A" * 32, ("v1", "v1a"), False),
        ("", ("v1", "v1a"), False),
        (whsk(SEED), ("v1",), False),
        ("whsec_" + "A" * 32, ("v1a",), False),
        (whsk(SEED[:31]), ("v1a",), False),
        (whsk(SEED + SEED), ("v1a",), False),
        (whsk(SEED + PUBLIC + b"x"), ("v1a",), False),
        ("whpk_" + base64.b64encode(PUBLIC).decode(), ("v1", "v1a"), False),
    ],
)
def test_which_secrets_are_valid(secret: str, kinds: tuple[Kind, ...], valid: bool) -> None:
    fault = secret_fault(secret, kinds)
    assert (fault is None) is valid
    if fault:
        assert all(prefix in fault for prefix, kind in (("whsec_", "v1"), ("whsk_", "v1a")) if kind in kinds)
